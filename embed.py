#!/usr/bin/env python3
"""Embeddings of the proteins of a FASTA file, by a model that you have trained or any ESM-2, as Parquet.

python embed.py --model_name_or_path out/final_model --fasta my.fasta --output_dir embedded
python embed.py --model_name_or_path out/final_model --fasta my.fasta --output_dir embedded --per_residue

OUTPUT_DIR/embeddings/part-00000.parquet, ...: id, length, embedding, in the order of the file. Stopped and started
again, the same command goes on where it was. docs/after.md has more.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from common.cli import Missing, UserError, flag, parse_arguments, run
from common.files.output_directory import building
from common.inference.embeddings import Protein, embed, in_parts, table, write_part
from common.inference.encoder import Encoder, EncoderFlags
from common.sources.fasta import read_fasta

logger = logging.getLogger(__name__)
DECIDES = ("model_name_or_path", "max_seq_length", "bf16", "per_residue", "proteins_per_part")


@dataclass
class Arguments(EncoderFlags):
    needed = ("fasta", "output_dir")

    fasta: str | None = flag(None, "The proteins, plain or packed.")
    output_dir: str | None = flag(None, "The tables go to OUTPUT_DIR/embeddings.")
    per_residue: bool = flag(
        False, "An embedding of each residue, not their mean: 1.3 kB a residue with the 8M model."
    )
    proteins_per_part: int = flag(1000, "Proteins in a file; what is lost when the run is stopped.")
    overwrite: bool = flag(False, "Make the tables anew, whatever is there.")

    def missing(self) -> Iterator[Missing]:
        if not self.fasta:
            yield Missing("--fasta", "the proteins", "my.fasta")
        if not self.output_dir:
            yield Missing("--output_dir", "where the tables go", "embedded")

    def check(self) -> None:
        self.require_at_least(1, "proteins_per_part")
        if not Path(self.fasta).is_file():
            raise UserError(f"--fasta {self.fasta}: no such file")


def proteins_of(fasta: str) -> Iterator[Protein]:
    for name, text in read_fasta(fasta):
        yield name.decode(), text


def main() -> None:
    (args,) = parse_arguments(__doc__, Arguments)
    source = Path(args.fasta).stat()
    made_from = {name: value for name, value in asdict(args).items() if name in DECIDES}
    made_from |= {"fasta": Path(args.fasta).name, "size": source.st_size, "mtime_ns": source.st_mtime_ns}
    with building(Path(args.output_dir), ["embeddings"], made_from, args.overwrite) as build:
        if not build.paths:
            return
        directory, encoder, count, residues = build.paths["embeddings"], Encoder(args), 0, 0
        bar = tqdm(unit=" tokens", unit_scale=True, mininterval=0.5 if sys.stderr.isatty() else 10.0)
        with bar:
            for number, part in enumerate(in_parts(proteins_of(args.fasta), args.proteins_per_part)):
                path = directory / f"part-{number:05d}.parquet"
                if not path.exists():
                    write_part(table(part, embed(encoder, part, bar.update), args.per_residue), path)
                count += len(part)
                residues += sum(len(text) for _, text in part)
                bar.set_postfix_str(f"{count:,} proteins", refresh=False)
        build.results |= {"proteins": count, "residues": residues}
    logger.info("%s proteins of %s residues: %s/embeddings", f"{count:,}", f"{residues:,}", args.output_dir)


if __name__ == "__main__":
    run(main, resumable=True)
