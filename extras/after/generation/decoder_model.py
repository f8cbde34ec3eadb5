"""A decoder of transformers from a directory, as generate.py opens it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from common.cli import UserError, one_line
from common.files.safe_files import read_json, shorten
from extras.after.generation.flags import GenerateFlags
from extras.families.decoders.config import DecoderConfig

logger = logging.getLogger(__name__)
GENERATION = "generation_config.json"
NO_SETTING = {"transformers_version", "_from_model_config"} | {f"{name}_token_id" for name in ("bos", "eos", "pad")}


@contextmanager
def opening(args: GenerateFlags) -> Iterator[None]:
    """UserError for files that are missing, damaged or foreign."""
    try:
        yield
    except Exception as error:  # many types
        where = f"--model_name_or_path {args.model_name_or_path}"
        raise UserError(f"{where}: cannot be opened: {one_line(error)[:200]}") from error


class Decoder:
    """A causal model of transformers, on a GPU if there is one.

    context: tokens of prompt and answer together; reads: why; ends: ids of tokens that end a text, if any.
    """

    def __init__(self, args: GenerateFlags, directory: Path):
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # of loading weights
        self.args = args
        where = f"--model_name_or_path {args.model_name_or_path}"
        try:
            self.config = DecoderConfig.read(directory / "config.json")  # without keys that load code
        except (OSError, ValueError) as error:
            raise UserError(f"{where}: neither an encoder nor a decoder ({one_line(error)})") from error
        self.config.check(where)
        self.ends = end_tokens(directory, self.config, where)
        self.context = self.config.context
        is_trained = self.context < self.config.max_position_embeddings
        self.reads = f"was trained on contexts of {self.context:,}" if is_trained else f"reads {self.context:,}"
        self.device = torch.device("cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu")
        with opening(args):
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=self.config.to_transformers(),
                generation_config=GenerationConfig(),  # of no file: the flags say how to sample
                dtype=torch.bfloat16 if args.bf16 else torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
            )
        self.model.to(self.device).eval()


def end_tokens(directory: Path, config: DecoderConfig, where: str) -> list[int]:
    """The ids of eos_token_id of generation_config.json (a chat model may have several), else of config.json.

    Other settings of that file do not apply, which the log says. UserError for what are no ids of the model.
    """
    content, name = config.others, "config.json"
    try:
        found = read_json(directory / GENERATION, follow_links=True)
        if settings := sorted(found.keys() - NO_SETTING):
            logger.info("%s: not applied, flags say how to sample: %s", GENERATION, shorten(", ".join(settings)))
        if found.get("eos_token_id") is not None:
            content, name = found, GENERATION
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: {GENERATION} cannot be read: {one_line(error)[:160]}: mend or remove it") from error
    value = content.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for each in ids:
        if type(each) is not int or not 0 <= each < config.vocab_size:
            most = f"vocab_size {config.vocab_size:,}"
            raise UserError(f"{where}: {name}: eos_token_id has {shorten(each)}: must be an id below {most}: mend it")
    return ids
