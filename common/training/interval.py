"""What is summed between two rows of metrics.jsonl, and the row."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.data.loader import StepCounts
from common.distributed.world import World
from common.training.progress import StepResult, TrainerState
from common.training.run_logger import peak_memory_gb


@dataclass
class Interval:
    """Sums since the last row of metrics.jsonl, or since this start of the run."""

    tokens: int = 0
    computed: int = 0  # tokens that the layers ran on, padding included
    flops: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    forward_backward: float = 0.0
    optimizer: float = 0.0
    checkpoints: float = 0.0  # seconds that saving blocked training
    steps: int = 0
    last_targets: int = 0  # of the last step
    ranks: dict = field(default_factory=dict)  # the last comparison of the ranks (step_monitor.py)

    def add(self, counts: StepCounts, flops: float, seconds: float, waited: float, result: StepResult) -> None:
        self.tokens += counts.num_tokens
        self.computed += counts.num_computed
        self.flops += flops
        self.seconds += seconds
        self.waited += waited
        self.forward_backward += result.forward_backward
        self.optimizer += result.optimizer
        self.steps += 1
        self.last_targets = counts.num_targets

    def add_monitored(self, ranks: dict) -> None:
        self.ranks |= ranks

    def add_checkpoint(self, seconds: float) -> None:
        self.checkpoints += seconds

    def row(
        self, state: TrainerState, total_steps: int, lr: float, result: StepResult, world: World, peak: float | None
    ) -> dict:
        """The row of metrics.jsonl after the last step, without `step_loss` and `grad_norm` if that was skipped, and
        without `step_loss` if it had no target.

        peak: FLOP/s of the device, None if unknown.
        """
        has_loss = not result.skipped and self.last_targets > 0
        seconds = max(self.seconds, 1e-9)
        flops = self.flops / seconds / world.size
        row = {
            "step": state.step,
            "total_steps": max(total_steps, state.step),
            "epoch": state.epoch,
            **state.pop_row_loss(),
            **({"step_loss": result.loss} if has_loss else {}),
            **({} if result.skipped else {"grad_norm": result.grad_norm}),
            "learning_rate": lr,
            "tokens": state.tokens,
            "unknown_characters": state.unknown,
            "tokens_per_second": self.tokens / seconds,
            "tokens_per_second_per_gpu": self.computed / seconds / world.size,
            "unpadded_tokens_per_second_per_gpu": self.tokens / seconds / world.size,
            "step_seconds": seconds / self.steps,
            "data_wait_seconds": self.waited / self.steps,
            "forward_backward_seconds": self.forward_backward / self.steps,
            "optimizer_seconds": self.optimizer / self.steps,
            "checkpoint_seconds": self.checkpoints,
            "skipped_steps": state.skipped_steps,
            "tflops_per_device": flops / 1e12,
            "peak_memory_gb": peak_memory_gb(world.device),
        }
        return row | self.ranks | ({"mfu": flops / peak} if peak else {})
