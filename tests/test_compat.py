"""Private API of other packages: all of it behind common.compat, and there in the versions that are installed."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import warnings
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from common import compat

ROOT = Path(__file__).parent.parent
PACKAGES = ("common", "extras", "benchmarks", "docs", "docker")
OURS = {"common", "extras", "benchmarks", "tests", "docs"}
# Documented although their names begin with an underscore: a named tuple's methods, os._exit, torch's own example of
# an optimiser's and an elastic agent's methods to override.
PUBLIC = {"_replace", "_asdict", "_fields", "_exit", "_init_group", "_start_workers", "_monitor_workers"}
EXEMPT = {"common/compat.py", "common/cli.py"}  # cli.py: argparse's actions, until the parser is no longer patched


@pytest.mark.parametrize("name", compat.NAMES)
def test_compat_resolves_name_with_installed_versions(name):
    if name == "ProfilerEventType" and not torch.profiler.kineto_available():
        pytest.skip("this torch is built without its profiler")
    path, private = compat.NAMES[name]
    try:
        getattr(compat, name)
    except (ImportError, AttributeError):
        pytest.fail(f"torch {torch.__version__} has no {path}.{private}: find what replaced it, for compat.{name}")


def test_compat_import_imports_no_other_package():
    code = "import sys, common; before = set(sys.modules); import common.compat; print(set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "torch" not in done.stdout


def test_compat_refuses_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'something_else'"):
        _ = compat.something_else


def test_compat_storage_key_is_shared_by_views_and_by_no_other_tensor():
    x = torch.zeros(4)
    assert compat.storage_key(x[1:]) == compat.storage_key(x) != compat.storage_key(x.clone())
    assert compat.untyped_storage_key(x.untyped_storage()) == compat.storage_key(x)


def test_compat_stop_loader_workers_ends_every_worker():
    iterator = iter(DataLoader([torch.zeros(1)] * 4, num_workers=2))
    next(iterator)
    workers = list(iterator._workers)
    compat.stop_loader_workers(iterator)
    assert not any(worker.is_alive() for worker in workers)


def test_compat_attributes_exist_on_installed_objects():
    from torch.distributed import distributed_c10d
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    assert hasattr(distributed_c10d, "set_timeout") or hasattr(distributed_c10d, "_set_pg_timeout")
    assert hasattr(DeviceMesh, "_flatten")
    assert hasattr(DynamicRendezvousHandler, "_create_tcp_store_server")
    assert isinstance(compat.dump_flight_recorder(), bytes)
    assert compat.operator_schema(torch.ops.aten.mm.default).name == "aten::mm"
    assert compat.operator_schema(len) is None
    assert compat.frame_of_thread(None) is None


def test_compat_group_timeout_is_set_without_a_word():
    """torch 2.15 warns of the name of before, on every rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings(action="error"):
            compat.set_group_timeout(dist.group.WORLD, timedelta(seconds=77))
        dist.barrier()
    finally:
        dist.destroy_process_group()


# What the installed versions must be among: tests have passed with these (docs/installing.md).
SEEN = {
    "torch": ("2.11", "2.13", "2.15"),
    "transformers": ("5.17", "5.24"),
    "huggingface_hub": ("1.31", "1.33", "2.4"),
}


@pytest.mark.parametrize("name", SEEN)
def test_compat_was_seen_with_the_installed_version(name):
    """A newer one: run the tests with it, add it here and to docs/installing.md, and widen pyproject.toml's range."""
    assert ".".join(version(name).split(".")[:2]) in SEEN[name]


@pytest.mark.skipif(importlib.util.find_spec("megatron_fsdp") is None, reason="megatron-fsdp is not installed")
def test_compat_megatron_names_exist():
    from megatron_fsdp import param_and_grad_buffer

    assert hasattr(param_and_grad_buffer, compat.MEGATRON_COALESCING)
    assert hasattr(param_and_grad_buffer.GradReducePipeline, compat.MEGATRON_GRAD_REDUCE)


def test_private_names_of_other_packages_are_used_in_compat_alone():
    """A name counts as ours if some file of the repository defines or assigns it."""
    files = [*ROOT.glob("*.py"), *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))]
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in files}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    uses = {
        f"{file}:{line}: {name}"
        for file, tree in trees.items()
        if file not in EXEMPT
        for line, name in _private_uses(tree)
        if name not in ours | PUBLIC
    }
    assert not uses, "put these behind a name of common/compat.py"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _defined(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _private_uses(tree: ast.AST):
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] not in OURS:
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        yield from ((node.lineno, name) for name in names if _is_private(name))
