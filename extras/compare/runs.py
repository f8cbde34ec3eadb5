"""Runs to compare, read from their output directories, and groups of runs that differ in the seed alone."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from common.checkpoint.checkpointer import CheckpointFlags
from common.cli import UserError, one_line
from common.files.runs import BASELINES, METRICS, list_checkpoints, read_run_info
from common.files.safe_files import read_json_lines
from common.training.arguments import DownstreamFlags, DryRunFlags, LearningRateFlags
from common.training.curves import read_results
from common.training.protein_losses import ProteinLosses
from common.training.run_logger import LogFlags
from common.training.same_run import FREE_TO_CHANGE, short_identity
from common.training.verdict import held_out_key
from extras.compare.losses_file import read_losses
from extras.plan.find_learning_rate.search import WITHOUT_EFFECT as OF_LOADING
from extras.report import NAMES

logger = logging.getLogger(__name__)

STATE = "trainer_state.json"
NO_EFFECT_GROUPS = (CheckpointFlags, LogFlags, DryRunFlags, LearningRateFlags, DownstreamFlags)
# Flags that do not change a run's losses. Those of the evaluation are covered by the hash of its questions, the places
# of the data by their hash, where the run was stopped by `Run.settings`.
WITHOUT_EFFECT = {each.name for group in NO_EFFECT_GROUPS for each in fields(group)} | FREE_TO_CHANGE | OF_LOADING
WITHOUT_EFFECT |= {
    "do_train",
    "do_eval",
    "do_preprocess",
    "use_cpu",
    "ddp_timeout",
    "save_final_model",
    "hub_model_id",
}
WITHOUT_EFFECT |= {"dataloader_prefetch_factor", "dataloader_pin_memory"}  # of runs of before 0.5
WITHOUT_EFFECT |= {"dataset_dir", "dataset", "max_record_length", "max_eval_samples", "per_device_eval_batch_size"}
PATHS = {"output_dir", "run_name", "dataset_dir", "dataset", "eval_dataset", "resume_from_checkpoint"}
PACKS = {"gradient_accumulation_steps", "tokens_per_step", "packs_per_step_schedule"}  # resolved to packs_per_step
LONGEST_LABEL = 60


@dataclass(frozen=True)
class Run:
    """A run's output directory.

    evaluations: rows of metrics.jsonl with a held-out loss, and the one at the end; last: what is compared, the
    results at the end (of the best step with --load_best_model_at_end) or the last row; state: trainer_state.json of
    the run or, before its end, of its newest checkpoint; info: run_info.json; is_stopped: whether it ended, so far or
    for good, before its schedule did; eval_set: as of `read_run`; its results have the validation split's names here.
    """

    path: Path
    evaluations: Sequence[dict[str, Any]]
    last: dict[str, Any]
    state: dict[str, Any]
    info: dict[str, Any]
    is_stopped: bool
    losses: ProteinLosses | None
    eval_set: str = ""

    @property
    def is_decoder(self) -> bool:
        return "eval_tokens" in self.last

    @property
    def key(self) -> str:
        """The name of the loss that is compared."""
        return held_out_key([self.last])

    @property
    def asked(self) -> str:
        """What the losses are means over."""
        kind, what = ("sequences", "tokens") if self.is_decoder else ("proteins", "hidden residues")
        number = self.last.get("eval_tokens" if self.is_decoder else "eval_masked_tokens", 0)
        named = f" of {self.eval_set}" if self.eval_set else ""
        return f"{self.last.get('eval_samples', 0):,} held-out {kind}{named}, {number:,} {what}"

    @property
    def objective(self) -> str:
        """What it was trained by; "" of a decoder, or before a first checkpoint."""
        return self.state.get("arguments", {}).get("objective", "mlm" if self.state and not self.is_decoder else "")

    @property
    def seed(self) -> int | None:
        return self.state.get("arguments", {}).get("seed")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What its losses depend on, the seed aside: {flag, data, code or device: value}; of what is not recorded,
        nothing. A run has no flags before its first checkpoint."""
        flags = self.state.get("arguments", {})
        settings = {k: v for k, v in flags.items() if k != "seed" and not _is_without_effect(k) and k not in PACKS}
        if packs := self.state.get("resolved", {}).get("packs_per_step"):
            settings["packs_per_step"] = packs
        settings["stopped_at_step"] = self.last["step"] if self.is_stopped else None
        identity = self.state.get("data", {})
        if data := [short_identity(identity[name]) for name in ("dataset", "sample_clusters") if name in identity]:
            settings["data"] = ", clusters ".join(data)
        recorded = (("code", "software"), ("device", "device"))
        return settings | {name: self.info[key] for name, key in recorded if key in self.info}

    @property
    def without_effect(self) -> dict[str, Any]:
        """Flags that change no loss, but for paths and names."""
        flags = self.state.get("arguments", {})
        return {k: v for k, v in flags.items() if _is_without_effect(k) and k not in PATHS}


def _is_without_effect(flag: str) -> bool:
    return flag in WITHOUT_EFFECT or flag.startswith(("eval_", "quant_stats"))


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed alone: a row of the table. name: a letter; label: what tells it from the others."""

    name: str
    label: str
    runs: tuple[Run, ...]

    @property
    def by_seed(self) -> dict[int | None, Run]:
        return {run.seed: run for run in self.runs}

    @property
    def settings(self) -> dict[str, Any]:
        return self.runs[0].settings

    def lasts(self, key: str) -> list[float]:
        """A value of each seed's last evaluation, of those that have it."""
        return [run.last[key] for run in self.runs if key in run.last]


def prefix_of(eval_set: str) -> str:
    """How the names of a held-out set's results begin."""
    return {"": "eval", "test": "test"}.get(eval_set, f"eval_{eval_set}")


def of_set(row: dict[str, Any], prefix: str) -> dict[str, Any]:
    """A row with the results of a held-out set in the place of the validation split's."""
    if prefix == "eval":
        return row
    others = {name: value for name, value in row.items() if not name.startswith("eval_")}
    return others | {f"eval{n.removeprefix(prefix)}": v for n, v in row.items() if n.startswith(f"{prefix}_")}


def read_run(path: Path, eval_set: str = "") -> Run:
    """eval_set: "" for the validation split, "test", or a name of --eval_dataset. UserError where there is no run, or
    none with a held-out loss."""
    try:
        rows, results, info = read_json_lines(path / METRICS), read_results(path), read_run_info(path)
        state, is_complete = _read_state(path, rows)
    except ValueError as error:
        raise UserError(f"{path}: not readable as a run: {one_line(error)}") from error
    if not rows and not results:
        raise UserError(f"{path}: no run there: it has neither {METRICS} nor all_results.json")
    prefix = prefix_of(eval_set)
    file, results = f"{prefix}_losses.parquet", of_set(results, prefix)
    evaluations = [row for row in (of_set(row, prefix) for row in rows) if "eval_loss" in row]
    if is_complete and "eval_loss" in results:
        last = results | _place(state, rows, results)
        if "step" in last and last["step"] not in {row["step"] for row in evaluations}:
            evaluations.append(last)  # the one at the end may not be in metrics.jsonl
    elif evaluations:
        last = evaluations[-1]
    else:
        named = f" of {eval_set}" if eval_set else ""
        also = f" and {eval_set}=... of --eval_dataset" if prefix.startswith("eval_") else ""
        raise UserError(f"{path}: no held-out loss{named}: run its command again with --do_eval{also}")
    if not is_complete:
        logger.warning("%s: not finished: compared by its last evaluation, at step %s", path, f"{last['step']:,}")
    is_stopped = not is_complete or _was_stopped(state, rows)
    losses = _read_losses(path / file, last.get("step"))
    run = Run(path, evaluations, last, state, info, is_stopped, losses, eval_set)
    if run.losses is None and not run.is_decoder and is_complete:
        raise UserError(
            f"{path}: no losses of single proteins ({file}), as of an older version: run its command again with "
            "--do_eval"
        )
    return run


def _place(state: dict[str, Any], rows: list[dict], results: dict[str, Any]) -> dict[str, Any]:
    """Step and tokens of the results at the end; {} if nothing was trained."""
    if not rows:
        return {}
    is_best = state.get("arguments", {}).get("load_best_model_at_end")
    step = results.get("best_global_step", rows[-1]["step"]) if is_best else rows[-1]["step"]
    row = next((row for row in rows if row["step"] == step), rows[-1])
    return {name: row[name] for name in ("step", "tokens") if name in row}


def _read_losses(path: Path, step: int | None) -> ProteinLosses | None:
    """None if there are none of this step: a run that goes on has those of its earlier end."""
    if not path.exists():
        return None
    losses, saved_step = read_losses(path)
    return losses if step in (None, saved_step) else None


def _was_stopped(state: dict[str, Any], rows: list[dict]) -> bool:
    """By --stop_at_step or --stop_after_minutes, and not within a hundredth of the end, which may be an estimate."""
    has_limit = any(state.get("arguments", {}).get(name) for name in ("stop_at_step", "stop_after_minutes"))
    return has_limit and bool(rows) and rows[-1]["step"] < 0.99 * rows[-1].get("total_steps", 0)


def _read_state(path: Path, rows: list[dict]) -> tuple[dict[str, Any], bool]:
    """The trainer state, and whether the run has ended with its last row; a run that trained nothing has."""
    state = json.loads((path / STATE).read_text()) if (path / STATE).exists() else {}
    if not rows or state.get("step") == rows[-1]["step"]:
        return state, True
    for _, checkpoint in list_checkpoints(path):
        if (checkpoint / STATE).exists():
            return json.loads((checkpoint / STATE).read_text()), False
    return state, False


def check_same_questions(runs: Sequence[Run]) -> None:
    """UserError unless all runs were asked the same of the same held-out proteins (of decoders: as many tokens)."""
    first = runs[0]
    for run in runs[1:]:
        if run.is_decoder != first.is_decoder:
            masked, causal = (first, run) if run.is_decoder else (run, first)
            raise UserError(
                f"{masked.path} predicts masked residues, {causal.path} next tokens: their losses do not compare"
            )
        if run.objective != first.objective and run.objective and first.objective:
            raise UserError(
                f"{first.path} was trained by {first.objective}, {run.path} by {run.objective}: their losses do not "
                "compare, but their eval_nelbo does (key eval_nelbo of a file of flags, with --do_eval)"
            )
    with_hash = {run.path: f"{run.asked}, hash {run.losses.questions[:12]}" for run in runs if run.losses is not None}
    for asked in ({run.path: run.asked for run in runs}, with_hash):  # a run that is not finished has no hash
        for path, text in asked.items():
            if text != (of_first := next(iter(asked.values()))):
                raise UserError(
                    f"{next(iter(asked))} and {path} were evaluated on other questions ({of_first}; {text}): evaluate "
                    "both on the same held-out data with the same evaluation flags"
                )


def group_runs(runs: Sequence[Run], baseline: Path | None = None) -> list[Group]:
    """In the order of the runs, the baseline's group first. Runs of the same seed too are apart."""
    groups: list[tuple[dict, list[Run]]] = []
    for run in runs:
        same = (of for settings, of in groups if run.seed is not None and settings == run.settings)
        group = next((of for of in same if run.seed not in {each.seed for each in of}), None)
        if group is None:
            groups.append((run.settings, [run]))
        else:
            group.append(run)
    groups_of_runs = [of for _, of in groups]
    if baseline is not None:
        groups_of_runs.sort(key=lambda of: baseline.resolve() not in {run.path.resolve() for run in of})
    return _labelled(groups_of_runs)


def differences(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """{flag, data, code or device: each group's value}, of those that are not the same in all."""
    return _differing([group.settings for group in groups])


def _differing(settings: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """{name: each one's value, None where it is not recorded}, of those that are recorded with different values."""
    differing = {}
    for name in dict.fromkeys(name for each in settings for name in each):
        recorded = [each[name] for each in settings if name in each]
        if any(value != recorded[0] for value in recorded):
            differing[name] = [each.get(name) for each in settings]
    return differing


def without_effect(groups: Sequence[Group]) -> list[str]:
    """Names of the flags that differ and change no loss."""
    return sorted(_differing([run.without_effect for group in groups for run in group.runs]))


def baselines(groups: Sequence[Group]) -> list[tuple[str, float]]:
    """(name, loss) of predictors that are not the model, on the same residues, as the first run that has them."""
    runs = [run for group in groups for run in group.runs]
    values = []
    for name, _ in BASELINES:
        key = f"eval_{name}_loss{runs[0].key.removeprefix('eval_loss')}"
        values += [(NAMES[name], run.last[key]) for run in runs if key in run.last][:1]
    return values


def unit(run: Run) -> str:
    return "nats per " + ("token" if run.is_decoder else "hidden residue")


def _labelled(groups: Sequence[list[Run]]) -> list[Group]:
    settings = [runs[0].settings for runs in groups]
    names = _differing(settings)
    of_flags = [", ".join(_shown(name, each[name]) for name in names if name in each) for each in settings]
    fits = all(0 < len(label) <= LONGEST_LABEL for label in of_flags) and len(set(of_flags)) == len(of_flags)
    labels = of_flags if fits else list(map(_directory, groups))
    return [Group(name, label, tuple(runs)) for name, label, runs in zip(_letters(), labels, groups, strict=False)]


def _shown(name: str, value: Any) -> str:
    if value is None or value is False:
        return f"no {name}"
    return name if value is True else f"{name} {value}"


def _directory(runs: list[Run]) -> str:
    """What the names of the directories begin with, without a seed at the end."""
    common = os.path.commonprefix([run.path.resolve().name for run in runs])
    return (re.sub(r"[-_.]*(seed)?[-_.=]*\d*$", "", common) if len(runs) > 1 else "") or runs[0].path.resolve().name


def _letters() -> Iterator[str]:
    """A to Z, then A1 to Z1, ..."""
    number = 0
    while True:
        yield chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")
        number += 1
