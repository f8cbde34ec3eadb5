#!/usr/bin/env python3
r"""Generate text with a decoder that you trained, or any Llama, Mistral or Mixtral: from a prompt, a file or a chat.

python generate.py --model_name_or_path out-llama --prompt "Once upon a time"
python generate.py --model_name_or_path out-llama/checkpoint-500 --prompt_file prompts.txt --temperature 0
python generate.py --model_name_or_path out-llama

The last one asks for prompts in the terminal until Ctrl-D; a model whose tokenizer has a chat template then keeps the
conversation. Text appears as it is generated. docs/after.md has more.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.cli import UserError, one_line, run
from common.flags import Flags, Missing, flag, parse_arguments
from common.models.layers.hf_directory import local_directory
from extras.families.decoders.config import TRAINED_CONTEXT, DecoderConfig, load_decoder_config
from extras.families.text.chat_template import render
from extras.prepare.sources.hub import HUB_NAME

logger = logging.getLogger(__name__)
NEW_TOKENS, TOP_K = 200, 50


@dataclass
class Arguments(Flags):
    required = ("model_name_or_path", "prompt", "prompt_file")

    model_name_or_path: str | None = flag(
        None, "A run's output directory, its final_model/ or a checkpoint; another decoder's directory or Hub name."
    )
    prompt: str | None = flag(None, "The text to continue. Without it and --prompt_file: asks in the terminal.")
    prompt_file: str | None = flag(None, "A text file with a prompt a line.")
    max_new_tokens: int | None = flag(
        None, f"At most so many tokens for a prompt. Default: {NEW_TOKENS}, or what the context has room for."
    )
    temperature: float = flag(0.8, "Of sampling; 0: always the likeliest token.")
    top_k: int | None = flag(None, f"Sample from so many likeliest tokens; 0: from all. Default: {TOP_K}.")
    top_p: float | None = flag(
        None, "Sample from the likeliest tokens that together have this probability. Default: 1, from all."
    )
    repetition_penalty: float = flag(1.0, "Above 1: make tokens that are there already less likely.")
    num_samples: int = flag(1, "Texts for each prompt.")
    seed: int = flag(42, "Of the first text of each prompt; the next ones have the next seeds.")
    bf16: bool = flag(False, "Compute in bfloat16.")
    use_cpu: bool = flag(False, "Compute on the CPU even where there is a GPU.")

    def missing(self) -> Iterator[Missing]:
        if not self.model_name_or_path:
            yield Missing("--model_name_or_path", "the model", "out-llama")

    def check(self) -> None:
        self.require_at_least(1, "max_new_tokens", "num_samples")
        self.require_at_least(0, "temperature", "top_k", "seed")
        self.require_above(0, "top_p", "repetition_penalty")
        if self.top_p is not None and self.top_p > 1:
            raise UserError(f"--top_p {self.top_p}: must be at most 1")
        for name in ("top_k", "top_p"):
            if not self.temperature and getattr(self, name) is not None:
                raise UserError(
                    f"--{name}: without effect at --temperature 0, which takes the likeliest token: drop one"
                )
        if not self.temperature and self.num_samples > 1:
            raise UserError(f"--num_samples {self.num_samples}: all the same at --temperature 0: drop one of the two")
        if self.num_samples > 1 and self.prompt is None and self.prompt_file is None:
            raise UserError(f"--num_samples {self.num_samples}: goes with --prompt or --prompt_file")
        if self.prompt is not None and self.prompt_file is not None:
            raise UserError("--prompt and --prompt_file: give one of them")
        if self.prompt_file is not None and not Path(self.prompt_file).is_file():
            raise UserError(f"--prompt_file {self.prompt_file}: no such file")


def model_directory(name: str, stack: ExitStack) -> Path:
    """As `exported`, downloaded if it is a name on the Hub. UserError if there is no decoder."""
    from extras.after.inference.exported import exported

    name = exported(name, stack)
    if Path(name).is_dir():
        return Path(name)
    if not HUB_NAME.fullmatch(name):
        raise UserError(f"--model_name_or_path {name}: no such directory, and no name on the Hub (owner/name)")
    load_decoder_config(name)  # before weights are downloaded
    return local_directory(name)


def context_of(config: DecoderConfig) -> tuple[int, str]:
    """(tokens of prompt and answer together, why): those that the model was trained on where the run recorded it."""
    trained, most = config.others.get(TRAINED_CONTEXT), config.max_position_embeddings
    if type(trained) is int and 0 < trained < most:
        return trained, f"was trained on contexts of {trained:,}"
    return most, f"reads {most:,}"


class Generator:
    """A causal model of transformers with its tokenizer; samples as the flags say."""

    def __init__(self, args: Arguments, directory: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # of loading weights
        self.args = args
        where = f"--model_name_or_path {args.model_name_or_path}"
        try:
            self.config = DecoderConfig.read(directory / "config.json")  # without keys that load code
        except (OSError, ValueError) as error:
            raise UserError(f"{where}: no decoder ({one_line(error)}); embed.py and score.py take ESM-2") from error
        self.config.check(where)
        self.context, self.reads = context_of(self.config)
        self.device = torch.device("cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu")
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=self.config.to_transformers(),
                dtype=torch.bfloat16 if args.bf16 else torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
            )
        except Exception as error:  # many types: missing, damaged or foreign files
            raise UserError(f"{where}: cannot be opened: {one_line(error)[:200]}") from error
        self.model.to(self.device).eval()
        end = self.model.generation_config.eos_token_id  # a chat model may have several
        self.end = self.tokenizer.eos_token_id if end is None else end

    @property
    def chats(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def prompt_ids(self, prompt: str | list[dict[str, str]]) -> torch.Tensor:
        """[1, tokens] of a text or a conversation. An empty text begins a document: after an end-of-text token.

        UserError if the context is full.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt)["input_ids"] or [self.tokenizer.eos_token_id]
        else:
            ids = self.tokenizer(render(self.tokenizer, prompt), add_special_tokens=False)["input_ids"]
        if len(ids) >= self.context:
            raise UserError(f"the prompt has {len(ids):,} tokens, and the model {self.reads}: shorten it")
        return torch.tensor([ids])

    def generate(self, prompt: str | list[dict[str, str]], seed: int, shows_prompt: bool) -> str:
        """The new text, which is also printed while it is generated."""
        args, ids = self.args, self.prompt_ids(prompt)
        left = self.context - ids.shape[1]
        wanted = args.max_new_tokens or NEW_TOKENS
        if left < wanted:
            logger.log(
                logging.WARNING if args.max_new_tokens else logging.INFO,
                "Only %d more tokens fit into the model's context: it %s",
                left,
                self.reads,
            )
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        if args.temperature:
            top_k, top_p = TOP_K if args.top_k is None else args.top_k, 1.0 if args.top_p is None else args.top_p
            sampling = {"do_sample": True, "temperature": args.temperature, "top_k": top_k, "top_p": top_p}
        torch.manual_seed(seed)
        found = self.model.generate(
            ids.to(self.device),
            attention_mask=torch.ones_like(ids).to(self.device),
            max_new_tokens=min(wanted, left),
            repetition_penalty=args.repetition_penalty,
            eos_token_id=self.end,
            pad_token_id=self.tokenizer.pad_token_id or 0,  # of one sequence nothing is padded
            streamer=terminal_streamer(self.tokenizer, shows_prompt),
            **sampling,
        )
        return self.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def terminal_streamer(tokenizer: Any, shows_prompt: bool) -> Any:
    """Prints text as it is generated, without characters that would control the terminal."""
    from transformers import TextStreamer

    class Printable(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(printable(text), stream_end)

    return Printable(tokenizer, skip_prompt=not shows_prompt, skip_special_tokens=True)


def printable(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def prompts(args: Arguments) -> list[str]:
    if args.prompt is not None:
        return [args.prompt]
    assert args.prompt_file is not None
    try:
        lines = Path(args.prompt_file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt_file {args.prompt_file}: not a text in UTF-8: {one_line(error)}") from error
    if not any(lines):
        raise UserError(f"--prompt_file {args.prompt_file}: it has no prompt")
    return [line for line in lines if line]


def chat(generator: Generator) -> None:
    """Answer lines of standard input until it ends; those of one conversation if the model has a chat template."""
    asks = sys.stdin.isatty()
    if asks:
        what = "A conversation" if generator.chats else "A text to continue"
        print(f"{what}; Ctrl-D ends.", file=sys.stderr)
    conversation: list[dict[str, str]] = []
    seed = generator.args.seed
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        if not (line := line.rstrip("\n")):
            continue
        if not generator.chats:
            generator.generate(line, seed, shows_prompt=True)
        else:
            conversation.append({"role": "user", "content": line})
            answer = generator.generate(conversation, seed, shows_prompt=False)
            conversation.append({"role": "assistant", "content": answer})
        seed += 1


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    with ExitStack() as stack:
        generator = Generator(args, model_directory(args.model_name_or_path or "", stack))
        if args.prompt is None and args.prompt_file is None:
            chat(generator)
            return
        for number, prompt in enumerate(prompts(args)):
            for sample in range(args.num_samples):
                if number or sample:
                    print()
                generator.generate(prompt, args.seed + sample, shows_prompt=True)


if __name__ == "__main__":
    run(main)
