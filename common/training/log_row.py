"""A row of metrics.jsonl. Each of its keys is defined in FIELDS, and nowhere else.

What is summed between two rows (RowWindow) is saved with the trainer state. So a run that is killed in between and
resumes writes the row of one that was not, but for the group "perf", which clock and machine decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common import console
from common.data.loader import StepCounts
from common.distributed.world import World
from common.files.safe_files import check_type, shorten


@dataclass(frozen=True)
class StepResult:
    """A step's loss (nats per target, over the global batch), gradient norm before clipping, and seconds.

    The seconds are the host's, which is exact on a CPU. On a GPU the loss is read while the optimiser runs:
    `forward_backward` covers forward, backward and communication; `optimizer` is the launch alone, its kernels count
    with the next step. Neither includes the wait for the next batches. quant_stats: rows of quant_stats.jsonl;
    by_source: of each source of a mixture in turn, the loss summed over its targets, and their number.
    """

    loss: float
    grad_norm: float
    skipped: bool
    forward_backward: float
    optimizer: float
    quant_stats: list[dict]
    by_source: Sequence[float] = ()


@dataclass(frozen=True)
class StepRecord:
    """What is known of a step once it is taken and counted in `state`; fields are computed from it.

    counts: of the global batch; flops: of it, forward and backward; seconds: of the step; waited: those of them for
    batches; saving: seconds that a save held up training before the step; ranks: as `StepMonitor.after_step`;
    peak_flops: of a device per second, None if unknown.
    """

    state: Any  # the TrainerState
    total_steps: int
    learning_rate: float
    counts: StepCounts
    result: StepResult
    flops: float
    seconds: float
    waited: float
    saving: float
    ranks: dict
    world: World
    peak_flops: float | None

    @property
    def loss(self) -> float | None:
        """None of a step that was skipped or had no target."""
        return None if self.result.skipped or not self.counts.num_targets else self.result.loss


# How the values of the steps since the last row become one. Steps whose value is None are left out.
AT_ROW = "of the row's step"
LAST = "the last value"
SUM = "sum"
MEAN = "mean of the steps"
PER_SECOND = "sum, per second of the steps"


@dataclass(frozen=True)
class Shown:
    """A part of a line. Parts of a lower `place` come first; where a line is too narrow, parts of a higher `rank` are
    left out first. text: a format of the row's keys, or a function of the row; "" shows nothing."""

    place: int
    text: str | Callable[[dict], str]
    rank: int = 0


@dataclass(frozen=True)
class Field:
    """A key of a row. All are written to metrics.jsonl and, if numbers, to the tracker, as `group`/`name`.

    unit, meaning: for docs/reference_metrics.md; a field of the unit "name" is text. value: of a step; None: it has
    none; over: what the row has of the values since the last row; then: applied to that. log, terminal: where in the
    line of a log, and in that of a terminal; None: not in it.
    """

    name: str
    unit: str
    meaning: str
    value: Callable[[StepRecord], Any]
    over: str = AT_ROW
    then: Callable[[float], float] | None = None
    group: str = "train"
    log: Shown | None = None
    terminal: Shown | None = None


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory so far, in GB: the allocator's on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    for line in Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else ():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024 / 1e9
    return 0.0


def _data_wait(row: dict) -> float:
    """The wait for data as a fraction of the step."""
    return row["data_wait_seconds"] / max(row["step_seconds"], 1e-9)


def _seconds_left(row: dict) -> float:
    """At most a million years: a longer time is no timedelta."""
    left, most = (row["total_steps"] - row["step"]) * row["step_seconds"], 3e13
    return left if left < most else most


perf = partial(Field, group="perf")
FIELDS = [
    Field(
        "step",
        "optimiser steps",
        "done so far, of all starts",
        lambda step: step.state.step,
        log=Shown(0, "step: {step}/{total_steps}"),
        terminal=Shown(0, "step {step:,}/{total_steps:,}"),
    ),
    Field("total_steps", "optimiser steps", "of the whole run", lambda step: max(step.total_steps, step.state.step)),
    Field("epoch", "epochs", "so far", lambda step: step.state.epoch, log=Shown(1, "epoch: {epoch:.2f}")),
    Field(
        "loss",
        "nats per target",
        "mean of the steps since the last row, but for those skipped or without a target",
        lambda step: step.loss,
        MEAN,
        log=Shown(2, "loss: {loss:.4f}"),
        terminal=Shown(1, "loss {loss:.4f}", rank=1),
    ),
    Field(
        "train_perplexity",
        "",
        "exp(`loss`)",
        lambda step: step.loss,
        MEAN,
        then=lambda loss: math.exp(min(loss, 700)),
        log=Shown(4, "ppl: {train_perplexity:.3f}"),
    ),
    Field(
        "step_loss",
        "nats per target",
        "of this step; absent if it was skipped or had no target",
        lambda step: step.loss,
        log=Shown(3, "step_loss: {step_loss:.4f}"),
    ),
    Field(
        "grad_norm",
        "",
        "of this step, before clipping; absent if it was skipped",
        lambda step: None if step.result.skipped else step.result.grad_norm,
        log=Shown(5, "grad_norm: {grad_norm:.3f}"),
        terminal=Shown(9, "norm {grad_norm:.2f}", rank=8),
    ),
    Field(
        "learning_rate",
        "",
        "of this step",
        lambda step: step.learning_rate,
        log=Shown(6, "lr: {learning_rate:.2e}"),
        terminal=Shown(8, "lr {learning_rate:.1e}", rank=7),
    ),
    Field("tokens", "tokens", "so far, of all ranks, without padding", lambda step: step.state.tokens),
    Field(
        "unknown_characters",
        "tokens",
        "so far: `<unk>`, for characters that are no residues",
        lambda s: s.state.unknown,
    ),
    perf(
        "tokens_per_second",
        "tokens/s",
        "of all ranks, without padding, since the last row",
        lambda step: step.counts.num_tokens,
        PER_SECOND,
        log=Shown(8, "tps: {tokens_per_second:,.0f}"),
        terminal=Shown(3, lambda row: f"{console.short(row['tokens_per_second'])} tok/s", rank=2),
    ),
    perf(
        "tokens_per_second_per_gpu",
        "tokens/s",
        "per rank, with the padding that the layers compute",
        lambda step: step.counts.num_computed / step.world.size,
        PER_SECOND,
    ),
    perf(
        "unpadded_tokens_per_second_per_gpu",
        "tokens/s",
        "per rank, without padding",
        lambda step: step.counts.num_tokens / step.world.size,
        PER_SECOND,
        log=Shown(9, "tps/gpu: {unpadded_tokens_per_second_per_gpu:,.0f}"),
    ),
    perf(
        "step_seconds",
        "s",
        "mean per step since the last row, by rank 0's clock, like the next three",
        lambda step: step.seconds,
        MEAN,
        log=Shown(13, lambda row: f"eta: {timedelta(seconds=round(left))}" if (left := _seconds_left(row)) else ""),
        terminal=Shown(5, lambda row: f"ETA {console.duration(left)}" if (left := _seconds_left(row)) else "", rank=3),
    ),
    perf(
        "data_wait_seconds",
        "s",
        "waiting for the next batch; on a GPU only while it is idle",
        lambda step: step.waited,
        MEAN,
        log=Shown(12, lambda row: f"data wait: {_data_wait(row):.0%}"),
        terminal=Shown(7, lambda row: f"data wait {wait:.0%}" if (wait := _data_wait(row)) >= 0.1 else "", rank=6),
    ),
    perf(
        "forward_backward_seconds", "s", "forward and backward pass", lambda step: step.result.forward_backward, MEAN
    ),
    perf(
        "optimizer_seconds",
        "s",
        "clipping and optimiser; on a GPU its kernels count with the next forward pass",
        lambda step: step.result.optimizer,
        MEAN,
    ),
    perf(
        "checkpoint_seconds",
        "s",
        "sum since the last row of what checkpoints held training up; not in `step_seconds`",
        lambda step: step.saving,
        SUM,
        log=Shown(14, lambda row: f"checkpoint: {s:.1f}s" if (s := row["checkpoint_seconds"]) >= 0.05 else ""),
    ),
    Field(
        "skipped_steps",
        "optimiser steps",
        "so far: those whose loss or gradient norm was NaN or infinite",
        lambda step: step.state.skipped_steps,
        log=Shown(15, lambda row: f"skipped: {row['skipped_steps']}" if row["skipped_steps"] else ""),
        terminal=Shown(6, lambda row: f"skipped {row['skipped_steps']}" if row["skipped_steps"] else "", rank=3),
    ),
    perf(
        "tflops_per_device",
        "TFLOP/s",
        "of the model's matmuls, forward and backward, per rank",
        lambda step: step.flops / step.world.size / 1e12,
        PER_SECOND,
        log=Shown(10, "tflops: {tflops_per_device:.2f}"),
    ),
    perf(
        "peak_memory_gb",
        "GB",
        "rank 0's peak so far: of the allocator on a GPU, else resident",
        lambda step: peak_memory_gb(step.world.device),
        log=Shown(7, "memory: {peak_memory_gb:.2f}GB"),
    ),
    *(
        perf(name, unit, meaning, lambda step, name=name: step.ranks.get(name), LAST)
        for name, unit, meaning in (
            ("rank_seconds_min", "s", "of the fastest rank, per step without waits for others (`straggler_every`)"),
            ("rank_seconds_median", "s", "of the median rank"),
            ("rank_seconds_max", "s", "of the slowest rank"),
            ("slowest_rank", "rank", "which it is"),
            ("slowest_host", "name", "where it runs"),
        )
    ),
    perf(
        "mfu",
        "fraction",
        "`tflops_per_device` of the device's dense bf16 peak, or of `--peak_tflops_per_gpu`",
        lambda step: step.flops / step.world.size / step.peak_flops if step.peak_flops else None,
        PER_SECOND,
        log=Shown(11, "mfu: {mfu:.1%}"),
        terminal=Shown(4, "MFU {mfu:.1%}", rank=5),
    ),
]


# Keys of a row that has a loss.
_WITH_LOSS = {"total_steps", "learning_rate", "step_seconds", "data_wait_seconds"}


class RowWindow:
    """The steps since the last row.

    sums: {field: [sum or last value, what it is divided by]}, plain values; the trainer state's own, changed in place;
    more: fields beside FIELDS.
    """

    def __init__(self, sums: dict[str, list], more: Sequence[Field] = ()):
        self.sums, self.fields = sums, [*FIELDS, *more]

    def add(self, step: StepRecord) -> None:
        for field in self.fields:
            if field.over == AT_ROW or (value := field.value(step)) is None:
                continue
            if field.over == LAST:
                self.sums[field.name] = [value, 1]
            else:
                total, weight = self.sums.get(field.name, (0, 0))
                self.sums[field.name] = [total + value, weight + (step.seconds if field.over == PER_SECOND else 1)]

    def row(self, step: StepRecord) -> dict:
        """The row after `step`, the last one added, without fields that have no value. Resets the sums."""
        values = {f.name: f.value(step) if f.over == AT_ROW else self._value(f) for f in self.fields}
        self.sums.clear()
        return {name: value for name, value in values.items() if value is not None}

    def _value(self, field: Field) -> Any:
        if field.name not in self.sums:
            return None
        total, weight = self.sums[field.name]
        value = total if field.over in (LAST, SUM) else total / max(weight, 1e-9)
        return field.then(value) if field.then else value


def check_sums(sums: dict) -> None:
    """ValueError unless these can be a window's. A name without a field is of another version, and has no effect."""
    for name, pair in sums.items():
        what = f"row_sums: {shorten(name)}"
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{what} is {shorten(pair)}, expected two values")
        for value, kind in zip(pair, (_type(name), "int | float"), strict=True):
            _check_value(what, value, kind)


def check_row(row: dict) -> None:
    """ValueError unless this can be a row of metrics.jsonl."""
    for name, value in row.items():
        _check_value(f"unfinished_row: {name}", value, _type(name))
    if "step" not in row or ("loss" in row and not row.keys() >= _WITH_LOSS):
        raise ValueError("unfinished_row is no row of metrics")


def _check_value(what: str, value: Any, kind: str) -> None:
    check_type(what, value, kind)
    if not (value.isprintable() if isinstance(value, str) else math.isfinite(value)):
        raise ValueError(f"{what} is {shorten(value)}")


def _type(name: str) -> str:
    """A field's type or types, as in an annotation."""
    return "str" if any(field.name == name and field.unit == "name" for field in FIELDS) else "int | float"


def step_line(row: dict, more: Sequence[Field] = ()) -> str:
    """One line per logged step, like torchtitan's; fields that the row lacks are left out. more: beside FIELDS."""
    return "  ".join(text for _, text in _parts(row, {f.name: f.log for f in (*FIELDS, *more)}))


def terminal_line(row: dict, held_out: float | None, width: int) -> str:
    """A row of metrics.jsonl in a line of at most `width` columns. held_out: the last evaluation's loss."""
    shown = {f.name: f.terminal for f in FIELDS} | {"held_out": Shown(2, "held-out {held_out:.4f}", rank=4)}
    if held_out is not None:
        row = row | {"held_out": held_out}
    return console.fitted(_parts(row, shown), width)


def _parts(row: dict, shown: dict[str, Shown | None]) -> list[tuple[int, str]]:
    """(rank, text) of the keys that the row has."""
    parts = sorted((part for name, part in shown.items() if part and name in row), key=lambda part: part.place)
    texts = ((p.rank, p.text.format(**row) if isinstance(p.text, str) else p.text(row)) for p in parts)
    return [(rank, text) for rank, text in texts if text]
