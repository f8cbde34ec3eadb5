"""Tables of a benchmark as ProteinGym's official ones: by assay, UniProt id and function type, and a summary."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.files.safe_files import replace_flushed
from extras.after.proteingym.assays import DEPTH, ID, NAME, TAXON, TYPE, Assay
from extras.after.proteingym.averages import DECIMALS, Averages, averages, by_category, nan_mean
from extras.after.proteingym.metrics import METRICS

SUMMARY = "summary.csv"
GROUPS = {DEPTH: "msa_depth", TAXON: "taxon"}  # {column of the reference file: what a summary's column begins with}
SKIPPED = "skipped"  # key of results.json, and of the record of an assay without scores
ALL = ""  # the one function type of clinical assays


class Scored(NamedTuple):
    """An assay with its metrics: {score: {metric: value, None where it is not defined}}."""

    assay: Assay
    variants: int
    metrics: dict[str, dict[str, float | None]]


class Metric(NamedTuple):
    """A metric's values, [assays, scores], and their averages."""

    values: np.ndarray
    averages: Averages


class Results(NamedTuple):
    """scores: their names, in order; metrics: {name: of all assays}."""

    assays: Sequence[Scored]
    scores: list[str]
    metrics: dict[str, Metric]

    @property
    def ids(self) -> list[str]:
        return [id_of(each.assay) for each in self.assays]

    @property
    def types(self) -> list[str]:
        return [each.assay.about.get(TYPE, ALL) for each in self.assays]


def id_of(assay: Assay) -> str:
    """Of clinical assays, which have one a protein, the assay's name."""
    return assay.about.get(ID, assay.name)


def results_of(assays: Sequence[Scored]) -> Results:
    """The averages of each metric that an assay has."""
    results = Results(assays, list(dict.fromkeys(name for each in assays for name in each.metrics)), {})
    names = {metric for each in assays for of_score in each.metrics.values() for metric in of_score}
    for metric in (metric for metric in METRICS if metric in names):
        values = np.array([[_value(each, score, metric) for score in results.scores] for each in assays])
        results.metrics[metric] = Metric(values, averages(results.ids, results.types, values))
    return results


def _value(scored: Scored, score: str, metric: str) -> float:
    value = scored.metrics.get(score, {}).get(metric)
    return np.nan if value is None else value


def write_tables(directory: Path, results: Results) -> list[str]:
    """METRIC/assays.csv, uniprot_ids.csv and function_types.csv of each metric, and summary.csv; their names."""
    for metric, found in results.metrics.items():
        (directory / metric).mkdir(exist_ok=True)
        about = [name for name in (ID, TYPE, DEPTH, TAXON) if name in results.assays[0].assay.about]
        of_assays = [
            [each.assay.name, each.variants, *(each.assay.about[name] for name in about), *_cells(values)]
            for each, values in zip(results.assays, found.values, strict=True)
        ]
        write_csv(directory / metric / "assays.csv", [NAME, "variants", *about, *results.scores], of_assays)
        of_ids = [[key, *_cells(row)] for key, row in found.averages.of_ids.items()]
        of_ids.append(["Average", *_cells(nan_mean(np.array(list(found.averages.of_ids.values()))))])
        write_csv(directory / metric / "uniprot_ids.csv", [ID, *results.scores], of_ids)
        of_types = [[key, *_cells(row)] for key, row in found.averages.of_types.items() if key != ALL]
        of_types.append(["Average", *_cells(found.averages.average)])
        write_csv(directory / metric / "function_types.csv", [TYPE, *results.scores], of_types)
    rows = summary(results)
    write_csv(directory / SUMMARY, list(rows[0]), [list(row.values()) for row in rows])
    return [SUMMARY, *results.metrics]


def summary(results: Results) -> list[dict[str, Any]]:
    """A row for each metric and score: the average, its errors, and means by function type, MSA depth and taxon."""
    rows = []
    for metric, found in results.metrics.items():
        categories = {f"function_{name}": row for name, row in found.averages.of_types.items() if name != ALL}
        for column, prefix in GROUPS.items():
            of_category = _by(results, found.values, column)
            categories |= {f"{prefix}_{name}": nan_mean(means) for name, means in of_category.items()}
        for n in np.argsort(-found.averages.average, kind="stable"):
            row = {"metric": metric, "score": results.scores[n], "assays": int((~np.isnan(found.values[:, n])).sum())}
            numbers = {
                "average": found.averages.average,
                "standard_error": found.averages.error,
                "standard_error_to_best": found.averages.error_to_best,
            }
            rows.append(row | {name: _cells(values)[n] for name, values in (numbers | categories).items()})
    return rows


def _by(results: Results, values: np.ndarray, column: str) -> Mapping[str, np.ndarray]:
    """`by_category` of a column of the reference file; without assays that have nothing there."""
    rows = [n for n, each in enumerate(results.assays) if each.assay.about.get(column)]
    of_rows = [results.assays[n].assay.about[column] for n in rows]
    return by_category([results.ids[n] for n in rows], of_rows, values[rows].round(DECIMALS))


def _cells(values: np.ndarray) -> list[str]:
    return ["" if np.isnan(value) else f"{value:.{DECIMALS}f}" for value in values]


def write_csv(path: Path, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with replace_flushed(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([names, *rows])


def printed(results: Results) -> str:
    """The averages with standard errors, a row for each score; then Spearman's by function type."""
    width = max(map(len, results.scores))
    lines = [" " * width + "".join(metric.rjust(16) for metric in results.metrics)]
    for n, score in enumerate(results.scores):
        cells = [shown(each.averages.average[n], each.averages.error[n]) for each in results.metrics.values()]
        lines.append(f"{score:{width}}" + "".join(cell.rjust(16) for cell in cells))
    metric, first = next(iter(results.metrics.items()))
    of_types = {name: row for name, row in first.averages.of_types.items() if name != ALL}
    if of_types:
        lines += ["", f"{metric:{width}}" + "".join(name.rjust(18) for name in of_types)]
        for n, score in enumerate(results.scores):
            lines.append(f"{score:{width}}" + "".join(shown(row[n]).rjust(18) for row in of_types.values()))
    return "\n".join(lines)


def shown(value: float | None, error: float = np.nan) -> str:
    """For a table; `-` where it is not defined."""
    if value is None or np.isnan(value):
        return "-"
    return f"{value:.3f}" + ("" if np.isnan(error) else f" ± {error:.3f}")


def about_results(results: Results) -> dict[str, Any]:
    """What the averages are over, and the averages, not rounded."""
    found = {
        metric: {
            score: {
                "average": number(each.averages.average[n]),
                "standard_error": number(each.averages.error[n]),
                "standard_error_to_best": number(each.averages.error_to_best[n]),
                "undefined": int(np.isnan(each.values[:, n]).sum()),
            }
            for n, score in enumerate(results.scores)
        }
        for metric, each in results.metrics.items()
    }
    return {
        "assays": len(results.assays),
        "variants": sum(each.variants for each in results.assays),
        "uniprot_ids": len(set(results.ids)),
        "function_types": len(set(results.types)),
        "averages": found,
    }


def number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def over_what(about: dict[str, Any], is_clinical: bool) -> str:
    """What the printed averages are over, for the line below them. about: for results.json."""
    left = [f"{len(about[name])} {word}" for name, word in (("missing",) * 2, (SKIPPED, "left out")) if about[name]]
    more = f" ({', '.join(left)})" if left else ""
    assays = f"{about['assays']} assays, {about['variants']:,} variants{more}"
    of_all = [each for of_score in about["averages"].values() for each in of_score.values()]
    over = "proteins" if is_clinical else "UniProt ids"
    error = f"± bootstrap standard error over {over}"
    if all(each["standard_error"] is None for each in of_all):
        error = f"no standard error: {'one protein' if is_clinical else 'no type has two UniProt ids'}"
    if is_clinical:
        return f"Means over {assays}; {error}"
    groups = f"{about['uniprot_ids']} UniProt ids, {about['function_types']} function types"
    return f"{assays}, {groups}: means by UniProt id and type, then by type, then over types; {error}"
