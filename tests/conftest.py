"""Shared fixtures. Tests never reach for the network, and each process computes on one thread (xdist runs several)."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest

import extras  # noqa: F401  (hands its catalogue to the core)
from tests.forked import serve

ROOT = Path(__file__).resolve().parent.parent
# An image holds the code and its tests, not what is around it: no documentation, no scripts of a cluster.
AROUND = ["guides", "ops", "test_afternoon.py", "test_contributing.py"]
AROUND += [f"benchmarks/test_{page}.py" for page in ("compatibility", "sizes", "speedrun")]
AROUND += ["extras/test_migrate.py", "extras/test_migrated_commands.py", "training/test_log_row.py"]
AROUND += [f"test_{page}.py" for page in ("readme", "documents", "diagnosing", "flags", "decoders_page", "packaging")]
AROUND += [f"test_{page}.py" for page in ("reference", "site", "plain_words", "supply_chain")]
collect_ignore = [] if (ROOT / "README.md").exists() else AROUND
REAL_FASTA = ROOT.parent / "shared" / "data" / "uniref90_sample_8k.fasta.gz"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by `./test.sh &` in a script; tests would pass it on
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def real_fasta() -> Path:
    if not REAL_FASTA.exists():
        pytest.skip("the sample of 8,000 UniRef90 proteins is not beside this checkout")
    return REAL_FASTA


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    """processed/arrow with 240 training, 40 validation and 20 test proteins of 40 to 1,000 residues."""
    # Here: the process that has the others run tests, xdist's own, imports no torch.
    from tests.training_fixtures import dataset_of_tests

    return dataset_of_tests(tmp_path_factory.mktemp("proteins"))


@pytest.fixture(scope="session")
def short_run(dataset, tmp_path_factory) -> Path:
    """The output directory of a run of two steps, with a checkpoint and without final_model."""
    from tests.training_fixtures import train

    out = tmp_path_factory.mktemp("short") / "out"
    train(dataset, out, max_steps=2, save_final_model=False)
    return out


@pytest.fixture(scope="session")
def earlier_run(short_run, tmp_path_factory) -> Path:
    """The same with its checkpoint in format 1, as before 0.5."""
    from tests.training.format_1 import to_format_1

    out = Path(shutil.copytree(short_run, tmp_path_factory.mktemp("earlier") / "out"))
    to_format_1(out / "checkpoint-2")
    return out


@pytest.fixture
def rounds(request) -> int | None:
    """Of a soak test: how many kills; None: the short form."""
    return request.config.getoption("--soak-rounds")


@pytest.fixture
def generator(request) -> random.Random:
    """Of a soak test's random moments."""
    return random.Random(request.config.getoption("--soak-seed"))


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None):  # xdist's: this process has workers
        serve()
    else:
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: the garbage collector need not look through it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-rounds", type=int, help="Kills in each soak test (2 and 4); the long form has 30.")
    parser.addoption("--slow", action="store_true", help="Also the tests marked slow or soak.")
    parser.addoption("--soak-seed", type=int, default=0, help="Repeats the moments of a soak test that failed.")


def pytest_make_parametrize_id(config, val, argname: str) -> str | None:
    """Contents of files are no names: gzip's hold the time of day, and xdist's workers would collect other tests."""
    return argname if isinstance(val, bytes) else None


# Files whose tests wait for clusters, engines, torchrun and each other, in parts that take about as long.
WAITING = (
    ("ops/test_slurm", "test_readme", "ops/test_push"),
    ("ops/test_containers", "ops/test_kubernetes_run", "extras/preflight/"),
    (
        *("distributed/", "extras/launch/"),
        *("training/test_soak", "training/test_resume", "training/test_fsdp2_faults", "training/test_trackers"),
    ),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out_slow(config, items)
    order(items)


def leave_out_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Unless they are asked for: by --slow, -m, --soak-rounds, or a test by its name."""
    option = config.option
    if option.slow or option.markexpr or option.soak_rounds or any("::" in argument for argument in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("soak")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        left_out = set(slow)
        items[:] = [item for item in items if item not in left_out]


def order(items: list[pytest.Item]) -> None:
    """Put tests that wait first, each part on its own worker: other workers compute meanwhile.

    The last part comes after some that compute: not all workers wait at once. xdist gives each worker a run of
    neighbours; a worker that has finished steals from the end of another's.
    """
    starts = [tuple(f"tests/{name}" for name in names) for names in WAITING]
    parts: list[list[pytest.Item]] = [[] for _ in starts]
    others = []
    for item in items:
        part = next((part for part, of in zip(parts, starts, strict=True) if item.nodeid.startswith(of)), others)
        part.append(item)
    share = len(items) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = []
    for part in parts:
        filled = max(0, share - len(part))
        first = filled // 2 if part is parts[-1] else 0
        items += others[:first] + part + others[first:filled]
        others = others[filled:]
    items += others
