"""README.md of an exported model: what it is, how long it was trained, how transformers opens it.

Nothing of a user's text goes into it, nor a path: only numbers, hashes, and names that this program knows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CARD = "README.md"
HASH = re.compile(r"[0-9a-f]{16,64}(-\d+)?")  # and a number of records


@dataclass(frozen=True)
class Training:
    """How the weights came to be; None is not known.

    steps, tokens: trained, 0 for weights exported as they were given; data: the training data's identity; start:
    --model_name_or_path, "" for random weights.
    """

    steps: int | None = None
    tokens: int | None = None
    data: str | None = None
    start: str | None = None

    @classmethod
    def of_state(cls, state: Any) -> Training:
        """From a run's trainer_state.json; what is not of its type there is not known."""
        state = _object(state)
        steps, tokens = (n if type(n := state.get(name)) is int and n >= 0 else None for name in ("step", "tokens"))
        data = _object(state.get("data")).get("dataset")
        start = _object(state.get("arguments")).get("model_name_or_path", ...)
        return cls(
            steps,
            tokens,
            data if steps and isinstance(data, str) and HASH.fullmatch(data) else None,
            start if isinstance(start, str) else "" if start is None else None,
        )


UNKNOWN = Training()


def _object(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def write_card(
    directory: Path,
    architecture: str,
    tags: tuple[str, ...],
    config: Any,
    parameters: int,
    training: Training,
    published: Collection[str] = (),
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write README.md into the directory of a model.

    architecture: transformers' class; tags: the Hub's, its pipeline's first; published: names of weights that may be
    named as those that training started from; notes: {heading: text} below the rest.
    """
    start = training.start if training.start in published else None
    front = ["library_name: transformers", f"pipeline_tag: {tags[0]}", "tags:", *(f"- {tag}" for tag in tags[1:])]
    front += [f"base_model: {start}"] if start else []
    counts = {
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "attention heads": config.num_attention_heads,
        "parameters": parameters,
        "training steps": training.steps,
        "training tokens": training.tokens,
    }
    table = {name: f"{count:,}" for name, count in counts.items() if count is not None}
    if training.start is not None:
        table["started from"] = start or ("other weights" if training.start else "random weights")
    if training.data:
        table["training data (hash)"] = f"`{training.data}`"
    lines = ["---", *front, "---", "", f"# {architecture}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in table.items()]
    lines += ["", "```python", f"from transformers import AutoTokenizer, {architecture}", ""]
    lines += [f'model = {architecture}.from_pretrained("DIRECTORY")  # of this file']
    lines += ['tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")', "```"]
    for heading, text in (notes or {}).items():
        lines += ["", f"## {heading}", "", text]
    (directory / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")
