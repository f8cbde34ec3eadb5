"""Where compiled code is kept, and which layers are recorded as CUDA graphs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from common.cli import UserError
from common.distributed.strategy import ReplicaFlags
from common.distributed.world import World
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.models.layers import cpu
from common.models.layers.compiling import CACHE, cache_by_cpu, check_cuda_graphs, compile_layers
from tests.models.reference import packed, random_batch


def test_cache_by_cpu_separates_kinds_of_cpu(monkeypatch, tmp_path):
    """It was found, and computed NaN, where two kinds share a directory."""
    places = []
    for capability in ("AVX2", "AVX512", "AVX2"):
        monkeypatch.setenv(CACHE, str(tmp_path))
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        for _ in range(2):
            cache_by_cpu()
        places.append(Path(os.environ[CACHE]))
    assert [place.parent for place in places] == [tmp_path] * 3
    assert places[0] == places[2] != places[1]


def test_cache_by_cpu_separates_operator_versions(monkeypatch, tmp_path):
    """It was, and failed at the first step after an update: torch knows them by name alone."""
    places = []
    for version in ("one", "other", "one"):
        monkeypatch.setenv(CACHE, str(tmp_path))
        (tmp_path / "cpu.py").write_text(version)
        monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
        cache_by_cpu()
        places.append(os.environ[CACHE])
    assert places[0] == places[2] != places[1]


RECORDED = {"device": "cuda", "cp_size": 1, "backend": "torch"}
RECORDED |= {"compiled": True, "static_shape": True, "quantised": False, "bf16": True}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"device": "cpu"}, "a CPU has none"),
        ({"backend": "hf"}, "--backend hf has none: choose --backend torch or te"),
        ({"backend": "te", "compiled": False}, None),
        ({"backend": "te", "bf16": False}, "--backend te records layers in bf16: add --bf16"),
        ({"compiled": False}, "not compiled have none: drop --torch_compile False"),
        ({"static_shape": False}, "no single shape: drop --pad_to_max_length"),
        ({"cp_size": 2}, "with --cp_size .*: drop one of the two"),
        ({"quantised": True}, "drop --fp8, --fp4, or the flag"),
    ],
    ids=str,
)
def test_cuda_graphs_are_refused_where_nothing_holds_them(changed, said):
    case = RECORDED | changed
    world = World(0, 0, 2, torch.device(case.pop("device")), cp_size=case.pop("cp_size"))
    if said is None:
        check_cuda_graphs(world, **case)
    else:
        with pytest.raises(UserError, match=f"--cuda_graphs: .*{said}"):
            check_cuda_graphs(world, **case)


def test_cuda_graphs_exclude_recomputation():
    assert ReplicaFlags(cuda_graphs=True).replays_layers
    with pytest.raises(UserError, match="--cuda_graphs: .*drop it, or --gradient_checkpointing"):
        ReplicaFlags(cuda_graphs=True, gradient_checkpointing=True).check()


def test_cuda_graphs_reach_the_compiler():
    """With the name that Inductor knows, and each pass marked for its graphs' memory."""
    from torch._inductor.cudagraph_trees import MarkStepBox

    torch._dynamo.reset()
    given = []

    def compiler(graph: torch.fx.GraphModule, inputs: list, options: dict):
        given.append(options)
        return graph.forward

    pack = packed(random_batch([64, 64]))
    model, other = (build_model(esm2_config(1, 64, 4), seed=1) for _ in range(2))
    compile_layers(model, "cuda", compiler, static_shape=True, cuda_graphs=True)
    before = MarkStepBox.mark_step_counter
    for _ in range(3):
        model(**pack)
    assert given == [{"triton.cudagraphs": True}]
    assert abs(MarkStepBox.mark_step_counter - before) == 3
    compile_layers(other, "cuda", static_shape=True, cuda_graphs=True)  # Inductor refuses unknown options
    torch._dynamo.reset()
