"""The training run: one trajectory, a function of (data, arguments, seed), whatever interrupts it.

A strategy (train_ddp.py, ...) hands in its wrapped model; everything else is here, readable from top to bottom:
`train` sets up, resumes, and loops over steps; `Run` holds what the steps share.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from common import batches, esm2
from common.checkpoint import Checkpointer
from common.cli import UserError
from common.distributed import World
from common.evaluate import evaluate
from common.finish import finish
from common.loader import TrainStep
from common.metrics import MetricsLog, peak_flops, step_line
from common.optim import build_optimizer, lr_schedule
from common.progress import COUNTS, Interval, announce, flops_of
from common.run_directory import RunDirectory
from common.run_state import TrainerState, check_same_data, plain, warn_of_changes
from common.sharding import gradient_sync, whole
from common.stopping import Preempted
from common.trackers import Tracker, open_tracker
from common.training_data import TrainingData, find_source, open_training

logger = logging.getLogger(__name__)


def train(model: nn.Module, args, world: World) -> None:
    """Train, evaluate, save and export as the flags say. `model` is what `load_model` gave, wrapped or not."""
    output_dir = Path(args.output_dir)
    source = None
    with world.main_does() as mine:  # bad input is found before anything is removed or written
        if mine:
            source = find_source(args)
    source = world.share(source)
    with world.together():
        data = open_training(args, source)
    directory = None
    with world.main_does() as mine:
        if mine:
            directory = RunDirectory(output_dir, overwrite=args.overwrite_output_dir and args.do_train)
    run = Run(model, data, args, world, output_dir)
    try:
        run.resume(restarted=world.share(directory and directory.restarted))
        if args.do_train:
            run.loop(directory)
        finish(run)
    finally:
        run.checkpointer.close()
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
        self.optimizer = build_optimizer(model, args)
        quantised = self.core.emulation or self.core.encoder.quantised
        scales = quantised.state if quantised else {}
        self.checkpointer = Checkpointer(output_dir, model, self.optimizer, self.config, world, args, scales)
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
        self.saved_step = self.state.step
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
                self.log = MetricsLog(self.output_dir / "metrics.jsonl", keep_through)
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
        interval = Interval()
        stopping = False
        with closing(iter(loader)) as steps, logging_redirect_tqdm(), bar:
            while state.step < self.last_step and not stopping:
                started = time.perf_counter()
                share, counts = self._next(steps)
                stopping = share is None
                if not stopping:
                    waited = time.perf_counter() - started
                    loss, grad_norm = self._step(share, counts)
                    interval.add(counts, flops_of(self.config, counts), time.perf_counter() - started, waited)
                    state.seconds += time.perf_counter() - started
                    bar.update()
                    evaluating = self.eval_every and state.step % self.eval_every == 0
                    if evaluating or state.step % args.logging_steps == 0 or state.step in (1, self.last_step):
                        row = interval.row(self, loss, grad_norm)
                        interval = Interval()
                        if evaluating:
                            stopping = not self._complete(row)
                        else:
                            self._record(row)
                if stopping or state.step == self.last_step or state.step % self.save_every == 0:
                    self._save()
            self.checkpointer.wait()
        if stopping:
            raise Preempted

    def _next(self, steps) -> tuple[TrainStep | None, list[int]]:
        """This rank's share of the next step and the COUNTS of the whole of it; (None, _) if a rank is to stop.

        A rank that waits for data in vain, or whose data are damaged, tells the others here: no rank waits for it.
        """
        share, failure = None, None
        try:
            share = self.world.stop.wait_for(steps)
        except Exception as error:
            failure = error
        counts = [sum(batch[key] for batch in share.micro_batches) if share else 0 for key in COUNTS]
        stop = failure is None and (share is None or self.world.stop_requested)
        *counts, stop, failed = self.world.sum(torch.tensor([*counts, stop, failure is not None])).tolist()
        if failed:
            self.world.end_together(failure)
        return (None if stop else share), counts

    def _step(self, share: TrainStep, counts: list[int]) -> tuple[float, float]:
        """One optimiser step: (the global batch's loss, its gradient norm)."""
        args, world, state = self.args, self.world, self.state
        masked, tokens, _, sequences = counts
        lr = self.lr(state.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = torch.zeros((), device=world.device)
        for number, batch in enumerate(share.micro_batches):
            last = number == len(share.micro_batches) - 1
            if self.core.emulation:
                self.core.emulation.begin(state.step, number * world.size + world.rank)
            with gradient_sync(self.model, last):
                with torch.autocast(world.device.type, torch.bfloat16, enabled=args.bf16):
                    output = self.model(**batches.to_device(batch, world.device))
                # Gradients are averaged over the ranks, so the sum over the global batch is scaled up by their number.
                (output.loss_sum * (world.size / max(masked, 1))).backward()
            loss += output.loss_sum.detach()
        loss = world.sum(loss) / max(masked, 1)
        norm = whole(clip_grad_norm_(self.model.parameters(), args.max_grad_norm or math.inf))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.core.emulation:
            self.core.emulation.end_step(world)

        state.step += 1
        loss, norm = torch.stack([loss, norm]).tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            # Before anything of it is saved: --save_total_limit would let garbage replace the good checkpoints.
            diverged = UserError(
                f"step {state.step}: the run has diverged: loss {loss}, gradient norm {norm}; nothing of this step is "
                "kept: go on from an earlier checkpoint with a lower --learning_rate or --max_grad_norm"
            )
            world.end_together(diverged)
        state.position, state.epoch = self.data.position_after(share), share.epoch
        state.tokens += tokens
        state.sequences += sequences
        state.total_flos += flops_of(self.config, counts)
        state.loss_total += loss
        return loss, norm

    def _record(self, row: dict) -> None:
        if self.world.is_main:
            self.log.write(row)
            self.tracker.write(row)
            if "loss" in row:
                logger.info(step_line(row))

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
        results = evaluate(self.core, self.data.held_out("validation"), self.args, self.world)
        if results:
            logger.info(
                "Held-out loss %.4f, perplexity %.3f, accuracy %.4f (%d masked residues)",
                *(results[k] for k in ("eval_loss", "perplexity", "eval_accuracy", "eval_masked_tokens")),
            )
        self.model.train()
        return results

    def _save(self) -> None:
        if self.state.step > self.saved_step:
            position = self.data.position_of_all(self.state.position, self.world)
            self.checkpointer.save(self.state.step, asdict(self.state) | {"position": position})
            self.saved_step = self.state.step


def _steps(every: float | None, total: int) -> int:
    """--eval_steps and --save_steps: a number of steps, or below 1 a fraction of the run; 0 when unset."""
    if every is None:
        return 0
    return max(1, int(every * total)) if every < 1 else int(every)
