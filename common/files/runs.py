"""What a run leaves in its directory, by name: final_model/, checkpoint-N/, metrics.jsonl, run_info.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

FINAL_MODEL = "final_model"
METRICS = "metrics.jsonl"
RUN_INFO = "run_info.json"  # the title of the curves, and the first step of each start
# Of results: (key, name) of what a model is compared with, the weaker first.
BASELINES = (("unigram", "their frequencies"), ("neighbours", "their neighbours"))
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
MANIFEST = "manifest.json"  # of a checkpoint


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, directory), newest (by number) first."""
    paths = (path for path in output_dir.glob("checkpoint-*") if path.is_dir())
    return sorted(
        ((int(match[1]), path) for path in paths if (match := CHECKPOINT.fullmatch(path.name))), reverse=True
    )


def final_model_of(name: str) -> str:
    """A run's final_model/ if `name` is its directory, else the name as it is."""
    final = Path(name) / FINAL_MODEL
    return str(final) if (final / "config.json").is_file() else name


def resolve_directory(name: str) -> Path:
    """The directory that --model_name_or_path stands for: of a run its final_model/, or its newest checkpoint, not
    verified; else the name as it is."""
    path = Path(name)
    if not path.is_dir() or (path / "config.json").is_file():
        return path
    if (final := Path(final_model_of(name))) != path:
        return final
    inside = list_checkpoints(path)
    return inside[0][1] if inside else path


def read_run_info(output_dir: Path) -> dict:
    """run_info.json: model, data, device, labels, and `starts`, the first step of each start; {} if it is missing."""
    path = output_dir / RUN_INFO
    return json.loads(path.read_text()) if path.exists() else {}
