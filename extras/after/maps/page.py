"""The map as one HTML file, which fetches nothing: points drawn on a canvas, ids on hover, a search, a legend."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from extras.after.maps.colouring import OTHER_CLASSES, Colouring
from extras.after.maps.projections import Projection
from extras.after.maps.vectors import Embedded

logger = logging.getLogger(__name__)
TEMPLATE = Path(__file__).with_name("page.html")
MOST = 50_000  # points; more make a browser slow
STOPS = 5  # of the legend of numbers


def write_page(path: Path, embedded: Embedded, projection: Projection, colourings: Sequence[Colouring]) -> None:
    """Write the page. colourings: the first is shown at once. Of more than `MOST` proteins a random sample."""
    count = len(embedded.ids)
    chosen = np.arange(count)
    if count > MOST:
        chosen = np.sort(np.random.default_rng(0).choice(count, MOST, replace=False))
        logger.info("%s: a random %s of %s proteins", path.name, f"{MOST:,}", f"{count:,}")
    points = np.round(projection.points[chosen], 5)
    data = {
        "ids": [embedded.ids[place] for place in chosen],
        "lengths": embedded.lengths[chosen].tolist(),
        "x": points[:, 0].tolist(),
        "y": points[:, 1].tolist(),
        "axes": projection.axes,
        "about": f"{len(chosen):,} of {count:,} proteins",
        "colourings": [colours_of(colouring, chosen) for colouring in colourings],
    }
    path.write_text(TEMPLATE.read_text(encoding="utf-8").replace("DATA", inert(data)), encoding="utf-8")


def inert(data: Any) -> str:
    """JSON that ends no <script>, whatever an id or a label says. The page shows texts as text, never as HTML."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def colours_of(colouring: Colouring, chosen: np.ndarray) -> dict[str, Any]:
    """What the page knows of a colouring: texts and colours of the chosen points, and the rows of the legend."""
    all_colours = colouring.of_points()
    of_points = [all_colours[place] for place in chosen]
    colours = list(dict.fromkeys(of_points))
    texts = [colouring.texts[place] for place in chosen]
    legend: list[tuple[str, str, int | None]] = [*colouring.legend()]
    if colouring.numbers is not None:
        legend = [*number_stops(colouring), *legend]
    unnamed = {OTHER_CLASSES: sorted(set(texts) - set(colouring.shown) - {""}), colouring.absent: [""]}
    return {
        "title": colouring.title,
        "texts": texts,
        "colours": colours,
        "codes": [colours.index(colour) for colour in of_points],
        "legend": legend,
        "members": {name: [name] for name in colouring.shown} | unnamed,
    }


def number_stops(colouring: Colouring) -> list[tuple[str, str, None]]:
    """(number, colour, None) from the lowest colour to the highest."""
    values = np.linspace(*colouring.limits(), STOPS)
    return [(f"{value:.4g}", shade, None) for value, shade in zip(values, colouring.shades(values), strict=True)]
