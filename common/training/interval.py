"""What is summed between two rows of metrics.jsonl, and the row."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.data.loader import StepCounts
from common.distributed.world import World
from common.training.progress import StepResult, TrainerState
from common.training.run_logger import peak_memory_gb


@dataclass(frozen=True)
class StepRecord:
    """What is known of a step once it is taken. counts: of the global batch; flops: of it, forward and backward;
    seconds: of the step, with those `waited` for batches; ranks: as `StepMonitor.after_step`."""

    counts: StepCounts
    result: StepResult
    flops: float
    seconds: float
    waited: float
    learning_rate: float
    ranks: dict


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
    ranks: dict = field(default_factory=dict)  # the last comparison of the ranks (step_monitor.py)

    def add(self, step: StepRecord) -> None:
        self.tokens += step.counts.num_tokens
        self.computed += step.counts.num_computed
        self.flops += step.flops
        self.seconds += step.seconds
        self.waited += step.waited
        self.forward_backward += step.result.forward_backward
        self.optimizer += step.result.optimizer
        self.steps += 1
        self.ranks |= step.ranks

    def add_checkpoint(self, seconds: float) -> None:
        self.checkpoints += seconds

    def row(self, state: TrainerState, total_steps: int, last: StepRecord, world: World, peak: float | None) -> dict:
        """The row of metrics.jsonl after the last step, without `step_loss` and `grad_norm` if that was skipped, and
        without `step_loss` if it had no target.

        peak: FLOP/s of the device, None if unknown. Resets the sums.
        """
        result = last.result
        has_loss = not result.skipped and last.counts.num_targets > 0
        seconds = max(self.seconds, 1e-9)
        flops = self.flops / seconds / world.size
        row = {
            "step": state.step,
            "total_steps": max(total_steps, state.step),
            "epoch": state.epoch,
            **state.pop_row_loss(),
            **({"step_loss": result.loss} if has_loss else {}),
            **({} if result.skipped else {"grad_norm": result.grad_norm}),
            "learning_rate": last.learning_rate,
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
        row |= self.ranks | ({"mfu": flops / peak} if peak else {})
        vars(self).update(vars(Interval()))
        return row
