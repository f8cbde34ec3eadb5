"""The training run: one trajectory, a function of (data, arguments, seed), whatever interrupts it.

A strategy (train_ddp.py, ...) hands in its wrapped model; everything else is here, readable from top to bottom:
`train` sets up, resumes, and loops over steps; `_Run` holds what the steps share.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from common import batches, convert, esm2, presets
from common.checkpoint import Checkpointer, list_checkpoints
from common.cli import UserError
from common.distributed import Preempted, World
from common.encode_records import check_tokenizer
from common.evaluate import evaluate, unigram
from common.metrics import (
    MetricsLog,
    format_block,
    peak_flops,
    peak_memory_gb,
    read_metrics,
    step_flops,
    step_line,
    write_json,
    write_results,
)
from common.optim import build_optimizer, lr_schedule
from common.packing import Position
from common.trackers import Tracker, open_tracker

logger = logging.getLogger(__name__)

OWN_FILES = ("metrics.jsonl", "training_curves.png", "trainer_state.json", "*_results.json", ".launch")
OWN_DIRECTORIES = ("checkpoint-*", "tmp-checkpoint-*", "final_model", "final_model.partial", "logs")


@dataclass
class TrainerState:
    """What a run has done so far: with the weights and the optimiser, all there is to go on from."""

    step: int = 0
    position: dict = field(default_factory=lambda: asdict(Position()))  # of the next step's first pack
    packs_per_step: int | None = None
    epoch: float = 0.0
    tokens: int = 0  # real ones: no padding
    sequences: int = 0
    total_flos: float = 0.0
    loss_total: float = 0.0  # sum of the steps' losses
    seconds: float = 0.0  # spent in steps, over all restarts
    data: dict = field(default_factory=dict)  # identity of the batch plan
    arguments: dict = field(default_factory=dict)


def load_model(args, world: World) -> esm2.Esm2ForMaskedLM:
    """The model on the rank's device: random weights of --config_name, or those of --model_name_or_path."""
    if args.tokenizer_name:
        check_tokenizer(args.tokenizer_name)
    source = args.config_name or args.model_name_or_path
    config = presets.load_config(source)
    if args.config_overrides:
        config = presets.override(config, args.config_overrides)
    model = esm2.build_model(config, args.seed, world.device)
    if args.model_name_or_path:
        weights, model.extras = convert.load_weights(args.model_name_or_path, config)
        model.load_state_dict(weights)
    if args.torch_compile:
        esm2.compile_layers(model)
    return model


def train(model: nn.Module, args, world: World) -> None:
    """Train, evaluate, save and export as the flags say. `model` is what `load_model` gave, wrapped or not."""
    output_dir = Path(args.output_dir)
    data = batches.open_training(args)  # bad input is found before anything is removed or written
    if args.do_eval:
        batches.require_validation(args)
    with world.main_does() as mine:
        if mine:
            _prepare_output(output_dir, args)
    run = _Run(model, data, args, world, output_dir)
    try:
        run.resume()
        if args.do_train:
            run.loop()
        run.finish()
    finally:
        run.checkpointer.close()
        run.tracker.close()


class _Run:
    def __init__(self, model: nn.Module, data: batches.TrainData, args, world: World, output_dir: Path):
        self.model, self.args, self.world, self.output_dir = model, args, world, output_dir
        self.core: esm2.Esm2ForMaskedLM = getattr(model, "module", model)
        self.config = self.core.config
        self.data = data
        self.optimizer = build_optimizer(model, args)
        self.checkpointer = Checkpointer(output_dir, model, self.optimizer, self.config, world, args)
        self.tracker = open_tracker(args, output_dir) if world.is_main else Tracker()
        self.peak = peak_flops(world.device, args.bf16)
        self.state = TrainerState()

    # ---- where to start -------------------------------------------------------------------------------------

    def resume(self) -> None:
        args, data = self.args, self.data
        saved = self.checkpointer.restore(args.resume_from_checkpoint)
        if saved is not None:
            self.state = TrainerState(**saved)
            _check_same_data(self.state.data, data.identity)
            _warn_of_changes(self.state.arguments, asdict(args))
        self.packs = batches.packs_per_step(args, self.world, self.state.packs_per_step)
        self.accumulation = self.packs // self.world.size
        self.total_steps = batches.total_steps(args, data.plan, self.packs)
        self.last_step = min(self.total_steps, args.stop_at_step or self.total_steps)
        self.lr = lr_schedule(args, self.total_steps)
        self.eval_every, self.save_every = (_steps(n, self.total_steps) for n in (args.eval_steps, args.save_steps))
        self.state = replace(self.state, packs_per_step=self.packs, data=data.identity, arguments=_plain(asdict(args)))
        if self.world.is_main and args.do_train:
            self.log = MetricsLog(self.output_dir / "metrics.jsonl", self.state.step)
        self._announce()

    def _announce(self) -> None:
        args, state = self.args, self.state
        per_rank = args.tokens_per_pack if args.packing else args.per_device_train_batch_size
        unit = "tokens" if args.packing else "sequences"
        logger.info("***** Running training *****" if args.do_train else "***** No training *****")
        for name, value in (
            ("Num examples", len(self.data.store)),
            ("Num Epochs", math.ceil(args.num_train_epochs) if args.max_steps <= 0 else "as --max_steps says"),
            (f"Instantaneous batch size per device ({unit})", per_rank),
            (f"Total train batch size (w. parallel, distributed & accumulation; {unit})", per_rank * self.packs),
            ("Gradient Accumulation steps", self.accumulation),
            ("Total optimization steps", self.total_steps),
            ("Number of trainable parameters", esm2.count_parameters(self.core)),
        ):
            logger.info("  %s = %s", name, f"{value:,}" if isinstance(value, int) else value)
        precision = "bfloat16, fp32 master weights" if args.bf16 else "fp32"
        logger.info("  Device = %s x %d, computing in %s", self.world.device.type, self.world.size, precision)
        if state.step:
            logger.info("Resuming after step %d (epoch %.2f)", state.step, state.epoch)
        if self.accumulation != args.gradient_accumulation_steps:
            logger.info("Accumulation is %d, to keep %d packs a step", self.accumulation, self.packs)

    # ---- the loop -------------------------------------------------------------------------------------------

    def loop(self) -> None:
        args, state, world = self.args, self.state, self.world
        if state.step >= self.last_step:
            logger.info("Step %d of %d is done already: nothing to train", state.step, self.last_step)
            return
        if args.eval_on_start and state.step == 0:
            self._record({"step": 0, "epoch": 0.0, **self._evaluate()})
        loader = batches.training_loader(
            args, self.data, world, self.packs, state.step, Position(**state.position), self.last_step
        )
        bar = tqdm(
            total=self.last_step,
            initial=state.step,
            disable=True if args.disable_tqdm or not world.is_main else None,  # None: only on a terminal
            unit="step",
        )
        self.model.train()
        interval = _Interval()
        with logging_redirect_tqdm(), bar:
            started = time.perf_counter()
            for share in loader:
                waited = time.perf_counter() - started
                stopping, loss, grad_norm = self._step(share, interval)
                now = time.perf_counter()
                interval.waited += waited
                interval.seconds += now - started
                state.seconds += now - started
                bar.update()
                logging_now = state.step % args.logging_steps == 0 or state.step in (1, self.last_step)
                evaluating = self.eval_every and state.step % self.eval_every == 0 and not stopping
                row = self._row(loss, grad_norm, interval) if logging_now or evaluating else None
                if evaluating:
                    results = self._evaluate()
                    stopping = stopping or not results
                    row |= results
                if row:
                    self._record(row)
                    interval = _Interval()
                if stopping or state.step == self.last_step or state.step % self.save_every == 0:
                    self._save()
                if stopping:
                    self.checkpointer.wait()
                    raise Preempted
                started = time.perf_counter()
        self.checkpointer.wait()

    def _step(self, share, interval) -> tuple[bool, torch.Tensor, torch.Tensor]:
        """One optimiser step: (whether some rank was told to stop, the global batch's loss, its gradient norm)."""
        args, world, state = self.args, self.world, self.state
        keys = ("num_masked", "num_tokens", "sum_squared_lengths", "num_sequences")
        counts = [sum(batch[key] for batch in share.micro_batches) for key in keys]
        counts = world.sum(torch.tensor([*counts, int(world.stop_requested)]))
        masked, tokens, squared, sequences, stop = counts.tolist()

        lr = self.lr(state.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = torch.zeros((), device=world.device)
        for number, batch in enumerate(share.micro_batches):
            last = number == len(share.micro_batches) - 1
            with _gradient_sync(self.model, last):
                with torch.autocast(world.device.type, torch.bfloat16, enabled=args.bf16):
                    output = self.model(**batches.to_device(batch, world.device))
                # Gradients are averaged over the ranks, so the sum over the global batch is scaled up by their number.
                (output.loss_sum * (world.size / max(masked, 1))).backward()
            loss += output.loss_sum.detach()
        loss = world.sum(loss) / max(masked, 1)
        grad_norm = clip_grad_norm_(self.model.parameters(), args.max_grad_norm or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()

        state.step += 1
        state.position, state.epoch = asdict(share.position), share.epoch
        state.tokens += tokens
        state.sequences += sequences
        flops = step_flops(self.config, tokens, squared, masked)
        state.total_flos += flops
        state.loss_total += loss.item()
        interval.add(tokens, flops)
        return bool(stop), loss, grad_norm

    def _row(self, loss: torch.Tensor, grad_norm: torch.Tensor, interval) -> dict:
        seconds = max(interval.seconds, 1e-9)
        flops = interval.flops / seconds / self.world.size
        row = {
            "step": self.state.step,
            "total_steps": self.total_steps,
            "epoch": self.state.epoch,
            "loss": loss.item(),
            "grad_norm": grad_norm.item(),
            "learning_rate": self.lr(self.state.step - 1),
            "tokens": self.state.tokens,
            "tokens_per_second": interval.tokens / seconds,
            "step_seconds": seconds / interval.steps,
            "data_wait_seconds": interval.waited / interval.steps,
            "tflops_per_device": flops / 1e12,
            "peak_memory_gb": peak_memory_gb(self.world.device),
        }
        return row | ({"mfu": flops / self.peak} if self.peak else {})

    def _record(self, row: dict) -> None:
        if self.world.is_main:
            self.log.write(row)
            self.tracker.write(row)
            if "loss" in row:
                logger.info(step_line(row))

    def _evaluate(self) -> dict:
        results = evaluate(self.core, self.args, "validation", self.world)
        assert results is not None, "train() has looked for the split"
        if results:
            logger.info(
                "Held-out loss %.4f, perplexity %.3f, accuracy %.4f (%d masked residues)",
                *(results[k] for k in ("eval_loss", "perplexity", "eval_accuracy", "eval_masked_tokens")),
            )
        self.model.train()
        return results

    def _save(self) -> None:
        self.checkpointer.save(self.state.step, asdict(self.state))

    # ---- the end --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        args, state, world = self.args, self.state, self.world
        results: dict[str, dict] = {}
        if args.do_train:
            seconds = max(state.seconds, 1e-9)
            results["train"] = {
                "epoch": state.epoch,
                "total_flos": state.total_flos,
                "train_loss": state.loss_total / max(state.step, 1),
                "train_runtime": state.seconds,
                "train_samples": len(self.data.store),
                "train_samples_per_second": state.sequences / seconds,
                "train_steps_per_second": state.step / seconds,
                "train_tokens_per_second": state.tokens / seconds,
            }
            self._report("train", results["train"])
        if args.do_eval:
            logger.info("*** Evaluate ***")
            for split, prefix, name in (("validation", "eval", "eval"), ("test", "test", "test")):
                found = self._evaluate() if prefix == "eval" else evaluate(self.core, args, split, world, prefix)
                if found == {}:
                    raise Preempted
                if found:
                    found |= unigram(self.data.store, args, split, world, prefix)
                    self._report(name, {"epoch": state.epoch} | found)
        if world.is_main and args.do_train:
            history = read_metrics(self.output_dir / "metrics.jsonl")
            write_json(self.output_dir / "trainer_state.json", asdict(state) | {"log_history": history})
        finished = args.do_train and state.step >= self.total_steps
        if finished if args.save_final_model is None else args.save_final_model:
            with world.main_does() as mine:
                if mine:
                    final = self.output_dir / "final_model"
                    convert.save_pretrained(self.core.state_dict(), self.config, self.core.extras, final)
                    logger.info("Model for transformers' from_pretrained: %s", final)
        with world.main_does() as mine:
            if mine and args.do_train:
                from common.report import draw_curves

                draw_curves(self.output_dir)
        world.barrier()

    def _report(self, split: str, results: dict) -> None:
        if self.world.is_main:
            write_results(self.output_dir, split, results)
            self.tracker.write({"step": self.state.step, **results})
            if not self.args.disable_tqdm or sys.stdout.isatty():
                print(format_block(split, results), flush=True)


@dataclass
class _Interval:
    """Sums since the last row of metrics."""

    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    steps: int = 0

    def add(self, tokens: int, flops: float) -> None:
        self.tokens += tokens
        self.flops += flops
        self.steps += 1


def _gradient_sync(model: nn.Module, last: bool):
    """Gradients are exchanged with the last micro-batch of a step only."""
    return nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


def _steps(every: float | None, total: int) -> int:
    """--eval_steps and --save_steps: a number of steps, or below 1 a fraction of the run; 0 when unset."""
    if every is None:
        return 0
    return max(1, int(every * total)) if every < 1 else int(every)


def _plain(arguments: dict) -> dict:
    return {k: v for k, v in arguments.items() if isinstance(v, str | int | float | bool | None)}


def _check_same_data(saved: dict, now: dict) -> None:
    differing = [f"{k} {saved.get(k)!r} (now {v!r})" for k, v in now.items() if saved.get(k) != v]
    differing += [f"{k} {v!r} (now not used)" for k, v in saved.items() if k not in now]
    if differing:
        raise UserError(
            f"the checkpoint stands in another order of batches: {', '.join(differing)}; give the same flags, or "
            "start a new run from its final_model/ with --model_name_or_path and another --output_dir"
        )


def _warn_of_changes(saved: dict, now: dict) -> None:
    """Not refused (a user may well want another --save_steps), but said."""
    harmless = {"resume_from_checkpoint", "overwrite_output_dir", "stop_at_step", "disable_tqdm"}
    changed = [f"{k} {saved[k]} -> {now[k]}" for k in saved if k in now and saved[k] != now[k] and k not in harmless]
    if changed:
        logger.warning("Flags differ from those of the checkpoint: %s", ", ".join(changed))


def _prepare_output(output_dir: Path, args) -> None:
    """Make the directory, find out now whether it is writable, and apply --overwrite_output_dir."""
    output_dir.mkdir(parents=True, exist_ok=True)
    probe = output_dir / ".writable"
    probe.touch()
    probe.unlink()
    # A restarted job comes with the same command line; it must go on, not wipe out what it did before.
    marker, launch = output_dir / ".launch", _launch_id()
    restarted = launch is not None and marker.exists() and marker.read_text() == launch
    if args.overwrite_output_dir and not restarted:
        if list_checkpoints(output_dir):
            logger.warning("Removing the earlier run in %s, as --overwrite_output_dir says", output_dir)
        for pattern in OWN_FILES:
            for path in output_dir.glob(pattern):
                path.unlink()
        for pattern in OWN_DIRECTORIES:
            for path in output_dir.glob(pattern):
                shutil.rmtree(path)
    if launch is not None:
        marker.write_text(launch)


def _launch_id() -> str | None:
    """What stays the same when this very job is restarted, by torchrun, an operator or the batch system."""
    if os.environ.get("SLURM_JOB_ID"):
        return f"slurm {os.environ['SLURM_JOB_ID']}"
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if run_id == "none" else f"torchelastic {run_id}"
