"""A training run, from top to bottom: set up, resume, loop over steps, end.

A run is a deterministic function of (data, arguments, seed), however often it is interrupted. A train script passes
`build`, which makes the model and wraps it in the script's strategy; everything else is the same for all strategies.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from common.data.loader import merge_positions
from common.distributed.run import distributed_run
from common.distributed.stopping import Preempted
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.flags import flat
from common.hooks import extra
from common.models.layers.compiling import FirstStep
from common.training.arguments import RunArguments
from common.training.best import Best
from common.training.checkpoint import Checkpointer, SaveSchedule
from common.training.duration import Duration
from common.training.evaluation import Evaluator
from common.training.interval import Interval
from common.training.optim import set_hyperparameters
from common.training.parse import task_of
from common.training.progress import RunPlan, TrainerState, plan_run
from common.training.results import announce, export_model, run_info, training_results, write_evaluations
from common.training.resume import ResumePlan, plan_resume
from common.training.run_directory import RunDirectory
from common.training.run_logger import RunLogger, peak_flops
from common.training.step import Stepper, StepPrefetcher, scheduled_gc
from common.training.step_monitor import StepMonitor
from common.training.task import Build, BuiltModel, Task

logger = logging.getLogger(__name__)


def train(args: RunArguments, build: Build) -> None:
    """Train as the flags say; or estimate the memory of such a run (--dry_run), or find a learning rate for it."""
    args = args.with_pack(build)
    if args.dry_run.dry_run:
        return extra().dry_run(args, build)
    with distributed_run(args.process) as world:
        if args.find.find_learning_rate:
            return extra().find_learning_rate(args, build, world)
        return run_training(args, build, world)


def run_training(args: RunArguments, build: Build, world: World) -> None:
    """A function of its own: its locals (model, process groups) must be freed before the groups are destroyed."""
    with ExitStack() as stack:
        directory = None
        with world.on_main_rank() as is_main:
            if is_main:
                directory = stack.enter_context(RunDirectory(Path(args.checkpoint.output_dir)))
        # With the directory locked, no other run can change the checkpoints.
        resume = plan_resume(args, world.broadcast_object(directory and directory.restarted), world)
        run = set_up(args, build, world, resume, directory, stack)
        if args.do_train:
            run = train_steps(run)
        if directory:
            directory.keep()
        end(run)
        if directory and args.do_train:
            directory.done()


@dataclass(frozen=True)
class Run:
    """The parts of a run once it is set up; only `state` changes while it trains."""

    args: RunArguments
    world: World
    directory: RunDirectory | None  # on rank 0
    strategy: Strategy
    built: BuiltModel
    task: Task
    stepper: Stepper
    evaluator: Evaluator
    best: Best
    checkpointer: Checkpointer
    log: RunLogger
    monitor: StepMonitor
    plan: RunPlan
    state: TrainerState

    @property
    def done(self) -> bool:
        """Whether no step is left to take."""
        return self.plan.finished(self.task.data, self.state.step, self.state.position)


def set_up(
    args: RunArguments,
    build: Build,
    world: World,
    resume: ResumePlan,
    directory: RunDirectory | None,
    stack: ExitStack,
) -> Run:
    """Build the model, open data, log and checkpoints, load the checkpoint, resolve what the flags leave open."""
    strategy, built = build(args, world, resume.implementation)
    with world.on_main_rank() as is_main:  # report bad input before anything is removed or written
        if is_main:
            args.precision.check_stats_directory()
    task = task_of(args)(built, args, world)
    task.open(evaluates=args.do_eval)
    world.assert_same(task.data.identity)
    evaluator, best = Evaluator(task, strategy), Best(args.best, task.compared, args.downstream.given)
    with world.raise_together():
        if directory and args.checkpoint.overwrite_output_dir and args.do_train:
            directory.overwrite()
    log = stack.enter_context(RunLogger(args.log, Path(args.checkpoint.output_dir), world))
    optimizer = built.optimizer(args, strategy, world)
    built.precision.attach(optimizer)
    checkpointer = Checkpointer(
        *(args.checkpoint, built.weights, optimizer, built.config, world),
        timeout_s=args.process.ddp_timeout,
        scales=built.precision.scales,
        extras=built.extras,
        dcp_state=strategy.dcp_state,
        tokenizer=task.tokenizer,
    )
    stack.enter_context(checkpointer)
    monitor = StepMonitor(strategy, built.weights, args, world)

    state = resume.state
    with world.raise_together():
        resume.check(built.config.fingerprint(), args, task.data)
    if resume.checkpoint is not None:
        checkpointer.load(resume.checkpoint)
    set_hyperparameters(optimizer, args.optimizer)
    grad_scale = strategy.grad_scale(world.size)
    built.precision.attach_restored(grad_scale / (state.gradient_factor or grad_scale))
    strategy.sync_model_weights()
    plan = plan_run(args, task.data, state, world)
    state.start(plan, built.implementation, task.data.identity, flat(args), grad_scale)
    plan = best.ended(plan, state)
    announce(args, built, task.data, plan, state, world)
    first_row = plan.first_row(task.data, state) if args.do_train else None
    log.track(flat(args), first_row, anew=state.step == 0 and not resume.restarted)
    stepper = Stepper(task, strategy, built.precision, optimizer, world, args.optimizer.max_grad_norm)
    parts = args, world, directory, strategy, built, task, stepper, evaluator, best, checkpointer, log, monitor
    return Run(*parts, plan, state)


def train_steps(run: Run) -> Run:
    """Train up to the last step, or to --stop_after_minutes: the run that is returned ends there.

    Raises Preempted, with the state saved, if a signal stops the run before.
    """
    args, world, state, plan, task, log = run.args, run.world, run.state, run.plan, run.task, run.log
    first_row = plan.first_row(task.data, state)
    if first_row is None:
        logger.info("Step %d of %d is done already: nothing to train", state.step, plan.last_step or state.step)
        return run
    limit = Duration(args, world, run.evaluator.results, state.step, plan.last_step or plan.total_steps)
    begin_training(run, first_row)
    if args.eval_on_start and state.step == 0:
        state.keep_row({"step": 0, "epoch": 0.0})
    if state.unfinished_row is not None:
        if not evaluate_and_log(run, state.unfinished_row):
            raise Preempted
        run = replace(run, plan=run.best.ended(plan, state))
    with world.raise_together():
        loader = task.steps(plan.packs_per_step, state.step, state.position, plan.last_step, plan.total_steps)
    learning_rate = replace(args.optimizer, warmup_steps=plan.warmup_steps).schedule(plan.total_steps)
    peak = peak_flops(world.device, args.precision.bf16, args.log.peak_tflops_per_gpu)
    first_step, interval = FirstStep(run.built.compiled), Interval()
    saves = SaveSchedule(plan.save_every, args.checkpoint.save_minutes, state.step)
    progress_bar = log.progress_bar(plan.last_step or plan.total_steps, state.step)
    stopped = False
    with closing(iter(loader)) as steps, progress_bar as bar, scheduled_gc() as collect:
        prefetcher = StepPrefetcher(steps, task, world, saves.is_due_by_clock, limit.is_over)
        while not run.done:
            started = time.perf_counter()
            data, counts = prefetcher.pop(state.step + 1)
            if data is None:
                stopped = True
                break
            epoch = task.data.epochs(state.sequences + counts.num_sequences) if data.epoch is None else data.epoch
            run.monitor.before_step(state.step + 1)
            # A few steps more than estimated may come before the data end: keep the last learning rate.
            lr = learning_rate(min(state.step, plan.total_steps - 1))
            is_last = plan.finished(task.data, state.step + 1, data.position)
            with first_step.waited_for():
                result = run.stepper.step(state.step, lr, data.micro_batches, counts, None if is_last else prefetcher)
            log.quant_stats_rows(result.quant_stats)
            seconds, waited = time.perf_counter() - started, prefetcher.pop_wait()
            flops = task.flops(counts)
            interval.add(counts, flops, seconds, waited, result)
            state.advance(data.position, epoch, counts, flops, seconds, result)
            if result.skipped:
                with world.raise_together():
                    state.check_divergence(args.optimizer.max_skipped_steps)
            bar.update()
            if prefetcher.is_over and not run.done:
                run = replace(run, plan=limit.ended(plan, state.step))
            limit.after_step(state.step, seconds)
            collect(state.step)
            interval.add_monitored(run.monitor.after_step(state.step, waited))
            evaluates = plan.evaluates(state.step) or run.best.evaluates_last(task.data, state)
            if evaluates or state.step % args.log.logging_steps == 0 or state.step == 1 or run.done:
                row = interval.row(state, plan.total_steps, lr, result, world, peak)
                interval = Interval()
                if not evaluates:
                    log.row(row)
                elif not evaluate_and_log(run, row):
                    stopped = True
                    break
                run = replace(run, plan=run.best.ended(run.plan, state))
            requested = prefetcher.save_requested or run.best.saves(state)
            if saves.is_due(state.step, bool(state.skipped_lately), requested):
                interval.add_checkpoint(save(run, saves))
        save(run, saves)
        run.monitor.close(state.step)
        world.watch.mark("save", state.step)
        run.checkpointer.wait()
        world.watch.rest()
    if stopped:
        raise Preempted
    return run


def begin_training(run: Run, first_row: int) -> None:
    """Take possession of the output directory; all ranks together."""
    # From here on ranks agree on a signal and save. They meet below first, so that none exits by itself any more.
    run.world.stop.save_first()
    run.checkpointer.begin(run.state.step)
    with run.world.raise_together():
        if run.directory:
            run.directory.claim()
            stats_directory = run.args.precision.stats_directory(run.args.checkpoint.output_dir)
            info = run_info(run.args, run.built, run.task.labels, run.world)
            line = partial(run.task.line, packs_per_step=run.plan.packs_per_step)
            run.log.begin(first_row, stats_directory, run.state.step, info, line, run.task.terminal_every)
            run.directory.keep()
    run.strategy.model.train()
    if run.built.compiled:
        run.world.watch.compilation_counts_as_progress()


def evaluate_and_log(run: Run, row: dict) -> bool:
    """Add held-out results to the row and log it; False if stopped meanwhile: then the next start does it."""
    run.state.keep_row(row)
    downstream = run.plan.evaluates_downstream(run.state.step) or run.done
    results = run.evaluator.evaluate(run.state.step, downstream=downstream)
    if not results:
        return False
    run.state.keep_row(None)
    run.log.row(row | results)
    if run.best.observe(run.state, results):
        run.log.losses(run.evaluator.losses(), run.state.step, best=True)
    return True


def save(run: Run, schedule: SaveSchedule) -> float:
    """Save if there are new steps, and draw the curves; all ranks together. Returns the seconds training waited."""
    state, started = run.state, time.perf_counter()
    if state.step > schedule.saved_step:
        run.monitor.check_replicas(state.step)
        run.world.watch.mark("save", state.step)
        # Each rank knows the position of its own streams; rank 0 writes all of them.
        position = merge_positions(run.world.gather_to_main(state.position))
        run.checkpointer.save(state.step, asdict(state) | {"position": position})
        schedule.mark_saved(state.step)
    run.log.draw()
    return time.perf_counter() - started


def end(run: Run) -> None:
    """Write results, evaluate, export and draw as the flags say. Raises Preempted if stopped in an evaluation."""
    args, world, state, task, log = run.args, run.world, run.state, run.task, run.log
    if args.do_train:
        results = training_results(state, run.built.implementation, task.data.num_examples)
        log.results("train", state.step, results, of_training=True)
    is_complete = args.do_train and (task.data.finished(state.step, state.position) or run.best.ends(state))
    if args.best.load_best_model_at_end:
        state = run.best.load(state, run.checkpointer, run.strategy, run.built)
    if args.do_eval:
        logger.info("*** Evaluate ***")
        if not write_evaluations(run.evaluator, log, args, state):
            raise Preempted
    if args.do_train:
        log.trainer_state(asdict(run.state))
    if is_complete if args.save_final_model is None else args.save_final_model:
        export_model(task, state, world, run.strategy.full_tensor, run.evaluator.fitted(), run.evaluator.results)
    if args.do_train:
        log.draw_last()
