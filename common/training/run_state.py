"""What a run has done so far, and whether a checkpoint of it fits the run that wants to go on from it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from common.cli import UserError

logger = logging.getLogger(__name__)

# May change between a run and its continuation without a word.
HARMLESS = {"resume_from_checkpoint", "overwrite_output_dir", "stop_at_step", "disable_tqdm"}


@dataclass
class TrainerState:
    """With the weights and the optimiser, all there is to go on from."""

    step: int = 0
    position: dict = field(default_factory=dict)  # in the data, where the next step begins
    packs_per_step: int | None = None
    epoch: float = 0.0
    tokens: int = 0  # real ones: no padding
    sequences: int = 0
    total_flos: float = 0.0
    loss_total: float = 0.0  # sum of the losses of the steps not skipped
    skipped_steps: int = 0  # whose loss or gradient norm was no number: counted in `step`
    skipped_lately: list[str] = field(default_factory=list)  # what those in a row up to now looked like
    seconds: float = 0.0  # spent in steps, over all restarts
    unfinished_row: dict | None = None  # of metrics.jsonl: its evaluation was broken off by a signal
    data: dict = field(default_factory=dict)  # identity of the batch plan
    arguments: dict = field(default_factory=dict)


def plain(arguments: dict) -> dict:
    return {k: v for k, v in arguments.items() if isinstance(v, str | int | float | bool | None)}


def check_same_data(saved: dict, now: dict) -> None:
    """UserError naming what differs, unless a position in the one batch plan is valid in the other."""
    differing = [f"{k} {saved.get(k)!r} (now {v!r})" for k, v in now.items() if saved.get(k) != v]
    differing += [f"{k} {v!r} (now not used)" for k, v in saved.items() if k not in now]
    if differing:
        raise UserError(
            f"the checkpoint stands in another order of batches: {', '.join(differing)}; give the same flags, or "
            "start a new run from its final_model/ with --model_name_or_path and another --output_dir"
        )


def warn_of_changes(saved: dict, now: dict) -> None:
    """Not refused (a user may well want another --save_steps), but said."""
    changed = [f"{k} {saved[k]} -> {now[k]}" for k in saved if k in now and saved[k] != now[k] and k not in HARMLESS]
    if changed:
        logger.warning("Flags differ from those of the checkpoint: %s", ", ".join(changed))
