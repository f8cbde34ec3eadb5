"""--torch_compile: each layer is one graph, whatever the strategy; a graph that is cut cannot fuse across the cut."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

from tests.decoder_fixtures import decoder_flags, train_decoder, write_text
from tests.training_fixtures import TINY_OVERRIDES, _main, flags_of, losses, on_ranks, train

# Layers of 3 MB: more than one of DDP's buckets, at whose borders torch cuts graphs unless told not to.
WIDE = TINY_OVERRIDES.replace("=32", "=256").replace("=64", "=1024")
FLAGS = {"config_overrides": WIDE, "max_steps": 2, "packs_per_step": 4, "tokens_per_pack": 128}
SMALL_BUCKETS = {"ddp_bucket_cap_mb": 1}


def _list_graphs(argv: list[str], script: str) -> None:
    """On a rank: a run of the script, then "graphs" and for each graph that went to the compiler "FRAME/VERSION".

    FRAME: the code it was traced from; VERSION: counts its recompilations.
    """
    graphs = []

    def compiler(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(torch._guards.CompileContext.current_compile_id())
        return graph.forward

    _main(argv, script, compiler)
    print("graphs", *graphs)


def hold_one_graph(argv: list[str], script: str) -> None:
    """On two ranks, each layer of the run is one graph. All layers share it: they differ in their weights alone."""
    codes, said = on_ranks(2, _list_graphs, argv, script)
    assert codes == [0, 0], "\n".join(said)
    for rank in said:
        graphs = rank.splitlines()[-1].split()[1:]
        assert len(graphs) == len(set(graphs)), f"one trace, several graphs: {graphs}"
        assert len({graph.split("/")[0] for graph in graphs}) == 1, graphs


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory) -> list[float]:
    """The losses of one process, not compiled."""
    out = tmp_path_factory.mktemp("alone")
    train(dataset, out, **FLAGS)
    return losses(out)


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_ddp.py", SMALL_BUCKETS),
        pytest.param("train_ddp_cp.py", SMALL_BUCKETS, marks=pytest.mark.slow),
        pytest.param(
            "train_ddp_cp.py", {"cp_comm_type": "all_gather", "gradient_checkpointing": True}, marks=pytest.mark.slow
        ),
        pytest.param("train_fsdp2.py", {}, marks=pytest.mark.slow),
        pytest.param("train_mfsdp.py", {"activation_checkpointing": "full"}, marks=pytest.mark.slow),
    ],
)
def test_compiled_layer_is_one_graph_on_two_ranks(dataset, tmp_path, alone, script, flags):
    if script == "train_mfsdp.py" and find_spec("megatron_fsdp") is None:
        pytest.skip("megatron-fsdp is not installed")
    hold_one_graph(flags_of(dataset, tmp_path, **FLAGS, torch_compile=True, **flags), script)
    assert losses(tmp_path) == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags"), [("train_fsdp2.py", {}), ("train_ddp_cp.py", {"cp_comm_type": "all_gather"})]
)
def test_compiled_decoder_layer_of_shared_documents_is_one_graph(tmp_path, script, flags):
    """Whichever of its two chunks of a document a rank attends with: the operator in the graph decides."""
    text, documents = write_text(tmp_path / "text"), {"document_masks": 1, "max_steps": 2, "save_final_model": False}
    train_decoder(text, tmp_path / "alone", **documents)
    shared = decoder_flags(text, tmp_path / "shared", cp_size=2, torch_compile=True, **documents, **flags)
    hold_one_graph(shared, script)
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
