"""Text from a decoder: prompts of a command line, a file or a conversation in the terminal."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch

from common.cli import UserError, one_line
from extras.after.generation.decoder_model import Decoder, opening
from extras.after.generation.flags import GenerateFlags
from extras.families.text.chat_template import render

logger = logging.getLogger(__name__)
NEW_TOKENS, TOP_K, TEMPERATURE = 200, 50, 0.8


class Generator(Decoder):
    """A causal model of transformers with its tokenizer; samples as the flags say."""

    def __init__(self, args: GenerateFlags, directory: Path):
        from transformers import AutoTokenizer

        super().__init__(args, directory)
        with opening(args):
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        self.end = self.ends or self.tokenizer.eos_token_id

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
        if args.temperature != 0:
            temperature = TEMPERATURE if args.temperature is None else args.temperature
            top_k, top_p = TOP_K if args.top_k is None else args.top_k, 1.0 if args.top_p is None else args.top_p
            sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
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


def prompts(args: GenerateFlags) -> list[str]:
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


def write_text(args: GenerateFlags, directory: Path) -> None:
    """Print what the model makes of the prompts. UserError for flags of proteins."""
    args.refuse("a decoder of text", *args.out.given, *args.decoder.given, *args.encoder.given)
    args.refuse_copies(True)
    if args.num_samples > 1 and args.prompt is None and args.prompt_file is None:
        raise UserError(f"--num_samples {args.num_samples}: goes with --prompt or --prompt_file")
    generator = Generator(args, directory)
    if args.prompt is None and args.prompt_file is None:
        chat(generator)
        return
    for number, prompt in enumerate(prompts(args)):
        for sample in range(args.num_samples):
            if number or sample:
                print()
            generator.generate(prompt, args.seed + sample, shows_prompt=True)
