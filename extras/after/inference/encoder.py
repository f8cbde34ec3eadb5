"""Run an encoder on many sequences, packed without padding, and write embeddings to Parquet part by part."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from common.cli import UserError
from common.data.alphabet import Alphabet
from common.files.safe_files import replace_flushed
from common.flags import Flags, Missing, flag
from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.family import encoder_family, family_of
from common.models.layers.residual import total
from extras.after.inference.packed import loaded, packs, windows
from extras.prepare.sources.fasta import read_fasta_lines
from extras.prepare.sources.proteins import ProteinFlags
from extras.prepare.sources.records import characters, columns, hash_bytes, numbers, texts

logger = logging.getLogger(__name__)


@dataclass
class Totals:
    """Counts of a FASTA file. unknown: characters that become <unk>; duplicates: repeated ids."""

    proteins: int = 0
    residues: int = 0
    unknown: int = 0
    with_unknown: int = 0
    duplicates: int = 0

    def report(self, where: str) -> None:
        if self.duplicates:
            logger.warning("%s: %s ids are repeated: each gets a row", where, f"{self.duplicates:,}")


def look_through(fasta: str, alphabet: Alphabet = ESM2_TOKENS, flags: ProteinFlags | None = None) -> Totals:
    """Read the whole file once, say what is changed in it (extras.prepare.sources.residues), and count.

    alphabet: of the model, whose unknown characters are counted; flags: what is made of gaps and of bad records.
    UserError for any invalid record. Takes 8 bytes of memory a protein.
    """
    cleaner = (flags or ProteinFlags()).cleaner(f"--fasta {fasta}", alphabet)
    totals, ids = Totals(), []
    for lines in read_fasta_lines(fasta, cleaner=cleaner):
        rows = columns(lines)
        data, offsets = characters(rows.column("text"))
        data, offsets = data[offsets[0] : offsets[-1]], (offsets - offsets[0]) // alphabet.width
        is_unknown = alphabet.ids_of(data) == alphabet.unknown
        unknown = np.add.reduceat(is_unknown, offsets[:-1], dtype=np.int64)  # texts are not empty
        totals.proteins += rows.num_rows
        totals.residues += len(is_unknown) - (int((data == ord(":")).sum()) if alphabet.chains else 0)
        totals.unknown += int(unknown.sum())
        totals.with_unknown += int(np.count_nonzero(unknown))
        ids.append(hash_bytes(*characters(rows.column("id"))))
    cleaner.report()
    if totals.unknown > cleaner.changes.unknown:  # residues of ESM-2 that the model does not have
        counts = f"{totals.unknown:,}", f"{totals.with_unknown:,}"
        logger.warning("%s: %s characters in %s proteins are <unk> to the model", cleaner.where, *counts)
    if not totals.proteins:
        raise UserError(f"{cleaner.where}: no record is a protein")
    totals.duplicates = totals.proteins - len(np.unique(np.concatenate(ids)))
    return totals


Progress = Callable[[int], None]
Item = TypeVar("Item")
Each = Iterator[tuple[int, Tensor]]


PACK = "Tokens per forward pass; more need more memory. Default: 4096 on a GPU, 2048 on a CPU."
INT8 = "Matmuls of 8-bit integers: faster on CPUs with VNNI or AMX, two digits."


@dataclass
class EncoderFlags(Flags):
    """The model, and how to run it."""

    group = "model"
    required = ("model_name_or_path",)

    model_name_or_path: str | None = flag(
        None,
        "A run's output directory, a checkpoint, or any directory or Hub name of an ESM-2, ESM C, AMPLIFY or E1.",
    )
    max_seq_length: int = flag(
        1024, "Tokens, <cls> and <eos> included; longer proteins are split into overlapping windows."
    )
    tokens_per_pack: int | None = flag(None, PACK)
    bf16: bool = flag(False, "Compute in bfloat16: faster on GPUs and some CPUs, three digits.")
    int8: bool = flag(False, INT8)
    use_cpu: bool = flag(False, "Compute on the CPU even where there is a GPU.")

    def missing(self) -> Iterator[Missing]:
        if not self.model_name_or_path:
            yield Missing("--model_name_or_path", "the model", "out/final_model")

    def check(self) -> None:
        self.require_at_least(8, "max_seq_length")
        self.require_at_least(1, "tokens_per_pack")
        if self.int8:
            from extras.after.inference.int8 import check_int8

            check_int8(self.device, self.bf16)

    @property
    def pack_tokens(self) -> int:
        return self.tokens_per_pack or (2048 if self.device.type == "cpu" else 4096)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu")


def alphabet_of(name: str) -> Alphabet:
    """Of a model; ESM-2's of one that cannot be read, as `Encoder` will say."""
    try:
        family = encoder_family(name)
        tokens = family.tokens_of(family.load_config(name))
    except UserError:
        return ESM2_TOKENS
    return tokens if isinstance(tokens, Alphabet) else ESM2_TOKENS


class Encoder:
    """A model with its weights, on a GPU if there is one.

    device: of this rank, if several share a machine; stock: transformers' model whose weights to take, in place of
    those that the flags name. UserError for weights that are missing, damaged or not finite, and for a family whose
    vocabulary has no letters. alphabet: of its token ids.
    """

    def __init__(self, flags: EncoderFlags, device: torch.device | None = None, stock: Any = None):
        self.flags = flags
        self.device = device or flags.device
        if stock is None:
            family = encoder_family(flags.model_name_or_path)
            config = family.load_config(flags.model_name_or_path)
            pieces, _ = family.adapter.read(flags.model_name_or_path, config)
        else:
            family = family_of(stock.config.model_type)
            config, pieces = family.from_transformers(stock)
        if not isinstance(tokens := family.tokens_of(config), Alphabet):
            raise UserError(f"{flags.model_name_or_path}: its family has no letters to encode proteins with")
        self.alphabet: Alphabet = tokens
        self.model: Any = loaded(family, config, pieces, self.device)
        self._to_fit = flags.int8
        if stock is None:
            size = (config.num_hidden_layers, config.hidden_size)
            logger.info("%s: %d layers of %d, on %s", flags.model_name_or_path, *size, self.device)

    def fit_int8(self, texts: Iterable[bytes]) -> None:
        """With --int8, once and before all else: see `int8.fit_int8`. texts: proteins, whatever is run later."""
        if self._to_fit:
            from extras.after.inference.int8 import check_int8, fit_int8

            check_int8(self.device, self.flags.bf16)
            self._to_fit = False
            fit_int8(self, map(self.alphabet.encode, texts))

    @torch.inference_mode()
    def read(self, homologs: Sequence[bytes]) -> Any:
        """The context of these homologs, in this order, for `hidden` and `logits`; None for none. Only of a model that
        reads sets."""
        if not homologs:
            return None
        tokens = [self.alphabet.encode(residues) for residues in homologs]
        ids = torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(self.device)
        ends = torch.from_numpy(np.cumsum([0, *map(len, tokens)], dtype=np.int32)).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.flags.bf16):
            return self.model.read_context(ids, ends)

    def hidden(
        self,
        sequences: Sequence[np.ndarray],
        done: Progress = lambda tokens: None,
        layers: Sequence[int] = (),
        context: Any = None,
    ) -> list[Tensor]:
        """Hidden states after the last LayerNorm, fp32 [length, hidden] for token ids uint8 [length].

        done: called after each pack with its number of tokens. layers: those whose output is wanted instead, side by
        side, [length, layers x hidden]; 0 is the embeddings' output, the last one's comes after the last LayerNorm,
        as transformers' `hidden_states`. context: of `read`, which every sequence follows. UserError if one is NaN or
        infinite.
        """
        return in_order(self.states(sequences, done, layers, context))

    def states(self, sequences: Sequence[np.ndarray], done: Progress, layers: Sequence[int], context: Any) -> Each:
        """(index of a sequence, its states as of `hidden`), as soon as its pack is done."""
        last = self.model.config.num_hidden_layers
        if tuple(layers) in ((), (last,)):
            yield from self._run(sequences, True, done, context=context)
            return
        outputs: dict[int, Tensor] = {}
        modules = [self.model.embeddings, *list(self.model.layers)[:-1], self.model.encoder]
        handles = [
            module.register_forward_hook(lambda _module, _inputs, out, n=n: outputs.update({n: total(out)}))
            for n, module in enumerate(modules)
            if n in layers
        ]
        try:
            yield from self._run(sequences, True, done, None, lambda: [outputs[n] for n in layers], context)
        finally:
            for handle in handles:
                handle.remove()

    def logits(
        self,
        sequences: Sequence[np.ndarray],
        done: Progress = lambda tokens: None,
        at: Sequence[np.ndarray] | None = None,
        context: Any = None,
    ) -> list[Tensor]:
        """Logits of ESM-2's 33 tokens, fp32 [length, 33] for token ids uint8 [length]; ESM C has 64, AMPLIFY 27.

        done, context: as above; at: the indices of each sequence's tokens [n] whose logits are wanted, [n, 33].
        """
        return in_order(self._run(sequences, False, done, at, context=context))

    @torch.inference_mode()
    def _run(
        self,
        sequences: Sequence[np.ndarray],
        hidden: bool,
        done: Progress,
        at: Sequence[np.ndarray] | None = None,
        of_layers: Callable[[], list[Tensor]] | None = None,
        context: Any = None,
    ) -> Each:
        assert not self._to_fit, "fit_int8 comes first"
        for pack in packs([len(sequence) for sequence in sequences], self.flags.pack_tokens):
            lengths = [len(sequences[number]) for number in pack]
            ids = torch.from_numpy(np.concatenate([sequences[number] for number in pack]).astype(np.int64))
            starts = [0, *np.cumsum(lengths)[:-1].tolist()]
            ends = torch.tensor([*starts, len(ids)], dtype=torch.int32)
            ids, ends = ids.to(self.device), ends.to(self.device)
            options: dict[str, Any] = {"context": context} if context is not None else {}
            rows = lengths
            if hidden:  # no label is set, so that the LM head is skipped
                options |= {"labels": torch.full_like(ids, -100), "output_hidden": True}
            elif at is not None:
                wanted = np.concatenate([at[n] + start for n, start in zip(pack, starts, strict=True)])
                options["at"] = torch.from_numpy(wanted).to(self.device)
                rows = [len(at[number]) for number in pack]
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.flags.bf16):
                output = self.model(ids, cu_seqlens=ends, max_seqlen=max(lengths), **options)
                packed = output.hidden if hidden else output.logits
            if of_layers is not None:
                packed = torch.cat([output[: len(ids)].float() for output in of_layers()], 1)  # without fillers
            packed = packed.float().cpu()
            done(len(ids))
            parts = list(zip(pack, packed.split(rows), strict=True))
            if not packed.isfinite().all():
                self._refuse(sequences[next(number for number, part in parts if not part.isfinite().all())])
            yield from parts

    def _refuse(self, sequence: np.ndarray) -> None:
        first = len(self.alphabet.head)
        begins = "".join(self.alphabet.letters[token] for token in sequence[first : first + 20])
        raise UserError(
            f"{self.flags.model_name_or_path}: gives NaN or infinity for the sequence {begins}... of {len(sequence)} "
            "tokens: try it without --bf16, or take another checkpoint"
        )


def in_order(numbered: Iterable[tuple[int, Tensor]]) -> list[Tensor]:
    return [tensor for _, tensor in sorted(numbered, key=lambda each: each[0])]


# Embeddings as Parquet tables

Protein = tuple[str, bytes]  # name and residues
Facts = dict[bytes, bytes]  # metadata of a table: hashes of model and input, and the settings


def embed(
    encoder: Encoder,
    proteins: list[Protein],
    done: Progress = lambda tokens: None,
    pooling: str | None = None,
    layers: Sequence[int] = (),
    context: Any = None,
) -> list[Tensor]:
    """fp32 [residues, hidden] of each protein, without `<cls>` and `<eos>`; [hidden] with a pooling.

    pooling: "mean" or "max" over residues, or "cls": the `<cls>` of the protein's first window. done, layers, context:
    as in `Encoder.hidden`.
    """
    alphabet, longest = encoder.alphabet, encoder.flags.max_seq_length
    parts = [
        (n, window)
        for n, (_, text) in enumerate(proteins)
        for window in windows(len(text) // alphabet.width, alphabet.room(text, longest))
    ]
    texts = [window.residues_of(proteins[n][1], alphabet.width) for n, window in parts]
    count, pieces, embedded = Counter(n for n, _ in parts), defaultdict(dict), {}
    for number, hidden in encoder.states([alphabet.encode(text) for text in texts], done, layers, context):
        n, window = parts[number]
        places = alphabet.places(texts[number])[window.begin : window.end]
        pieces[n][number] = hidden[:1] if pooling == "cls" else hidden[torch.from_numpy(places)]
        if len(pieces[n]) == count[n]:
            embedded[n] = pooled(torch.cat(in_order(pieces.pop(n).items())), pooling)
    return in_order(embedded.items())


def pooled(of_residues: Tensor, pooling: str | None) -> Tensor:
    """[residues, hidden] -> [hidden]; as it is without a pooling."""
    if pooling in (None, "cls"):
        return of_residues if pooling is None else of_residues[0]
    return of_residues.amax(0) if pooling == "max" else of_residues.mean(0)


def table(
    proteins: list[Protein], embedded: list[Tensor], facts: Facts, layers: Sequence[int] = (), width: int = 1
) -> pa.Table:
    """Columns id, length, and embedding: float32 [hidden] of each protein, or a list of one per residue.

    embedded: as from `embed`. layers: if several, the columns are embedding_N. width: characters a
    residue.
    """
    columns: dict[str, pa.Array] = {}
    for number, name in enumerate([f"embedding_{n}" for n in layers] if len(layers) > 1 else ["embedding"]):
        rows = [tensor.chunk(max(1, len(layers)), -1)[number] for tensor in embedded]
        hidden = rows[0].shape[-1]
        of_residues = rows[0].dim() == 2
        flat = (torch.cat if of_residues else torch.stack)(rows).numpy()
        vectors = pa.FixedSizeListArray.from_arrays(numbers(flat.ravel()), hidden)
        if of_residues:
            ends = np.cumsum([0, *(len(tensor) for tensor in embedded)], dtype=np.int32)
            vectors = pa.ListArray.from_arrays(numbers(ends), vectors)
        columns[name] = vectors
    lengths = numbers(np.array([len(text) // width for _, text in proteins], np.int32))
    names = [name.encode() for name, _ in proteins]
    ids = texts(np.frombuffer(b"".join(names), np.uint8), np.cumsum([0, *map(len, names)]), pa.string())
    made = pa.table({"id": ids, "length": lengths} | columns)
    return made.replace_schema_metadata(facts)


def in_parts(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` items; the last may be shorter."""
    items = iter(items)
    while part := list(islice(items, size)):
        yield part


def write_part(made: pa.Table, path: Path) -> None:
    """Written and flushed before it gets its name, with a checksum of every page."""
    with replace_flushed(path) as partial:
        pq.write_table(made, partial, write_page_checksum=True)


def is_made(path: Path, proteins: list[Protein], facts: Facts) -> bool:
    """Whether the table of these proteins exists and is intact: a disk may lose writes that it confirmed."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            ids = [name for batch in file.iter_batches() for name in batch.column("id").to_pylist()]
            return file.schema_arrow.metadata == facts and ids == [name for name, _ in proteins]
    except (OSError, pa.ArrowException):
        return False


def check_parts(directory: Path, count: int, facts: Facts) -> None:
    """UserError unless all parts exist and have these facts: ranks may see different directories."""
    for number in range(count):
        path = part_path(directory, number)
        try:
            metadata = pq.read_schema(path).metadata
        except (OSError, pa.ArrowException):
            metadata = None
        if metadata != facts:
            what = "is missing" if metadata is None else "is of another model or input"
            raise UserError(f"{path}: {what}: give all ranks one directory that they share, and start again")


def part_path(directory: Path, number: int) -> Path:
    return directory / f"part-{number:05d}.parquet"
