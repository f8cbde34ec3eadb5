"""--find_learning_rate: compare short runs at several learning rates, and recommend one.

    python train_ddp.py --find_learning_rate ...     with the flags of the run; any train script, any number of ranks

Each trial trains from the run's initial weights on its first packs, with a short warm-up to a constant rate. Trials
are compared with those weights and with each other, by the hidden residues of held-out proteins, in pairs. Rates are
--learning_rate times powers of two: doubled while the highest is the best, halved while the lowest is as good as the
best. Results go to `output_dir/find_learning_rate/`, and the same command continues there after a kill; a run in
--output_dir and its checkpoints are not touched.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.cli import UserError
from common.data.training_data import packs_per_step
from common.distributed.stopping import Preempted
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.files.safe_files import replace_flushed, write_json
from common.flags import flat, with_flags
from common.training.arguments import RunArguments
from common.training.command_line import task_of
from common.training.protein_losses import ProteinLosses, write_losses
from common.training.run_directory import RunDirectory
from common.training.step import Stepper, StepPrefetcher
from common.training.task import Build, Task
from common.training.trainer_state import TrainerState, plan_run
from common.training.verdict import held_out_key
from extras.compare.losses_file import read_losses
from extras.plan.find_learning_rate.report import Found, advice, draw, line, table
from extras.plan.find_learning_rate.trials import (
    Trial,
    has_diverged,
    losses_file,
    next_rate,
    read_results,
    recommended,
)

logger = logging.getLogger(__name__)

DIRECTORY, RESULTS, TABLE, PICTURE = "find_learning_rate", "results.json", "results.md", "results.png"
STEPS, MINUTES = 100, 10.0  # defaults of --find_steps and --find_minutes
WARMUP = 0.15  # of a trial's steps, unless the run has none
EVAL_SAMPLES = 1000  # held-out proteins, unless --max_eval_samples is given
# Flags that do not change a trial's losses.
WITHOUT_EFFECT = {"dataloader_num_workers"}


class Search:
    """Runs and keeps the trials of a run's flags; all ranks together.

    settings: what the trials depend on; identity: of the data, None before the first trial.
    """

    def __init__(self, args: RunArguments, build: Build, world: World, directory: RunDirectory | None):
        self.args, self.build, self.world, self.directory = trial_flags(args), build, world, directory
        self.settings = settings_of(args, world)
        self.trials: list[Trial] = []
        self.identity: dict | None = None
        self.total_steps: int | None = None  # of the run
        self.start: float | None = None  # held-out loss of the starting weights
        self.baseline: float | None = None  # and of a predictor that learns nothing from context
        self.proteins: dict[float, ProteinLosses] = {}  # by rate; 0: of the starting weights; on rank 0, which reports
        saved: dict[str, Any] = {}
        with world.on_main_rank():
            if directory:
                saved = read_results(directory.path / RESULTS, self.settings)
                rates = [0.0, *(trial["learning_rate"] for trial in saved["trials"])] if saved else []
                files = {rate: losses_file(directory.path, rate) for rate in rates}
                self.proteins = {rate: read_losses(file)[0] for rate, file in files.items() if file.exists()}
        if saved := world.broadcast_object(saved):
            self.trials = [Trial(**trial) for trial in saved["trials"]]
            self.identity, self.total_steps = saved["data"], saved["total_steps"]
            self.start, self.baseline = saved["start"], saved["baseline"]

    def try_rate(self, rate: float) -> None:
        """Run a trial, and keep its result."""
        known = set(self.proteins)
        self.trials.append(self._trial(rate))
        gc.collect()  # the trial's model, before the next one is built
        with self.world.on_main_rank():
            if self.directory:
                for each in self.proteins.keys() - known:
                    steps = 0 if each == 0 else len(self.trials[-1].losses)
                    write_losses(losses_file(self.directory.path, each), self.proteins[each], steps)
                results = {
                    "settings": self.settings,
                    "data": self.identity,
                    "total_steps": self.total_steps,
                    "start": self.start,
                    "baseline": self.baseline,
                    "trials": [asdict(trial) for trial in self.trials],
                }
                write_json(self.directory.path / RESULTS, results)
                self.directory.keep()

    def _trial(self, rate: float) -> Trial:
        """A function of its own: the model is freed when it returns."""
        args, world = self.args, self.world
        strategy, built = self.build(args, world, {})
        task = task_of(args)(built, args, world)
        task.open(evaluates=args.do_eval)
        self._check_data(task.data.identity)
        optimizer = built.optimizer(args.optimizer, strategy, world, args.precision.bf16)
        built.precision.attach(optimizer)
        built.precision.attach_restored(1.0)
        strategy.sync_model_weights()
        plan = plan_run(args, task.data, TrainerState(), world)
        self.total_steps = plan.total_steps
        steps = min(self.settings["find_steps"], plan.total_steps)
        # Not the run's schedule: the first steps of a long run see its peak, and no decay.
        warmup = 0 if args.optimizer.warmup_steps == 0 else math.ceil(WARMUP * steps)
        stepper = Stepper(task, strategy, built.precision, optimizer, world, args.optimizer.max_grad_norm)
        with world.raise_together():
            has_held_out = task.data.held_out(next(iter(task.held_out))) is not None
        if has_held_out and self.start is None:
            self.start = self._held_out(task, strategy, 0.0, 0)
        strategy.model.train()
        if built.compiled:
            world.watch.compilation_counts_as_progress()
        with world.raise_together():
            loader = task.steps(plan.packs_per_step, 0, {}, steps, plan.total_steps)
        losses: list[float] = []
        tokens = skipped = 0
        diverged = is_last = False
        with closing(iter(loader)) as batches:
            prefetcher = StepPrefetcher(batches, task, world)
            for step in range(steps):
                data, counts = prefetcher.pop(step + 1)
                if data is None:
                    raise Preempted
                is_last = step + 1 == steps or task.data.finished(step + 1, data.position)
                lr = rate * min(1.0, (step + 1) / max(warmup, 1))
                result = stepper.step(step, lr, data.micro_batches, counts, None if is_last else prefetcher)
                tokens += counts.num_tokens
                skipped = skipped + 1 if result.skipped else 0
                losses += [] if result.skipped else [result.loss]
                diverged = skipped >= args.optimizer.max_skipped_steps or has_diverged(losses)
                if diverged or is_last:
                    break
        diverged = diverged or not losses
        eval_loss = self._held_out(task, strategy, rate, steps) if has_held_out and not diverged else None
        world.watch.rest()
        return Trial(rate, losses, eval_loss, diverged, tokens)

    def _held_out(self, task: Task, strategy: Strategy, rate: float, steps: int) -> float | None:
        """The loss of the first held-out set after a trial's steps; keeps that of each protein."""
        split, prefix = next(iter(task.held_out.items()))
        results, losses = task.evaluate(strategy.evaluated, split, prefix, steps)
        strategy.reshard()
        if not results:
            raise Preempted
        with self.world.raise_together():
            if losses is not None and self.directory:
                if any(each.questions != losses.questions for each in self.proteins.values()):
                    raise self._changed("the held-out proteins")
                self.proteins[rate] = losses
        self.baseline = results.get(f"{prefix}_unigram_loss_masked")
        return results.get(held_out_key([results], prefix))

    def _check_data(self, identity: dict) -> None:
        """UserError if they are not those of the earlier trials."""
        self.world.assert_same(identity)
        with self.world.raise_together():
            if self.identity not in (None, identity):
                raise self._changed("the data")
        self.identity = identity

    def _changed(self, what: str) -> UserError:
        return UserError(
            f"{self.args.checkpoint.output_dir}/{DIRECTORY}: {what} have changed since its first trials: remove it to "
            "search again"
        )


def find_learning_rate(
    args: RunArguments, build: Build, world: World, clock: Callable[[], float] = time.monotonic
) -> None:
    """Log a table and a recommendation, and write both with a picture. UserError if every trial diverged."""
    path = Path(args.checkpoint.output_dir) / DIRECTORY
    started = clock()
    world.stop.exit_note = "finished trials are kept: the same command continues"
    with ExitStack() as stack:
        directory = None
        with world.on_main_rank() as is_main:
            check_flags(args)
            if is_main:
                directory = stack.enter_context(RunDirectory(path))
        search = Search(args, build, world, directory)
        for trial in search.trials:
            logger.info("Kept: %s", line(trial))
        minutes = args.find.find_minutes or MINUTES
        while True:
            rate = next_rate(args.optimizer.learning_rate, search.trials, search.start)
            is_late = world.broadcast_object(bool(search.trials) and clock() - started >= 60 * minutes)
            if rate is None or is_late:
                break
            logger.info("Trial %d: learning rate %g", len(search.trials) + 1, rate)
            search.try_rate(rate)
            logger.info("%s", line(search.trials[-1]))
        found = Found(search.trials, search.start, search.baseline, search.proteins)
        lines = [*table(found), "", *advice(found, search.total_steps, rate is not None)]
        with world.on_main_rank():
            if directory:
                with replace_flushed(path / TABLE) as file:
                    file.write_text("\n".join(lines) + "\n")
                draw(found, (path / PICTURE).with_suffix(""))
        for text in lines:
            logger.info("%s", text)
        logger.info("Table and picture: %s, %s", path / TABLE, path / PICTURE)
        if recommended(search.trials) is None:
            raise UserError(
                f"every trial diverged, down to {min(t.learning_rate for t in search.trials):g}: "
                "look at the data, or give a lower --learning_rate to start from"
            )


def check_flags(args: RunArguments) -> None:
    """UserError for flags that contradict the search."""
    resumed = args.checkpoint.resume_from_checkpoint
    if not args.do_train:
        raise UserError("--find_learning_rate trains: drop --do_train False")
    if args.optimizer.learning_rate == 0:
        raise UserError("--find_learning_rate: --learning_rate 0 is no rate to start from: give one above 0")
    if resumed and Path(resumed).exists():
        raise UserError(
            f"--find_learning_rate: trials start at step 0: drop --resume_from_checkpoint {resumed} (weights to start "
            "from are given as --model_name_or_path)"
        )


def trial_flags(args: RunArguments) -> RunArguments:
    """The run's flags without what would write files or evaluate for long."""
    changes: dict[str, Any] = {"quant_stats": False}
    if "max_eval_samples" in flat(args):
        changes["max_eval_samples"] = flat(args)["max_eval_samples"] or EVAL_SAMPLES
    return with_flags(args, **changes)


def settings_of(args: RunArguments, world: World) -> dict[str, Any]:
    """What a trial's losses depend on, but for the data."""
    groups = (args.model, args.data, args.optimizer, args.precision, args.strategy)
    settings = {name: value for group in groups for name, value in flat(group).items() if name not in WITHOUT_EFFECT}
    settings |= {"task": args.task, "find_steps": args.find.find_steps or STEPS}
    # Without the flag it depends on the number of ranks.
    return settings | {"packs_per_step": str(packs_per_step(args.data, world.mesh, args.pack_tokens))}
