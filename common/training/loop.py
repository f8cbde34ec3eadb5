"""A training run, from top to bottom: set up, resume, loop over steps, end.

A run is a deterministic function of (data, arguments, seed), however often it is interrupted. A train script passes
`build`, which makes the model and wraps it in the script's strategy; everything else is the same for all strategies.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

from common.checkpoint.checkpointer import SaveSchedule
from common.cli import MEMORY
from common.data.loader import merge_positions
from common.distributed.process_group import distributed_run
from common.distributed.stopping import Preempted
from common.distributed.world import World
from common.files.runs import FINAL_MODEL
from common.hooks import extra
from common.training.arguments import RunArguments
from common.training.log_row import RowWindow, StepRecord
from common.training.results import export_model, run_info, training_results, write_evaluations
from common.training.resume import plan_resume
from common.training.run_directory import RunDirectory
from common.training.set_up import Run, set_up
from common.training.step import StepPrefetcher, scheduled_gc
from common.training.task import Build
from common.training.time_budget import TimeBudget

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
        restarted = world.broadcast_object(directory and directory.restarted)
        memory = None
        if MEMORY in os.environ and args.do_train and args.checkpoint.memory_save_steps != 0:
            memory = stack.enter_context(extra().memory_checkpoints(world))
        resume = plan_resume(args.checkpoint, args.do_train, restarted, world, memory)
        world.start_up.done("checkpoint")
        run = set_up(args, build, world, resume, directory, stack, memory)
        if args.do_train:
            train_steps(run)
        if directory:
            directory.keep()
        end(run)
        if directory and args.do_train:
            directory.done()


def train_steps(run: Run) -> None:
    """Train up to the last step, or to --stop_after_minutes: `run.plan` then ends there.

    Raises Preempted, with the state saved, if a signal stops the run before.
    """
    args, world, state, task = run.args, run.world, run.state, run.task
    first_row = run.plan.first_row(task.data, state)
    if first_row is None:
        logger.info("Step %d of %d is done already: nothing to train", state.step, run.plan.last_step or state.step)
        return
    results = run.evaluator.results
    budget = TimeBudget(args.stop_after_minutes, args.yes, world, results, state.step, run.last_step)
    begin_training(run, first_row)
    if args.eval_on_start and state.step == 0:
        state.keep_row({"step": 0, "epoch": 0.0})
    if state.unfinished_row is not None and not evaluate_and_log(run, state.unfinished_row):
        raise Preempted
    with world.raise_together():
        plan = run.plan
        loader = task.steps(plan.packs_per_step, state.step, state.position, plan.last_step, plan.total_steps)
    saves = SaveSchedule(run.plan.save_every, args.checkpoint.save_minutes, state.step)
    progress_bar = run.log.progress_bar(run.last_step, state.step)
    stopped = False
    with closing(iter(loader)) as steps, progress_bar as bar, scheduled_gc() as collect:
        prefetcher = StepPrefetcher(steps, task, world, saves.is_due_by_clock, budget.is_over)
        window, saving = RowWindow(state.row_sums, task.data.row_fields), 0.0
        while not run.done:
            step = take_step(run, prefetcher, saving)
            if step is None:
                stopped = True
                break
            window.add(step)
            bar.update()
            if prefetcher.is_over and not run.done:
                run.plan = budget.ended(run.plan, state.step)
            budget.after_step(state.step, step.seconds)
            collect(state.step)
            if not log_step(run, window, step):
                stopped = True
                break
            requested = prefetcher.save_requested or run.best.saves(state)
            is_due = saves.is_due(state.step, bool(state.skipped_lately), requested)
            saving = save(run, saves) if is_due else 0.0
            if run.memory:
                run.memory.after_step(state, step.seconds)
        save(run, saves)
        run.monitor.close(state.step)
        world.watch.mark("save", state.step)
        run.checkpointer.wait()
        world.watch.rest()
    if stopped:
        raise Preempted


def take_step(run: Run, prefetcher: StepPrefetcher, saving: float) -> StepRecord | None:
    """Take the next step and count it in the state; None if a rank is to stop. All ranks together.

    saving: seconds that a save held up training since the last step.
    """
    state, task, started = run.state, run.task, time.perf_counter()
    data, counts = prefetcher.pop(state.step + 1)
    if data is None:
        return None
    epoch = task.data.epochs(state.sequences + counts.num_sequences) if data.epoch is None else data.epoch
    run.monitor.before_step(state.step + 1)
    lr = run.learning_rate(state.step)
    is_last = run.plan.finished(task.data, state.step + 1, data.position)
    with run.first_step.waited_for():
        result = run.stepper.step(state.step, lr, data.micro_batches, counts, None if is_last else prefetcher)
    if line := run.world.start_up.report():
        logger.info(line)
    run.log.quant_stats_rows(result.quant_stats)
    seconds, waited = time.perf_counter() - started, prefetcher.pop_wait()
    flops = task.flops(counts)
    state.advance(data.position, epoch, counts, flops, seconds, result)
    if result.skipped:
        with run.world.raise_together():
            state.check_divergence(run.args.optimizer.max_skipped_steps)
    return StepRecord(
        state=state,
        total_steps=run.plan.total_steps,
        learning_rate=lr,
        counts=counts,
        result=result,
        flops=flops,
        seconds=seconds,
        waited=waited,
        saving=saving,
        ranks=run.monitor.after_step(state.step, waited),
        world=run.world,
        peak_flops=run.log.peak_flops,
    )


def log_step(run: Run, window: RowWindow, step: StepRecord) -> bool:
    """Log a row, and evaluate, if the step has one; False if stopped meanwhile."""
    state = run.state
    evaluates = run.plan.evaluates(state.step) or run.best.evaluates_last(run.task.data, state)
    if not (evaluates or run.log.is_due(state.step) or run.done):
        return True
    row = window.row(step)
    if evaluates:
        return evaluate_and_log(run, row)
    run.log.row(row)
    return True


def begin_training(run: Run, first_row: int) -> None:
    """Take possession of the output directory; all ranks together."""
    # From here on ranks agree on a signal and save. They meet below first, so that none exits by itself any more.
    run.world.stop.save_first()
    run.checkpointer.begin(run.state.step)
    if run.memory:
        run.memory.begin(run.checkpointer, run.args.checkpoint.memory_save_steps, run.state.step)
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
    state = run.state
    state.keep_row(row)
    downstream = run.plan.evaluates_downstream(state.step) or run.done
    results = run.evaluator.evaluate(state.step, downstream=downstream)
    if not results:
        return False
    state.keep_row(None)
    run.log.row(row | results)
    if run.best.observe(state, results):
        run.log.losses(run.evaluator.losses(), state.step, best=True)
    run.plan = run.best.ended(run.plan, state)
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
        ran = run.monitor.kernels.found if run.monitor.kernels else ""
        results = training_results(state, run.built.implementation, task.data.num_examples, ran)
        log.results("train", state.step, results, of_training=True)
    is_complete = args.do_train and (task.data.finished(state.step, state.position) or run.best.ends(state))
    if args.best.load_best_model_at_end:
        state = run.best.load(state, run.checkpointer, run.strategy, run.built)
    if args.do_eval:
        logger.info("*** Evaluate ***")
        if not write_evaluations(run.evaluator, log, state, args.best.load_best_model_at_end, args.do_train):
            raise Preempted
    if args.do_train:
        log.trainer_state(asdict(run.state))
    if is_complete if args.save_final_model is None else args.save_final_model:
        export_model(
            task,
            state,
            world,
            gather=run.strategy.full_tensor,
            directory=Path(args.checkpoint.output_dir) / FINAL_MODEL,
            hub_model_id=args.hub_model_id,
            fitted=run.evaluator.fitted(),
            results=run.evaluator.results,
        )
    if args.do_train:
        log.draw_last()
