"""What colours a map's points: a column of a table, as classes or numbers, the lengths, or the clusters."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.cli import UserError
from common.figures import COLOURS, SEQUENTIAL
from extras.after.downstream.labels import class_names, is_absent, is_regression, place_of, read_rows
from extras.after.maps.clusters import NO_CLUSTER

logger = logging.getLogger(__name__)
LENGTH = "length"  # a --colour_by that needs no table
KINDS = ("numbers", "classes")
OTHER, MISSING = COLOURS[-1], "#D0D0D0"
OTHER_CLASSES, NO_VALUE, NO_CLUSTER_NAME = "other classes", "no value", "no cluster"  # in legends
MOST = len(COLOURS) - 1  # classes with a colour of their own
SHADES = 32  # of a colour map, in the page


@dataclass(frozen=True)
class Colouring:
    """texts: the value of each protein, "" where it is missing; numbers: float64 [proteins], NaN where missing, or
    None of classes; shown: {class: proteins} of those that have a colour of their own, the most frequent first;
    absent: what the legend calls missing values."""

    title: str
    texts: list[str]
    numbers: np.ndarray | None
    shown: dict[str, int]
    absent: str = NO_VALUE

    @property
    def missing(self) -> int:
        return self.texts.count("")

    @property
    def others(self) -> int:
        """Proteins of the classes that share a colour."""
        return 0 if self.numbers is not None else len(self.texts) - self.missing - sum(self.shown.values())

    def legend(self) -> list[tuple[str, str, int]]:
        """(name, colour, proteins) of each class, of the other ones and of missing values."""
        rows = [(name, COLOURS[place], count) for place, (name, count) in enumerate(self.shown.items())]
        return rows + [
            (name, colour, count)
            for name, colour, count in ((OTHER_CLASSES, OTHER, self.others), (self.absent, MISSING, self.missing))
            if count
        ]

    def of_points(self) -> list[str]:
        """The colour of each protein's class, or the shade of its number."""
        if self.numbers is None:
            colours = dict(zip(self.shown, COLOURS, strict=False)) | {"": MISSING}
            return [colours.get(text, OTHER) for text in self.texts]
        return self.shades(self.numbers)

    def shades(self, numbers: np.ndarray) -> list[str]:
        from matplotlib import colormaps
        from matplotlib.colors import to_hex

        low, high = self.limits()
        steps = [to_hex(colormaps[SEQUENTIAL](place / (SHADES - 1))) for place in range(SHADES)]
        places = np.clip((numbers - low) / ((high - low) or 1), 0, 1) * (SHADES - 1)
        return [MISSING if np.isnan(place) else steps[round(place)] for place in places]

    def limits(self) -> tuple[float, float]:
        """Of the colours of numbers: 1 % and 99 % of them, so that one far value does not take all shades."""
        low, high = np.nanpercentile(self.numbers, (1, 99))
        return float(low), float(high)


def of_classes(title: str, texts: list[str], absent: str = NO_VALUE) -> Colouring:
    counts = Counter(text for text in texts if text)
    frequent = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    if len(frequent) > MOST:
        logger.info("%s: %d classes: the %d most frequent have a colour", title, len(frequent), MOST)
    return Colouring(title, texts, None, dict(frequent[:MOST]), absent)


def of_clusters(labels: np.ndarray, names: Sequence[str]) -> Colouring:
    texts = ["" if label == NO_CLUSTER else names[label] for label in labels]
    return of_classes("cluster", texts, NO_CLUSTER_NAME)


def of_lengths(lengths: np.ndarray) -> Colouring:
    return Colouring(LENGTH, list(map(str, lengths.tolist())), lengths.astype(np.float64), {})


def of_table(table: str, id_column: str, column: str, asked: str | None, ids: Sequence[str]) -> Colouring:
    """The column's value of each protein. asked: of `KINDS`, else decided by the values.

    UserError for a missing column, a protein with two rows, and a table of other proteins. Rows of other proteins
    and proteins without a value are counted.
    """
    where = f"--table {table}"
    rows = read_rows(table, where, [id_column, column])
    cells: dict[str, str] = {}
    for row in rows:
        name = row[id_column].strip()
        if name in cells:
            raise UserError(f"{place_of(row, where)}: a second row of {name[:40]!r}: leave one")
        cells[name] = "" if is_absent(text := row[column].strip()) else text
    known = set(ids)
    if strangers := [name for name in cells if name not in known]:
        if len(strangers) == len(cells):
            raise UserError(f"{where}: none of its {len(cells):,} ids is embedded, {strangers[0][:40]!r} say")
        logger.warning(
            "%s: %s of %s ids are not embedded, %r say: left out",
            *(where, f"{len(strangers):,}", f"{len(cells):,}", strangers[0][:40]),
        )
    texts = [cells.get(name, "") for name in ids]
    words = [text for text in texts if text]
    if not words:
        raise UserError(f"{where}: the column {column!r} has no value of an embedded protein")
    if absent := len(texts) - len(words):
        logger.info("%s: %s of %s proteins have no %s: grey", where, f"{absent:,}", f"{len(texts):,}", column)
    numbers = asked == KINDS[0] if asked else None
    if not is_regression(words, numbers, where, "--colour_as classes"):
        classes = class_names(words) | {"": ""}
        return of_classes(column, [classes[text] for text in texts])
    values = np.array([float(text) if text else np.nan for text in texts])
    return Colouring(column, texts, values, {})
