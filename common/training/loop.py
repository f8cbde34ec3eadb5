"""The training run: one trajectory, a function of (data, arguments, seed), whatever interrupts it.

A strategy (train_ddp.py, ...) hands in its wrapped model; the rest is here, in the order in which it happens: set up,
resume, loop over steps, end.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from common.data.loader import TrainStep, check_divisible, merge_positions
from common.data.training_data import packs_per_step
from common.distributed.stopping import Preempted
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.flags import flat
from common.models.layers.compiling import FirstStep
from common.training.arguments import RunArguments
from common.training.checkpoint import Checkpointer
from common.training.finish import finish
from common.training.gc_schedule import collected_by_step
from common.training.optim import build_optimizer, set_hyperparameters
from common.training.progress import Interval, Resolved, TrainerState, about_run, announce, check_same_data
from common.training.registry import task_of
from common.training.run_directory import RunDirectory
from common.training.run_logger import RunLogger, peak_flops
from common.training.step import StepAhead, Stepper
from common.training.task import BuiltModel, StepCounts, Task
from extras.monitor.replicas import Replicas
from extras.monitor.stragglers import Stragglers
from extras.monitor.watchdog import SAVE
from extras.profiling import StepProfiler

logger = logging.getLogger(__name__)


def train(strategy: Strategy, built: BuiltModel, args: RunArguments, world: World) -> None:
    """Train, evaluate, save and export as the flags say. `strategy` holds the model of `built`, wrapped or not."""
    with world.on_main_rank() as is_main:  # bad input is found before anything is removed or written
        if is_main and args.precision.quant_stats:
            from extras.quant_stats.stats_plan import check_stats_directory

            check_stats_directory(args.precision)
    task = task_of(args)(built, args, world)
    task.open(evaluates=args.do_eval)
    world.assert_same(task.data.identity)
    with ExitStack() as way_out:
        directory = None
        with world.on_main_rank() as is_main:
            if is_main:
                overwrite = args.checkpoint.overwrite_output_dir and args.do_train
                directory = way_out.enter_context(RunDirectory(Path(args.checkpoint.output_dir), overwrite))
        log = way_out.enter_context(RunLogger(args.log, Path(args.checkpoint.output_dir), world))
        trainer = Trainer(strategy, built, task, log, args, world)
        with trainer.checkpointer:
            restarted = world.broadcast_object(directory and directory.restarted)
            trainer.resume(restarted)
            log.track(
                flat(args), trainer.first_row if args.do_train else None, trainer.state.step == 0 and not restarted
            )
            if args.do_train:
                trainer.loop(directory)
            if directory:
                directory.begun = True
            finish(task, trainer.state, trainer.resolved, log, args, world, trainer.evaluate, strategy.whole)
            if directory and args.do_train:
                directory.done()


class Trainer:
    """A run under way: `state` is how far it is, `resolved` what it has settled on."""

    def __init__(
        self, strategy: Strategy, built: BuiltModel, task: Task, log: RunLogger, args: RunArguments, world: World
    ):
        self.strategy, self.built, self.task, self.log = strategy, built, task, log
        self.args, self.world = args, world
        self.state = TrainerState()
        self.evaluated: dict[tuple[str, int], dict] = {}  # the last results: of which split, after which step
        optimizer = build_optimizer(built.weights, args.optimizer)
        built.precision.attach(optimizer)
        self.checkpointer = Checkpointer(
            *(args.checkpoint, built.weights, optimizer, built.config, world, args.process.ddp_timeout),
            scales=built.precision.scales,
            extras=built.extras,
            training=args.do_train,
            described=strategy.dcp_state,
        )
        self.stragglers = Stragglers(strategy, world, args.log.straggler_every)
        self.replicas = Replicas(built.weights, world)
        self.profiler = StepProfiler(args.log.profile_steps, world, Path(args.checkpoint.output_dir))
        self.stepper = Stepper(
            task, strategy, built.precision, optimizer, self.stragglers, world, args.optimizer.max_grad_norm
        )

    def resume(self, restarted: bool) -> None:
        """Take up the newest checkpoint if there is one, settle what the flags leave open, and say so."""
        args, data, world = self.args, self.task.data, self.world
        saved = self.checkpointer.restore(args.checkpoint.resume_from_checkpoint, restarted)
        set_hyperparameters(self.checkpointer.optimizer, args.optimizer)
        factor = self.strategy.grad_scale(world.size)
        self.built.precision.attach_restored(factor / ((saved or {}).get("gradient_factor") or factor))
        self.strategy.sync_model_weights()
        with world.raise_together():
            if saved is not None:
                self.state = TrainerState.read(
                    saved, f"{args.checkpoint.output_dir}: the checkpoint's trainer_state.json"
                )
                self.state.check_same_start(args)
                check_same_data(self.state.data, data.identity, data.earlier_identity)
            packs = packs_per_step(args.data, world.mesh, self.state.packs_per_step)
            data.check_packs(self.state.packs_per_step or packs, packs)
            total_steps, last_step = self.state.steps_begun(args, packs)
            if total_steps is None:
                total_steps = data.total_steps(packs, self.state.step, self.state.position)
        world.assert_same({"total_steps": total_steps, "packs_per_step": packs})
        self.resolved = Resolved(
            backend=self.built.backend,
            gelu=self.built.gelu,
            formats=self.built.precision.formats,
            packs_per_step=packs,
            accumulation=max(1, packs // world.mesh.dp_size),  # which need not divide where nothing is trained
            total_steps=total_steps,
            last_step=min(
                (n for n in (args.data.max_steps, args.stop_at_step, last_step) if n and n > 0), default=None
            ),
            eval_every=_steps(args.eval_steps, total_steps),
            save_every=_steps(args.checkpoint.save_steps, total_steps),
        )
        with world.raise_together():
            if args.do_train and not self.done:
                check_divisible(packs, world.mesh.dp_size)
        self.state.gradient_factor = factor
        self.state.go_on(data.identity, flat(args), self.resolved)
        self.lr = args.optimizer.schedule(total_steps)
        self.log.line = partial(self.task.line, packs_per_step=packs)
        self.saved_step, self.saved_at, self.save_asked = self.state.step, time.monotonic(), False
        announce(args, self.built, data, self.resolved, self.state, world)

    @property
    def done(self) -> bool:
        """Whether no step is left to take, of the flags' or of the data's."""
        return self._no_step_left(self.state.step, self.state.position)

    def _no_step_left(self, step: int, position: dict) -> bool:
        last = self.resolved.last_step
        return (last is not None and step >= last) or self.task.data.finished(step, position)

    @property
    def first_row(self) -> int | None:
        """The step of the first row that is to come; None where nothing is to be trained."""
        step = self.state.step
        if self.state.unfinished_row is not None:
            return step
        if self.done:
            return None
        return step + 1 if step else 0

    def loop(self, directory: RunDirectory | None) -> None:
        """Train up to the last step, or until told to stop: then Preempted, with the state saved."""
        args, state, world, resolved = self.args, self.state, self.world, self.resolved
        if self.first_row is None:
            last = resolved.last_step or state.step
            logger.info("Step %d of %d is done already: nothing to train", state.step, last)
            return
        # From here on a signal is agreed on and the state is saved. Ranks meet below before the first of them begins:
        # none that is still to come here may then leave the others by itself.
        world.stop.at_once = False
        self.checkpointer.begin(state.step)
        with world.on_main_rank() as is_main:
            if is_main:
                directory.claim()
                quant_stats_in = (
                    args.precision.stats_directory(args.checkpoint.output_dir) if args.precision.quant_stats else None
                )
                about = about_run(args, self.built, self.task.words, world)
                self.log.begin(self.first_row, quant_stats_in, state.step, about)
                directory.begun = True
        if args.eval_on_start and state.step == 0:
            state.unfinished_row = {"step": 0, "epoch": 0.0}
        if state.unfinished_row is not None and not self._complete(state.unfinished_row):
            raise Preempted
        with world.raise_together():
            loader = self.task.steps(resolved.packs_per_step, state.step, state.position, resolved.last_step)
        bar = tqdm(
            total=resolved.last_step or resolved.total_steps,
            initial=state.step,
            disable=True if args.log.disable_tqdm or not world.is_main else None,  # None: only on a terminal
            unit="step",
        )
        self.strategy.model.train()
        if self.built.compiled:
            world.watch.compilation_counts_as_progress()
        first_step = FirstStep(self.built.compiled)
        interval = Interval()
        peak = peak_flops(world.device, args.precision.bf16)
        self.saved_at = time.monotonic()
        stopping = False
        with closing(iter(loader)) as steps, logging_redirect_tqdm(), bar, collected_by_step() as collect:
            ahead = StepAhead(steps, self.task, self.stragglers, world, self._save_is_due_by_the_clock)
            while not self.done and not stopping:
                started, ahead.waited = time.perf_counter(), 0.0
                share, counts = self._next(ahead)
                stopping = share is None
                if not stopping:
                    self.profiler.before(state.step + 1)
                    # Where the end of the data was estimated, a few more steps may come: as the last of the schedule.
                    lr = self.lr(min(state.step, resolved.total_steps - 1))
                    flops = self.task.flops(counts)
                    following = None if self._is_last(share) else ahead
                    with first_step.waited_for():
                        result = self.stepper.take(state.step, lr, share.micro_batches, counts, following)
                    self.save_asked |= ahead.save_asked
                    self.log.quant_stats_rows(result.quant_stats)
                    seconds = time.perf_counter() - started
                    interval.add(counts, flops, seconds, ahead.waited, result)
                    state.advance(share, counts, flops, result, seconds)
                    if result.skipped:
                        with world.raise_together():
                            state.check_divergence(args.optimizer.max_skipped_steps)
                    bar.update()
                    collect(state.step)
                    self.profiler.after(state.step)
                    interval.ranks |= self.stragglers.compare(state.step)
                    if args.log.straggler_every and state.step % args.log.straggler_every == 0:
                        self.replicas.check(state.step)
                    evaluating = resolved.eval_every and state.step % resolved.eval_every == 0
                    if evaluating or state.step % args.log.logging_steps == 0 or state.step == 1 or self.done:
                        row = interval.row(state, resolved.total_steps, lr, result, world, peak)
                        interval = Interval()
                        if evaluating:
                            stopping = not self._complete(row)
                        else:
                            self.log.row(row)
                if stopping or self.done or self._save_due():
                    interval.checkpoints += self._save()
                    self.log.draw()
            self.profiler.after(state.step, ends=True)
            world.watch.mark(SAVE, state.step)
            self.checkpointer.wait()
            world.watch.rest()
        if stopping:
            raise Preempted

    # ---- the parts of the loop ------------------------------------------------------------------------------

    def _next(self, ahead: StepAhead) -> tuple[TrainStep | None, StepCounts]:
        """This rank's share of the next step and the counts of the whole of it; (None, _) if a rank is to stop."""
        share, counts = ahead.take(self.state.step + 1)
        if share is not None and share.epoch is None:
            share = share._replace(epoch=self.task.data.epochs(self.state.sequences + counts.num_sequences))
        return share, counts

    def _is_last(self, share: TrainStep) -> bool:
        """Whether no step is left to take after this one."""
        return self._no_step_left(self.state.step + 1, share.position)

    def _save_is_due_by_the_clock(self) -> bool:
        minutes = self.args.checkpoint.save_minutes
        return minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def _complete(self, row: dict) -> bool:
        """Evaluate, add that to the row and record it; False if told to stop meanwhile: then the next start does."""
        self.state.unfinished_row = row
        results = self.evaluate()
        if not results:
            return False
        self.state.unfinished_row = None
        self.log.row(row | results)
        return True

    def evaluate(self, split: str = "validation", prefix: str = "eval") -> dict:
        """On a held-out split; {} if the run was told to stop meanwhile (all ranks agree)."""
        if (split, self.state.step) in self.evaluated:  # these very weights: at the end of a run after its last step
            return self.evaluated[split, self.state.step]
        told = split == "validation"  # of the test split only the results at the end
        if told:
            logger.info("***** Running Evaluation *****")
        results = self.task.evaluate(self.strategy.evaluated, split, prefix, self.state.step)
        self.strategy.release()
        self.strategy.model.train()
        if results:
            results |= self.task.baseline(split, prefix)
            self.evaluated = {(split, self.state.step): results}
        if told and results:
            logger.info(self.task.summary(results))
        return results

    def _save_due(self) -> bool:
        if self.state.skipped_lately:
            return False  # the weights may be what is wrong: no good checkpoint makes room for them
        every = self.resolved.save_every
        return self.save_asked or self.state.step // every > self.saved_step // every

    def _save(self) -> float:
        """Save what is not saved yet; the seconds that training stood still for it."""
        started = time.perf_counter()
        if self.state.step > self.saved_step:
            self.replicas.check(self.state.step)
            self.world.watch.mark(SAVE, self.state.step)
            # Every rank's own streams, for the one that writes them down.
            position = merge_positions(self.world.gather_to_main(self.state.position))
            self.checkpointer.save(self.state.step, asdict(self.state) | {"position": position})
            self.saved_step, self.saved_at, self.save_asked = self.state.step, time.monotonic(), False
        return time.perf_counter() - started


def _steps(every: float | None, total: int) -> int:
    """--eval_steps and --save_steps: a number of steps, or below 1 a fraction of the run; 0 when unset."""
    if every is None:
        return 0
    return max(1, int(every * total)) if every < 1 else int(every)
