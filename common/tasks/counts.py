"""What a step's micro-batches hold, whatever the task."""

from __future__ import annotations

from typing import NamedTuple


class StepCounts(NamedTuple):
    """What micro-batches hold (`Counts`), and on how many tokens, fillers included, the layers run for them."""

    num_masked: int
    num_tokens: int
    sum_squared_lengths: int
    num_sequences: int
    num_unknown: int
    num_computed: int
