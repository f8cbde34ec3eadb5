"""Proteins from a decoder by generate.py, residue after residue, from either end.

All samples of a prompt have the same length until they end, so a batch has no padding; those that end leave it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common.cli import UserError
from common.console import slow_bar
from extras.after.generation.decoder_model import Decoder
from extras.after.generation.draws import LETTER, Drawn, Sampling, draw, uniforms
from extras.after.generation.encoders import drawable, sampling_of
from extras.after.generation.fasta import Generated, locked_output, write
from extras.after.generation.flags import GenerateFlags
from extras.after.generation.text import prompts
from extras.after.inference.encoder import in_parts
from extras.families.decoders.config import DIRECTIONS
from extras.families.decoders.residues import RESIDUE_TOKENS, encode_direction

CACHED = 16  # times --tokens_per_pack: tokens whose keys and values are kept
RESIDUES = 20


class Sample(NamedTuple):
    """What follows a prompt. tokens: the residues' ids; log_p: float64, of each; ended: whether an end was drawn."""

    tokens: list[int]
    log_p: list[float]
    ended: bool


def write_proteins(args: GenerateFlags, directory: Path) -> None:
    """Write the proteins of all prompts as FASTA. UserError for flags of text and of encoders."""
    args.refuse("a protein decoder, which takes --prompt", *args.encoder.given, "repetition_penalty")
    args.refuse_copies(True)
    texts = [""] if args.prompt is None and args.prompt_file is None else prompts(args)
    for text in texts:
        if text and not (text.isascii() and text.isalpha()):
            raise UserError(f"--prompt {text[:40]}: residues alone, please: letters without blanks")
    with locked_output(args.out.output):
        decoder = Decoder(args, directory)
        check_direction(args, decoder)
        if decoder.config.vocab_size < RESIDUE_TOKENS.vocab_size:
            raise UserError(f"{args.model_name_or_path}: its tokenizer has more tokens than the model: export it anew")
        write(generated(decoder, args, texts), args.out.output)


def check_direction(args: GenerateFlags, decoder: Decoder) -> None:
    """UserError for a direction that the model's run says it did not train."""
    if args.decoder.direction == "reverse" and decoder.config.others.get(DIRECTIONS) == "forward":
        raise UserError(
            f"--direction reverse: {args.model_name_or_path} has read proteins forwards alone: drop it, or take a "
            "model that was trained with --directions both"
        )


def generated(decoder: Decoder, args: GenerateFlags, texts: Sequence[str]) -> Iterator[Generated]:
    """The proteins of each prompt, complete, in order."""
    reverse = args.decoder.direction == "reverse"
    total = len(texts) * args.num_samples
    with slow_bar(total, "proteins", desc="Generating") as bar:
        for place, text in enumerate(texts):
            # Without the end's two tokens.
            ids = encode_direction(text.upper().encode(), reverse)[:-2].astype(np.int64)
            room = decoder.context - len(ids)
            if room < 1:
                raise UserError(f"the prompt has {len(ids):,} tokens, and the model {decoder.reads}: shorten it")
            most = min(room, args.max_new_tokens or room)
            batch = max(1, CACHED * args.out.tokens_per_pack // (len(ids) + most))
            for numbers in in_parts(range(args.num_samples), batch):
                keys = [(args.seed, place, number) for number in numbers]
                for number, sample in zip(
                    numbers, continued(decoder, ids, keys, most, sampling_of(args), reverse), strict=True
                ):
                    letters = "".join(RESIDUE_TOKENS.letters[token] for token in sample.tokens)
                    residues = letters[::-1] + text.upper() if reverse else text.upper() + letters
                    name = f"sample_{number + 1}" if len(texts) == 1 else f"prompt_{place + 1}_sample_{number + 1}"
                    yield Generated(name, residues, np.array(sample.log_p), "" if sample.ended else "unfinished")
                bar.update(len(numbers))


@torch.inference_mode()
def continued(
    decoder: Decoder, prompt: np.ndarray, keys: Sequence[tuple[int, ...]], most: int, how: Sampling, reverse: bool
) -> list[Sample]:
    """A sample for each key, which alone decides it. prompt: int64 [tokens]; most: residues of a sample.

    Only the standard residues and the two end tokens are drawn, an end not before there is a residue.
    """
    residues = drawable(RESIDUE_TOKENS, "residues")
    last = (RESIDUE_TOKENS.after_begin if reverse else RESIDUE_TOKENS.before_end)[0]
    columns = np.concatenate((residues, [last, RESIDUE_TOKENS.end]))
    samples = [Sample([], [], False) for _ in keys]
    active = np.arange(len(keys))
    ids = torch.from_numpy(prompt).to(decoder.device)[None]
    output = decoder.model(ids, use_cache=True)
    cache, logits = output.past_key_values, output.logits[:, -1].expand(len(keys), -1)
    cache.batch_repeat_interleave(len(keys))
    is_empty = len(prompt) == 2
    for step in range(most):
        rows = _columns(decoder, logits, columns)
        uniform = np.concatenate([uniforms((*keys[n], LETTER), np.array([step])) for n in active])
        if is_empty and not step:
            rows[:, RESIDUES:] = -np.inf
        drawn = draw(rows, uniform, how)
        for n in np.flatnonzero(drawn.is_tie) if step else ():
            alone = _columns(decoder, _alone(decoder, prompt, samples[active[n]].tokens), columns)
            drawn = _replaced(drawn, n, draw(alone, uniform[n : n + 1], how))
        goes_on = drawn.letters < RESIDUES
        for n, letter, log_p in zip(active, drawn.letters, drawn.log_p, strict=True):
            if letter < RESIDUES:
                samples[n].tokens.append(int(columns[letter]))
                samples[n].log_p.append(float(log_p))
            else:
                samples[n] = samples[n]._replace(ended=True)
        active = active[goes_on]
        if not len(active) or step == most - 1:
            break
        if not goes_on.all():
            cache.batch_select_indices(torch.from_numpy(np.flatnonzero(goes_on)).to(decoder.device))
        following = torch.from_numpy(columns[drawn.letters[goes_on]])[:, None].to(decoder.device)
        output = decoder.model(following, past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[:, -1]
    return samples


def _alone(decoder: Decoder, prompt: np.ndarray, tokens: list[int]) -> torch.Tensor:
    """Logits [1, vocabulary] after these tokens, without other samples and without a cache."""
    ids = torch.from_numpy(np.concatenate((prompt, tokens)).astype(np.int64)).to(decoder.device)
    return decoder.model(ids[None], use_cache=False).logits[:, -1]


def _columns(decoder: Decoder, logits: torch.Tensor, columns: np.ndarray) -> np.ndarray:
    """Logits float32 [n, columns]. UserError for NaN and infinity."""
    rows = logits[:, columns].float().cpu().numpy()
    if not np.isfinite(rows).all():
        name = decoder.args.model_name_or_path
        raise UserError(f"{name}: gives NaN or infinity: try it without --bf16, or take another checkpoint")
    return rows


def _replaced(drawn: Drawn, n: int, by: Drawn) -> Drawn:
    drawn.letters[n], drawn.log_p[n] = by.letters[0], by.log_p[0]
    return drawn
