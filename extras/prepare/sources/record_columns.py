"""Which columns of a table hold the proteins, their ids and their clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from common.cli import UserError

TEXTS = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
TEXTS += (pa.types.is_string_view, pa.types.is_binary_view, pa.types.is_null)
# In the order of preference, case ignored. ur50_id, ur90_id, sequence: nvidia/esm2_uniref_pretraining_data.
SEQUENCES = ("sequence", "text", "seq", "protein_sequence", "aa_sequence", "aa_seq")
IDS = ("id", "ur90_id", "accession", "name", "entry", "protein_id", "sequence_id", "seq_id")
CLUSTERS = ("ur50_id", "cluster", "cluster_id")
TOKENS = "input_ids"


class Columns(NamedTuple):
    """Names of the columns of a table. id: None: records are numbered; cluster: None: there are no clusters."""

    text: str
    id: str | None = None
    cluster: str | None = None

    @property
    def names(self) -> list[str]:
        """The columns to read, each once."""
        return list(dict.fromkeys(name for name in self if name is not None))

    def check(self, where: str, schema: pa.Schema) -> None:
        """UserError for a column of another type than texts or, of ids and clusters, whole numbers."""
        for role, name in self._asdict().items():
            if name is None:
                continue
            kind = schema.field(name).type
            values = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not is_text(values) and (role == "text" or not pa.types.is_integer(values)):
                expected = "texts" if role == "text" else "texts or whole numbers"
                raise UserError(f"{where}: the column {name} holds {kind}: expected {expected}")

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Those of them that there are as `id`, `text` and `cluster`, binary."""
        chosen = {role: as_binary(batch.column(name)) for role, name in self._asdict().items() if name is not None}
        order = [role for role in ("id", "text", "cluster") if role in chosen]
        return pa.RecordBatch.from_arrays([chosen[role] for role in order], names=order)


@dataclass(frozen=True)
class Wanted:
    """The columns that the user named, None for the usual names."""

    sequence: str | None = None
    id: str | None = None
    cluster: str | None = None

    @property
    def sequences(self) -> tuple[str, ...]:
        """Possible names of the column of residues."""
        return (self.sequence.lower(),) if self.sequence else SEQUENCES

    def choose(self, where: str, names: list[str]) -> Columns:
        """UserError if a named column is not among `names`, or none holds proteins."""
        if (text := column_named(names, self.sequences)) is None:
            wrong_delimiter(where, names)
            if TOKENS in names:
                raise UserError(f"{where}: holds token ids (a column {TOKENS}), tokenised already: see --dataset_dir")
            wanted = self.sequence or " or ".join(SEQUENCES[:3])
            raise UserError(
                f"{where}: no column {wanted}, only {', '.join(names)[:80]}: name the one of the residues by "
                "--sequence_column, or leave the file out if it has no proteins"
            )
        return Columns(
            text,
            _optional(where, names, "id_column", self.id, IDS),
            _optional(where, names, "cluster_column", self.cluster, CLUSTERS),
        )


def _optional(where: str, names: list[str], flag: str, given: str | None, usual: tuple[str, ...]) -> str | None:
    found = column_named(names, (given.lower(),) if given else usual)
    if given and found is None:
        raise UserError(f"{where}: no column {given} (--{flag}), only {', '.join(names)[:80]}")
    return found


def column_named(names: list[str], wanted: tuple[str, ...]) -> str | None:
    """The name in `names` that matches the first of `wanted` that has a match; case is ignored."""
    lower = [name.strip().lower() for name in names]
    matches = [names[lower.index(name)] for name in wanted if lower.count(name) == 1]
    return matches[0] if matches else None


def wrong_delimiter(where: str, names: list[str]) -> None:
    """UserError for one column whose name has the delimiter of another format in it."""
    for delimiter, name in {";": "semicolons", "\t": "tabs", ",": "commas"}.items():
        if len(names) == 1 and delimiter in names[0]:
            raise UserError(
                f"{where}: one column, {names[0][:80]!r}: separated by {name}? Save it as CSV with commas, or as .tsv"
            )


def is_text(kind: pa.DataType) -> bool:
    return any(is_kind(kind) for is_kind in TEXTS)


def as_binary(values: pa.Array) -> pa.Array:
    """Texts or whole numbers of any of Arrow's types as binary."""
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return values.cast(pa.binary())
    if pa.types.is_dictionary(kind):
        values = values.cast(kind.value_type)
    return (values if is_text(values.type) else values.cast(pa.string())).cast(pa.binary())
