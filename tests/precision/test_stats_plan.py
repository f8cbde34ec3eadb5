"""Which statistics are wanted: flags, files, those that are wrong; and the same asked of Transformer Engine."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from common.cli import UserError
from common.distributed.world import World
from extras.formats.plan import resolve
from extras.formats.stats_plan import MODULES, PrecisionFlags, select
from extras.formats.stats_te import TeStats, configuration, matmul_of, te_name
from tests.training_fixtures import ROOT, train

FP8 = {"fp8": True, "emulate_precision": True}
EXAMPLE = ROOT / "fp8_debugging_stats.yaml"
# As in the guides (their names of the tensors of LogTensorStats included).
GUIDES = {
    "example_fp8_tensor_stat_collection": {
        "enabled": True,
        "layers": {"layer_types": ["layernorm_qkv", "proj", "fc1", "fc2"]},
        "transformer_engine": {
            "LogFp8TensorStats": {
                "enabled": True,
                "tensors_struct": [
                    {"tensor": tensor, "stats": ["underflows%", "scale_inv_min", "scale_inv_max", "mse"], "freq": 10}
                    for tensor in ("activation", "gradient", "weight")
                ],
            },
            "LogTensorStats": {
                "enabled": True,
                "stats": ["max", "min", "mean", "std", "l1_norm"],
                "tensors": ["dgrad", "wgrad", "fprop"],
                "freq": 1,
            },
        },
    }
}

# As NVIDIA's recipe for NVFP4 has it: a section for each format, by the names of its own model.
ITS_LAYERS = {"layer_name_regex_pattern": r"model\.esm\.encoder\.layers\.[1-6]\..*(layernorm_qkv|proj|fc1|fc2)"}
BOTH_FORMATS = {
    name: {
        "enabled": True,
        "layers": ITS_LAYERS,
        "transformer_engine": {
            feature: {"enabled": True, "tensors_struct": [{"tensor": "activation", "stats": stats, "freq": 100}]}
        },
    }
    for name, feature, stats in (
        ("fp4", "LogNvfp4TensorStats", ["underflows%", "mse"]),
        ("fp8", "LogFp8TensorStats", ["mxfp8_underflows%", "mxfp8_scale_inv_min", "mxfp8_mse"]),
    )
}


def write(directory: Path, content) -> Path:
    path = directory / "stats.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def selected(layers: int = 6, **flags):
    args = PrecisionFlags(quant_stats=True, **{"fp8": True} | flags)
    return select(args, resolve(args, layers))


# ---- flags and files ---------------------------------------------------------------------------------------------


def test_stats_plan_of_example_file():
    selection = selected(quant_stats_file=str(EXAMPLE), fp8_layers="2-3")
    assert {key[0] for key in selection} == {2, 3}
    assert {key[1] for key in selection} == {"qkv", "proj", "fc1", "fc2"}
    quantised, plain = selection[3, "fc1", "gradient"]
    assert (quantised.stats[0], quantised.freq, plain.freq) == ("underflows%", 10, 10)
    (results,) = selection[3, "fc1", "wgrad"]
    assert [step for step in range(1, 301) if results.due(step)] == [100, 200, 300]
    overridden = selected(quant_stats_file=str(EXAMPLE), quant_stats_freq=7)
    assert {w.freq for wanted in overridden.values() for w in wanted} == {7}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({"layer_numbers": [1, "3-4"]}, {1, 3, 4}),
        ({"layer_numbers": "all"}, {1, 2, 3, 4, 5, 6}),
        ({"layer_numbers": 2, "layer_types": ["fc1"]}, {2}),
        ({"layer_name_regex_pattern": r"layers\.(5|6)\..*proj"}, {5, 6}),
    ],
)
def test_stats_plan_selects_layers(tmp_path, layers, expected):
    content = copy.deepcopy(GUIDES)
    content["example_fp8_tensor_stat_collection"]["layers"] = layers
    selection = selected(quant_stats_file=str(write(tmp_path, content)))
    assert {key[0] for key in selection} == expected
    if "layer_types" in layers:
        assert {key[1] for key in selection} == {"fc1"}
    if "layer_name_regex_pattern" in layers:
        assert {key[1] for key in selection} == {"proj"}


def test_stats_plan_of_file_with_section_per_format(tmp_path):
    path = str(write(tmp_path, BOTH_FORMATS))
    selection = selected(fp8_recipe="mxfp8", fp8_layers="1-3", fp4=True, quant_stats_file=path)
    stats = {layer: selection[layer, "fc1", "activation"][0].stats for layer in range(1, 7)}
    assert stats == dict.fromkeys(
        (1, 2, 3), ("mxfp8_underflows%", "mxfp8_scale_inv_min", "mxfp8_mse")
    ) | dict.fromkeys((4, 5, 6), ("underflows%", "mse"))
    # In one section, what NVFP4's layers would be in another recipe stays beside their own statistics.
    features = {k: v for section in BOTH_FORMATS.values() for k, v in section["transformer_engine"].items()}
    path = str(write(tmp_path, {"both": BOTH_FORMATS["fp4"] | {"transformer_engine": features}}))
    own, other = selected(fp8=False, fp4=True, quant_stats_file=path)[1, "qkv", "activation"]
    assert (own.stats[0], other.stats[0]) == ("underflows%", "mxfp8_underflows%")


def changed(*path, value=None) -> dict:
    """GUIDES with one value set (or a key removed: None)."""
    content = copy.deepcopy(GUIDES)
    at = content
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return content


NAME = "example_fp8_tensor_stat_collection"
FEATURES = (NAME, "transformer_engine")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            changed(NAME, "freqency", value=3),
            f"{NAME}: unknown freqency: known are enabled, layers, transformer_engine",
        ),
        (changed(*FEATURES, "LogFp4", value={}), "transformer_engine: unknown LogFp4: known are LogFp8TensorStats"),
        (changed(*FEATURES, "LogTensorStats", "every", value=3), "LogTensorStats: unknown every: known are enabled"),
        (
            changed(*FEATURES, "LogFp8TensorStats", "tensors_struct", 0, "stat", value=1),
            "LogFp8TensorStats: unknown stat: known are tensor, stats, freq",
        ),
        (
            changed(*FEATURES, "LogTensorStats", "stats", value=["median"]),
            "unknown statistic median: known are min, max",
        ),
        (
            changed(*FEATURES, "LogTensorStats", "stats", value=["mxfp8_max"]),
            "unknown statistic mxfp8_max: known are min, max",
        ),
        (
            changed(*FEATURES, "LogFp8TensorStats", "tensors_struct", 0, "stats", value=["mxfp8_std"]),
            "unknown statistic mxfp8_std: known are underflows%, overflows%, scale_inv_min, scale_inv_max, mse, any",
        ),
        (changed(*FEATURES, "LogTensorStats", "tensors", value=["bias"]), "unknown tensor bias: known are activation"),
        (changed(*FEATURES, "LogTensorStats", "freq", value=0), "freq 0: expected a number of steps, at least 1"),
        (
            changed(NAME, "layers", "layer_kinds", value=["fc1"]),
            "layers: unknown layer_kinds: known are layer_numbers",
        ),
        (changed(NAME, "layers", value={"layer_numbers": ["3-x"]}), "'3-x' is no layer and no range"),
        (changed(NAME, "layers", value={"layer_name_regex_pattern": "("}), "layer_name_regex_pattern: missing )"),
        (changed(NAME, "layers", value={"layer_types": ["lm_head"]}), "selects no quantised layer: names are like"),
        (changed(NAME, "enabled"), f"{NAME}: expected enabled: True or False"),
        (GUIDES | {"more": GUIDES[NAME]}, f"{NAME} and more both select encoder.layers.1."),
        ("- a\n- list\n", "expected named sections"),
        ("a: [1,\n", "no YAML: "),
    ],
)
def test_stats_plan_refuses_bad_file_in_one_line(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(UserError) as caught:
        selected(quant_stats_file=str(path))
    assert str(caught.value).startswith(f"--quant_stats_file {path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_stats_plan_refuses_history_without_delayed_scaling(tmp_path):
    file = changed(*FEATURES, "LogFp8TensorStats", "tensors_struct", 0, "stats", value=["fp8_delayed_scaling_mse"])
    path = str(write(tmp_path, file))
    assert selected(quant_stats_file=path)[1, "fc1", "activation"][0].stats == ("fp8_delayed_scaling_mse",)
    with pytest.raises(UserError, match="is in MXFP8: there is no history for fp8_delayed_scaling: drop it there"):
        selected(fp8_recipe="mxfp8", quant_stats_file=path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"quant_stats": True}, "missing: --fp8 (or --fp4: --quant_stats needs quantised layers)"),
        ({"quant_stats_freq": 5} | FP8, "--quant_stats_freq goes with --quant_stats"),
        ({"quant_stats": True, "quant_stats_freq": 0} | FP8, "--quant_stats_freq 0: must be at least 1"),
        (
            {"quant_stats": True, "quant_stats_file": "nowhere.yaml"} | FP8,
            "nowhere.yaml: cannot be read: No such file",
        ),
        (
            {"quant_stats": True, "quant_stats_dir": "/proc/none/here"} | FP8,
            "--quant_stats_dir /proc/none/here: not wri",
        ),
    ],
)
def test_stats_flags_refused_in_one_line(dataset, tmp_path, flags, message):
    said = train(dataset, tmp_path / "out", expect=2, **flags)
    (line,) = (line for line in said.splitlines() if line.startswith("error:"))
    assert message in line
    assert not (tmp_path / "out").exists()


# ---- Transformer Engine ------------------------------------------------------------------------------------------


def te(layers: int = 3, **flags):
    args = PrecisionFlags(quant_stats=True, quant_stats_freq=4, **flags)
    plan = resolve(args, layers)
    return select(args, plan), plan


def test_stats_plan_configures_transformer_engine():
    asked = configuration(te(fp8=True, fp8_recipe="mxfp8", fp8_layers="1", fp4=True)[0])
    assert len(asked) == 3 * 4
    name = "encoder.layers.0.self_attention.layernorm_linear_qkv"
    assert list(asked)[0] == te_name(1, "qkv") == name
    assert asked[name] == {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": r"^encoder\.layers\.0\.self_attention\.layernorm_linear_qkv$"},
        "transformer_engine": {"AddedUp": {"enabled": True, "tensors": ["activation", "weight", "gradient"]}},
    }
    assert [matmul_of(te_name(layer, module)) for layer in (1, 3) for module in MODULES] == [
        (layer, matmul) for layer in (0, 2) for matmul in range(4)
    ]


@pytest.mark.skipif(find_spec("nvdlfw_inspect") is not None, reason="nvdlfw_inspect is installed")
def test_stats_of_te_without_debug_api_is_one_line(tmp_path):
    with pytest.raises(UserError, match="need nvdlfw_inspect: pip install nvdlfw-inspect, or add --emulate_precision"):
        TeStats(*te(fp8=True), World(0, 0, 1, torch.device("cpu")), tmp_path)
    assert not list(tmp_path.iterdir())
