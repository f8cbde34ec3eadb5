"""--quant_stats with Transformer Engine: the rows are those of the emulation, tensor by tensor and run by run."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from common.distributed.world import World
from common.files.safe_files import read_json_lines
from extras.formats.fp8_block import BlockScaling
from extras.formats.fp8_current import CurrentScaling
from extras.formats.fp8_delayed import DelayedScaling
from extras.formats.mxfp8 import MXFP8BlockScaling
from extras.formats.nvfp4 import NVFP4BlockScaling
from extras.formats.recipe import Plan
from extras.formats.stats_plan import OPERANDS, RESULTS
from tests.marks import cases
from tests.precision.test_stats_plan import write
from tests.te_on_cpu import boot
from tests.te_on_cpu.modules import BLACKWELL, HOPPER, models, passes
from tests.te_on_cpu.runs import train_by_te
from tests.training_fixtures import on_ranks, train

pytestmark = boot.needs_site
PLANS: dict[tuple[int, int], Plan] = {
    HOPPER: (
        DelayedScaling("e4m3"),
        CurrentScaling(),
        BlockScaling("e4m3"),
        BlockScaling("e4m3", use_f32_scales=True),
    ),
    # Without random bits, which differ.
    BLACKWELL: (MXFP8BlockScaling("e4m3"), NVFP4BlockScaling("e4m3", disable_stochastic_rounding=True)),
}
POWERS_OF_2 = {HOPPER: (3,), BLACKWELL: (1,)}  # layers, from 1: bf16 matmuls are the same bits (test_modules.py)
# Operands that are results of a bf16 matmul; all others are the same bits, and so are their casts. Results are
# rounded once more or less, and those of proj and fc2 have no bias yet.
AFTER_A_MATMUL = {("fc1", "gradient"), ("fc2", "activation")}
WHERE = ("layer", "module", "tensor", "gemms")


def _rows_of_both(capability: tuple[int, int], directory: str, path: str) -> None:
    boot.start(capability)
    from extras.formats.emulation import Emulation
    from extras.formats.stats import QuantStats
    from extras.formats.stats_plan import PrecisionFlags, select
    from extras.formats.stats_te import TeStats
    from extras.formats.te import Quantised
    from tests.precision.test_stats import everything

    plan, world = PLANS[capability], World(0, 0, 1, torch.device("cuda"))
    flags = PrecisionFlags(fp8=True, quant_stats=True, quant_stats_file=str(everything(Path(directory))))
    selection = select(flags, plan)
    te_stats = TeStats(selection, plan, world, Path(directory))
    ours, theirs = models(len(plan))
    quantised, emulated = Quantised(theirs, plan), copy.deepcopy(ours)
    emulation = Emulation(emulated, plan, seed=0, device="cuda")
    found = []
    for stats, model in ((QuantStats(emulation, selection, world), emulated), (te_stats, theirs)):
        stats.begin_step(1)
        emulation.begin_pack(0, 0)
        stats.begin_pack()
        for layer in range(len(plan)):

            @contextmanager
            def contexts(layer=layer, te=model is theirs):
                with quantised.all() if te else nullcontext(), quantised.layer(layer) if te else nullcontext():
                    yield

            passes(model, contexts, True, layer)
        found.append(stats.end_step())
    torch.save(found, path)


@pytest.mark.parametrize("capability", cases(PLANS, slow={HOPPER}), ids=["9.0", "10.0"])
def test_stats_rows_equal_the_emulation(capability, tmp_path):
    codes, said = on_ranks(1, _rows_of_both, capability, str(tmp_path), str(tmp_path / "rows"))
    assert codes == [0], said[0]
    emulated, theirs = torch.load(tmp_path / "rows")
    assert [[row[key] for key in WHERE] for row in theirs] == [[row[key] for key in WHERE] for row in emulated]
    assert len(theirs) == sum(4 * (3 if recipe.whole_tensor else 6) + 4 * 3 for recipe in PLANS[capability])
    for row, expected in zip(theirs, emulated, strict=True):
        where = {key: row[key] for key in WHERE}
        assert row.keys() == expected.keys(), where
        result, apart = row["tensor"] in RESULTS, (row["module"], row["tensor"]) in AFTER_A_MATMUL
        if result or (apart and row["layer"] not in POWERS_OF_2[capability]):
            stats, bound = {"l2_norm", "std", "mse"} & row.keys(), 0.05
        else:
            stats, bound = row.keys() - {"step", "format", *WHERE}, 1e-6
        for stat in stats:
            assert row[stat] == pytest.approx(expected[stat], rel=bound, abs=1e-12), (where, stat)


@pytest.mark.slow
def test_stats_rows_do_not_depend_on_sharding_and_recomputation(dataset, tmp_path):
    """Weights, stored for one dimension at a time, have both; recomputed tensors count once; a what-if comes along."""
    features = {
        "LogFp8TensorStats": {"enabled": True, "tensors": list(OPERANDS), "stats": ["mse", "fp8_current_scaling_mse"]},
        "LogTensorStats": {"enabled": True, "tensors": list(OPERANDS), "stats": ["l1_norm"]},
    }
    section = {"enabled": True, "layers": {"layer_numbers": "all"}, "transformer_engine": features}
    flags = {
        "fp8": True,
        "fp8_recipe": "mxfp8",
        "quant_stats": True,
        "quant_stats_file": write(tmp_path, {"all": section}),
    }
    flags |= {"script": "train_fsdp2.py", "max_steps": 1, "packs_per_step": 2, "bf16": True, "save_final_model": False}
    train_by_te(dataset, tmp_path / "te", 2, capability=BLACKWELL, activation_checkpointing="full", **flags)
    train(dataset, tmp_path / "emulated", 1, emulate_precision=True, backend="torch", gelu="tanh", **flags)
    theirs, emulated = (read_json_lines(tmp_path / run / "quant_stats.jsonl") for run in ("te", "emulated"))
    assert [[row[key] for key in WHERE] for row in theirs] == [[row[key] for key in WHERE] for row in emulated]
    assert len(theirs) == 2 * 4 * 3 * 3  # along two dimensions, and one row for a scale of the tensor
    for row, expected in zip(theirs, emulated, strict=True):
        for stat in expected.keys() - {"step", "format", *WHERE}:
            # Weights are the same bits. The rest has passed a residual stream in bf16, not fp32: a percent in size,
            # and another error of every number. Counted twice, or in a rank's units, all would be twice as large.
            apart = 0.03 if stat == "l1_norm" else 0.4
            bound = 1e-6 if row["tensor"] == "weight" else apart
            assert row[stat] == pytest.approx(expected[stat], rel=bound), (row, stat)
