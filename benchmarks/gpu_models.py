"""What the GPU benchmarks compare, as flags of the train scripts: sizes, and kinds of layers; the pack that fits."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from benchmarks.dry_run import parsed
from benchmarks.measuring import words
from common.cli import UserError
from common.flags import Flags
from common.models.esm2.config import ESM2_SIZES
from common.training.arguments import DryRunFlags
from extras.plan.dry_run.dry_run import GIB, largest_pack
from extras.plan.dry_run.memory_estimate import fake_run
from extras.plan.step_model.model import MAX_LENGTH

NAMES = {name.split("_")[2]: name for name in ESM2_SIZES}
# layers, hidden size, heads; of 15B also as many layers as fit beside their optimiser
SIZES = {size: ESM2_SIZES[name] for size, name in NAMES.items()}
SIZES |= {"15B/8": (6, *SIZES["15B"][1:]), "tiny": (2, 64, 4)}
TORCH, TE, FP8 = {"backend": "torch"}, {"backend": "te"}, {"fp8": True, "fp8_recipe": "delayed"}
COMPILED, PADDED = TORCH | {"torch_compile": True}, {"sequence_packing": False}
FOUR_PACKS = COMPILED | {"gradient_accumulation_steps": 4}
KINDS = {  # {kind: (in a table, flags beside --bf16)}
    "te": ("TE", TE),
    "te-fp8": ("TE, FP8", TE | FP8),
    "te-fp8-params": ("TE, FP8, weights in FP8", TE | FP8 | {"fp8_params": True}),
    "torch-compiled": ("torch, compiled", COMPILED),
    "fp32-residual": ("torch, compiled, --bf16_residual False", COMPILED | {"bf16_residual": False}),
    "4-packs": ("torch, compiled, 4 packs a step", FOUR_PACKS),
    "flash2": ("4 packs, --attention flash2", FOUR_PACKS | {"attention": "flash2"}),
    "flash4": ("4 packs, --attention flash4", FOUR_PACKS | {"attention": "flash4"}),
    "cudnn": ("4 packs, --attention cudnn", FOUR_PACKS | {"attention": "cudnn"}),
    "cuda-graphs": ("4 packs, cuda_graphs", FOUR_PACKS | {"cuda_graphs": True}),
    "te-cuda-graphs": ("TE, 4 packs, cuda_graphs", TE | {"gradient_accumulation_steps": 4, "cuda_graphs": True}),
    "triton-adamw": ("4 packs, triton_adamw", FOUR_PACKS | {"triton_adamw": True}),
    "muon": ("4 packs, --optim muon", FOUR_PACKS | {"optim": "muon"}),
    "scaled-mm": (
        "4 packs, fp8_scaled_mm",
        FOUR_PACKS | {"fp8": True, "fp8_recipe": "current", "fp8_scaled_mm": True},
    ),
    "torch": ("torch", TORCH | {"torch_compile": False}),
    "peer": ("EsmForMaskedLM, padded, sdpa", PADDED | {"backend": "hf"}),
    "peer-flash": ("EsmForMaskedLM, padded, flash_attention_2", PADDED | {"backend": "hf_flash"}),
}


def check_choices(flags: Flags, device: str, **known: Collection[str]) -> None:
    """UserError for a value of a flag that is none of those known, or a device that is not here."""
    for name, values in known.items():
        for value in getattr(flags, name).split(","):
            if value not in values:
                raise UserError(f"--{name} {value}: choose {', '.join(values)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no GPU here; --device cpu --size(s) tiny tries the script itself")


def gpu_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "no GPU"


def failure(error: Exception) -> str:
    """In a cell of a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:80]}".replace("|", "/")


# ---- a row's flags ---------------------------------------------------------------------------------------------


def model_flags(size: str) -> dict[str, object]:
    """Of a model with random weights."""
    if size in NAMES:
        return {"config_name": NAMES[size]}
    layers, hidden, heads = SIZES[size]
    changes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    changes["intermediate_size"] = 4 * hidden
    overrides = ",".join(f"{name}={value}" for name, value in changes.items())
    return {"config_name": NAMES["15B" if size == "15B/8" else "8M"], "config_overrides": overrides}


def row_flags(
    size: str, kind: str, tokens: int, steps: int, place: Path | str, device: str = "cuda"
) -> dict[str, object]:
    """Of a run of so many steps on generated proteins. The peer's batches are padded to at most `tokens` positions."""
    flags = model_flags(size) | {"dataset": "sample", "output_dir": place, "max_steps": steps, "bf16": True}
    flags |= KINDS[kind][1]
    if flags.get("sequence_packing", True):
        flags |= {"tokens_per_pack": tokens}
    else:
        flags |= {"per_device_train_batch_size": max(1, tokens // MAX_LENGTH)}
    return flags | ({"use_cpu": True} if device == "cpu" else {})


def that_fits(size: str, tokens: int, scripts: Sequence[str], gpus: int, memory: float) -> tuple[str, int]:
    """(train script, tokens of a pack, at most `tokens`) for GPUs of `memory` GiB, by the dry run of eager layers: the
    first script by which a pack of `tokens` fits, else the one with the largest. UserError if nothing fits."""
    limit, best = int((memory - DryRunFlags.device_reserve) * GIB), (scripts[0], 0)
    for script in scripts:
        flags = model_flags(size) | {"tokens_per_pack": tokens, "bf16": True, **TORCH}
        args = parsed(script, gpus, words(flags))
        with fake_run(args, importlib.import_module(script).build) as run:
            held = run.step(tokens)
            fits = held if held.peak <= limit else largest_pack(run.step, held, limit, args.data.max_seq_length)
        best = max(best, (script, fits.tokens if fits else 0), key=lambda found: found[1])
        if best[1] == tokens:
            return best
    if not best[1]:
        raise UserError(f"--sizes {size}: not one sequence fits {memory:.0f} GiB on {gpus} GPUs: leave it out")
    return best[0], min(best[1], tokens)
