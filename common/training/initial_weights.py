"""Which weights a run starts from, for its log, and a warning where a directory's weights are not among them."""

from __future__ import annotations

from pathlib import Path

from common.tasks.arguments import RunArguments

PATTERNS = ("model*.safetensors", "pytorch_model*.bin", "*.distcp")  # of transformers, and of a checkpoint


def describe_weights(args: RunArguments, step: int) -> str:
    """step: of the checkpoint that the run resumes from; 0: it starts anew."""
    if step:
        return f"from checkpoint-{step}"
    if not args.model_name_or_path:
        return f"random, seed {args.seed}"
    files = weight_files(args.model_name_or_path)
    return f"from {args.model_name_or_path}" + (f" ({files})" if files else "")


def warn_of_unused_weights(args: RunArguments) -> str | None:
    """The warning for --config_name, or --model, of a directory that has weights: they are not loaded."""
    if args.model_name_or_path or not args.model_named or not (files := weight_files(args.model_named)):
        return None
    return (
        f"{args.model_named} has weights ({files}), which are not loaded: training starts from random ones; to start "
        f"from them give --model_name_or_path {args.model_named}"
    )


def weight_files(directory: str) -> str:
    """The name of a local directory's weight file, or of the first and how many there are; "" if there is none."""
    names = next((found for pattern in PATTERNS if (found := sorted(Path(directory).glob(pattern)))), [])
    if not names:
        return ""
    return names[0].name + (f" and {len(names) - 1} more" if len(names) > 1 else "")
