"""ProteinGym's files: the reference file, with a row for each assay, and the assays' tables."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.cli import UserError
from extras.after.inference.indels import Mutated
from extras.after.inference.mutation_scores import Variant, quoted
from extras.after.inference.mutation_tables import (
    MEASURED,
    MUTANT,
    SEQUENCES,
    columns_by,
    is_missing,
    measured_of,
    read_rows,
    variants_of,
)

logger = logging.getLogger(__name__)
NAME, FILE, TARGET = "DMS_id", "DMS_filename", "target_seq"
ID, TYPE = "UniProt_ID", "coarse_selection_type"
DEPTH, TAXON = "MSA_Neff_L_category", "taxon"
BINARY = "DMS_score_bin"
# Measured of clinical variants: Pathogenic, or 1, and Benign, or 0. The second is an earlier version's.
CLINICAL = ("DMS_bin_score", BINARY)
BENIGN = {"benign": 1.0, "0": 1.0, "pathogenic": 0.0, "1": 0.0}  # higher is better, as of the model's scores


class Assay(NamedTuple):
    """A row of the reference file: the columns that are there of those above, its table, and the wild type."""

    name: str
    path: Path
    protein: bytes
    about: dict[str, str]

    @property
    def is_clinical(self) -> bool:
        """Whether the reference file has no function types."""
        return TYPE not in self.about


class Table(NamedTuple):
    """An assay's rows. measured: [rows], higher is better, NaN for none; fit: bool [rows], the binary label."""

    names: list[str]
    rows: list[dict[str, str]]
    variants: list[Variant | Mutated]
    measured: np.ndarray
    fit: np.ndarray


class Reference(NamedTuple):
    """The assays whose tables are there, the names of those that are missing, and whether they are clinical variants,
    which have one protein an assay and no function types."""

    assays: list[Assay]
    missing: list[str]
    is_clinical: bool


def read_reference(path: str, data: str) -> Reference:
    """UserError for a column that is needed and absent, a wild type that is no protein, a repeated or empty name, and
    a directory without any of the tables."""
    where = f"--reference {path}"
    names, rows = read_rows(path, where, has_prose=True)
    needed = [NAME, FILE, TARGET] + ([ID, TYPE] if {ID, TYPE} & set(names) else [])
    if absent := [name for name in needed if name not in names]:
        raise UserError(f"{where}: no column {absent[0]!r}, only {', '.join(map(quoted, names))}: add it")
    assays = [_assay(row, needed, Path(data), f"{where}, row {line}") for line, row in enumerate(rows, 2)]
    known: set[str] = set()
    for line, assay in enumerate(assays, 2):
        if assay.name in known:
            raise UserError(f"{where}, row {line}: a second {NAME} {quoted(assay.name)}: rename or remove it")
        known.add(assay.name)
    there = [assay for assay in assays if assay.path.is_file()]
    if not there:
        raise UserError(
            f"--data {data}: none of the {len(assays)} assays of {path}, as {assays[0].path.name}, is there"
        )
    is_clinical = TYPE not in names
    columns = read_rows(there[0].path, f"--data {there[0].path}")[0] if is_clinical else []
    if is_clinical and (MEASURED in columns or not {*CLINICAL} & {*columns}):
        raise UserError(
            f"{where}: no columns {ID!r} and {TYPE!r}, by which assays are averaged: add them (clinical assays, which "
            f"need none, have a column {CLINICAL[0]!r}; {there[0].path.name} has {', '.join(map(quoted, columns))})"
        )
    return Reference(there, [assay.name for assay in assays if not assay.path.is_file()], is_clinical)


def _assay(row: dict[str, str], needed: Sequence[str], data: Path, where: str) -> Assay:
    for name in needed:
        if is_missing(row[name]):
            raise UserError(f"{where}: no {name}: add it, or remove the row")
    target = row[TARGET].strip().upper()
    if not re.fullmatch("[A-Z]+", target):
        raise UserError(f"{where}: {TARGET} {quoted(row[TARGET])} is not a protein: correct it, or remove the row")
    about = {name: row[name].strip() for name in (ID, TYPE, DEPTH, TAXON) if name in row}
    if DEPTH in about:  # the official file has both Medium and medium
        about[DEPTH] = about[DEPTH].capitalize()
    return Assay(row[NAME].strip(), data / row[FILE].strip(), target.encode(), about)


def read_table(assay: Assay, reference: str) -> Table:
    """UserError for a mutation that does not fit the wild type, and measured values that are infinite or all alike."""
    where = f"--data {assay.path}"
    names, rows = read_rows(assay.path, where)
    there = ", ".join(map(quoted, names))
    column = next((name for name in (MUTANT, *SEQUENCES) if name in names), None)
    if column is None:
        raise UserError(f"{where}: no column {MUTANT!r} and no {SEQUENCES[0]!r}, only {there}: add one")
    measured, fit = (_clinical if assay.is_clinical else _measured)(names, rows, where)
    if len(set(measured[~np.isnan(measured)].tolist())) < 2:
        effects = "the clinical label" if assay.is_clinical else MEASURED
        raise UserError(f"{where}: {effects} has fewer than 2 different values: remove {assay.name} from {reference}")
    columns, proteins = columns_by(column, names, rows), {assay.name: assay.protein}
    try:
        variants = variants_of(columns, rows, proteins, where, reference)
    except UserError as error:
        raise UserError(f"{error} ({TARGET} of {assay.name} in {reference})") from error
    return Table(names, rows, variants, measured, fit)


def _measured(names: Sequence[str], rows: list[dict[str, str]], where: str) -> tuple[np.ndarray, np.ndarray]:
    """(measured, fit): fit where `DMS_score_bin` is 1, or without this column from the median on."""
    if MEASURED not in names:
        raise UserError(f"{where}: no column {MEASURED!r}, only {', '.join(map(quoted, names))}: add it")
    measured = np.array(measured_of(MEASURED, rows, where, "leave it empty"))
    if BINARY not in names:
        return measured, measured >= np.nanmedian(measured) if (~np.isnan(measured)).any() else measured > 0
    fit = []
    for line, (row, value) in enumerate(zip(rows, measured.tolist(), strict=True), 2):
        cell = row[BINARY].strip()
        if not math.isnan(value) and cell not in ("0", "1", "0.0", "1.0"):
            raise UserError(
                f"{where}, row {line}: {BINARY} {quoted(cell)} is not 0 or 1: correct it, or drop the column"
            )
        fit.append(cell in ("1", "1.0"))
    return measured, np.array(fit)


def _clinical(names: Sequence[str], rows: list[dict[str, str]], where: str) -> tuple[np.ndarray, np.ndarray]:
    """(1 of a benign variant and 0 of a pathogenic one, whether it is benign)."""
    column = next((name for name in CLINICAL if name in names), None)
    if column is None:
        raise UserError(f"{where}: no column {CLINICAL[0]!r}, only {', '.join(map(quoted, names))}: add it")
    values = []
    for line, row in enumerate(rows, 2):
        cell = row[column].strip().lower()
        if cell not in BENIGN and not is_missing(cell):
            raise UserError(
                f"{where}, row {line}: {column} {quoted(cell)} is neither Benign nor Pathogenic: correct it"
            )
        values.append(BENIGN.get(cell, math.nan))
    return np.array(values), np.array(values) == 1
