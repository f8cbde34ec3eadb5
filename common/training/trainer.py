"""The training run: one trajectory, a function of (data, arguments, seed), whatever interrupts it.

A strategy (train_ddp.py, ...) hands in its wrapped model; everything else is here, readable from top to bottom:
`train` sets up, resumes, and loops over steps; `Run` holds what the steps share.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from common.batches import batches
from common.batches.loader import TrainStep
from common.batches.training_data import TrainingData, find_source, open_training
from common.files.json_files import JsonLinesLog
from common.model import esm2
from common.precision import stats as quant_stats
from common.ranks.stopping import Preempted
from common.ranks.stragglers import Stragglers
from common.ranks.watchdog import SAVE
from common.ranks.world import World
from common.training.checkpoint import Checkpointer
from common.training.evaluate import evaluate
from common.training.finish import finish
from common.training.metrics import peak_flops, step_line
from common.training.optim import build_optimizer, lr_schedule
from common.training.profiling import StepProfiler
from common.training.progress import COUNTS, Interval, announce, flops_of
from common.training.run_directory import RunDirectory
from common.training.run_state import TrainerState, check_same_data, plain, warn_of_changes
from common.training.step import take_step
from common.training.trackers import Tracker, open_tracker

logger = logging.getLogger(__name__)


def train(model: nn.Module, args, world: World) -> None:
    """Train, evaluate, save and export as the flags say. `model` is what `load_model` gave, wrapped or not."""
    output_dir = Path(args.output_dir)
    source = None
    with world.main_does() as mine:  # bad input is found before anything is removed or written
        if mine:
            source = find_source(args)
            quant_stats.check_directory(args)
    source = world.share(source)
    with world.together():
        data = open_training(args, source)
    directory = None
    with world.main_does() as mine:
        if mine:
            directory = RunDirectory(output_dir, overwrite=args.overwrite_output_dir and args.do_train)
    run = Run(model, data, args, world, output_dir)
    try:
        with run.checkpointer:
            run.resume(restarted=world.share(directory and directory.restarted))
            if args.do_train:
                run.loop(directory)
            finish(run)
    finally:
        run.tracker.close()
        if directory is not None:
            directory.close()


class Run:
    """What the steps of a run share."""

    def __init__(self, model: nn.Module, data: TrainingData, args, world: World, output_dir: Path):
        self.model, self.args, self.world, self.output_dir = model, args, world, output_dir
        self.core: esm2.Esm2ForMaskedLM = getattr(model, "module", model)
        self.config = self.core.config
        self.data = data
        masters = self.core.masters
        self.weights = masters.weights if masters else self.core  # what is updated, saved and exported
        self.optimizer = build_optimizer(self.weights, args)
        if masters:
            masters.follow(self.optimizer)
        quantised = self.core.emulation or self.core.encoder.quantised
        scales = quantised.state if quantised else {}
        self.checkpointer = Checkpointer(output_dir, self.weights, self.optimizer, self.config, world, args, scales)
        self.stragglers = Stragglers(model, world, args.straggler_every)
        self.profiler = StepProfiler(args.profile_steps, world, output_dir)
        self.tracker = Tracker()
        with world.main_does() as mine:
            if mine:
                self.tracker = open_tracker(args, output_dir)
        self.peak = peak_flops(world.device, args.bf16)
        self.state = TrainerState()

    # ---- where to start -------------------------------------------------------------------------------------

    def resume(self, restarted: bool = False) -> None:
        args, data = self.args, self.data
        saved = self.checkpointer.restore(args.resume_from_checkpoint, restarted)
        if self.core.masters:
            self.core.masters.hand_out()
        with self.world.together():
            if saved is not None:
                self.state = TrainerState(**saved)
                check_same_data(self.state.data, data.identity)
                warn_of_changes(self.state.arguments, asdict(args))
            self.packs = batches.packs_per_step(args, self.world, self.state.packs_per_step)
        self.accumulation = self.packs // self.world.size
        self.total_steps = data.total_steps(self.packs)
        self.last_step = min(self.total_steps, args.stop_at_step or self.total_steps)
        self.lr = lr_schedule(args, self.total_steps)
        self.eval_every, self.save_every = (_steps(n, self.total_steps) for n in (args.eval_steps, args.save_steps))
        self.state = replace(self.state, packs_per_step=self.packs, data=data.identity, arguments=plain(asdict(args)))
        self.saved_step, self.saved_at, self.save_asked = self.state.step, time.monotonic(), False
        announce(self)

    # ---- the loop -------------------------------------------------------------------------------------------

    def loop(self, directory: RunDirectory | None) -> None:
        args, state, world = self.args, self.state, self.world
        if state.step >= self.last_step and state.unfinished_row is None:
            logger.info("Step %d of %d is done already: nothing to train", state.step, self.last_step)
            return
        # From here on a signal is agreed on and the state is saved. Ranks meet below before the first of them begins:
        # none that is still to come here may then leave the others by itself.
        world.stop.at_once = False
        self.checkpointer.begin(state.step)
        with world.main_does() as mine:
            if mine:
                directory.claim()
                keep_through = -1 if state.step == 0 else state.step - (state.unfinished_row is not None)
                self.log = JsonLinesLog(self.output_dir / "metrics.jsonl", keep_through)
                if self.core.quant_stats:
                    self.quant_log = JsonLinesLog(quant_stats.directory_of(args) / quant_stats.FILE, state.step)
        if args.eval_on_start and state.step == 0:
            state.unfinished_row = {"step": 0, "epoch": 0.0}
        if state.unfinished_row is not None and not self._complete(state.unfinished_row):
            raise Preempted
        with world.together():
            loader = self.data.steps(world, self.packs, state.step, state.position, self.last_step)
        bar = tqdm(
            total=self.last_step,
            initial=state.step,
            disable=True if args.disable_tqdm or not world.is_main else None,  # None: only on a terminal
            unit="step",
        )
        self.model.train()
        if args.torch_compile:
            world.watch.compilation_counts_as_progress()
        interval = Interval()
        self.saved_at = time.monotonic()
        stopping = False
        with closing(iter(loader)) as steps, logging_redirect_tqdm(), bar:
            while state.step < self.last_step and not stopping:
                world.watch.mark("data", state.step + 1)
                started = time.perf_counter()
                share, counts = self._next(steps)
                stopping = share is None
                if not stopping:
                    waited = time.perf_counter() - started
                    self.profiler.before(state.step + 1)
                    result = take_step(self, share, counts)
                    seconds = time.perf_counter() - started
                    interval.add(counts, flops_of(self.config, counts), seconds, waited, result)
                    state.seconds += seconds
                    bar.update()
                    self.profiler.after(state.step)
                    interval.ranks |= self.stragglers.compare(state.step)
                    evaluating = self.eval_every and state.step % self.eval_every == 0
                    if evaluating or state.step % args.logging_steps == 0 or state.step in (1, self.last_step):
                        row = interval.row(self, result)
                        interval = Interval()
                        if evaluating:
                            stopping = not self._complete(row)
                        else:
                            self._record(row)
                if stopping or state.step == self.last_step or self._save_due():
                    interval.checkpoints += self._save()
            self.profiler.after(state.step, ends=True)
            world.watch.mark(SAVE, state.step)
            self.checkpointer.wait()
            world.watch.rest()
        if stopping:
            raise Preempted

    def _next(self, steps) -> tuple[TrainStep | None, list[int]]:
        """This rank's share of the next step and the COUNTS of the whole of it; (None, _) if a rank is to stop.

        A rank that waits for data in vain, or whose data are damaged, tells the others here: no rank waits for it.
        """
        share, failure = None, None
        started = time.perf_counter()
        try:
            share = self.world.stop.wait_for(steps)
        except Exception as error:
            failure = error
        self.stragglers.waited(time.perf_counter() - started)
        counts = [sum(batch[key] for batch in share.micro_batches) if share else 0 for key in COUNTS]
        stop = failure is None and (share is None or self.world.stop_requested)
        minutes = self.args.save_minutes if self.world.is_main else None  # one clock decides for all
        save = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        ours = torch.tensor([*counts, stop, failure is not None, save])
        *counts, stop, failed, save = self.world.sum(ours).tolist()
        self.save_asked |= bool(save)
        if failed:
            self.world.end_together(failure)
        return (None if stop else share), counts

    def _record(self, row: dict) -> None:
        if self.world.is_main:
            self.log.write(row)
            self.tracker.write(row)
            if "loss" in row:
                logger.info(step_line(row))

    def record_quant_stats(self, rows: list[dict]) -> None:
        if rows and self.world.is_main:
            self.quant_log.write(*rows)
            self.tracker.write(quant_stats.scalars(rows))

    def _complete(self, row: dict) -> bool:
        """Evaluate, add that to the row and record it; False if told to stop meanwhile: then the next start does."""
        self.state.unfinished_row = row
        results = self.evaluate()
        if not results:
            return False
        self.state.unfinished_row = None
        self._record(row | results)
        return True

    def evaluate(self) -> dict:
        """On the validation split; {} if the run was told to stop meanwhile (all ranks agree)."""
        logger.info("***** Running Evaluation *****")
        results = evaluate(self.core, self.data.held_out("validation"), self.args, self.world, step=self.state.step)
        if results:
            logger.info(
                "Held-out loss %.4f, perplexity %.3f, accuracy %.4f (%d masked residues)",
                *(results[k] for k in ("eval_loss", "perplexity", "eval_accuracy", "eval_masked_tokens")),
            )
        self.model.train()
        return results

    def _save_due(self) -> bool:
        if self.state.skipped_lately:
            return False  # the weights may be what is wrong: no good checkpoint makes room for them
        return self.save_asked or self.state.step // self.save_every > self.saved_step // self.save_every

    def _save(self) -> float:
        """Save what is not saved yet; the seconds that training stood still for it."""
        started = time.perf_counter()
        if self.state.step > self.saved_step:
            self.world.watch.mark(SAVE, self.state.step)
            position = self.data.position_of_all(self.state.position, self.world)
            self.checkpointer.save(self.state.step, asdict(self.state) | {"position": position})
            self.saved_step, self.saved_at, self.save_asked = self.state.step, time.monotonic(), False
        return time.perf_counter() - started


def _steps(every: float | None, total: int) -> int:
    """--eval_steps and --save_steps: a number of steps, or below 1 a fraction of the run; 0 when unset."""
    if every is None:
        return 0
    return max(1, int(every * total)) if every < 1 else int(every)
