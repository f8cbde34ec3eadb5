"""Whole command lines by Transformer Engine's Python, on ranks of a CPU that say they have a GPU each."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from tests import megatron_on_cpu
from tests.decoder_fixtures import decoder_flags
from tests.forked import ROOT
from tests.te_on_cpu import boot
from tests.training_fixtures import flags_of, on_ranks

HOPPER, BLACKWELL = (9, 0), (10, 0)


def train_by_te(
    dataset_dir: Path | None,
    output_dir: Path,
    nproc: int = 1,
    script: str = "train_ddp.py",
    capability: tuple[int, int] = HOPPER,
    expect: int = 0,
    before: Callable[[], None] | None = None,
    **flags,
) -> str:
    """The run of `tests.training_fixtures.train` with --backend te and --bf16; what rank 0 said.

    before: called on each rank, first.
    """
    flags = {"backend": "te", "bf16": True, "max_steps": 3} | flags
    return _run(nproc, flags_of(dataset_dir, output_dir, **flags), script, capability, expect, before)


def train_decoder_by_te(
    text: Path,
    output_dir: Path,
    nproc: int = 1,
    script: str = "train_fsdp2.py",
    capability: tuple[int, int] = HOPPER,
    expect: int = 0,
    **flags,
) -> str:
    """The same of `tests.decoder_fixtures.train_decoder`."""
    flags = {"backend": "te", "bf16": 1} | flags
    return _run(nproc, decoder_flags(text, output_dir, **flags), script, capability, expect)


def _run(
    nproc: int,
    argv: list[str],
    script: str,
    capability: tuple[int, int],
    expect: int = 0,
    before: Callable[[], None] | None = None,
) -> str:
    codes, said = on_ranks(nproc, _main, argv, script, capability, before)
    assert codes == [expect] * nproc, f"exit codes {codes}\n" + "\n".join(said)
    return said[0]


def _main(argv: list[str], script: str, capability: tuple[int, int], before: Callable[[], None] | None) -> None:
    boot.start(capability, attention=script == "train_ddp_cp.py")
    if script == "train_mfsdp.py":
        megatron_on_cpu.exchange_by_gloo()
    if before is not None:
        before()
    sys.argv = [script, *argv]
    runpy.run_path(str(ROOT / script), run_name="__main__")
