"""AdamW with weight-decay groups, and learning rates as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType, get_scheduler

from common.cli import UserError

ESM2_WARMUP_STEPS = 2000  # Lin et al. 2023, supplement A.2.4; also: decay to a tenth of the peak at 90 % of the run
ESM2_FINAL_FRACTION, ESM2_DECAY_END = 0.1, 0.9


def build_optimizer(model: nn.Module, args) -> torch.optim.AdamW:
    """AdamW over fp32 master weights; no decay on biases and norms (everything with one dimension)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, fused=True)


def warmup_steps(args, total_steps: int) -> int:
    if args.warmup_steps is None:
        return min(ESM2_WARMUP_STEPS, total_steps // 20)
    # As in transformers' TrainingArguments.get_warmup_steps.
    return math.ceil(args.warmup_steps * total_steps) if args.warmup_steps < 1 else int(args.warmup_steps)


def lr_schedule(args, total_steps: int) -> Callable[[int], float]:
    """step (0-based, the one about to be taken) -> learning rate.

    `esm2` reaches the peak with the last step of the warm-up; the others are transformers' own schedules.
    """
    warmup = warmup_steps(args, total_steps)
    if args.lr_scheduler_type == "esm2":
        decay_end = max(ESM2_DECAY_END * total_steps, warmup + 1)

        def esm2(step: int) -> float:
            if step < warmup:
                return args.learning_rate * (step + 1) / warmup
            progress = min(1.0, (step - warmup) / (decay_end - warmup))
            return args.learning_rate * (1 - (1 - ESM2_FINAL_FRACTION) * progress)

        return esm2
    try:
        kind = SchedulerType(args.lr_scheduler_type)
        scratch = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
        scheduler = get_scheduler(kind, scratch, num_warmup_steps=warmup, num_training_steps=total_steps)
        if not isinstance(scheduler, LambdaLR):
            raise ValueError("not a function of the step alone")
    except (ValueError, TypeError) as error:
        raise UserError(
            f"--lr_scheduler_type {args.lr_scheduler_type}: choose esm2, linear, cosine, constant, "
            "constant_with_warmup, polynomial or inverse_sqrt"
        ) from error
    factor = scheduler.lr_lambdas[0]
    return lambda step: args.learning_rate * factor(step)
