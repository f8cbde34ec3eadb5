"""The parts of a training run, and how they are made: model, data, log, checkpoints, and the state to resume from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from common.checkpoint.checkpointer import Checkpointer
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.flags import flat
from common.models.layers.compiling import FirstStep
from common.training.arguments import RunArguments
from common.training.best import Best
from common.training.command_line import task_of
from common.training.evaluation import Evaluator
from common.training.optim import set_hyperparameters
from common.training.results import announce
from common.training.resume import ResumePlan
from common.training.run_directory import RunDirectory
from common.training.run_logger import RunLogger
from common.training.step import Stepper
from common.training.step_monitor import StepMonitor
from common.training.task import Build, BuiltModel, Task
from common.training.trainer_state import RunPlan, TrainerState, plan_run


@dataclass
class Run:
    """The parts of a run once it is set up; only `state` and `plan` change while it trains."""

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
    first_step: FirstStep
    plan: RunPlan
    state: TrainerState
    memory: Any = None  # of the launcher, for states: extras.launch.memory_checkpoints

    @property
    def done(self) -> bool:
        """Whether no step is left to take."""
        return self.plan.finished(self.task.data, self.state.step, self.state.position)

    @property
    def last_step(self) -> int:
        """The step at which the run ends, or is expected to."""
        return self.plan.last_step or self.plan.total_steps

    @cached_property
    def learning_rate(self) -> Callable[[int], float]:
        """The learning rate of a step, counted from 0."""
        total_steps = self.plan.total_steps
        schedule = replace(self.args.optimizer, warmup_steps=self.plan.warmup_steps).schedule(total_steps)
        # A few steps more than estimated may come before the data end: keep the last learning rate.
        return lambda step: schedule(min(step, total_steps - 1))


def set_up(
    args: RunArguments,
    build: Build,
    world: World,
    resume: ResumePlan,
    directory: RunDirectory | None,
    stack: ExitStack,
    memory: Any = None,
) -> Run:
    """Build the model, open data, log and checkpoints, load the checkpoint, resolve what the flags leave open."""
    strategy, built = build(args, world, resume.implementation)
    world.start_up.done("model")
    with world.on_main_rank() as is_main:  # report bad input before anything is removed or written
        if is_main:
            args.precision.check_stats_directory()
    task = task_of(args)(built, args, world)
    task.open(evaluates=args.do_eval)
    world.start_up.done("data")
    world.assert_same(task.data.identity)
    evaluator, best = Evaluator(task, strategy), Best(args.best, task.compared, args.downstream.given)
    with world.raise_together():
        if directory and args.checkpoint.overwrite_output_dir and args.do_train:
            directory.overwrite()
    output_dir = Path(args.checkpoint.output_dir)
    log = RunLogger(args.log, output_dir, world, args.precision.bf16)
    stack.enter_context(log)
    optimizer = built.optimizer(args.optimizer, strategy, world, args.precision.bf16)
    built.precision.attach(optimizer)
    checkpointer = Checkpointer(
        flags=args.checkpoint,
        model=built.weights,
        optimizer=optimizer,
        config=built.config,
        world=world,
        timeout_s=args.process.ddp_timeout,
        scales=built.precision.scales,
        extras=built.extras,
        dcp_state=strategy.dcp_state,
        tokenizer=task.tokenizer,
    )
    stack.enter_context(checkpointer)
    monitor = StepMonitor(strategy, built.weights, args.log, output_dir, world)

    state = resume.state
    with world.raise_together():
        resume.check(
            fingerprint=checkpointer.fingerprint,
            data=task.data,
            weights=args.model.model_name_or_path,
            optim=args.optimizer.optim,
            output_dir=args.checkpoint.output_dir,
            objective=flat(args).get("objective", "mlm"),
        )
    world.start_up.done("model")
    if resume.checkpoint is not None:
        checkpointer.load(resume.checkpoint)
        world.start_up.done("checkpoint")
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
    return Run(
        args=args,
        world=world,
        directory=directory,
        strategy=strategy,
        built=built,
        task=task,
        stepper=Stepper(
            task, strategy, built.precision, optimizer, world, args.optimizer.max_grad_norm, len(task.data.sources)
        ),
        evaluator=evaluator,
        best=best,
        checkpointer=checkpointer,
        log=log,
        monitor=monitor,
        first_step=FirstStep(built.compiled),
        plan=plan,
        state=state,
        memory=memory,
    )
