"""The flags of step 1, and what its outputs are known by."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from common.cli import UserError
from common.data.alphabet import Alphabet
from common.files.content_hash import combined_hash, content_hash
from common.flags import Missing, flag
from common.hooks import extra
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.prepare.cluster_splits import COMPONENTS
from extras.prepare.encode import check_tokenizer
from extras.prepare.fetch import Source, describe_sources, name_sources
from extras.prepare.output_directory import read_record
from extras.prepare.shards import Shard, ShardFlags
from extras.prepare.sources.alphabet_texts import AlphabetCleaner
from extras.prepare.sources.protein_records import RecordFlags
from extras.prepare.sources.records import BadRecords
from extras.prepare.sources.residues import Cleaner
from extras.prepare.splits import HELD_OUT, HELD_OUT_CLUSTERS
from extras.prepare.structure_letters import StructureLetters, structures_hash

logger = logging.getLogger(__name__)


@dataclass
class TokenizeFlags(ShardFlags, RecordFlags):
    """Flags of 1.tokenize_uniref_csv.py."""

    input_dir: str = flag("csv", "directory of CSV files, or of parquet, Arrow, TSV, JSON lines or FASTA; or a file")
    source: list[str] = field(
        default_factory=list,
        metadata={"help": "in place of --input_dir: files, directories, patterns, datasets of the Hub, URLs"},
    )
    output_dir: str = flag("processed", "the splits go to OUTPUT_DIR/arrow")
    train_size: float | None = flag(None, "records, or a fraction; default: all remaining records")
    validation_size: float | None = flag(
        None, "records, or a fraction below 1; default: 50,000, with test at most a tenth unless --train_size is given"
    )
    test_size: float | None = flag(None, "as --validation_size")
    max_seq_length: int | None = flag(None, "truncate to so many tokens; default: keep all")
    pad_to_max_length: bool = flag(False, "pad every record to --max_seq_length")
    preprocessing_num_workers: int = flag(8, "threads; the result is the same for any")
    tokenizer_name: str = flag(
        "facebook/esm2_t30_150M_UR50D", "any facebook/esm2_*, or a directory with its vocab.txt"
    )
    alphabet: str | None = flag(
        None, "saprot (amino acid and 3Di letter), codon, or a YAML file that declares one; default: ESM-2's"
    )
    structures: str | None = flag(
        None, "saprot: a FASTA file of the proteins' 3Di letters, or a directory of PDB or mmCIF files (mini3di)"
    )
    line_by_line: bool = flag(True, "False: concatenate records and cut into chunks of --max_seq_length (or 1024)")
    cluster_table: str | None = flag(
        None, "table of ur50_id, ur90_id (parquet, CSV, TSV): split by clusters and index them"
    )
    cluster: float | None = flag(
        None, "cluster at this identity (0.5) with MMseqs2, which must be installed, and split as --cluster_table does"
    )
    line_ends_in_text: bool = flag(False, "quoted texts may span lines; line ends are removed")
    count_relatives: bool = flag(
        True, "search held-out proteins in training, up to 100,000 proteins, with MMseqs2 if it is installed"
    )
    seed: int = flag(42, "seed of the choice of splits")
    overwrite: bool = flag(False, "replace an existing output")
    verify: bool = flag(False, "read a complete output and compare its checksums")

    def missing(self) -> Iterator[Missing]:
        if self.pad_to_max_length and self.max_seq_length is None:
            yield Missing("--max_seq_length", "--pad_to_max_length True needs it", "512")

    @property
    def given_input(self) -> str:
        """Flag and value, for messages."""
        return f"--source {' '.join(self.source)}" if self.source else f"--input_dir {self.input_dir}"

    @property
    def clustered(self) -> bool:
        return self.cluster is not None or self.cluster_table is not None

    def check(self) -> None:
        check_tokenizer(self.tokenizer_name)
        self._check_alphabet()
        if self.max_seq_length is not None and self.max_seq_length < 3:
            raise UserError(f"--max_seq_length {self.max_seq_length}: at least 3 (<cls>, a residue, <eos>)")
        self.require_at_least(1, "preprocessing_num_workers")
        if self.keeps_chains and not self.line_by_line:
            raise UserError("--chains keep needs --line_by_line True: a chunk has the chains of several records")
        clusters = "--cluster_table" if self.cluster_table else "--cluster"
        if self.clustered and not self.line_by_line:
            raise UserError(f"{clusters} needs --line_by_line True: a chunk belongs to no cluster")
        if self.clustered and self.line_ends_in_text:
            raise UserError(f"--line_ends_in_text does not go with {clusters}: remove the line ends first")
        if self.cluster is not None and self.cluster_table:
            raise UserError("--cluster and --cluster_table: give one of them")
        if self.cluster is not None and not 0 < self.cluster <= 1:
            raise UserError(f"--cluster {self.cluster}: an identity above 0 and up to 1, as 0.5")
        self.require_at_least(0, "seed")

    @cached_property
    def tokens(self) -> Alphabet:
        """The alphabet to encode in."""
        return extra().alphabet(self.alphabet, "--alphabet") if self.alphabet else ESM2_TOKENS

    @cached_property
    def opened_structures(self) -> StructureLetters | None:
        return StructureLetters(self.structures) if self.structures else None

    def _check_alphabet(self) -> None:
        if self.structures and self.tokens.name != "saprot":
            raise UserError(f"--structures {self.structures}: is of --alphabet saprot: give that, or drop the flag")
        if self.alphabet and self.gaps:
            raise UserError(
                f"--gaps {self.gaps}: is of proteins alone, not of --alphabet {self.alphabet}: drop the flag"
            )
        if self.cluster is not None and not self.tokens.amino_acids.any():
            raise UserError(f"--cluster {self.cluster}: {self.tokens.name} has no amino acids: give --cluster_table")

    @property
    def changing(self) -> dict[str, Any]:
        of_alphabet: dict[str, Any] = {"alphabet": json.loads(self.tokens.declared)} if self.alphabet else {}
        if self.structures:
            of_alphabet["structures"] = structures_hash(self.structures)
        return super().changing | of_alphabet

    def cleaner(self, path: Path, bad_records: BadRecords | None = None) -> Cleaner:
        if not self.alphabet or self.structures:
            return super().cleaner(path, bad_records)
        return AlphabetCleaner(str(path), self.tokens, bad_records or BadRecords(self.on_bad_record))


def describe(args: TokenizeFlags, sources: list[Source]) -> dict:
    """All that the output depends on: an output made from the same is reused."""
    deciding = (
        "train_size",
        "validation_size",
        "test_size",
        "max_seq_length",
        "pad_to_max_length",
        "line_by_line",
        "seed",
    )
    files = [source.path for source in sources if not source.is_url]
    about_input: dict = {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}
    if len(files) < len(sources):
        about_input |= describe_sources(sources)
    # Earlier versions recorded the default as HELD_OUT; the same number given as a flag is used exactly.
    held_out = ("validation_size", "test_size")
    given = [name for name in held_out if getattr(args, name) == HELD_OUT]
    optional = {"said": given} if given else {}
    if args.on_bad_record != "error":
        optional["on_bad_record"] = args.on_bad_record
    optional |= args.changing
    if args.line_ends_in_text:
        optional["line_ends_in_text"] = True
    if args.cluster_table:
        table = Path(args.cluster_table)
        optional["cluster_table"] = content_hash(table) if table.is_file() else None
    by_clusters = {"held_out_clusters": HELD_OUT_CLUSTERS} if args.clustered else {}
    if args.cluster is not None:
        optional["cluster"] = args.cluster
        by_clusters["mmseqs_flags"] = COMPONENTS
    now = {
        "input": about_input | {"content": combined_hash(files)},
        **{name: getattr(args, name) for name in deciding},
        **{name: HELD_OUT for name in held_out if getattr(args, name) is None},
        **optional,
        **by_clusters,
    }
    if by_clusters and not args.overwrite:
        output = Path(args.output_dir) / "arrow"
        of_0_4 = json.loads(json.dumps({name: value for name, value in now.items() if name not in by_clusters}))
        if (read_record(output) or {}).get("made_from") == of_0_4:
            logger.warning(
                "%s was split by an earlier version: relatives may stand on both sides, and one family may fill a "
                "held-out split: --overwrite makes it anew",
                output,
            )
            return of_0_4
    return now


def describe_shard(args: TokenizeFlags, sources: list[Source], shard: Shard) -> dict:
    """All that a shard's encoded files depend on, whatever becomes of them."""
    names = ("max_seq_length", "pad_to_max_length", "line_by_line", "on_bad_record", "line_ends_in_text")
    return name_sources(sources, shard.has) | {name: getattr(args, name) for name in names} | args.changing
