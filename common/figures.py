"""All pictures: one style, widths of journals, colours for colour-blind readers and for grey, formats of files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.cli import UserError
from common.files.safe_files import replace_flushed
from common.flags import Flags, flag

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)
MILLIMETRE = 1 / 25.4  # in inches
ONE_COLUMN, TWO_COLUMNS = 89 * MILLIMETRE, 183 * MILLIMETRE  # widths in inches
PAGE = 247 * MILLIMETRE  # height in inches
# Okabe and Ito (2008), which colour-blind readers tell apart; without yellow, which is faint on white. Black is for
# baselines. In this order the first three are told apart in grey, too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#5A5A5A")
LINES = ("-", "--", "-.", (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# Colour maps whose lightness rises from end to end, so that a printed grey still says which value is higher.
SEQUENTIAL = "viridis"
DIVERGING = "below_and_above_zero"  # for limits as far below zero as above it; known within `figure_style`
BELOW_AND_ABOVE_ZERO = ("#08204F", "#1F63B0", "#B4B4B4", "#FFEF5E")  # at 0, 1/4, 1/2 and 1: zero is grey
FORMATS = ("png", "svg", "pdf")
LOWEST_DPI, HIGHEST_DPI = 50, 1200
MOST_PIXELS = 65_000  # a side: matplotlib draws less than 2**16
SMALL, NORMAL, LARGE = 6, 7, 8  # points
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": NORMAL,
    "axes.titlesize": LARGE,
    "axes.labelsize": NORMAL,
    "figure.titlesize": LARGE,
    "figure.labelsize": NORMAL,
    "legend.fontsize": SMALL,
    "legend.title_fontsize": SMALL,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.0,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    # Text stays text, which an editor can change: TrueType fonts in PDF, <text> in SVG.
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class FigureFlags(Flags):
    """Formats of the pictures that a script draws."""

    group = "pictures"

    figure_format: list[str] | None = flag(
        None, f"Formats of pictures, one or several of {' '.join(FORMATS)}; svg and pdf for a paper. Default: png."
    )
    dpi: int = flag(200, "Dots per inch of pictures in PNG; raise it for print.")

    @property
    def given(self) -> dict[str, Any]:
        """What is not the default: {} or {"figures": [formats, dots per inch]}."""
        return {} if self == DEFAULT else {"figures": [list(self.formats), self.dpi]}

    @property
    def formats(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.figure_format or FORMATS[:1]))

    def check(self) -> None:
        for name in self.formats:
            if name not in FORMATS:
                raise UserError(f"--figure_format {name}: choose {', '.join(FORMATS)}")
        if not LOWEST_DPI <= self.dpi <= HIGHEST_DPI:
            raise UserError(f"--dpi {self.dpi}: must be from {LOWEST_DPI} to {HIGHEST_DPI}")


DEFAULT = FigureFlags()


@contextmanager
def figure_style() -> Iterator[None]:
    """Within it figures are made in the project's style, whatever the user's matplotlibrc says."""
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap

    if DIVERGING not in matplotlib.colormaps:
        points = list(zip((0, 0.25, 0.5, 1), BELOW_AND_ABOVE_ZERO, strict=True))
        matplotlib.colormaps.register(LinearSegmentedColormap.from_list(DIVERGING, points))
    defaults = {name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")}
    with matplotlib.rc_context(defaults | STYLE):
        yield


def series_style(number: int, marker: bool = False) -> dict[str, Any]:
    """How the series of this number is drawn: with a colour, and a line or a marker that its neighbours have not."""
    other = {"marker": MARKERS[number % len(MARKERS)]} if marker else {"linestyle": LINES[number % len(LINES)]}
    return {"color": COLOURS[number % len(COLOURS)], **other}


def save_figure(figure: Figure, path: Path, flags: FigureFlags = DEFAULT) -> list[Path]:
    """Write `path`.png, .svg, .pdf, as the flags say; returns the files. The same picture makes the same bytes.

    path: without a suffix. A file gets its name when it is whole. A PNG of more than `MOST_PIXELS` a side has
    fewer dots per inch.
    """
    import matplotlib

    paths = []
    dpi = min(flags.dpi, int(MOST_PIXELS / max(figure.get_size_inches())))
    for form in flags.formats:
        paths.append(path.with_name(f"{path.name}.{form}"))
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form, {})
        with (
            figure_style(),
            matplotlib.rc_context({"svg.hashsalt": paths[-1].name}),
            replace_flushed(paths[-1]) as file,
        ):
            figure.savefig(file, format=form, dpi=dpi, metadata=metadata)
        if form == "png" and dpi < flags.dpi:
            logger.warning("%s: %d dots per inch instead of %d, as it is large", paths[-1].name, dpi, flags.dpi)
    return paths
