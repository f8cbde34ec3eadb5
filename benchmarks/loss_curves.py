"""Held-out loss by tokens: when a curve reaches a loss, recipes beside tuned AdamW, over seeds; a table and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measuring import mean_and_error
from common.figures import TWO_COLUMNS, figure_style, save_figure, series_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = Sequence[tuple[float, float]]  # (tokens, held-out loss in nats) of each evaluation
BASE = "adamw"


@dataclass(frozen=True)
class Tuned:
    """A recipe's best setting, and its curve of each seed."""

    rate: float
    warmup: float
    curves: Mapping[int, Curve]

    @property
    def loss(self) -> float:
        return statistics.mean(map(last_loss, self.curves.values()))


def last_loss(curve: Curve) -> float:
    """Infinite where it is NaN, so that a diverged run is the worst."""
    loss = curve[-1][1]
    return math.inf if math.isnan(loss) else loss


def tokens_to(curve: Curve, loss: float) -> float | None:
    """When it first reaches the loss, linearly between two evaluations; None if it never does."""
    before = None
    for tokens, here in curve:
        if here <= loss:
            if before is None:
                return tokens
            return before[0] + (tokens - before[0]) * (before[1] - loss) / (before[1] - here)
        before = (tokens, here)
    return None


def tokens_to_stay(curve: Curve, loss: float) -> float | None:
    """From when on it is never above the loss again; None if it ends above."""
    above = [number for number, (_, here) in enumerate(curve) if not here <= loss]
    return tokens_to(curve[above[-1] :] if above else curve, loss)


def reached(
    recipe: Tuned, base: Tuned, loss: float | None, when: Callable = tokens_to
) -> dict[int, tuple[float | None, float | None]]:
    """{seed: tokens to the loss of the recipe and of AdamW}. loss: None for the last one of AdamW with this seed."""
    found = {}
    for seed in recipe.curves.keys() & base.curves.keys():
        target = last_loss(base.curves[seed]) if loss is None else loss
        found[seed] = when(recipe.curves[seed], target), when(base.curves[seed], target)
    return found


def ratios(recipe: Tuned, base: Tuned, loss: float | None, when: Callable = tokens_to) -> list[float]:
    """Tokens to a loss as a part of AdamW's, of each seed; [] unless both reach it with every seed."""
    pairs = reached(recipe, base, loss, when).values()
    if any(own is None or other is None for own, other in pairs):
        return []
    return [own / other for own, other in pairs if own and other]


def shown(values: Sequence[float], form: str) -> str:
    """Mean ± standard error."""
    if not values:
        return ""
    mean, error = mean_and_error(list(values))
    return f"{mean:{form}}" + ("" if math.isnan(error) else f" ± {error:{form.lstrip('+')}}")


def cells_of(recipe: Tuned, base: Tuned | None, loss: float | None) -> list[str]:
    """Thousands of tokens to the loss, and as a part of AdamW's."""
    if base is None:
        return ["", ""]
    tokens = [own for own, _ in reached(recipe, base, loss).values()]
    missed = tokens.count(None)
    if missed:
        return [f"not reached ({missed} of {len(tokens)})", ""]
    return [shown([own / 1000 for own in tokens if own], ",.0f"), shown(ratios(recipe, base, loss), ".2f")]


def table(recipes: Mapping[str, Tuned], losses: Sequence[float]) -> list[str]:
    """Markdown. losses: targets beside AdamW's last."""
    targets = ["AdamW's last loss", *(f"{loss:g}" for loss in losses)]
    columns = ["recipe", "rate", "warm-up", "seeds", "last loss", "less AdamW's"]
    for target in targets:
        columns += [f"thousand tokens to {target}", "of AdamW's"]
    columns.insert(8, "to stay there")
    lines = [f"| {' | '.join(columns)} |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    base = recipes.get(BASE)
    for name, recipe in recipes.items():
        own = {seed: last_loss(curve) for seed, curve in recipe.curves.items()}
        cells = [name, f"{recipe.rate:g}", f"{recipe.warmup:.0%}", str(len(own)), shown(list(own.values()), ".4f")]
        shared = [] if base is None or name == BASE else sorted(own.keys() & base.curves.keys())
        cells.append(shown([own[seed] - last_loss(base.curves[seed]) for seed in shared], "+.4f"))
        for loss in (None, *losses):
            cells += cells_of(recipe, base, loss)
            if loss is None:
                cells.append("" if base is None else shown(ratios(recipe, base, None, tokens_to_stay), ".2f"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdict(recipes: Mapping[str, Tuned], goal: float, seeds: int) -> str:
    """The recipe with the least tokens to AdamW's last loss, of those run on all seeds, beside the goal."""
    base = recipes.get(BASE)
    of_all = {name: recipe for name, recipe in recipes.items() if name != BASE and len(recipe.curves) == seeds}
    found = {} if base is None else {name: ratios(recipe, base, None) for name, recipe in of_all.items()}
    found = {name: values for name, values in found.items() if len(values) == seeds}
    if not found:
        return f"Goal: {goal} of AdamW's tokens to its last loss. No other recipe has reached it on {seeds} seeds."
    name = min(found, key=lambda each: statistics.mean(found[each]))
    met = "met" if statistics.mean(found[name]) <= goal else "not met"
    to_stay = shown(ratios(recipes[name], recipes[BASE], None, tokens_to_stay), ".2f")
    best = f"{shown(found[name], '.2f')} to reach it: {met}; {to_stay} to stay there"
    return f"Goal: {goal} of AdamW's tokens to its last loss. Best: {name}, {best}."


def draw(panels: Mapping[str, Mapping[str, Tuned]], path: Path) -> None:
    """For each size the mean over the seeds, shaded from the lowest to the highest. path: without a suffix."""
    from matplotlib.figure import Figure

    with figure_style():
        figure = Figure(figsize=(TWO_COLUMNS, 0.6 * TWO_COLUMNS), layout="constrained")
        _draw(figure, panels)
    save_figure(figure, path)


def _draw(figure: Figure, panels: Mapping[str, Mapping[str, Tuned]]) -> None:
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, (size, recipes) in zip(axes[0], panels.items(), strict=True):
        shortest = []
        for number, (name, recipe) in enumerate(recipes.items()):
            curves = list(recipe.curves.values())
            tokens = [statistics.mean(point[0] for point in points) for points in zip(*curves, strict=True)]
            losses = [[point[1] for point in points] for points in zip(*curves, strict=True)]
            style = series_style(number)
            axis.plot(tokens, [statistics.mean(v) for v in losses], label=name, **style)
            low, high = [min(v) for v in losses], [max(v) for v in losses]
            axis.fill_between(tokens, low, high, alpha=0.12, color=style["color"], linewidth=0)
            shortest.append(statistics.mean(losses[len(losses) // 4]))
        if base := recipes.get(BASE):
            axis.axhline(base.loss, color="black", linewidth=0.8, linestyle=":")
        if shortest:  # leave out the first quarter, which is steep
            axis.set_ylim(top=max(shortest))
        axis.set(title=size, xlabel="tokens", ylabel="held-out loss, nats per hidden residue")
        axis.grid(visible=True)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), borderaxespad=0, ncols=2, handlelength=3)
