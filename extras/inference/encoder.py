"""ESM-2 over many sequences: packed end to end, so that none of them is padded for another's sake."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.cli import UserError
from common.files.alphabet import BYTE_TO_ID, TOKENS, UNK, encode
from common.files.hashing import hash_bytes
from common.flags import Flags, Missing, flag
from common.models.esm2.config import load_config
from common.models.esm2.convert import read_pretrained
from common.models.esm2.model import Esm2ForMaskedLM
from extras.sources.fasta import read_fasta_lines
from extras.sources.records import characters, columns
from extras.sources.residues import check_residues, clean

# Proteins that are longer than the model has seen: in windows that overlap by half.


class Window(NamedTuple):
    """Residues [start, start + length) of a protein; [begin, end), counted in it, are the ones to take of it."""

    start: int
    length: int
    begin: int
    end: int


def windows(residues: int, longest: int) -> Iterator[Window]:
    """Of so many residues each window holds `longest` at most, all the same; each residue is taken of the window in
    whose middle it lies most nearly."""
    if residues <= longest:
        yield Window(0, residues, 0, residues)
        return
    count = -(-(residues - longest) // (longest // 2)) + 1
    starts = np.linspace(0, residues - longest, count).round().astype(int).tolist()
    # Half-way between the middles of two neighbours the one hands over to the other.
    borders = [0, *((a + b + longest) // 2 for a, b in zip(starts, starts[1:], strict=False)), residues]
    for start, begin, end in zip(starts, borders, borders[1:], strict=False):
        yield Window(start, longest, begin - start, end - start)


def tokens_of(sequence: bytes, start: int, length: int) -> np.ndarray:
    """`<cls> residues <eos>` of a part, uint8 [length + 2]."""
    return encode(sequence[start : start + length])


# A FASTA file of proteins, looked through as a whole before anything is computed from it.

logger = logging.getLogger(__name__)


@dataclass
class Totals:
    """Counts. unknown: characters that are no residues, <unk> to the model; duplicates: ids that came before."""

    proteins: int = 0
    residues: int = 0
    unknown: int = 0
    with_unknown: int = 0
    duplicates: int = 0

    def report(self, where: str) -> None:
        if self.unknown:
            counts = f"{self.unknown:,}", f"{self.with_unknown:,}"
            logger.warning("%s: %s characters in %s proteins are no residues: <unk>", where, *counts)
        if self.duplicates:
            logger.warning("%s: %s ids have come before: each has its row", where, f"{self.duplicates:,}")


def look_through(fasta: str) -> Totals:
    """What is in the file, by the rules that hold for training (extras.sources.residues).

    UserError for what `read_fasta_lines` refuses anywhere in the file, and for what is no protein. 8 bytes a protein.
    """
    where = f"--fasta {fasta}"
    totals, ids = Totals(), []
    for lines in read_fasta_lines(fasta):
        rows = columns(lines)
        data, offsets = clean(*characters(rows.column("text")), where)
        unknown = np.add.reduceat(BYTE_TO_ID[data] == UNK, offsets[:-1], dtype=np.int64)  # no text is empty
        totals.proteins += rows.num_rows
        totals.residues += len(data)
        totals.unknown += int(unknown.sum())
        totals.with_unknown += int(np.count_nonzero(unknown))
        ids.append(hash_bytes(*characters(rows.column("id"))))
    check_residues(where, totals.unknown, totals.residues)
    totals.duplicates = totals.proteins - len(np.unique(np.concatenate(ids)))
    return totals


Progress = Callable[[int], None]


@dataclass
class EncoderFlags(Flags):
    """The model, and how it is run."""

    group = "model"
    required = ("model_name_or_path",)

    model_name_or_path: str | None = flag(
        None, "A final_model/, any other directory of an EsmForMaskedLM, or its name on the Hub."
    )
    max_seq_length: int = flag(1024, "Tokens, <cls> and <eos> included; longer proteins are seen in windows.")
    tokens_per_pack: int = flag(4096, "Tokens that are computed at a time; more need more memory.")
    bf16: bool = flag(False, "Compute in bfloat16: faster on GPUs and some CPUs, three digits.")
    use_cpu: bool = flag(False, "Compute on the CPU even where there is a GPU.")

    def missing(self) -> Iterator[Missing]:
        if not self.model_name_or_path:
            yield Missing("--model_name_or_path", "the model", "out/final_model")

    def check(self) -> None:
        self.require_at_least(8, "max_seq_length")
        self.require_at_least(1, "tokens_per_pack")


class Encoder:
    """A model with its weights, on the GPU where there is one.

    device: of this process, where several share a machine. UserError for weights that are missing, damaged or not
    finite, and for another vocabulary than ESM-2's.
    """

    def __init__(self, flags: EncoderFlags, device: torch.device | None = None):
        self.flags = flags
        on_gpu = torch.cuda.is_available() and not flags.use_cpu
        self.device = device or torch.device("cuda" if on_gpu else "cpu")
        config = load_config(flags.model_name_or_path)
        with torch.device("meta"):
            self.model = Esm2ForMaskedLM(config)
        self.model.to_empty(device=self.device).eval()
        parameters = dict(self.model.named_parameters())
        pieces, _ = read_pretrained(flags.model_name_or_path, config)
        with torch.no_grad():
            for name, tensor in pieces:
                parameters[name].copy_(tensor)
        size = (config.num_hidden_layers, config.hidden_size)
        logger.info("%s: %d layers of %d, on %s", flags.model_name_or_path, *size, self.device)

    def packs(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of the sequences that are computed together: the longest first, so that memory is known at once."""
        pack, tokens = [], 0
        for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
            if pack and tokens + lengths[number] > self.flags.tokens_per_pack:
                yield pack
                pack, tokens = [], 0
            pack.append(number)
            tokens += lengths[number]
        if pack:
            yield pack

    def hidden(self, sequences: Sequence[np.ndarray], done: Progress = lambda tokens: None) -> list[Tensor]:
        """After the last LayerNorm: fp32 [length, hidden] each, of token ids uint8 [length].

        done: called after each pack with the number of its tokens. UserError where one is NaN or infinite.
        """
        return self._run(sequences, True, done)

    def logits(self, sequences: Sequence[np.ndarray], done: Progress = lambda tokens: None) -> list[Tensor]:
        """Of the 33 tokens: fp32 [length, 33] each, of token ids uint8 [length]. done: as above."""
        return self._run(sequences, False, done)

    @torch.inference_mode()
    def _run(self, sequences: Sequence[np.ndarray], hidden: bool, done: Progress) -> list[Tensor]:
        results: list[Tensor | None] = [None] * len(sequences)
        for pack in self.packs([len(each) for each in sequences]):
            lengths = [len(sequences[number]) for number in pack]
            ids = torch.from_numpy(np.concatenate([sequences[number] for number in pack]).astype(np.int64))
            ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
            ids, ends = ids.to(self.device), ends.to(self.device)
            # Labels that ask for nothing: the head has nothing to do.
            more = {"labels": torch.full_like(ids, -100), "output_hidden": True} if hidden else {}
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.flags.bf16):
                output = self.model(ids, cu_seqlens=ends, max_seqlen=max(lengths), **more)
            found = (output.hidden if hidden else output.logits).float().cpu()
            done(len(ids))
            for number, part in zip(pack, found.split(lengths), strict=True):
                results[number] = part
            if not found.isfinite().all():
                self._refuse(sequences[next(number for number in pack if not results[number].isfinite().all())])
        return results

    def _refuse(self, sequence: np.ndarray) -> None:
        begins = "".join(TOKENS[token] for token in sequence[1:21])
        raise UserError(
            f"{self.flags.model_name_or_path}: gives NaN or infinity for the sequence {begins}... of {len(sequence)} "
            "tokens: try it without --bf16, or take another checkpoint"
        )
