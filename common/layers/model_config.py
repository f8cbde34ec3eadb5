"""A config.json as somebody else may have written it: read, held to sizes that exist, and rid of what names code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from common.cli import UserError
from common.files.untrusted import read_json, shorten

# Keys by which transformers takes code, of the directory or of the Hub, for the model.
NAMES_CODE = {"auto_map", "custom_pipelines", "attn_implementation", "experts_implementation"}
NAMES_CODE |= {"_attn_implementation", "_experts_implementation"}

# Well above any published model: what is larger would have a process build layers, or shapes, for hours.
LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "max_position_embeddings": 1 << 30,
    "num_local_experts": 1 << 10,
    "num_experts_per_tok": 1 << 10,
}


def read_config(path: Path) -> dict[str, Any]:
    """Names and values. ValueError where it is none, OSError where it cannot be read."""
    return _without_code(read_json(path, follow_links=True))


def _without_code(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_code(inner) for name, inner in value.items() if name not in NAMES_CODE}
    return [_without_code(inner) for inner in value] if isinstance(value, list) else value


def check_sizes(config: Any, where: str) -> None:
    """UserError for a size that is no integer, below 1 (0 for experts) or larger than any model has."""
    for name, largest in LARGEST.items():
        if not hasattr(config, name):
            continue
        value, least = getattr(config, name), 0 if "experts" in name else 1
        if type(value) is not int:
            raise UserError(f"{where}: {name} is {shorten(value)}: must be an integer")
        if value < least:
            raise UserError(f"{where}: {name} is {shorten(value)}: must be {'above 0' if least else 'at least 0'}")
        if value > largest:
            raise UserError(f"{where}: {name} is {shorten(value)}: no model here has more than {largest:,}")


def check_positive(config: Any, where: str, *names: str) -> None:
    """UserError for a number that is none, not above 0 or infinite."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(f"{where}: {name} is {shorten(value)}: must be above 0")
