"""--lora: low-rank adapters of the matrices of a model's layers, which are trained in place of its weights.

y = x W^T + b + (alpha / r) (x A^T) B^T, with A [r, in] and B [out, r] (Hu et al. 2021, arXiv:2106.09685). B starts as
zeros: the first step computes what the given weights do. Exports have W + (alpha / r) B A in the place of W.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from common.cli import UserError
from common.files.safe_files import check_type
from common.flags import flat
from common.models.layers.backend import HF_BACKENDS, BackendFlags
from common.models.layers.initialise import count_parameters
from common.models.layers.linear import linear
from common.models.layers.residual import Model

logger = logging.getLogger(__name__)
# Value of --lora_targets: how the names of these matrices end, in the layers of all families.
TARGETS = {"qkv": "layernorm_qkv.weight", "proj": "proj.weight", "fc1": "fc1_weight", "fc2": "fc2_weight"}


class LoraMatmul(nn.Module):
    """In the place of `linear` in a layer, which keeps the matrix [rows, columns] itself."""

    matmul_weights = ("lora_a", "lora_b")  # that have bf16 copies (common.models.layers.linear.RoundedWeights)

    def __init__(self, rows: int, columns: int, rank: int, scale: float):
        super().__init__()
        self.scale = scale
        self.lora_a = nn.Parameter(torch.empty(rank, columns))
        self.lora_b = nn.Parameter(torch.empty(rows, rank))

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, columns] -> [T, rows]"""
        return linear(x, weight, bias) + self.scale * linear(linear(x, self.lora_a), self.lora_b)


def check_run(args: Any) -> None:
    """UserError where --lora cannot work, and for its details without it."""
    flags, others = args.model, flat(args)
    if not flags.lora:
        given = next(name for name in flags.adapters if getattr(flags, name) != getattr(BackendFlags, name))
        raise UserError(f"--{given}: goes with --lora: give that too")
    refused = {
        "--backend " + flags.backend: flags.backend in HF_BACKENDS,
        "--fp8": args.precision.fp8,
        "--fp4": args.precision.fp4,
        "--optim muon": args.optimizer.optim == "muon",
        "fused_gelu": others.get("fused_gelu"),
        "train_mfsdp.py": "zero_dp_strategy" in others,
    }
    for name in (name for name, is_given in refused.items() if is_given):
        raise UserError(f"--lora: adapters do not go with {name}: drop one of the two (docs/adapting.md)")
    if flags.model_name_or_path is None:
        raise UserError("--lora: adapts given weights: give --model_name_or_path")
    flags.require_at_least(1, "lora_r")
    flags.require_above(0, "lora_alpha")
    targets_of(flags)


def targets_of(flags: BackendFlags) -> list[str]:
    """--lora_targets. UserError for what is none."""
    names = flags.lora_targets.split(",")
    for name in names:
        if name not in TARGETS or names.count(name) > 1:
            raise UserError(f"--lora_targets {flags.lora_targets}: choose from {','.join(TARGETS)}, each once")
    return names


def add_adapters(model: Model, flags: BackendFlags) -> None:
    """Freeze a model on the meta device, and give an adapter to each matrix that --lora_targets names. UserError if
    the layers have no matrix of a name."""
    model.requires_grad_(False)
    layers, zero_rows, found = set(model.layers.modules()), dict(getattr(model, "zero_rows", {})), set()
    for path, module in [*model.named_modules()] if (targets := targets_of(flags)) else ():
        for name in getattr(module, "matmul_weights", ()) if module in layers else ():
            target = next((each for each in targets if f"{path}.{name}".endswith(f".{TARGETS[each]}")), None)
            if target is None:
                continue
            rows, columns = getattr(module, name).shape
            matmul = name.replace("weight", "matmul")
            setattr(module, matmul, LoraMatmul(rows, columns, flags.lora_r, flags.lora_alpha / flags.lora_r))
            zero_rows[f"{path}.{matmul}.lora_b"] = range(rows)
            found.add(target)
    if lacking := [name for name in targets if name not in found]:
        raise UserError(f"--lora_targets {flags.lora_targets}: this model's layers have no {lacking[0]}: leave it out")
    details = {"r": flags.lora_r, "alpha": flags.lora_alpha, "targets": flags.lora_targets}
    model.zero_rows, model.lora = zero_rows, {"lora": details}
    logger.info("LoRA: rank %d, alpha %g, of %s: %s weights", *details.values(), f"{count_parameters(model):,}")


def merged(read: Callable[[str], Tensor], names: Collection[str], alpha: float) -> Callable[[str], Tensor]:
    """Reads a parameter with its adapter merged into it, if it has one. read: a parameter as it is; names: of all."""

    def read_merged(name: str) -> Tensor:
        weight = read(name)
        a, b = (f"{name.removesuffix('weight')}matmul.lora_{part}" for part in "ab")
        if a not in names:
            return weight
        down, up = read(a).float(), read(b).float()
        return (weight.float() + alpha / len(down) * (up @ down)).to(weight.dtype)

    return read_merged


def alpha_of(manifest: dict[str, Any], where: str) -> float:
    """--lora_alpha of a checkpoint's adapters. UserError if it is not finite."""
    try:
        check_type("lora", manifest["lora"], "dict")
        check_type("lora: alpha", alpha := manifest["lora"].get("alpha"), "float")
        if not math.isfinite(alpha):
            raise ValueError(f"lora: alpha is {alpha}")
    except ValueError as error:
        raise UserError(f"{where}: refused: {error}") from error
    return alpha
