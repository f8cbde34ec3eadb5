"""Read FASTA records from a file, plain or compressed; every error names file and line.

A block of a megabyte is parsed by a few vectorised passes over its bytes (NumPy, Arrow). Python handles single records
only to report errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.cli import UserError
from extras.prepare.sources.compression import (
    DECOMPRESS_ERRORS,
    HEAD_BYTES,
    LONGEST_PROTEIN,
    check_file,
    decompress,
    describe_damage,
    detect_non_text,
    too_long,
)
from extras.prepare.sources.records import NEWLINE, TAB, Lines, cut, numbers, prefetch, texts, view
from extras.prepare.sources.residues import ANNOTATIONS, IS_WHITESPACE, WHITESPACE, Cleaner, is_alignment

BLOCK_BYTES = 1 << 20  # fits in the cache, with the arrays made from it
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # Windows editors write it
GREATER = b">"[0]
MARKS = (b";", b"#", b"/")  # first bytes of lines that are no residues
COMMENTS = (b";", b"#")  # begin a line of comment: Pearson's original format, and ColabFold's
# Lines of comment and of `//` after the first, which end records of other formats; and line ends of old Macs.
NO_RESIDUES = re.compile(rb"(?<=\n)(?:[;#][^\n]*|//[ \t\r]*(?=\n))")
# Where `#` is a letter of the alphabet.
MARKS_BUT_HASH = (b";", b"/")
NO_RESIDUES_BUT_HASH = re.compile(NO_RESIDUES.pattern.replace(b";#", b";"))
OLD_LINE_END = re.compile(rb"\r(?!\n)")
NUCLEIC_ACID = b" mol:na "
PIR = re.compile(rb">(P1|F1|DL|DC|RL|RC|N3|N1|XX);")


def read_fasta_lines(
    path: Path | str,
    block_bytes: int = BLOCK_BYTES,
    on_read: Callable[[int], None] | None = None,
    max_record: int = LONGEST_PROTEIN,
    cleaner: Cleaner | None = None,
) -> Iterator[Lines]:
    """Yield all records, in file order, in batches: each one line `id TAB sequence NEWLINE`
    (extras/prepare/sources/records.py).

    The id is the first word after `>`. Lines of comment (`;`) are left out; sequences are cleaned
    (extras/prepare/sources/residues.py). Letters keep their case. max_record: maximum bytes of a record; memory is a
    few blocks or a few times max_record.

    on_read: called with the number of bytes of the file read so far. cleaner: its `bad_records` is also called with
    the error of each record without id or sequence, with `>` inside its sequence or with non-ASCII bytes; if it
    returns, the record is skipped. By default it raises, and gaps are refused. UserError, naming file and line, in any
    case for: not FASTA, an empty file, a truncated or corrupt compressed file, a record that is too long.
    """
    path = Path(path)
    cleaner = cleaner or Cleaner(str(path), aligned=is_alignment(path.name))
    line, records = 1, 0  # line: that of the first byte of `rest`
    rest = bytearray()  # possibly the beginning of a record
    begun = False
    # Closed explicitly, also after an error: the garbage collector may run in any thread, and waiting for the prefetch
    # thread from there may deadlock.
    with closing(prefetch(_read_blocks(path, block_bytes), depth=4)) as blocks:
        while True:
            try:
                block, position = next(blocks, (b"", None))
            except DECOMPRESS_ERRORS as error:
                if (what := describe_damage(error)) is None:
                    raise
                where = f"somewhere after {records:,} records, line {line + rest.count(NEWLINE)}"
                raise UserError(f"{path}: the compressed file {what} {where}: fetch it again") from None
            if on_read and position is not None:
                on_read(position)
            searched = max(len(rest) - 1, 0)
            rest += block
            if not begun:
                before = _before_first_record(rest, at_end=not block)
                line += rest.count(NEWLINE, 0, before)
                lines = bytes(rest[:before]).splitlines()
                cleaner.changes.comments += sum(text.lstrip().startswith(COMMENTS) for text in lines)
                del rest[:before]
                begun = bool(rest) and not (block and rest.startswith(COMMENTS))
                if begun and rest[0] != GREATER:
                    raise UserError(f"{path}: line {line}: not FASTA: {_what_else(bytes(rest[:HEAD_BYTES]))}")
                if PIR.match(rest):
                    raise UserError(
                        f"{path}: line {line}: PIR (NBRF), which has a line of description: convert it to FASTA"
                    )
            if not block:
                break
            # Only records before the last header are known to be complete.
            if end := rest.rfind(b"\n>", searched) + 1:
                complete, rest = rest[:end], rest[end:]
                parsed = _Records(_without_comments(complete, cleaner))
                parsed.check_lengths(path, line, records, max_record)
                cleaner.changes.blanks += parsed.num_blanks
                yield from _cleaned(parsed.lines(path, line, records, cleaner.bad_records), cleaner)
                line += parsed.num_lines
                records += parsed.num_records
            if len(rest) > max_record:
                raise too_long(f"{path}: line {line}: record {records + 1:,}", max_record)
        if not rest:
            raise UserError(f"{path}: empty file: expected FASTA records ('>id', then the sequence)")
        if rest[-1] != NEWLINE:
            rest.append(NEWLINE)
        parsed = _Records(_without_comments(rest, cleaner))
        cleaner.changes.blanks += parsed.num_blanks
        yield from _cleaned(parsed.lines(path, line, records, cleaner.bad_records), cleaner)


def read_fasta(
    path: Path | str,
    block_bytes: int = BLOCK_BYTES,
    max_record: int = LONGEST_PROTEIN,
    cleaner: Cleaner | None = None,
) -> Iterator[tuple[bytes, bytes]]:
    """Yield (id, sequence) of every record, as `read_fasta_lines`; slow."""
    for lines in read_fasta_lines(path, block_bytes, max_record=max_record, cleaner=cleaner):
        for line in lines.to_pylist():
            yield tuple(line[:-1].split(b"\t"))


def _before_first_record(start: bytearray, at_end: bool) -> int:
    """The bytes of blank lines and whole lines of comment at the beginning of a file."""
    place = 0
    while True:
        place = len(start) - len(start[place:].lstrip(WHITESPACE))
        if not start.startswith(COMMENTS, place):
            return place
        end = start.find(b"\n", place)
        if end < 0:
            return len(start) if at_end else place
        place = end + 1


def _without_comments(block: bytearray, cleaner: Cleaner) -> bytearray:
    """Whole records with blanks in place of lines that are no residues, so that lines keep their numbers."""
    if b"\r" in block and OLD_LINE_END.search(block):
        block = bytearray(OLD_LINE_END.sub(b"\n", block))
    marks, no_residues = MARKS, NO_RESIDUES
    if not cleaner.has_hashes:
        marks, no_residues = MARKS_BUT_HASH, NO_RESIDUES_BUT_HASH
    if any(mark in block for mark in marks):  # one byte is found much faster than two
        data = np.frombuffer(block, np.uint8)
        first = data[np.flatnonzero(data[:-1] == NEWLINE) + 1].tobytes()  # bytes of the lines
        if not any(mark in first for mark in marks):
            return block
        blanked, count = no_residues.subn(lambda line: b" " * len(line[0]), block)
        cleaner.changes.comments += count
        return bytearray(blanked)
    return block


def _cleaned(batches: Iterator[Lines], cleaner: Cleaner) -> Iterator[Lines]:
    """The lines with cleaned sequences, without those that have none then."""
    for lines in batches:
        lines = _without_annotations(lines, cleaner) if cleaner.aligned else lines
        data, offsets = view(lines)
        tabs = np.flatnonzero(data == TAB)

        def name(number: int, begins: np.ndarray = offsets, ends: np.ndarray = tabs, data: np.ndarray = data) -> str:
            return f"record {data[begins[number] : ends[number]].tobytes().decode()[:60]}"

        residues, bounds = view(cut(data, np.stack([tabs + 1, offsets[1:] - 1], axis=1)))
        text, ends, refused = cleaner(residues, bounds, name)
        if len(text) == len(residues):
            yield lines
            continue
        lengths = np.diff(ends)
        for number in sorted(set(np.flatnonzero(lengths == 0).tolist()) - set(refused)):
            cleaner.bad_records(UserError(f"{cleaner.where}: {name(number)} has no residues: remove it"))
        ids = cut(data, np.stack([offsets[:-1], tabs], axis=1))
        columns = [ids.cast(pa.binary()), texts(text, ends, pa.binary())]
        non_empty = [column.take(numbers(np.flatnonzero(lengths > 0))) for column in columns]
        if len(non_empty[0]):
            joined = pc.binary_join_element_wise(*non_empty, bytes([TAB]))
            yield pc.binary_join_element_wise(joined, bytes([NEWLINE]), b"").cast(pa.large_binary())


def _without_annotations(lines: Lines, cleaner: Cleaner) -> Lines:
    starts = tuple(name + bytes([TAB]) for name in ANNOTATIONS)
    is_protein = np.array([not line.startswith(starts) for line in lines.to_pylist()])
    cleaner.changes.annotations += int(np.count_nonzero(~is_protein))
    return lines.take(numbers(np.flatnonzero(is_protein)))


def _read_blocks(path: Path, block_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Decompressed blocks, each with the number of bytes of the file read so far."""
    check_file(path, str(path))
    with open(path, "rb") as raw, decompress(raw) as file:
        if first := file.read(max(block_bytes, len(BYTE_ORDER_MARK))).removeprefix(BYTE_ORDER_MARK):
            yield first, raw.tell()
        while block := file.read(block_bytes):
            yield block, raw.tell()


def _what_else(start: bytes) -> str:
    """Describe a file that is not FASTA; only text is shown."""
    if problem := detect_non_text(start):
        return problem
    line = start.partition(b"\n")[0][:40]
    if b"\0" in start or not line.isascii():
        return "it is a binary file: expected text"
    return f"expected a line that starts with '>', found {line.decode('ascii').strip()!r}"


class _Records:
    """The records of a block, parsed by passes over all of its bytes.

    A word is the text between two bytes of white space, and may be empty; arrays over words have W elements, arrays
    over records R. The first word of a record is `>id`; the words after the header's line are the sequence.
    """

    def __init__(self, block: bytearray) -> None:
        """block: begins with `>` and ends with a line end; it is modified."""
        self.block = block
        self.data = data = np.frombuffer(block, np.uint8)
        blanks = np.flatnonzero(data <= 32)
        blanks = blanks[IS_WHITESPACE[data[blanks]]]
        begin = np.concatenate(([0], blanks[:-1] + 1))
        self.end = blanks.copy()  # [W], exclusive
        opens_line = np.concatenate(([True], data[blanks[:-1]] == NEWLINE))
        opens_record = opens_line & (data[begin] == GREATER)
        self.heads = begin[opens_record]  # [R], first byte of each record
        begin[opens_record] += 1
        self.begin = begin  # [W]
        self.first = np.flatnonzero(opens_record)  # [R], their first words
        self.line_words = line_words = np.flatnonzero(opens_line)
        words_a_line = np.diff(line_words, append=len(begin))
        self.in_header = np.repeat(opens_record[line_words], words_a_line)  # [W]
        self.num_records, self.num_lines = len(self.first), len(line_words)
        self.num_blanks = int(np.count_nonzero(~self.in_header & ~opens_line & (self.end > begin)))  # within sequences

        self.ids = self._find_ids()  # [R], words
        residues = np.where(self.in_header, 0, self.end - self.begin)
        self.bad = np.add.reduceat(residues, self.first) == 0  # [R]
        self.bad |= self.begin[self.ids] == self.end[self.ids]
        self._mark_nucleic_acids()
        # Allowed in descriptions only.
        if np.count_nonzero(data == GREATER) > self.num_records:
            self._mark_bad(np.flatnonzero(data == GREATER), in_id=False)
        if not block.isascii():
            self._mark_bad(np.flatnonzero(data >= 128), in_id=True)

    def check_lengths(self, path: Path, line: int, records: int, max_record: int) -> None:
        """UserError for a record that is too long. line, records: of the file before the block."""
        long = np.flatnonzero(np.diff(self.heads, append=len(self.block)) > max_record)
        if len(long):
            line += int(np.searchsorted(self.line_words, self.first[long[0]]))
            raise too_long(f"{path}: line {line}: record {records + int(long[0]) + 1:,}", max_record)

    def lines(self, path: Path, line: int, records: int, bad_records: Callable[[UserError], None]) -> Iterator[Lines]:
        """At most one array: `id TAB sequence NEWLINE` of the good records. line, records: before the block."""
        for record in np.flatnonzero(self.bad).tolist():
            bad_records(self._complaint(record, path, line, records))
        if self.bad.all():
            return
        wanted = ~self.in_header & (self.end > self.begin)
        wanted[self.ids] = True
        if self.bad.any():
            wanted &= ~np.repeat(self.bad, np.diff(self.first, append=len(wanted)))
        words = np.flatnonzero(wanted)
        is_id = np.zeros(len(wanted), bool)
        is_id[self.ids] = True
        ids = np.flatnonzero(is_id[words])  # [good records], positions in `words`
        last = np.append(ids[1:], len(words)) - 1
        # Every word is followed by a byte of white space, which the tab or line end replaces.
        self.data[self.end[words[ids]]] = TAB
        self.data[self.end[words[last]]] = NEWLINE
        begin, end = self.begin[words], self.end[words]
        end[ids] += 1
        end[last] += 1
        pieces = cut(self.data, np.stack([begin, end], axis=1))
        _, offsets, text = pieces.buffers()
        offsets = np.frombuffer(offsets, np.int64)[np.append(ids, len(words))]
        yield Lines.from_buffers(pa.large_binary(), len(ids), [None, pa.py_buffer(offsets), text])

    def _find_ids(self) -> np.ndarray:
        """The first nonempty word of each header; an empty one if there is none."""
        if (self.begin[self.first] < self.end[self.first]).all():
            return self.first
        words = np.append(np.flatnonzero(self.in_header & (self.end > self.begin)), len(self.begin))
        starts = words[np.searchsorted(words, self.first)]
        return np.where(starts < np.append(self.first[1:], len(self.begin)), starts, self.first)

    def _mark_bad(self, positions: np.ndarray, in_id: bool) -> None:
        """Mark records with one of these positions of the block in their sequence or, with `in_id`, in their id."""
        words = np.searchsorted(self.end, positions, side="right")
        records = np.searchsorted(self.first, words, side="right") - 1
        wrong = ~self.in_header[words] | (in_id & (words == self.ids[records]))
        self.bad[records[wrong]] = True

    def _mark_nucleic_acids(self) -> None:
        """Mark records that pdb_seqres.txt of the PDB says are nucleic acids."""
        place = self.block.find(NUCLEIC_ACID) if b":" in self.block else -1
        while place >= 0:
            if self.in_header[np.searchsorted(self.end, place, side="right")]:
                self.bad[np.searchsorted(self.heads, place, side="right") - 1] = True
            place = self.block.find(NUCLEIC_ACID, place + 1)

    def _complaint(self, record: int, path: Path, line: int, records: int) -> UserError:
        """The error of a bad record."""
        end = self.heads[record + 1] if record + 1 < self.num_records else len(self.block)
        header, _, body = bytes(self.block[self.heads[record] + 1 : end - 1]).partition(b"\n")
        line += int(np.searchsorted(self.line_words, self.first[record]))
        words = header.split(None, 1)
        where = f"{path}: line {line}: record {records + record + 1:,}"
        if not words:
            return UserError(f"{where} has no id after '>': give it one or remove the record")
        name = words[0].decode("ascii", "backslashreplace")[:60]
        if not words[0].isascii():
            return UserError(f"{where}: non-ASCII bytes in the id {name}: rename it")
        if NUCLEIC_ACID in header:
            return UserError(f"{where} ({name}) is a nucleic acid (mol:na): remove it")
        if b">" in body:
            line += 1 + body.count(b"\n", 0, body.index(b">"))
            return UserError(
                f"{path}: line {line}: '>' inside the sequence of {name}: a header must start its own line"
            )
        if not body.isascii():
            position = next(i for i, byte in enumerate(body) if byte >= 128)
            line += 1 + body.count(b"\n", 0, position)
            return UserError(
                f"{path}: line {line}: non-ASCII byte 0x{body[position]:02x} in the sequence of {name}: remove it"
            )
        return UserError(f"{where} ({name}) has no sequence: remove the record or fetch the file again")
