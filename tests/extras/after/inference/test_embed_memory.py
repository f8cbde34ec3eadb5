"""What embed.py and score.py import, and what `embed` keeps while it runs."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from extras.after.inference.encoder import Encoder, EncoderFlags, embed
from tests.conftest import ROOT
from tests.data_fixtures import numbered, write_fasta
from tests.extras.after.inference.embed_fixtures import make_model
from tests.training_fixtures import environment

HEAVY = "datasets matplotlib pandas scipy sklearn sympy torch._dynamo torch.distributed.tensor transformers"
IMPORTED = f"""
import atexit, runpy, sys
import torch, pyarrow.compute, pyarrow.parquet  # what these import in their own right does not count
before = set(sys.modules)
atexit.register(lambda: print("imported:", *sorted({{*sys.modules}} - before & {{*{HEAVY.split()!r}}})))
sys.argv = sys.argv[1:]
sys.path.insert(0, "")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("flags", [(), ("--bf16", "--per_residue", "--repr_layers", "0", "1")])
def test_embed_imports_no_heavy_package(model, tmp_path, flags):
    """Each takes as long as everything else that a small run does, and tens of MB; half of a run was theirs."""
    proteins = write_fasta(tmp_path / "my.fasta", numbered(3))
    words = ("embed.py", "--model_name_or_path", model, "--fasta", proteins, "--output_dir", tmp_path, "--use_cpu")
    command = [sys.executable, "-c", IMPORTED, *map(str, words), *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"


def live_bytes() -> int:
    """Of all storages that tensors of this process have."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("pooling", ["mean", "max", "cls", None])
def test_memory_of_embed_grows_with_residues_only_without_a_pooling(model, pooling):
    """Windows of a long protein among them, which are kept until its last one is done."""
    encoder = Encoder(EncoderFlags(str(model), max_seq_length=64, tokens_per_pack=256, use_cpu=True))

    def peak(count: int) -> int:
        found = [0]
        proteins = [("long", b"MKVLAH" * 30), *[("short", b"MKVLAHWT" * 5)] * count]
        before = live_bytes()
        embedded = embed(encoder, proteins, lambda _: found.append(live_bytes() - before), pooling)
        assert len(embedded) == len(proteins)
        assert len(found) > count // 6
        return max(found)

    states = 32 * 4  # bytes a residue
    grown = peak(126) - peak(6)
    if pooling is None:
        assert grown >= 100 * 40 * states
    else:
        assert grown <= 130 * states  # the vectors themselves
