"""Checkpoints that are complete or not there.

`output_dir/checkpoint-<step>/` holds torch.distributed.checkpoint shards under canonical (unwrapped) names, so any
strategy on any number of ranks reads what any other wrote; `trainer_state.json`, what the trainer needs to go on; and
`manifest.json`: format version, the model's fingerprint, every file with its size and CRC-32. All of it is written
under a temporary name, flushed to disk, and renamed last: a directory with the final name is complete.

Saving copies the state and returns; a thread writes it, over a process group of its own. At most one save is under way
(so at most one copy is held), and `close` waits for it: a process that ended sooner would lose the checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from common.cli import UserError
from common.distributed import World

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
NAME = re.compile(r"checkpoint-(\d+)")
# What must agree for a checkpoint to be of the same model; the rest of config.json is free to differ.
FINGERPRINT_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "layer_norm_eps", "token_dropout", "position_embedding_type"),
)


def fingerprint(config) -> dict:
    return {name: getattr(config, name, None) for name in FINGERPRINT_FIELDS}


class Corrupt(Exception):
    """A checkpoint that must not be read, and why."""


class Checkpointer:
    """Saves and restores one run's (model, optimizer, trainer state) under `output_dir`."""

    def __init__(self, output_dir: Path, model: nn.Module, optimizer, config, world: World, args):
        self.output_dir = output_dir
        self.model, self.optimizer = model, optimizer
        self.fingerprint = fingerprint(config)
        self.world = world
        self.keep = args.save_total_limit
        self.background = args.async_save
        # Collectives of the writer thread must not interleave with the training step's.
        self.group = dist.new_group(backend="gloo") if world.size > 1 else None
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def save(self, step: int, trainer_state: dict) -> None:
        """Save now; returns once the state is copied (`async_save`) or written. Raises what the last save raised."""
        self.wait()
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        if not self.background:
            self._write(step, state, trainer_state)
            return self._raise_failure()
        arguments = (step, _copied(state), trainer_state)
        self.thread = threading.Thread(target=self._write, args=arguments, name="checkpoint writer")
        self.thread.start()
        return None

    def wait(self) -> None:
        """Return when no save is under way; raise if it failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self._raise_failure()

    def close(self) -> None:
        """Join the writer without raising: for the way out of a run that has failed already."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _raise_failure(self) -> None:
        # A full disk on one rank ends the run on all, or the others would wait for it in the next step.
        failed = self.world.any(self.failure is not None)
        failure, self.failure = self.failure, None
        if failure is not None:
            raise UserError(
                f"{self.output_dir}: checkpoint not saved: {_reason(failure)}; the last complete one is untouched: "
                "make room (or lower --save_total_limit) and run the same command again"
            ) from failure
        if failed:
            raise UserError(f"{self.output_dir}: checkpoint not saved: another rank failed to write its part")

    def _write(self, step: int, state: dict, trainer_state: dict) -> None:
        partial = self.output_dir / f"tmp-checkpoint-{step}"
        checksums: dict[str, list[int]] = {}

        def prepare() -> None:
            if self.world.is_main:
                for leftover in self.output_dir.glob("tmp-checkpoint-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                partial.mkdir(parents=True)

        def write() -> None:
            writer = dcp.FileSystemWriter(partial, sync_files=True)
            dcp.save(state, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
            checksums.update(self._gather_checksums(partial))

        def finish() -> None:
            if self.world.is_main:
                self._finish(step, partial, checksums, trainer_state)

        try:
            for work in (prepare, write, finish):
                self._together(work)
        except BaseException as error:
            self.failure = error
            if self.world.is_main:
                shutil.rmtree(partial, ignore_errors=True)

    def _together(self, work) -> None:
        """Do `work` on every rank; if it fails on one, raise on all, so that no rank waits for another in vain."""
        failure: BaseException | None = None
        try:
            work()
        except BaseException as error:
            failure = error
        if self.group is not None:
            failed = torch.tensor(int(failure is not None))
            dist.all_reduce(failed, group=self.group)
            if failed and failure is None:
                failure = RuntimeError("another rank failed to write its part")
        if failure is not None:
            raise failure

    def _finish(self, step: int, partial: Path, checksums: dict, trainer_state: dict) -> None:
        final = self.output_dir / f"checkpoint-{step}"
        _write_json(partial / "trainer_state.json", trainer_state)
        files = checksums | {"trainer_state.json": _size_and_crc(partial / "trainer_state.json")}
        manifest = {"format_version": FORMAT_VERSION, "step": step, "model": self.fingerprint, "files": files}
        _write_json(partial / "manifest.json", manifest)
        _flush_directory(partial)
        if final.exists():  # the same step again, after a resume from an older checkpoint
            shutil.rmtree(final)
        partial.rename(final)
        _flush_directory(self.output_dir)
        if self.keep is not None:
            for _, path in list_checkpoints(self.output_dir)[self.keep :]:
                shutil.rmtree(path, ignore_errors=True)
        logger.info("Saved %s", final)

    def _gather_checksums(self, directory: Path) -> dict[str, list[int]]:
        """{file: [bytes, CRC-32]}; each rank reads back its own shards, the main rank the metadata."""
        prefix = f"__{self.world.rank}_"
        mine = [p for p in directory.iterdir() if p.name.startswith(prefix)]
        mine += [directory / ".metadata"] if self.world.is_main else []
        sums = {p.name: _size_and_crc(p) for p in mine}
        if self.group is None:
            return sums
        gathered: list[dict] = [{}] * self.world.size
        dist.all_gather_object(gathered, sums, group=self.group)
        return {name: value for part in gathered for name, value in part.items()}

    def restore(self, where: str | None) -> dict | None:
        """Load `where`, or the newest usable checkpoint of the output directory; returns its trainer state or None.

        Damaged checkpoints are skipped with a warning; a checkpoint of another model is a UserError.
        """
        if where is not None and where.lower() in ("false", "no", "none", "0"):
            return None
        with self.world.main_does() as mine:
            path = self._choose(where) if mine else None
        path = self.world.share(path)
        if path is None:
            return None
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=self.world.size == 1)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return json.loads((path / "trainer_state.json").read_text())

    def _choose(self, where: str | None) -> Path | None:
        if where is not None and where.lower() not in ("true", "yes", "1"):
            path = Path(where)
            try:
                verify(path, self.fingerprint)
            except Corrupt as damage:
                raise UserError(f"--resume_from_checkpoint {path}: {damage}") from damage
            return path
        for _, path in list_checkpoints(self.output_dir):
            try:
                verify(path, self.fingerprint)
                return path
            except Corrupt as damage:
                logger.warning("%s: skipped: %s", path, damage)
        return None


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, directory), newest first."""
    found = [(m, p) for p in output_dir.glob("checkpoint-*") if (m := NAME.fullmatch(p.name)) and p.is_dir()]
    return sorted(((int(m[1]), p) for m, p in found), reverse=True)


def verify(path: Path, expected: dict) -> None:
    """Raise Corrupt unless every file is there with its size and checksum; UserError if of another model."""
    if not path.is_dir():
        raise Corrupt("no such directory")
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        model, files = manifest["model"], manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        raise Corrupt("not a checkpoint of this program, or torn: no readable manifest.json") from error
    if manifest.get("format_version") != FORMAT_VERSION:
        raise Corrupt(f"format {manifest.get('format_version')}, this program reads {FORMAT_VERSION}")
    differing = [f"{k} {model.get(k)!r} (now {v!r})" for k, v in expected.items() if model.get(k) != v]
    if differing:
        raise UserError(
            f"{path}: the checkpoint is of another model: {', '.join(differing)}; choose another --output_dir, "
            "or --overwrite_output_dir"
        )
    for name, recorded in files.items():
        try:
            found = _size_and_crc(path / name)
        except OSError as error:
            raise Corrupt(f"{name} is missing") from error
        if found != recorded:
            raise Corrupt(f"{name} is damaged ({found[0]} bytes, {recorded[0]} written, or checksum differs)")


def _copied(state):
    """A copy in host memory that later optimiser steps cannot change."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_copied(value) for value in state)
    return state


def _size_and_crc(path: Path) -> list[int]:
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def _write_json(path: Path, value: dict) -> None:
    with open(path, "w") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """The innermost cause in one line: DCP wraps a full disk in an exception that lists every rank's stack."""
    causes = getattr(error, "failures", None)
    if causes:
        first = next(iter(causes.values()))
        error = first[0] if isinstance(first, tuple) else first
    return " ".join(str(error).split())[:200] or type(error).__name__
