"""What a run says and counts while it is under way: how it starts, and the rows of metrics.jsonl."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.model import esm2
from common.training.metrics import peak_memory_gb, step_flops

if TYPE_CHECKING:
    from common.training.step import StepResult
    from common.training.trainer import Run

logger = logging.getLogger(__name__)

COUNTS = ("num_masked", "num_tokens", "sum_squared_lengths", "num_sequences")  # of a batch; summed over the step


def announce(run: Run) -> None:
    args, state = run.args, run.state
    per_rank = args.tokens_per_pack if args.packing else args.per_device_train_batch_size
    unit = "tokens" if args.packing else "sequences"
    logger.info("***** Running training *****" if args.do_train else "***** No training *****")
    for name, value in (
        ("Num examples", run.data.num_examples or "not counted: they are streamed"),
        ("Num Epochs", math.ceil(args.num_train_epochs) if args.max_steps <= 0 else "as --max_steps says"),
        (f"Instantaneous batch size per device ({unit})", per_rank),
        (f"Total train batch size (w. parallel, distributed & accumulation; {unit})", per_rank * run.packs),
        ("Gradient Accumulation steps", run.accumulation),
        ("Total optimization steps", run.total_steps),
        ("Number of trainable parameters", esm2.count_parameters(run.core)),
    ):
        logger.info("  %s = %s", name, f"{value:,}" if isinstance(value, int) else value)
    precision = "bfloat16, fp32 master weights" if args.bf16 else "fp32"
    for line in run.core.remarks:
        logger.info("  %s", line)
    logger.info("  Device = %s x %d, computing in %s", run.world.device.type, run.world.size, precision)
    if state.step:
        logger.info("Resuming after step %d (epoch %.2f)", state.step, state.epoch)
    if run.accumulation != args.gradient_accumulation_steps:
        logger.info("Accumulation is %d, to keep %d packs a step", run.accumulation, run.packs)


def flops_of(config, counts: list[int]) -> float:
    """Of a step with these COUNTS."""
    masked, tokens, squared, _ = counts
    return step_flops(config, tokens, squared, masked)


@dataclass
class Interval:
    """Sums since the last row of metrics."""

    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    forward_backward: float = 0.0
    optimizer: float = 0.0
    checkpoints: float = 0.0  # seconds that training stood still for them
    steps: int = 0
    ranks: dict = field(default_factory=dict)  # the last comparison of the ranks, common/ranks/stragglers.py

    def add(self, counts: list[int], flops: float, seconds: float, waited: float, result: StepResult) -> None:
        self.tokens += counts[COUNTS.index("num_tokens")]
        self.flops += flops
        self.seconds += seconds
        self.waited += waited
        self.forward_backward += result.forward_backward
        self.optimizer += result.optimizer
        self.steps += 1

    def row(self, run: Run, result: StepResult) -> dict:
        """The row of metrics.jsonl after the step just taken; without loss and norm if that was skipped."""
        seconds = max(self.seconds, 1e-9)
        flops = self.flops / seconds / run.world.size
        row = {
            "step": run.state.step,
            "total_steps": run.total_steps,
            "epoch": run.state.epoch,
            **({} if result.skipped else {"loss": result.loss, "grad_norm": result.grad_norm}),
            "learning_rate": run.lr(run.state.step - 1),
            "tokens": run.state.tokens,
            "tokens_per_second": self.tokens / seconds,
            "step_seconds": seconds / self.steps,
            "data_wait_seconds": self.waited / self.steps,
            "forward_backward_seconds": self.forward_backward / self.steps,
            "optimizer_seconds": self.optimizer / self.steps,
            "checkpoint_seconds": self.checkpoints,
            "skipped_steps": run.state.skipped_steps,
            "tflops_per_device": flops / 1e12,
            "peak_memory_gb": peak_memory_gb(run.world.device),
        }
        return row | self.ranks | ({"mfu": flops / run.peak} if run.peak else {})
