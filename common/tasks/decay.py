"""The learning rates of a decoder's run, under the guides' names for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from common.cli import UserError, flag
from common.tasks.optim import OptimizerFlags, warmup_steps

STYLES = ("constant", "linear", "cosine", "exponential", "plateau")


@dataclass
class DecayFlags(OptimizerFlags):
    group = "optimiser"
    rarely = ("lr_decay_iters", "plateau")

    learning_rate: float = flag(1e-4, "Peak learning rate.", "lr")
    lr_scheduler_type: str = flag(
        "cosine",
        "constant, or how the rate falls to --min_lr: linear, cosine, exponential, plateau (--plateau of the run at "
        "the peak, then linear).",
        "lr_decay_style",
    )
    warmup_steps: float | None = flag(0.0032, "Steps up to the peak, or a fraction of the run below 1.", "warmup")
    lr_decay_iters: int | None = flag(None, "The step at which --min_lr is reached. Default: the last.")
    min_lr: float = flag(1e-5, "What the rate falls to.")
    plateau: float = flag(0.0, "With --lr_decay_style plateau: the fraction of the run at the peak.")
    weight_decay: float = flag(0.2, "On matrices and embeddings; never on norms.")
    adam_beta1: float = flag(0.9, "AdamW's first moment.", "beta1")
    adam_beta2: float = flag(0.95, "AdamW's second moment.", "beta2")
    max_grad_norm: float = flag(1.0, "Clip the global gradient norm to this; 0: don't.", "grad_clip")

    def check(self) -> None:
        self.require_choice("lr_scheduler_type", STYLES)
        self.require_at_least(1, "lr_decay_iters")
        if not 0 <= self.min_lr <= self.learning_rate:
            raise UserError(f"--min_lr {self.min_lr}: must lie between 0 and --lr {self.learning_rate}")
        if self.lr_scheduler_type == "exponential" and self.min_lr == 0:
            raise UserError("--min_lr 0: --lr_decay_style exponential falls by factors, and never to 0: give another")
        if not 0 <= self.plateau < 1:
            raise UserError(f"--plateau {self.plateau}: a fraction of the run, at least 0 and below 1")
        if self.plateau and self.lr_scheduler_type != "plateau":
            raise UserError(
                f"--plateau {self.plateau}: goes with --lr_decay_style plateau, not {self.lr_scheduler_type}: drop one"
            )

    def schedule(self, total_steps: int) -> Callable[[int], float]:
        """The peak comes with the last step of the warm-up, --min_lr with step --lr_decay_iters and stays."""
        peak, low, style = self.learning_rate, self.min_lr, self.lr_scheduler_type
        warm = warmup_steps(self, total_steps)
        begin = warm + math.ceil(self.plateau * total_steps)
        span = max(1, (self.lr_decay_iters or total_steps) - begin)

        def rate(step: int) -> float:
            if step < warm:
                return peak * (step + 1) / warm
            progress = min(1.0, max(0.0, (step + 1 - begin) / span))
            if style == "constant":
                return peak
            if style == "exponential":
                return peak * (low / peak) ** progress
            fallen = (1 - math.cos(math.pi * progress)) / 2 if style == "cosine" else progress
            return peak - (peak - low) * fallen

        return rate
