"""Why a table of clusters does not name the records: their ids are written in another form, or its columns swapped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from extras.prepare.sources.records import hash_names

SAMPLE = 1 << 17  # records, about: of a batch or two
OWN_CLUSTER = "give each of the others a row with a cluster of its own, if they have no relatives"


class Form(NamedTuple):
    """What a name may have that another name of the same protein lacks, and a regular expression to remove it."""

    what: str
    pattern: str
    kept: str = ""


FORMS = (
    Form("'UniRef50_' or 'UniRef100_'", "^UniRef(50|100)_"),
    Form("all but the accession of 'sp|P12345|NAME'", r"^[a-z]+\|([^|]+)(\|.*)?$", r"\1"),
    Form("the version, as '.1',", r"\.[0-9]+$"),
    Form("the isoform, as '-2',", "-[0-9]+$"),
)
PREFIX = Form("'UniRef90_'", "^UniRef90_")  # which either may have
AS_IT_IS, SWAPPED, ALL = "as it is", "columns swapped", "all forms"


def explain(names: Iterable[pa.Array], table: Iterable[tuple[pa.Array, pa.Array]]) -> str:
    """What to do about a table that lacks many records. names: ids of the records; table: (clusters, members)."""
    sample: list[pa.Array] = []
    for batch in names:
        sample.append(_without(batch.cast(pa.binary()), PREFIX))
        if sum(map(len, sample)) >= SAMPLE:
            break
    records = pa.concat_arrays(sample)
    changes: dict[str | Form, tuple[Form, ...]] = {AS_IT_IS: (), SWAPPED: (), ALL: FORMS}
    changes |= {form: (form,) for form in FORMS}
    wanted = {change: hash_names(_without(records, *forms)) for change, forms in changes.items()}
    found = {change: np.zeros(len(records), bool) for change in changes}
    in_table, rows = dict.fromkeys(FORMS, 0), 0
    for block in table:
        clusters, members = (_without(column.cast(pa.binary()), PREFIX) for column in block)
        for change, forms in changes.items():
            column = clusters if change == SWAPPED else members
            found[change] |= np.isin(wanted[change], hash_names(_without(column, *forms)))
        for form in FORMS:
            in_table[form] += _changed(members, form)
        rows += len(members)
    of_table = {form for form in FORMS if in_table[form] * len(records) > _changed(records, form) * rows}
    return _advice({change: int(of.sum()) for change, of in found.items()}, of_table, len(records))


def _advice(found: dict[str | Form, int], of_table: set[Form], count: int) -> str:
    """found: records that the table would name, by what is changed; of_table: what its names have more often."""
    best = max(found, key=lambda change: (found[change], change != ALL))  # a single change before all of them
    if found[best] - found[AS_IT_IS] <= (count - found[AS_IT_IS]) // 2:
        return f"is it the table of these proteins, and of the same release? If so, {OWN_CLUSTER}"
    of_first = f"{found[best]:,} of the first {count:,} would be there if"
    if best == SWAPPED:
        return f"{of_first} its columns were in the order cluster, member"
    if not isinstance(best, Form):
        return f"{of_first} both had accessions alone, as P12345: write both so"
    where = "the table's names" if best in of_table else "the records' ids"
    return f"{of_first} {best.what} were removed from {where}"


def _without(names: pa.Array, *forms: Form) -> pa.Array:
    for form in forms:
        names = pc.replace_substring_regex(names, form.pattern, form.kept)
    return names


def _changed(names: pa.Array, form: Form) -> int:
    return pc.sum(pc.match_substring_regex(names, form.pattern)).as_py() or 0
