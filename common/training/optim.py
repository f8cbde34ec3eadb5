"""AdamW with weight-decay groups, or Muon, and their flags."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.cli import UserError
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.flags import flag
from common.hooks import extra
from common.models.layers.residual import Block
from common.training.schedule import ScheduleFlags

OPTIMIZERS = ("adamw_torch_fused", "muon")


@dataclass(frozen=True)
class OptimizerFlags(ScheduleFlags):
    group = "optimiser"
    advanced = ("max_grad_norm",)
    unlisted = ("adam_beta1", "adam_beta2", "adam_epsilon", "max_skipped_steps")
    file_only = ("triton_adamw",)

    optim: str = flag("adamw_torch_fused", "To need fewer tokens: muon (docs/optimisation.md).", choices=OPTIMIZERS)
    weight_decay: float = flag(0.01, "On matrices and embeddings; never on biases and norms. Raise it for few data.")
    adam_beta1: float = flag(0.9, "AdamW's first moment.")
    adam_beta2: float = flag(0.98, "AdamW's second moment.")
    adam_epsilon: float = flag(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = flag(1.0, "Clip the global gradient norm to this; 0: don't. Lower it if the loss jumps.")
    max_skipped_steps: int = flag(
        5, "Steps with a NaN or infinite loss or gradient norm are skipped; after this many in a row the run stops."
    )
    triton_adamw: bool = flag(
        False, "Clip, update and round to bf16 in one Triton kernel: fewer bytes on a GPU. No GPU has timed it."
    )

    def resolve(self) -> Self:
        optim = "adamw_torch_fused" if self.optim == "adamw_torch" else self.optim
        return replace(super().resolve(), optim=optim)

    def check(self) -> None:
        for name in ("weight_decay", "adam_epsilon", "max_grad_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"--{name} {getattr(self, name)}: must be a number that is not negative")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be at least 0 and below 1")
        self.require_at_least(1, "max_skipped_steps")
        if self.triton_adamw and self.optim != "adamw_torch_fused":
            raise UserError(f"--triton_adamw: not with --optim {self.optim}: drop one of the two")


class AdamW(torch.optim.AdamW):
    """torch's AdamW, updating the local shards of DTensors directly: the same bits.

    DTensor's dispatch for each tensor takes most of the host time of a sharded step.
    """

    found_inf: Tensor | None = None  # see `update_unless`

    def _init_group(self, group: dict, *lists: list[torch.Tensor]):  # pyrefly: ignore[bad-override]  # of any version
        result = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return result


def build_optimizer(
    weights: nn.Module,
    matrices: Mapping[str, Sequence[Block]],
    flags: OptimizerFlags,
    strategy: Strategy,
    world: World,
    bf16: bool,
) -> torch.optim.Optimizer:
    """The optimiser of --optim over fp32 master weights; all ranks together.

    matrices: `Model.hidden_matrices`; bf16: whether the run computes in it.
    """
    if flags.optim == "muon":
        if not matrices:
            raise UserError("--optim muon: this family does not name its hidden matrices: leave adamw_torch_fused")
        dtype = torch.bfloat16 if bf16 else torch.float32
        return extra().optimizer("muon")(weights, matrices, flags, strategy, world, dtype)
    if flags.triton_adamw and not world.is_dry_run:  # the same state
        if find_spec("triton") is None:
            raise UserError("--triton_adamw: Triton is not installed; CUDA builds of torch bring it: drop the flag")
        if any(p.device.type != "cuda" or p.dtype != torch.float32 for p in weights.parameters()):
            raise UserError("--triton_adamw: it updates fp32 weights on a GPU, and not all are: drop the flag")
        groups = adamw_groups(weights.parameters(), flags)
        return extra().optimizer("triton_adamw")(groups, lr=flags.learning_rate, fused=True)
    return build_adamw(weights.parameters(), flags)


def build_adamw(parameters: Iterable[nn.Parameter], flags: OptimizerFlags) -> AdamW:
    return AdamW(adamw_groups(parameters, flags), lr=flags.learning_rate, fused=True)


def update_unless(optimizer: torch.optim.Optimizer, found_inf: Tensor, grad_scale: Tensor | None = None) -> None:
    """Take a step unless found_inf, an fp32 scalar where the loss is, is 1: then weights and state stay as they are.

    grad_scale: what gradients are to be divided by, where the optimiser `clips_and_rounds`. It gets both
    as attributes, as torch.amp.GradScaler sets them for torch's fused optimisers.
    """
    # Of weights in host memory the update is the host's: it has to know now.
    found_inf = found_inf.to(optimizer.param_groups[0]["params"][0].device)
    optimizer.found_inf, optimizer.grad_scale = found_inf, grad_scale  # pyrefly: ignore[missing-attribute]  # fused ones'
    optimizer.step()
    optimizer.found_inf = optimizer.grad_scale = None  # pyrefly: ignore[missing-attribute]  # likewise


def adamw_groups(parameters: Iterable[nn.Parameter], flags: OptimizerFlags) -> list[dict[str, Any]]:
    """No decay on biases and norms (everything with one dimension)."""
    trained = [p for p in parameters if p.requires_grad]
    options = {"betas": (flags.adam_beta1, flags.adam_beta2), "eps": flags.adam_epsilon}
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": flags.weight_decay, **options},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, **options},
    ]


def set_hyperparameters(optimizer: torch.optim.Optimizer, flags: OptimizerFlags) -> None:
    """Replace a checkpoint's hyperparameters by those of the flags; the learning rate is set at every step."""
    decays = (flags.weight_decay, 0.0, flags.weight_decay)  # the third group is Muon's
    for group, weight_decay in zip(optimizer.param_groups, decays, strict=False):
        group["weight_decay"] = weight_decay
        if "betas" in group:
            group["eps"] = flags.adam_epsilon
            group["betas"] = type(group["betas"])((flags.adam_beta1, flags.adam_beta2))
