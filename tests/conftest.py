"""Shared fixtures. Tests never reach for the network, and each process computes on one thread (xdist runs several)."""

from __future__ import annotations

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import torch

from tests.training_fixtures import dataset  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
# An image holds the code and its tests, not what is around it: no documentation, no scripts of a cluster.
AROUND = ["ops", "test_readme.py", "test_diagnosing.py", "test_flags.py"]
collect_ignore = [] if (ROOT / "README.md").exists() else AROUND
REAL_FASTA = ROOT.parent / "shared" / "data" / "uniref90_sample_8k.fasta.gz"

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by `./test.sh &` in a script; tests would pass it on
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def real_fasta() -> Path:
    if not REAL_FASTA.exists():
        pytest.skip("the sample of 8,000 UniRef90 proteins is not beside this checkout")
    return REAL_FASTA


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-rounds", type=int, help="Kills in each soak test (2 and 4); the long form has 30.")
    parser.addoption("--soak-seed", type=int, default=0, help="Repeats the moments of a soak test that failed.")


def pytest_make_parametrize_id(config, val, argname: str) -> str | None:
    """Contents of files are no names: gzip's hold the time of day, and xdist's workers would collect other tests."""
    return argname if isinstance(val, bytes) else None


# Files whose tests wait for clusters, engines and torchrun: begun first, they leave no tail of their own.
LONG = (
    *("ops/test_slurm", "ops/test_containers", "ops/test_kubernetes_run", "ops/test_push", "test_readme"),
    *("training/test_soak", "training/test_resume", "training/test_fsdp2_faults", "ranks/", "preflight/"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(tuple(f"tests/{name}" for name in LONG)))
