"""Read directories of `transformers`: config.json and weights, a tensor at a time, when it is asked for.

Each family knows its tensors. `write_directory` writes such directories.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.cli import UserError, one_line
from common.files.content_hash import combined_hash
from common.files.runs import MANIFEST, resolve_directory
from common.files.safe_files import check_type, is_plain_name, open_regular, read_json, shorten
from common.hooks import extra

Config = TypeVar("Config")
logger = logging.getLogger(__name__)
TASK_HEADS, LM_HEAD = ("classifier.", "score."), "lm_head.safetensors"  # of a fully fine-tuned model

# Keys with which a config.json makes transformers load code.
NAMES_CODE = {"auto_map", "custom_pipelines", "attn_implementation", "experts_implementation"}
NAMES_CODE |= {"_attn_implementation", "_experts_implementation"}

# In the config.json of ESM-2, ESM C and AMPLIFY.
DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "dropout_prob")

# Well above any published model: larger sizes would keep a process building layers for hours.
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
    """A config.json without keys that load code. ValueError if it is malformed, OSError if it cannot be read."""
    return _without_code(read_json(path, follow_links=True))


def _without_code(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_code(inner) for name, inner in value.items() if name not in NAMES_CODE}
    return [_without_code(inner) for inner in value] if isinstance(value, list) else value


def fields_of(kind: type, content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the values of the fields of the dataclass `kind`, all others) of a config.json. ValueError for a wrong type."""
    known = {each.name: str(each.type) for each in fields(kind) if each.name != "others"}
    for name in known.keys() & content.keys():
        check_type(name, content[name], known[name])
    values = {name: value for name, value in content.items() if name in known}
    return values, {name: value for name, value in content.items() if name not in known}


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
    """UserError for a value that is not a finite number above 0."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(f"{where}: {name} is {shorten(value)}: must be above 0")


def dropout_of(config: Any) -> dict[str, Any]:
    """{name in config.json: value} of the dropout that a model was trained with; only training applies it."""
    return {name: value for name, value in config.content().items() if name in DROPOUT and value}


def check_no_dropout(config: Any, where: str) -> None:
    """UserError for a model that is to be trained with dropout, which no layer here has."""
    for name, value in dropout_of(config).items():
        raise UserError(
            f"{where}: {name} is {shorten(value)}, and training here has no dropout: set it to 0, by "
            "--config_overrides or in config.json"
        )


def check_heads(config: Any, where: str) -> None:
    """UserError unless rotary embeddings fit the heads."""
    if config.hidden_size % (2 * config.num_attention_heads):
        raise UserError(
            f"{where}: hidden_size {config.hidden_size} is not a multiple of 2 x num_attention_heads "
            f"({config.num_attention_heads}): rotary embeddings need an even head dimension"
        )


def load_config(name: str, read: Callable[[Path], Config], given: str, built_in: Iterable[str], hint: str) -> Config:
    """What `read` makes of the config.json of a directory, else of a name on the Hub.

    given: how error lines name it; built_in, hint: what else could be given there.
    """
    directory, known = resolve_directory(name), ", ".join(built_in)
    path = directory / "config.json"
    if not directory.is_dir() and not (name.count("/") == 1 and not name.startswith((".", "/"))):
        raise UserError(f"{given}: no such model: neither a directory nor one of {known}{hint}")
    if directory.is_dir() and not path.is_file():
        if not extra().recipe_checkpoint().weight_files(directory):
            raise UserError(f"{given}: this directory has no config.json: give one written by save_pretrained")
        path = extra().recipe_checkpoint().config_file(directory)
    try:
        if not directory.is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(name, "config.json"))
        return read(path)
    except Exception as error:  # the Hub has many; or a malformed config.json
        reason = one_line(error)[:160]
        if directory.is_dir():
            raise UserError(
                f"{given}: {path.name} cannot be used ({reason}): give a directory written by save_pretrained"
            ) from error
        raise UserError(
            f"{given}: no configuration found on the Hub ({reason}); a gated model needs HF_TOKEN; "
            f"built-in names: {known}"
        ) from error


INDEX = "model.safetensors.index.json"


def local_directory(name_or_path: str) -> Path:
    """A directory (see `resolve_directory`), or the local copy of a Hub repository's newest revision, downloaded if
    needed."""
    root = resolve_directory(name_or_path)
    if root.is_dir():
        return root
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name_or_path, allow_patterns=["*.safetensors", "*.json", "vocab.txt"]))
    except Exception as error:
        reason = one_line(error)[:160]
        raise UserError(
            f"{name_or_path}: weights not found, neither there nor on the Hub ({reason}); "
            "to start from random weights use --config_name"
        ) from error


def model_files(name_or_path: str) -> list[Path]:
    """The files that define a model: weights, configuration, vocabulary. UserError without weights."""
    root = local_directory(name_or_path)
    others = [root / name for name in ("config.json", "vocab.txt", INDEX)]
    if files := _recipe_files(root):
        return [extra().recipe_checkpoint().config_file(root), *files]
    return [*(path for path in others if path.is_file()), *_weight_files(root)]


def model_hash(name_or_path: str) -> str:
    """Identity of a model: one hash (hex) of the contents of its `model_files`.

    UserError without weights, or while a file is being written.
    """
    return combined_hash(model_files(name_or_path))


def read_tensors(directory: str) -> tuple[Path, dict[str, Tensor]]:
    """(where they are, the tensors) of a local directory's safetensors, or of a Hub repository's.

    Also those of a checkpoint of NVIDIA's recipe.
    """
    root = local_directory(directory)
    theirs: dict[str, Tensor] = {}
    if _recipe_files(root):
        return root, extra().recipe_checkpoint().read(root)
    for path in _weight_files(root):
        try:
            open_regular(path, follow_links=True).close()
            with safe_open(path, framework="pt") as file:
                # Memory-mapped: unused tensors are not read.
                theirs |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            reason = one_line(error)[:160]
            raise UserError(f"{path}: cannot be read: {reason}; cut short? Copy or download it again") from error
    if len(own := {name: x for name, x in theirs.items() if not name.startswith(TASK_HEADS)}) < len(theirs):
        logger.info("%s: its head, of finetune.py, is ignored", root)
    return root, own


def check_finite(name: str, tensor: Tensor, where: str) -> Tensor:
    """The tensor. UserError, which begins with `where`, if it holds NaN or infinity."""
    if tensor.numel() and tensor.is_floating_point():
        extremes = torch.stack(torch.aminmax(tensor))  # NaN propagates to both; no copy, no mask
        if not extremes.isfinite().all():
            raise UserError(
                f"{where}: tensor {name} holds NaN or infinity: its training diverged, or the file is damaged: "
                "take an earlier checkpoint, or download it again"
            )
    return tensor


def check_tensors(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    architecture: str,
    where: str,
    optional: tuple[str, ...] = (),
) -> None:
    """UserError unless `tensors` have the names and shapes of `expected`, those that may be absent left out.

    optional: beginnings of their names; architecture: for the error line, which begins with `where`.
    """
    for name, tensor in expected.items():
        if name not in tensors:
            if name.startswith(optional):
                continue
            raise UserError(f"{where}: not a checkpoint of {architecture}: it has no tensor {name}")
        if tensors[name].shape != tensor.shape:
            raise UserError(
                f"{where}: {name} is {list(tensors[name].shape)}, its config.json asks for {list(tensor.shape)}"
            )
    for name in tensors:
        if name not in expected:
            raise UserError(f"{where}: not a checkpoint of {architecture}: unknown tensor {name}")


def is_checkpoint(root: Path) -> bool:
    """Whether the weights of a directory are those of a run's checkpoint, not safetensors."""
    safetensors = ("model.safetensors", INDEX)
    return (root / MANIFEST).is_file() and not any(os.path.lexists(root / name) for name in safetensors)


def _recipe_files(root: Path) -> list[Path]:
    """The files with the weights of a checkpoint of the recipe; [] for any other directory or with safetensors."""
    if any(os.path.lexists(root / name) for name in ("model.safetensors", INDEX)):
        return []
    return extra().recipe_checkpoint().weight_files(root)


def _weight_files(root: Path) -> list[Path]:
    """The safetensors of a directory, or of the shards that its index names.

    Links are followed (the Hub's cache consists of them): their targets are read as tensors only. Names that lead out
    of the directory are refused.
    """
    index = root / INDEX
    names = ["model.safetensors"]
    if os.path.lexists(index):
        try:
            weight_map = read_json(index, follow_links=True)["weight_map"]
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index}: not an index of safetensors shards") from error
        for name in names:
            if not is_plain_name(name):
                raise UserError(f"{index}: names {shorten(name)}, which is no file of the directory")
    names = [*names, *([LM_HEAD] if os.path.lexists(root / LM_HEAD) else [])]
    for name in names:
        if not os.path.lexists(root / name):
            other = next(root.glob("pytorch_model*.bin"), None)
            hint = f"; {other.name} there is pickled: convert it with transformers' save_pretrained" if other else ""
            if next(root.glob("*.distcp"), None):
                hint = f"; a checkpoint of a run: python -m extras.export {root} OUT makes a model of it"
            if (root / "adapter_config.json").exists():
                hint = "; an adapter: predict.py --model takes finetune.py's output, and peft merges it"
            raise UserError(f"{root / name}: no such file; weights are read from safetensors only{hint}")
    return [root / name for name in names]
