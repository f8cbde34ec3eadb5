"""A decoder of transformers from a directory, as generate.py opens it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from common.cli import UserError, one_line
from extras.after.generation.flags import GenerateFlags
from extras.families.decoders.config import DecoderConfig


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

    context: tokens of prompt and answer together; reads: why.
    """

    def __init__(self, args: GenerateFlags, directory: Path):
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # of loading weights
        self.args = args
        where = f"--model_name_or_path {args.model_name_or_path}"
        try:
            self.config = DecoderConfig.read(directory / "config.json")  # without keys that load code
        except (OSError, ValueError) as error:
            raise UserError(f"{where}: neither an encoder nor a decoder ({one_line(error)})") from error
        self.config.check(where)
        self.context = self.config.context
        is_trained = self.context < self.config.max_position_embeddings
        self.reads = f"was trained on contexts of {self.context:,}" if is_trained else f"reads {self.context:,}"
        self.device = torch.device("cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu")
        with opening(args):
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=self.config.to_transformers(),
                dtype=torch.bfloat16 if args.bf16 else torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
            )
        self.model.to(self.device).eval()
