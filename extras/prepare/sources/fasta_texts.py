"""The proteins of FASTA and of alignments, cleaned as they are parsed, where records have names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from extras.prepare.sources.compression import check_file
from extras.prepare.sources.fasta import read_fasta_lines
from extras.prepare.sources.find_files import File
from extras.prepare.sources.hub import local_path
from extras.prepare.sources.record_counts import estimated
from extras.prepare.sources.records import columns
from extras.prepare.sources.sequence_files import Unit, cleaner_of, report


def column(unit: Unit) -> None:
    check_file(Path(unit.file.path), unit.file.path)


def records(file: File) -> float:
    file = replace(file, path=local_path(file.path))
    return estimated(file, lambda lines: sum(line.startswith(b">") for line in lines))


def texts(unit: Unit) -> Iterator[pa.Array]:
    cleaner = cleaner_of(unit)
    for lines in read_fasta_lines(local_path(unit.file.path), max_record=unit.file.content.longest, cleaner=cleaner):
        yield columns(lines).column("text")
    report(str(unit), unit, cleaner)
