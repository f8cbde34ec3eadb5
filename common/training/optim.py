"""AdamW with weight-decay groups, and its flags."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common.cli import UserError
from common.flags import flag
from common.training.schedule import ScheduleFlags


@dataclass(frozen=True)
class OptimizerFlags(ScheduleFlags):
    group = "optimiser"
    advanced = ("adam_beta1", "adam_beta2")
    unlisted = ("adam_epsilon", "max_skipped_steps")

    weight_decay: float = flag(0.01, "On matrices and embeddings; never on biases and norms.")
    adam_beta1: float = flag(0.9, "AdamW's first moment.")
    adam_beta2: float = flag(0.98, "AdamW's second moment.")
    adam_epsilon: float = flag(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = flag(1.0, "Clip the global gradient norm to this; 0: don't.")
    max_skipped_steps: int = flag(
        5, "Steps with a NaN or infinite loss or gradient norm are skipped; after this many in a row the run stops."
    )

    def check(self) -> None:
        for name in ("weight_decay", "adam_epsilon", "max_grad_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"--{name} {getattr(self, name)}: must be a number that is not negative")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be at least 0 and below 1")
        self.require_at_least(1, "max_skipped_steps")


class AdamW(torch.optim.AdamW):
    """torch's AdamW, updating the local shards of DTensors directly: the same bits.

    DTensor's dispatch for each tensor takes most of the host time of a sharded step.
    """

    def _init_group(self, group: dict, *lists: list[torch.Tensor]):  # pyrefly: ignore[bad-override]  # of any version
        result = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return result


def build_optimizer(model: nn.Module, flags: OptimizerFlags) -> torch.optim.AdamW:
    """AdamW over fp32 master weights; no decay on biases and norms (everything with one dimension)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": flags.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (flags.adam_beta1, flags.adam_beta2)
    return AdamW(groups, lr=flags.learning_rate, betas=betas, eps=flags.adam_epsilon, fused=True)


def set_hyperparameters(optimizer: torch.optim.AdamW, flags: OptimizerFlags) -> None:
    """Replace a checkpoint's hyperparameters by those of the flags; the learning rate is set at every step."""
    for group, weight_decay in zip(optimizer.param_groups, (flags.weight_decay, 0.0), strict=True):
        group |= {"weight_decay": weight_decay, "eps": flags.adam_epsilon}
        group["betas"] = type(group["betas"])((flags.adam_beta1, flags.adam_beta2))
