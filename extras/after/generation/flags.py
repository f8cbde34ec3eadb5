"""Flags of generate.py: those of every model, of text, of proteins, and of proteins from an encoder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from common.cli import UserError
from common.flags import Flags, Missing, flag
from extras.prepare.sources.proteins import ProteinFlags

Unmask = Literal["ancestral", "confidence"]
Direction = Literal["forward", "reverse"]


class Group(Flags):
    @property
    def given(self) -> list[str]:
        """The flags of this group that differ from their defaults."""
        return [
            each.name for each in fields(self) if getattr(self, each.name) != each.default and each.name != "proteins"
        ]


@dataclass
class ProteinOutputFlags(Group):
    """Of proteins, whichever model they come from."""

    group = "proteins"

    output: str | None = flag(None, "A FASTA file for the proteins. Default: they are printed.")
    overwrite: bool = flag(False, "Replace an existing --output.")
    tokens_per_pack: int = flag(4096, "Tokens per forward pass; more need more memory. It changes no protein.")
    proteins: ProteinFlags = field(default_factory=ProteinFlags)

    def check(self) -> None:
        self.require_at_least(1, "tokens_per_pack")
        if self.output is None:
            return
        output = Path(self.output)
        if output.exists() and not (output.is_file() and self.overwrite):
            what = "give --overwrite to replace it, or another name" if output.is_file() else "choose another name"
            raise UserError(f"--output {output}: exists: {what}")
        there = next(path for path in output.absolute().parents if path.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise UserError(f"--output {output}: {there} is not a directory that you can write to: choose another")


@dataclass
class DecoderFlags(Group):
    group = "proteins from a decoder"

    direction: Direction = flag(
        "forward",
        "Begin at the N-terminus; reverse: at the C-terminus, and --prompt ends it.",
        choices=get_args(Direction),
    )


@dataclass
class UnmaskFlags(Group):
    group = "proteins from an encoder"

    unmask: Unmask | None = flag(
        None,
        "Which masks open next: random ones, or those whose letters are the most probable. Default: ancestral.",
        choices=get_args(Unmask),
    )
    length: int | None = flag(None, "Residues of each protein.")
    length_from: str | None = flag(
        None, "A FASTA file, or processed/arrow of step 1: each protein has the length of a random record of it."
    )
    fasta: str | None = flag(None, "Templates: each X is generated, the other residues stay.")
    fix: str | None = flag(None, "Residues of the templates that stay, say 10-45,60; the others are generated.")
    steps: int | None = flag(None, "Steps from all masks to none. Default: one for each residue, exact.")
    remask: float = flag(
        0.0, "Share, of the most that keeps the number of masks on its schedule, of open letters that close again."
    )

    def check(self) -> None:
        self.require_at_least(1, "length", "steps")
        self.require_at_least(0, "remask")
        if self.remask > 1:
            raise UserError(f"--remask {self.remask}: must be at most 1")
        sources = [name for name in ("length", "length_from", "fasta") if getattr(self, name) is not None]
        if len(sources) > 1:
            raise UserError(f"--{sources[0]} and --{sources[1]}: give one of them")
        if self.fix is not None and self.fasta is None:
            raise UserError(f"--fix {self.fix}: of which protein? Give it as --fasta")
        for name in ("length_from", "fasta"):
            value = getattr(self, name)
            if value is not None and not (Path(value).exists() if name == "length_from" else Path(value).is_file()):
                raise UserError(f"--{name} {value}: no such file")


@dataclass
class GenerateFlags(Flags):
    required = ("model_name_or_path", "prompt", "length")

    model_name_or_path: str | None = flag(
        None, "A run's output directory, its final_model/ or a checkpoint; another model's directory or Hub name."
    )
    prompt: str | None = flag(
        None, "The text, or the residues, to continue. Without it and --prompt_file: asks for text in the terminal."
    )
    prompt_file: str | None = flag(None, "A text file with a prompt a line.")
    max_new_tokens: int | None = flag(
        None, "At most so many tokens for a prompt. Default: 200 of text, of proteins what the context has room for."
    )
    temperature: float | None = flag(
        None, "Of sampling; 0: always the likeliest token. Default: 0.8 of text, 1 of proteins."
    )
    top_k: int | None = flag(
        None, "Sample from so many likeliest tokens; 0: from all. Default: 50 of text, all of proteins."
    )
    top_p: float | None = flag(
        None, "Sample from the likeliest tokens that together have this probability. Default: 1, from all."
    )
    repetition_penalty: float = flag(1.0, "Above 1: make tokens that are there already less likely. Of text.")
    num_samples: int = flag(1, "Texts or proteins for each prompt or template; without either, in all.")
    seed: int = flag(42, "Of the first text of each prompt; the next ones have the next seeds. Of all proteins.")
    bf16: bool = flag(False, "Compute in bfloat16.")
    use_cpu: bool = flag(False, "Compute on the CPU even where there is a GPU.")
    out: ProteinOutputFlags = field(default_factory=ProteinOutputFlags)
    decoder: DecoderFlags = field(default_factory=DecoderFlags)
    encoder: UnmaskFlags = field(default_factory=UnmaskFlags)

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
            if self.temperature == 0 and getattr(self, name) is not None:
                raise UserError(
                    f"--{name}: without effect at --temperature 0, which takes the likeliest token: drop one"
                )
        if self.prompt is not None and self.prompt_file is not None:
            raise UserError("--prompt and --prompt_file: give one of them")
        if self.prompt_file is not None and not Path(self.prompt_file).is_file():
            raise UserError(f"--prompt_file {self.prompt_file}: no such file")
        for name, value in (("fasta", self.encoder.fasta), ("length_from", self.encoder.length_from)):
            output = Path(self.out.output) if self.out.output is not None else None
            if output is not None and value is not None and output.exists() and output.samefile(value):
                raise UserError(f"--output {output}: it would replace --{name}: choose another name")

    def refuse(self, what: str, *names: str) -> None:
        """UserError for a given flag that models like this one do not take. what: the model, and what it takes."""
        groups = (self, self.out, self.decoder, self.encoder)
        for name in names:
            group = next(group for group in groups if name in vars(group))
            default = next(each.default for each in fields(group) if each.name == name)
            if getattr(group, name) != default:
                raise UserError(f"--{name}: {self.model_name_or_path} is {what}: drop it")

    def refuse_copies(self, are_same: bool) -> None:
        """UserError for several samples that are all the same."""
        if self.temperature == 0 and self.num_samples > 1 and are_same:
            raise UserError(f"--num_samples {self.num_samples}: all the same at --temperature 0: drop one of the two")
