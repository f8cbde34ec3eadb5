"""Statistics of quantised tensors: each number against its definition, the log on every layout, the picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from common.cli import UserError
from common.files.safe_files import read_json_lines
from common.precision import PrecisionFlags
from extras.formats.emulation import GRADIENT, INPUT, WEIGHT
from extras.formats.stats import QuantStats, scalars
from extras.formats.stats_plan import PLAIN, QUANTISED, select
from extras.formats.stats_report import cells, draw
from tests.precision.test_emulation import ALONE, FP8, RECIPES, by_definition, operands, tiny_model
from tests.precision.test_stats_plan import GUIDES, selected, write
from tests.training_fixtures import losses, train

# ---- the numbers -------------------------------------------------------------------------------------------------


def one_step(name: str, file: Path, tensors: list[torch.Tensor], **more) -> dict[tuple, dict]:
    """The rows of fc1 of layer 2, by (tensor, matmuls), after one pack."""
    flags = RECIPES[name] | more
    model, emulation = tiny_model(**flags)
    args = PrecisionFlags(**flags, quant_stats=True, quant_stats_freq=1, quant_stats_file=str(file))
    stats = QuantStats(emulation, select(args, emulation.plan), ALONE)
    x, weight, bias, grad = tensors
    stats.begin_step(1)
    emulation.begin_pack(0, 0)
    model.encoder.layers[1].layernorm_mlp.fc1_matmul(x, weight, bias).backward(grad)
    rows = stats.end_step()
    return {(r["tensor"], *r["gemms"]): r for r in rows if (r["layer"], r["module"]) == (2, "fc1")}


def everything(directory: Path) -> Path:
    """A file that asks for all there is."""
    features = {
        "LogFp8TensorStats": {
            "enabled": True,
            "tensors": ["activation", "weight", "gradient"],
            "stats": list(QUANTISED),
        },
        "LogTensorStats": {
            "enabled": True,
            "tensors": ["activation", "weight", "gradient", "output", "dgrad", "wgrad"],
            "stats": list(PLAIN),
        },
    }
    return write(
        directory, {"all": {"enabled": True, "layers": {"layer_numbers": "all"}, "transformer_engine": features}}
    )


def plain_by_definition(x: np.ndarray) -> dict[str, float]:
    sizes = np.abs(x)
    return {
        "min": x.min(),
        "max": x.max(),
        "mean": x.mean(),
        "std": x.std(),
        "l1_norm": sizes.sum(),
        "l2_norm": np.sqrt((x**2).sum()),
        "cur_amax": sizes.max(),
        "dynamic_range": np.log2(sizes.max()) - np.log2(sizes[sizes > 0].min()),
    }


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_stats_equal_definitions(tmp_path, name):
    more = (
        {"fp4_recipe_kwargs": '{"disable_rht": true, "disable_stochastic_rounding": true}'} if name == "nvfp4" else {}
    )
    tensors = operands()
    with torch.no_grad():
        tensors[0][7] = 0  # rows that underflow nowhere, for nothing is there
        tensors[0][9] *= 1e-9  # and one that does
    rows = one_step(name, everything(tmp_path), tensors, **more)
    whole = name in ("delayed", "current")
    x, weight, bias, grad = tensors
    expected = {
        "activation": (INPUT, x, ("fprop", "wgrad")),
        "weight": (WEIGHT, weight, ("fprop", "dgrad")),
        "gradient": (GRADIENT, grad, ("dgrad", "wgrad")),
    }
    underflows = 0.0
    for tensor, (role, of, gemms) in expected.items():
        original = of.detach().double().numpy()
        for along in (1, 0):
            row = rows[(tensor, *gemms) if whole else (tensor, gemms[1 - along])]
            became = by_definition(name, more, of, role, along)
            wanted = plain_by_definition(original) | {
                "underflows%": 100 * ((became == 0) & (original != 0)).mean(),
                "mse": ((became - original) ** 2).mean(),
            }
            for stat, value in wanted.items():
                assert row[stat] == pytest.approx(value, rel=1e-6, abs=1e-12), (tensor, along, stat)
            underflows += wanted["underflows%"]
            assert row["format"] == tiny_model(**RECIPES[name])[1].plan[0].title
    assert underflows > 0.5
    for tensor, result in (("output", x @ weight.t() + bias), ("dgrad", x.grad), ("wgrad", weight.grad)):
        (row,) = (row for key, row in rows.items() if key[0] == tensor)
        close = 1e-5 if tensor != "output" else 0.05  # of which there is the quantised one only
        assert row["l2_norm"] == pytest.approx(result.detach().double().norm().item(), rel=close)
        assert "mse" not in row


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (
            "delayed",
            {"fp8_current_scaling": "current", "mxfp8": "mxfp8, hybrid"},
        ),  # in the layer's own element formats
        ("nvfp4", {"fp8_block_scaling": "block", "mxfp8": "mxfp8"}),
    ],
)
def test_stats_of_another_recipe(tmp_path, own, others):
    """Beside the layer's own, of the tensor as it is (not NVFP4's transform), along each dimension of a cast."""
    stats = ["underflows%", *(f"{name}_{stat}" for name in others for stat in ("underflows%", "mse"))]
    settings = {"enabled": True, "tensors": ["activation", "weight", "gradient"], "stats": stats}
    section = {
        "enabled": True,
        "layers": {"layer_types": ["fc1"]},
        "transformer_engine": {"LogFp8TensorStats": settings},
    }
    tensors = operands()
    rows = one_step(own, write(tmp_path, {"all": section}), tensors)
    x, weight, _, grad = tensors
    parts = (
        (INPUT, x, ("fprop", "wgrad")),
        (WEIGHT, weight, ("fprop", "dgrad")),
        (GRADIENT, grad, ("dgrad", "wgrad")),
    )
    for (role, of, gemms), tensor in zip(parts, ("activation", "weight", "gradient"), strict=True):
        original = of.detach().double().numpy()
        assert all(
            "underflows%" in rows[(tensor, *part)] for part in ([gemms] if own == "delayed" else [[g] for g in gemms])
        )
        for name, defined in others.items():
            for along in (1, 0):
                row = rows[(tensor, *gemms) if name == "fp8_current_scaling" else (tensor, gemms[1 - along])]
                became = by_definition(defined, {}, of, role, along)
                wanted = {
                    "underflows%": 100 * ((became == 0) & (original != 0)).mean(),
                    "mse": ((became - original) ** 2).mean(),
                }
                assert {s: row[f"{name}_{s}"] for s in wanted} == pytest.approx(wanted, rel=1e-6, abs=1e-12), (
                    tensor,
                    name,
                )


def test_stats_scales_and_overflows_are_per_block(tmp_path):
    tensors = operands()
    row = one_step("mxfp8", everything(tmp_path), tensors)["activation", "fprop"]
    blocks = tensors[0].detach().double().unflatten(1, (-1, 32)).abs().amax(-1)
    scales = 2.0 ** torch.ceil(torch.log2(blocks / 448))
    assert (row["scale_inv_min"], row["scale_inv_max"]) == (scales.min().item(), scales.max().item())
    assert row["overflows%"] == 0  # scales are rounded up

    weight = tensors[1].detach().double()
    row = one_step("nvfp4", everything(tmp_path), tensors)["weight", "dgrad"]
    squares = weight.abs().unflatten(1, (-1, 16)).unflatten(0, (-1, 16)).amax((1, 3))
    tensor_scale = weight.abs().max() / (448 * 6)
    scales = (squares / 6 / tensor_scale).to(torch.float8_e4m3fn).double() * tensor_scale
    clipped = weight.abs() > 6 * (1 + 1e-6) * scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert row["scale_inv_min"] == pytest.approx(scales.min().item(), rel=1e-5)
    assert row["scale_inv_max"] == pytest.approx(scales.max().item(), rel=1e-5)
    assert row["overflows%"] == pytest.approx(100 * clipped.double().mean().item(), abs=0.01)
    assert clipped.any()


def test_stats_count_overflows_of_delayed_scales(tmp_path):
    tensors = operands()
    with torch.no_grad():
        tensors[0].mul_(100)  # the first scale is 1, the largest number 448
    row = one_step("delayed", everything(tmp_path), tensors)["activation", "fprop", "wgrad"]
    beyond = (tensors[0].detach().abs() > 448).double().mean().item()
    assert beyond > 0
    assert row["overflows%"] == pytest.approx(100 * beyond)
    assert row["scale_inv_min"] == row["scale_inv_max"] == 1


def test_stats_of_zero_gradient_are_finite(tmp_path):
    tensors = operands()
    tensors[3].zero_()
    for name in ("mxfp8", "current", "nvfp4"):
        row = next(r for key, r in one_step(name, everything(tmp_path), tensors).items() if key[0] == "gradient")
        assert row["scale_inv_min"] is row["scale_inv_max"] is row["dynamic_range"] is None
        assert row["underflows%"] == row["mse"] == row["l2_norm"] == 0
        json.dumps(row, allow_nan=False)


def test_stats_sum_over_packs_and_skip_recomputation(tmp_path):
    """Two packs, the second seen twice, are the rows of both packs as one; weights count once."""
    flags = RECIPES["mxfp8"]
    model, emulation = tiny_model(**flags)
    args = PrecisionFlags(**flags, quant_stats=True, quant_stats_file=str(everything(tmp_path)))
    stats = QuantStats(emulation, select(args, emulation.plan), ALONE)
    matmul = model.encoder.layers[1].layernorm_mlp.fc1_matmul
    x, weight, bias, grad = operands()
    stats.begin_step(1)
    for number, part in enumerate((slice(0, 32), slice(32, 64))):
        emulation.begin_pack(0, number)
        stats.begin_pack()
        for _ in range(number + 1):
            matmul(x[part], weight, bias).backward(grad[part])
    rows = {(r["tensor"], *r["gemms"]): r for r in stats.end_step() if (r["layer"], r["module"]) == (2, "fc1")}
    whole = one_step("mxfp8", everything(tmp_path), operands())
    for key in whole:
        if key[0] not in ("wgrad", "output"):  # a sum over the pack, and one that rounds otherwise
            for stat, value in whole[key].items():
                same = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
                assert rows[key][stat] == same, (key, stat)


def test_stats_hooks_exist_only_in_logged_steps():
    flags = RECIPES["nvfp4"]
    _, emulation = tiny_model(**flags)
    stats = QuantStats(emulation, selected(2, **{"fp8": False} | flags, quant_stats_freq=3), ALONE)
    watched = []
    for step in range(1, 7):
        stats.begin_step(step)
        watched.append(emulation.watcher is stats)
        assert bool(stats.end_step()) == watched[-1]
        assert emulation.watcher is None
    assert watched == [False, False, True, False, False, True]


# ---- runs --------------------------------------------------------------------------------------------------------

RUN = {"max_steps": 4, "packs_per_step": 4, "save_final_model": False, "quant_stats": True, "quant_stats_freq": 1}
MIXED = {"fp8_recipe": "mxfp8", "fp8_layers": "1", "fp4": True}


def log(directory: Path) -> list[dict]:
    return read_json_lines(directory / "quant_stats.jsonl")


def assert_same_rows(ours: list[dict], expected: list[dict], rel: float) -> None:
    names = ("step", "layer", "module", "tensor", "gemms", "format")
    assert [[r[n] for n in names] for r in ours] == [[r[n] for n in names] for r in expected]
    for row, other in zip(ours, expected, strict=True):
        assert row.keys() == other.keys()
        for stat in row.keys() - set(names):
            slack = other["std"] if stat == "mean" else 0.0  # means are small differences of large sums
            assert row[stat] == pytest.approx(other[stat], rel=rel, abs=rel * slack), (row, stat, other[stat])


@pytest.mark.parametrize("name", ["delayed", pytest.param("mixed", marks=pytest.mark.slow)])
def test_stats_log_is_independent_of_strategy_and_ranks(dataset, tmp_path, name):
    # With a learning rate of 0 all runs keep the same weights: else, after the first step, they differ by fp32's
    # rounding, which moves a number in some thousands to the next one of its format.
    flags = RUN | {"learning_rate": 0} | (FP8 if name == "delayed" else FP8 | MIXED)
    train(dataset, tmp_path / "alone", **flags)
    train(dataset, tmp_path / "unwatched", **flags | {"quant_stats": None, "quant_stats_freq": None})
    assert losses(tmp_path / "unwatched") == losses(tmp_path / "alone"), "watching changes the run"
    layouts = {
        "ddp": (2, {}),
        "fsdp": (2, {"script": "train_fsdp2.py", "activation_checkpointing": "selective"}),
        "hsdp": (
            4,
            {
                "script": "train_fsdp2.py",
                "sharding_strategy": "hybrid",
                "hsdp_shard_size": 2,
                "activation_checkpointing": "full",
            },
        ),
    }
    alone = log(tmp_path / "alone")
    assert len(alone) == 4 * (2 * 4 * 3 if name == "delayed" else 2 * 4 * 6)
    for layout in ("ddp",) if name == "delayed" else ("fsdp", "hsdp"):
        nproc, more = layouts[layout]
        train(dataset, tmp_path / layout, nproc, **flags, **more)
        assert_same_rows(log(tmp_path / layout), alone, 1e-6)


@pytest.mark.slow
def test_stats_log_of_compiled_layers_is_the_same(dataset, tmp_path):
    flags = RUN | FP8 | {"fp8_layers": "1", "fp4": True, "learning_rate": 0, "max_steps": 2}
    for compiled in (False, True):
        train(dataset, tmp_path / str(compiled), compiler="aot_eager", **flags, torch_compile=compiled)
    assert losses(tmp_path / "True") == losses(tmp_path / "False")
    assert_same_rows(log(tmp_path / "True"), log(tmp_path / "False"), 1e-6)


def test_stats_log_of_resumed_run_has_each_step_once(dataset, tmp_path):
    flags = RUN | FP8 | {"bf16": True, "quant_stats_dir": tmp_path / "logs" / "stats"}
    train(dataset, tmp_path / "whole", **flags | {"quant_stats_dir": None})
    train(dataset, tmp_path / "parts", **flags, stop_at_step=2)
    with open(tmp_path / "logs" / "stats" / "quant_stats.jsonl", "a") as file:
        for row in log(tmp_path / "logs" / "stats")[-3:]:
            file.write(json.dumps(row | {"step": 3}) + "\n")  # of a run killed after step 3, in the midst of a line
        file.write('{"step": 3, "layer')
    train(dataset, tmp_path / "parts", **flags)
    assert log(tmp_path / "logs" / "stats") == log(tmp_path / "whole")
    assert not (tmp_path / "parts" / "quant_stats.jsonl").exists()
    train(dataset, tmp_path / "whole", overwrite_output_dir=True, max_steps=1, save_final_model=False)
    assert not (tmp_path / "whole" / "quant_stats.jsonl").exists()


def test_stats_file_of_guides_is_accepted(dataset, tmp_path):
    flags = RUN | FP8 | {"quant_stats_freq": None, "quant_stats_file": write(tmp_path, GUIDES), "max_steps": 10}
    train(dataset, tmp_path / "out", **flags)
    steps = {}
    for row in log(tmp_path / "out"):
        steps.setdefault(row["tensor"], set()).add(row["step"])
    assert steps == dict.fromkeys(("activation", "weight", "gradient"), {10}) | dict.fromkeys(
        ("output", "dgrad", "wgrad"), set(range(1, 11))
    )


def test_stats_tracker_gets_one_row_per_step():
    rows = [
        {
            "step": 5,
            "layer": 1,
            "module": "fc1",
            "tensor": "weight",
            "gemms": ["fprop", "dgrad"],
            "format": "",
            "mse": 0.5,
        },
        {
            "step": 5,
            "layer": 2,
            "module": "qkv",
            "tensor": "activation",
            "gemms": ["wgrad"],
            "format": "",
            "mse": None,
        },
    ]
    assert scalars(rows) == {"step": 5, "quant_stats/1.fc1.weight.fprop+dgrad/mse": 0.5}


# ---- the picture -------------------------------------------------------------------------------------------------


def row_of(layer: int, module: str, tensor: str, gemms: list[str], under: float, mse: float, **more) -> dict:
    where = {"step": 3, "layer": layer, "module": module, "tensor": tensor, "gemms": gemms, "format": "MXFP8"}
    return where | {"underflows%": under, "mse": mse, "mean": 0.0, "std": 2.0} | more


def test_stats_heat_map_places_rows(tmp_path):
    rows = [
        row_of(1, "qkv", "activation", ["fprop"], 10.0, 4e-3),
        row_of(1, "qkv", "activation", ["wgrad"], 20.0, 8e-3),
        row_of(3, "fc2", "weight", ["fprop", "dgrad"], 30.0, 4e-2),
        row_of(3, "fc2", "activation", ["fprop", "wgrad"], 5.0, None),
        row_of(2, "fc1", "weight", ["fprop", "dgrad"], 99.0, 1.0) | {"step": 2},
    ]
    columns, found = cells(rows, 3)
    assert columns == [
        "qkv activation fprop",
        "qkv activation wgrad",
        "fc2 activation fprop",
        "fc2 activation wgrad",
        "fc2 weight",
    ]
    assert found["underflows%"] == {
        (1, "qkv activation fprop"): 10.0,
        (1, "qkv activation wgrad"): 20.0,
        (3, "fc2 weight"): 30.0,
        (3, "fc2 activation fprop"): 5.0,
        (3, "fc2 activation wgrad"): 5.0,
    }
    assert found["error"] == {
        (1, "qkv activation fprop"): 1e-3,
        (1, "qkv activation wgrad"): 2e-3,
        (3, "fc2 weight"): 1e-2,
    }

    def pixels(rows: list[dict], step: int | None = None) -> np.ndarray:
        from matplotlib.image import imread

        (tmp_path / "quant_stats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return imread(*draw(tmp_path, step))

    picture = pixels(rows)
    assert np.array_equal(picture, pixels(rows))
    assert not np.array_equal(picture, pixels([rows[0] | {"underflows%": 15.0}, *rows[1:]]))
    assert not np.array_equal(picture, pixels(rows, 2))
    with pytest.raises(UserError, match="no step 7: it has 2, 3"):
        draw(tmp_path, 7)
    with pytest.raises(UserError, match="no statistics there"):
        draw(tmp_path / "none")
