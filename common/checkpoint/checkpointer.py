"""Save and restore checkpoints: complete, or absent.

`output_dir/checkpoint-<step>/` holds a safetensors file of each rank, with tensors under canonical (unwrapped) names,
so any strategy on any number of ranks loads what any other saved; `metadata.json`, which says where each part of a
tensor lies; `trainer_state.json`; `config.json`, which with the weights makes a model (extras/export.py); and
`manifest.json`: format version, the model's fingerprint, these files with size and CRC-32.
With --save_hf it also holds the files of transformers' `save_pretrained`, which a resume does not read. All of it is
written to a temporary directory, flushed to disk, and renamed last.

`save` copies the state to host memory (pinned_stager) and returns; a thread writes the copy, over its own process
group. At most one save, hence one copy, is in flight. Leaving the context waits for it: a process that exited before
would lose the checkpoint.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from common.checkpoint import files
from common.checkpoint.files import CONFIG, TRAINER_STATE, reason_of
from common.checkpoint.pinned_stager import PinnedStager, share_of
from common.checkpoint.writer import METADATA, Writer, shard_name
from common.cli import INTERRUPTED, UserError
from common.distributed.process_group import exit_if_peer_lost, is_peer_lost
from common.distributed.world import PeerFailed, World
from common.files.safe_files import size_and_crc, sync_directory, write_json_flushed
from common.flags import Flags, Missing, flag
from common.hooks import extra

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointFlags(Flags):
    group = "checkpoints"
    required = ("output_dir",)
    unlisted = ("save_hf", "async_save", "memory_save_steps")

    output_dir: str = flag("", "Where checkpoints, metrics and final_model/ go; a new one for each run.")
    overwrite_output_dir: bool = flag(
        False, "To begin again: remove an earlier run's files, start at step 0 (a restart of this very job resumes)."
    )
    save_steps: float = flag(
        500, "Steps between checkpoints (below 1: a fraction of the run). Lower it if jobs are killed."
    )
    save_minutes: float | None = flag(None, "To lose no more than this: save also when so many minutes have passed.")
    memory_save_steps: int | None = flag(
        None,
        "Steps between copies of the state in memory, from which restarts of extras.launch resume; 0: none. Default: "
        "so many that they cost below 2 % of the time.",
    )
    save_total_limit: int = flag(
        3, "Keep the newest N checkpoints, and the best (--load_best_model_at_end); 0: all. Lower it for small disks."
    )
    async_save: bool = flag(True, "Write checkpoints in the background.")
    save_hf: bool = flag(False, "Each checkpoint also holds model.safetensors, for transformers' from_pretrained.")
    resume_from_checkpoint: str | None = flag(
        None,
        "To resume from elsewhere: a checkpoint, or a directory of them (its newest); `false`: none. Default: that "
        "of --output_dir.",
    )

    def missing(self) -> Iterator[Missing]:
        if not self.output_dir:
            yield Missing("--output_dir", "where the results go", "out")

    def check(self) -> None:
        self.require_at_least(0, "save_total_limit", "memory_save_steps")
        self.require_above(0, "save_steps", "save_minutes")


class SaveSchedule:
    """When to save: every N steps, and every --save_minutes. step: the one that the run starts from."""

    def __init__(self, steps: int, minutes: float | None, step: int):
        self.steps, self.minutes, self.saved_step, self.saved_at = steps, minutes, step, time.monotonic()

    def is_due_by_clock(self) -> bool:
        """On rank 0, which decides for all."""
        return self.minutes is not None and time.monotonic() - self.saved_at >= 60 * self.minutes

    def is_due(self, step: int, skipped: bool, requested: bool) -> bool:
        """skipped: whether the last step was; requested: by rank 0's clock."""
        if skipped:  # the weights may be bad: do not let them replace good checkpoints
            return False
        return requested or step // self.steps > self.saved_step // self.steps

    def mark_saved(self, step: int) -> None:
        self.saved_step, self.saved_at = step, time.monotonic()


class Checkpointer:
    """Saves and restores one run's (model, optimizer, trainer state) under --output_dir. Methods are collective.

    scales: FP8 scales of --fp8_recipe delayed, replicated on all ranks and restored in place; extras: tensors of the
    initial weights that are exported again but not trained; dcp_state: `Strategy.dcp_state`; tokenizer: of text, for
    --save_hf.
    """

    def __init__(
        self,
        flags: CheckpointFlags,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config,
        world: World,
        timeout_s: float,
        scales: dict[str, torch.Tensor] | None = None,
        extras: dict[str, torch.Tensor] | None = None,
        dcp_state: Callable[[dict, bool], dict] = lambda state, saving: state,
        tokenizer: Any = None,
    ):
        self.flags, self.output_dir = flags, Path(flags.output_dir)
        self.model, self.optimizer = model, optimizer
        self.scales = scales or {}
        self.extras = {"extras": extras} if extras else {}
        self.config, self.fingerprint = config, config.fingerprint() | getattr(model, "lora", {})
        self.world, self.dcp_state, self.tokenizer = world, dcp_state, tokenizer
        self.stager = PinnedStager(world.device, optimizer, in_passes=bool(self.scales))
        # The writer thread's collectives must not interleave with those of the training step.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup), "all ranks are in it"
        self.group = group
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None  # of the save in flight, to be raised on all ranks

    # ---- saving ---------------------------------------------------------------------------------------------

    def save(self, step: int, trainer_state: dict) -> None:
        """Return once the state is copied (`async_save`) or written. Raises the previous save's error, if any."""
        self.wait()
        state = self.state()
        if not self.flags.async_save:
            self._write(step, self.dcp_state(state, True), trainer_state)
            return self._raise_failure()
        with self.world.raise_together():
            copies = self.stager.stage(share_of(state, self.world.rank, self.world.size))
        arguments = (step, self.dcp_state(copies, True), trainer_state)
        self.thread = threading.Thread(target=self._write, args=arguments, name="checkpoint writer")
        self.thread.start()
        return None

    def state(self) -> dict:
        """The tensors of a checkpoint, as they are: {"model": {name: ...}, "optimizer": {"state": ...}, ...}."""
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        moments = {"state": optimizer_state["state"]}  # no hyperparameters: flags and schedule give them
        return {"model": _canonical(model_state), "optimizer": moments} | self._scales() | self.extras

    def wait(self) -> None:
        """Wait for the save in flight; raise on every rank if it failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self._raise_failure()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind, error: BaseException | None, stack) -> None:
        """Join the writer without raising, also when the run has failed. Not collective.

        If the process group is broken (NCCL only reports a failure), the writer may be stuck in a collective: then it
        is not joined.
        """
        if self.thread is None or is_peer_lost(error) or isinstance(error, dist.DistError):
            return
        try:
            self.thread.join()
        except KeyboardInterrupt:
            # A second Ctrl-C, during the last save. A normal exit would destroy the process group under the writer
            # and abort.
            os._exit(INTERRUPTED)
        self.thread = None

    def _raise_failure(self) -> None:
        # An error on one rank ends the run on all: the others would wait for it in the next step.
        failure, self.failure = self.failure, None
        self.world.raise_on_all(failure)

    def _write(self, step: int, state: dict, trainer_state: dict) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)  # per thread; the default would allocate on GPU 0
        partial = self.output_dir / f"{files.PARTIAL}{step}"
        is_main, raise_together = self.world.is_main, self.world.raise_together
        try:
            self.stager.wait()
            with raise_together(self.group):
                if is_main:
                    files.clear_partial(self.output_dir)
                    partial.mkdir(parents=True)
            dcp.save(state, storage_writer=Writer(partial), process_group=self.group)  # raises on all ranks if on one
            with raise_together(self.group):
                checksums = self._checksums(partial)
            gathered = self.world.gather_to_main(checksums, self.group)
            checksums = {name: value for part in gathered for name, value in part.items()}
            with raise_together(self.group):
                if is_main:
                    self._finish(step, partial, checksums, trainer_state)
        except (Exception, CheckpointException) as error:  # DCP's derives from BaseException
            exit_if_peer_lost(self.world, error)
            self.failure = error if isinstance(error, PeerFailed | UserError) else self._not_saved(error)
            shutil.rmtree(partial, ignore_errors=True)  # on every rank: nodes may not share a disk

    def _not_saved(self, error: BaseException) -> UserError:
        """The error of a failed save."""
        failure = UserError(
            f"{self.output_dir}: checkpoint not saved: {reason_of(error)}; the last complete one is untouched: free "
            "disk space (or lower --save_total_limit) and run the same command again"
        )
        failure.__cause__ = error
        return failure

    def _finish(self, step: int, partial: Path, checksums: dict, trainer_state: dict) -> None:
        final = self.output_dir / f"checkpoint-{step}"
        files.wait_for_shards(partial, checksums)
        write_json_flushed(partial / TRAINER_STATE, trainer_state, sort_keys=False)
        write_json_flushed(partial / CONFIG, self.config.content(), sort_keys=True)
        self._write_manifest(step, partial, checksums)
        if self.flags.save_hf:
            extra().add_model(partial, self.tokenizer)
            self._write_manifest(step, partial, checksums)  # config.json is another
        sync_directory(partial)
        partial.rename(final)
        (self.output_dir / files.SAVED).touch()
        sync_directory(self.output_dir)
        if self.flags.save_total_limit:
            files.prune(self.output_dir, step, self.flags.save_total_limit, trainer_state.get("best_global_step"))
        logger.info("Saved %s", final)

    def _write_manifest(self, step: int, partial: Path, checksums: dict) -> None:
        contents = checksums | {name: size_and_crc(partial / name) for name in (TRAINER_STATE, CONFIG)}
        manifest = {"format_version": files.FORMAT_VERSION, "step": step, "model": self.fingerprint, "files": contents}
        write_json_flushed(partial / files.MANIFEST, manifest, sort_keys=False)

    def _checksums(self, directory: Path) -> dict[str, list[int]]:
        """{file: [bytes, CRC-32]} of this rank's shard, read back; on the main rank also of the metadata."""
        names = [shard_name(self.world.rank), *([METADATA] if self.world.is_main else [])]
        return {name: size_and_crc(directory / name) for name in names}

    # ---- restoring ------------------------------------------------------------------------------------------

    def load(self, path: Path | Any) -> None:
        """Load model, optimizer and scales from a whole checkpoint of this model, of any strategy and world size.

        path: its directory, or a state in memory (extras.launch.memory_checkpoints).
        """
        from common.checkpoint.reader import open_checkpoint  # only a resumed run reads one

        # torch makes an optimiser's state, for the checkpoint's to go to, only while it has none and no parameter has
        # a gradient, and takes those that it makes away: `Strategy.keep_gradients` needs them back. After a step the
        # state may lack parameters of which this rank has no rows.
        self.optimizer.state.clear()
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with self.world.raise_together():
            reader = open_checkpoint(path) if isinstance(path, Path) else path.reader(self.group)
            scales = self._scales(reader.metadata.state_dict_metadata)
        moments = {"state": optimizer_state["state"]}
        state = self.dcp_state({"model": _canonical(model_state), "optimizer": moments} | scales, False)
        try:
            dcp.load(state, storage_reader=reader, process_group=self.group)
        except CheckpointException as error:  # on all ranks
            self.world.raise_on_all(UserError(f"{path}: cannot be read: {reason_of(error)}"))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=model_state | state["model"],
            optim_state_dict=optimizer_state | state["optimizer"],
        )

    def _scales(self, saved: dict | None = None) -> dict:
        """The FP8 scales of a state to save, or of one to restore: {} if its metadata, `saved`, have none."""
        if saved is not None and not self.scales and any(name.startswith("scales.") for name in saved):
            logger.info("The checkpoint's FP8 scales are ignored: this run does not use delayed scaling")
        if saved is None or not self.scales:
            return {"scales": self.scales} if self.scales else {}
        for name, tensor in self.scales.items():
            stored = saved.get(f"scales.{name}")
            if stored is None:
                logger.warning("The checkpoint has no FP8 scales: they start at 1")
                return {}
            if stored.size != tensor.shape:
                raise UserError(
                    f"--fp8_recipe_kwargs: the checkpoint's {name} has the shape {list(stored.size)}, not "
                    f"{list(tensor.shape)}: give the same amax_history_len"
                )
        return {"scales": self.scales}

    def begin(self, step: int) -> None:
        """Before training from `step`: remove unfinished checkpoints and set aside those beyond `step`."""
        with self.world.on_main_rank() as is_main:
            if is_main:
                files.clear_partial(self.output_dir)
                files.set_aside_beyond(self.output_dir, step)
                if step == 0:
                    (self.output_dir / files.SAVED).unlink(missing_ok=True)


def _canonical(model_state: dict) -> dict:
    """Drop Transformer Engine's `_extra_state`: pickles of what `scales` holds."""
    return {name: value for name, value in model_state.items() if not name.endswith("_extra_state")}
