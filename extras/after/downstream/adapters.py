"""A LoRA adapter of finetune.py: the base model that it belongs to, and the configuration that peft gets.

peft would open files and import modules that an adapter_config.json names, so its configuration is made here, of
checked values.
"""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from common.cli import UserError, one_line
from common.files.safe_files import check_type, read_json, shorten

logger = logging.getLogger(__name__)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_HASH = "base_model_hash"  # in the config.json beside it, where peft does not look: the base's `model_hash`
# Of adapter_config.json: what is checked; what plays no part when an adapter is merged for inference.
READ = {"peft_type": "str", "r": "int", "lora_alpha": "int | float"}
READ |= {"target_modules": "list[str]", "modules_to_save": "list[str]"}
IDLE = {"base_model_name_or_path", "revision", "peft_version", "auto_mapping", "inference_mode", "task_type"}
IDLE |= {"lora_dropout"}
NAME = re.compile(r"[A-Za-z0-9_.]{1,100}")


def base_hash_of(config: dict[str, Any], made_from: dict[str, Any], where: str) -> str:
    """The hash of the model that an adapter belongs to. config: its config.json; made_from: of results.json, for an
    adapter that does not say, with a warning. ValueError if it is no text."""
    if (found := config.get(BASE_HASH)) is None:
        logger.warning(
            "%s: an adapter of an earlier version or another program: its config.json has no hash of its base model; "
            "that of results.json is taken",
            where,
        )
        found = made_from["model"]
    check_type(BASE_HASH, found, "str")
    return found


def base_name_of(directory: Path) -> str:
    """The base model's name or directory, as finetune.py was given it. ValueError, OSError or KeyError without one."""
    name = read_json(directory / ADAPTER_CONFIG)["base_model_name_or_path"]
    check_type("base_model_name_or_path", name, "str")
    return name


def merged(stock: Any, directory: Path, modules: tuple[str, ...]) -> Any:
    """transformers' model with an adapter in its weights. UserError as `lora_config`, and for another model's."""
    from peft import PeftModel

    config = lora_config(directory, modules)
    try:
        return PeftModel.from_pretrained(stock, str(directory), config=config).merge_and_unload()
    except (RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(
            f"{directory}: does not fit its model: {one_line(error)[:160]}: run finetune.py again"
        ) from error


def lora_config(directory: Path, modules: tuple[str, ...]) -> Any:
    """peft's LoraConfig of an adapter. modules: the names that modules_to_save may hold.

    UserError for anything but LoRA as finetune.py trains it.
    """
    from peft import LoraConfig

    path = directory / ADAPTER_CONFIG
    try:
        content = read_json(path)
        for name, kinds in READ.items():
            check_type(name, content.get(name), kinds)
        wrong = [name for name in content["target_modules"] if not NAME.fullmatch(name)]
        wrong += [name for name in content["modules_to_save"] if name not in modules]
        if wrong or content["peft_type"] != "LORA":
            raise ValueError(f"it has {shorten((wrong or [content['peft_type']])[0])}")
        if content["r"] < 1 or not 0 < content["lora_alpha"] < math.inf:
            raise ValueError(f"r is {content['r']}, lora_alpha {shorten(content['lora_alpha'])}")
        defaults = LoraConfig().to_dict()
        for name in content.keys() - READ.keys() - IDLE:
            if content[name] != defaults.get(name) and (name in defaults or content[name]):
                raise ValueError(f"it has {shorten(name)}")
        check_rank(directory / ADAPTER_WEIGHTS, content["r"])
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{path}: no adapter as finetune.py makes it: {one_line(error)[:120]}: merge it by peft's "
            "merge_and_unload, or run finetune.py again"
        ) from error
    values = {name: content[name] for name in READ if name != "peft_type"}
    return LoraConfig(**values)


def check_rank(path: Path, rank: int) -> None:
    """ValueError unless LoRA's matrices in the file have this rank: peft makes them before it looks."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            if "lora_A" in name and (found := file.get_slice(name).get_shape()[0]) != rank:
                raise ValueError(f"r is {rank}, that of {shorten(name)} {found}")
