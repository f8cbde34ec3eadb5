"""Proteins from an encoder by generate.py: its flags, the model's letters, the FASTA file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.cli import UserError
from common.console import slow_bar
from common.data.alphabet import Alphabet
from extras.after.generation.draws import Sampling
from extras.after.generation.fasta import STANDARD, Generated, locked_output, write
from extras.after.generation.flags import GenerateFlags
from extras.after.generation.templates import Template, templates
from extras.after.generation.unmask import Asks, Protein, Request, Schedule, run_all, unmask
from extras.after.inference.encoder import Encoder, EncoderFlags

logger = logging.getLogger(__name__)
OF_OTHERS = ("prompt", "prompt_file", "max_new_tokens", "repetition_penalty", "direction")


def write_proteins(args: GenerateFlags, directory: Path) -> None:
    args.refuse("an encoder, which takes --length, --length_from or --fasta", *OF_OTHERS)
    flags = args.encoder
    if flags.length is None and flags.length_from is None and flags.fasta is None:
        raise UserError("missing: --length, --length_from or --fasta (what to generate): add, say, --length 200")
    args.refuse_copies(flags.unmask == "confidence" and flags.length_from is None and not flags.remask)
    encoder_flags = EncoderFlags(
        str(directory), tokens_per_pack=args.out.tokens_per_pack, bf16=args.bf16, use_cpu=args.use_cpu
    )
    # Before the model is read.
    most = encoder_flags.max_seq_length - 2
    begun = list(templates(flags, args.out.proteins, args.num_samples, args.seed, most))
    with locked_output(args.out.output):
        encoder = Encoder(encoder_flags)
        drawable(encoder.alphabet, str(directory))
        warn_of_token_dropout(encoder.model, args.model_name_or_path)
        write(generated(encoder, begun, schedule_of(args), sampling_of(args), args.seed), args.out.output)


def schedule_of(args: GenerateFlags) -> Schedule:
    return Schedule(args.encoder.unmask == "confidence", args.encoder.steps, args.encoder.remask)


def sampling_of(args: GenerateFlags) -> Sampling:
    """Of proteins; text has other defaults."""
    temperature = 1.0 if args.temperature is None else args.temperature
    return Sampling(temperature, 1.0 if args.top_p is None else args.top_p, args.top_k or 0)


def generated(
    encoder: Encoder, begun: Sequence[Template], schedule: Schedule, how: Sampling, seed: int
) -> Iterator[Generated]:
    """The proteins, complete, in order. Each is a function of seed, its template and number, and the model."""
    letters = drawable(encoder.alphabet, str(encoder.flags.model_name_or_path))

    def started() -> Iterator[tuple[Protein, Asks]]:
        for template in begun:
            ids = encoder.alphabet.encode(template.residues)
            places = np.flatnonzero(template.is_free) + encoder.alphabet.num_head
            protein = Protein(ids, places, encoder.alphabet.mask, letters, (seed, *template.number))
            yield protein, unmask(protein, schedule, how)

    def compute(requests: list[Request]) -> list[np.ndarray]:
        logits = encoder.logits([request.ids for request in requests], at=[request.at for request in requests])
        return [rows[:, letters].numpy() for rows in logits]

    total = sum(int(template.is_free.sum()) for template in begun)
    with slow_bar(total, "residues", desc="Generating") as bar:
        complete = run_all(started(), compute, encoder.flags.pack_tokens, bar.update)
        for template, protein in zip(begun, complete, strict=True):
            residues = list(template.residues.decode())
            for place, token in zip(np.flatnonzero(template.is_free), protein.ids[protein.places], strict=True):
                residues[place] = encoder.alphabet.letters[token]
            yield Generated(template.name, "".join(residues), protein.log_p)


def drawable(alphabet: Alphabet, model: str) -> np.ndarray:
    """Token ids [20] of the standard residues, in the order of `STANDARD`. UserError if there is one that it lacks."""
    ids = alphabet.byte_to_id[np.frombuffer(STANDARD.encode(), np.uint8)]
    if (ids == alphabet.unknown).any():
        raise UserError(f"{model}: its alphabet has no plain residues to draw")
    return ids.astype(np.int64)


def warn_of_token_dropout(model: Any, name: str | None) -> None:
    if getattr(model.config, "token_dropout", False):
        logger.warning(
            "%s was trained at 15 %% masks with token dropout, which scales a protein's few known residues up by its "
            "share of masks: expect better proteins of a model trained with --objective mdlm",
            name,
        )
