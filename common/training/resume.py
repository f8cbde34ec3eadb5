"""Decide once, before the model is built, which checkpoint a run resumes from and what that checkpoint fixes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.checkpoint.checkpointer import CheckpointFlags
from common.checkpoint.files import (
    MANIFEST,
    TRAINER_STATE,
    check_nothing_was_completed,
    damage_of,
    newest_usable,
    read_listed,
    read_manifest,
)
from common.cli import UserError
from common.data.training_data import TrainingData
from common.distributed.world import World
from common.files.runs import list_checkpoints
from common.models.layers.backend import BACKENDS, KEPT_ON_RESUME
from common.training.same_run import check_same_data, check_same_model, check_same_objective, check_same_start
from common.training.trainer_state import TrainerState


@dataclass(frozen=True)
class ResumePlan:
    """The checkpoint a run resumes from: a directory, or a state in memory; None to start at step 0.

    model: the fingerprint in the checkpoint's manifest; state: its trainer state, or a new one; restarted: this is a
    restart of the very job that wrote the output directory last.
    """

    checkpoint: Path | Any = None
    model: dict = field(default_factory=dict)
    state: TrainerState = field(default_factory=TrainerState)
    restarted: bool = False

    @property
    def implementation(self) -> dict[str, str]:
        """{name in KEPT_ON_RESUME: what the run has used so far}; {} for a new run or where none is recorded."""
        saved = self.state.arguments
        return {k: str(saved.get(k)) for k in KEPT_ON_RESUME} if saved.get("backend") in BACKENDS else {}

    def check(
        self, fingerprint: dict, data: TrainingData, weights: str | None, optim: str, output_dir: str, objective: str
    ) -> None:
        """UserError if the checkpoint is of another model, data, initial weights, optimiser or objective. No
        collective.

        fingerprint: of the model; the others: of the run, --model_name_or_path, --optim, --output_dir, --objective.
        """
        if self.checkpoint is not None:
            check_same_objective(self.state.arguments, objective, output_dir)
            check_same_model(self.checkpoint, self.model, fingerprint)
            check_same_start(self.state.arguments, weights, optim, output_dir)
            self.state.enter_extended(data)
            check_same_data(self.state.data, data.identity)


def plan_resume(flags: CheckpointFlags, trains: bool, restarted: bool, world: World, memory: Any = None) -> ResumePlan:
    """Choose and verify the checkpoint to resume from; all ranks together, with the output directory locked.

    A restarted job resumes from its own newest checkpoint, whatever its flags say, or from its newest state in memory
    (extras.launch.memory_checkpoints) if that is not older. UserError: the checkpoint
    asked for is damaged, none of several is whole, none is left of an earlier run, or the trainer state is refused.
    """
    output_dir = Path(flags.output_dir)
    overwrite = flags.overwrite_output_dir and trains and not restarted
    if restarted and memory and (found := memory.newest()):
        on_disk = world.broadcast_object(max((step for step, _ in list_checkpoints(output_dir)), default=0))
        if found.step >= on_disk:
            return ResumePlan(found, found.model, found.state, restarted)
    request: str | bool = False
    with world.on_main_rank() as is_main:
        if is_main:
            chosen = requested_checkpoint(flags.resume_from_checkpoint, output_dir, restarted)
            if overwrite and chosen is True:
                chosen = False
            if overwrite and isinstance(chosen, Path) and chosen.resolve().parent == output_dir.resolve():
                raise UserError(
                    f"--resume_from_checkpoint {chosen}: --overwrite_output_dir would remove it: drop one of the two"
                )
            request = chosen if isinstance(chosen, bool) else str(chosen)
    request = world.broadcast_object(request)
    checkpoint = None
    if request is True:
        checkpoint = newest_usable(output_dir, world)
        with world.on_main_rank() as is_main:
            if is_main and checkpoint is None and trains:
                check_nothing_was_completed(output_dir)
    elif request:
        checkpoint = Path(request)
        if damage := damage_of(checkpoint, world):
            world.raise_on_all(UserError(f"--resume_from_checkpoint {checkpoint}: {damage}"))
    if checkpoint is None:
        return ResumePlan(restarted=restarted)
    with world.raise_together():
        model = read_manifest(checkpoint).model
        state = read_state(checkpoint)
    return ResumePlan(checkpoint, model, state, restarted)


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer state of a checkpoint. UserError if it is refused."""
    return TrainerState.read(
        read_listed(checkpoint, TRAINER_STATE), f"{checkpoint.parent}: the checkpoint's {TRAINER_STATE}"
    )


def requested_checkpoint(flag: str | None, output_dir: Path, restarted: bool) -> bool | Path:
    """--resume_from_checkpoint: True for the newest checkpoint of the output directory, False for none, or a path.

    The output directory itself means its newest checkpoint, also before it exists; another directory of checkpoints
    means the newest in there.
    """
    if restarted and list_checkpoints(output_dir):
        return True
    text = flag or "true"
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "none": False, "0": False}
    if text.lower() in words:
        return words[text.lower()]
    path = Path(text)
    if path.resolve() == output_dir.resolve():
        return True
    inside = [] if (path / MANIFEST).exists() else list_checkpoints(path)
    return inside[0][1] if inside else path
