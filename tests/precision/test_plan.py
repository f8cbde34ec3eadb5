"""From --fp8 and --fp4 to a format for each layer: the whole table, and every way to get it wrong."""

from __future__ import annotations

import pytest

from common.cli import UserError
from common.flags import checked, parse_arguments
from common.models.esm2.config import ESM2_SIZES, Esm2Config, load_config
from common.precision import PrecisionFlags
from common.shape_buckets import SHAPE_MULTIPLE
from extras.formats.fp8_block import BlockScaling
from extras.formats.fp8_current import CurrentScaling
from extras.formats.fp8_delayed import DelayedScaling
from extras.formats.mxfp8 import MXFP8BlockScaling
from extras.formats.nvfp4 import NVFP4BlockScaling
from extras.formats.plan import check_device, check_dimensions, describe, recipes, resolve
from extras.formats.recipe import fp8_formats

LETTERS = {DelayedScaling: "8", NVFP4BlockScaling: "4", type(None): "-"}


def plan_of(layers: int = 6, **flags) -> str:
    """The plan as a word, a letter a layer."""
    plan = resolve(checked(PrecisionFlags(**flags)), layers)
    return None if plan is None else "".join(LETTERS[type(recipe)] for recipe in plan)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, None),
        ({"fp8": True}, "888888"),
        ({"fp4": True}, "444444"),
        ({"fp8": True, "fp8_layers": "1-3"}, "888---"),
        ({"fp4": True, "fp4_layers": "4-6"}, "---444"),
        ({"fp8": True, "fp8_layers": "2"}, "-8----"),
        ({"fp8": True, "fp8_layers": "1,3-4,6"}, "8-88-8"),
        ({"fp8": True, "fp8_layers": "[1,2,3]"}, "888---"),
        ({"fp8": True, "fp8_layers": " 1, 2 , 2-3,3"}, "888---"),
        ({"fp8": True, "fp8_layers": "1-6"}, "888888"),
        ({"fp8": True, "fp4": True, "fp8_layers": "1-3"}, "888444"),
        ({"fp8": True, "fp4": True, "fp4_layers": "1-3"}, "444888"),
        ({"fp8": True, "fp4": True, "fp8_layers": "1-3", "fp4_layers": "4-6"}, "888444"),
        ({"fp8": True, "fp4": True, "fp8_layers": "1", "fp4_layers": "6"}, "8----4"),
        ({"fp8": True, "fp4": True, "fp8_layers": "2,4", "fp4_layers": "1,3,5"}, "48484-"),
    ],
)
def test_plan_assigns_formats_to_layers(flags, expected):
    assert plan_of(**flags) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"fp8": True, "fp4": True}, "--fp8 and --fp4 without lists of layers: give --fp8_layers, --fp4_layers"),
        (
            {"fp8": True, "fp4": True, "fp8_layers": "1-4", "fp4_layers": "3,4-6"},
            "--fp8_layers and --fp4_layers both name 3-4: a layer has one format",
        ),
        ({"fp8": True, "fp8_layers": "0"}, "--fp8_layers 0: there is no layer 0: the model has layers 1-6"),
        ({"fp8": True, "fp8_layers": "99"}, "--fp8_layers 99: there is no layer 99: the model has layers 1-6"),
        ({"fp4": True, "fp4_layers": "5-7"}, "--fp4_layers 5-7: there is no layer 7: the model has layers 1-6"),
        ({"fp4": True, "fp4_layers": "0-2"}, "--fp4_layers 0-2: there is no layer 0"),
        ({"fp8": True, "fp8_layers": "3-1"}, "--fp8_layers 3-1: the range 3-1 runs backwards: write 1-3"),
        ({"fp8": True, "fp8_layers": ""}, "--fp8_layers: the list is empty: name layers of 1-6, or drop the format"),
        ({"fp8": True, "fp8_layers": "[]"}, "--fp8_layers: the list is empty"),
        ({"fp8": True, "fp8_layers": "all"}, "--fp8_layers all: 'all' is no layer and no range: write 1-3,6"),
        ({"fp8": True, "fp8_layers": "-1"}, "'-1' is no layer and no range"),
        ({"fp8": True, "fp4": True, "fp8_layers": "1-6"}, "--fp4: --fp8_layers leaves it no layer of the 6"),
        ({"fp8": True, "fp4": True, "fp4_layers": "1-6"}, "--fp8: --fp4_layers leaves it no layer of the 6"),
        ({"fp8_layers": "1-3"}, "--fp8_layers goes with --fp8"),
        ({"fp8": True, "fp4_layers": "1-3"}, "--fp4_layers goes with --fp4"),
        ({"fp4": True, "fp8_recipe_kwargs": "{}"}, "--fp8_recipe_kwargs goes with --fp8"),
        ({"fp8_params": True}, "--fp8_params goes with --fp8"),
        ({"fp8_params": True, "fp4": True}, "--fp8_params goes with --fp8: Transformer Engine 2.20's NVFP4 weights"),
        ({"emulate_precision": True}, "missing: --fp8 (or --fp4: there is nothing to emulate)"),
        ({"emulate_precision": True, "fp8": True, "fp8_params": True}, "--fp8_params keeps weights in a GPU's memory"),
        ({"fp8": True, "fp8_recipe": "slow"}, "--fp8_recipe slow: choose delayed, current, block, mxfp8"),
        ({"fp8": True, "fp8_format": "e5m2"}, "--fp8_format e5m2: choose hybrid, e4m3"),
        ({"fp4": True, "fp4_format": "e3m0"}, "--fp4_format e3m0: choose e2m1"),
        (
            {"fp8": True, "fp8_recipe_kwargs": '{"history": 3}'},
            "--fp8_recipe_kwargs: DelayedScaling has no history: it has margin, amax_history_len, amax_compute_algo",
        ),
        (
            {"fp8": True, "fp8_recipe": "mxfp8", "fp8_recipe_kwargs": '{"margin": 3}'},
            "MXFP8BlockScaling has no margin: it has enable_2d_quantization",
        ),
        ({"fp4": True, "fp4_recipe_kwargs": '{"disable_rht": 1}'}, "disable_rht 1: expected a value like false"),
        ({"fp8": True, "fp8_recipe_kwargs": '{"fp8_dpa": true}'}, "fp8_dpa true: attention is computed in BF16: drop"),
        ({"fp8": True, "fp8_recipe_kwargs": '{"reduce_amax": false}'}, "reduce_amax false: all ranks scale alike"),
        ({"fp8": True, "fp8_recipe_kwargs": "margin=1"}, "--fp8_recipe_kwargs margin=1: no JSON"),
        ({"fp8": True, "fp8_recipe_kwargs": "[1]"}, "--fp8_recipe_kwargs [1]: expected an object"),
        ({"fp8": True, "fp8_recipe_kwargs": '{"amax_history_len": 0}'}, "amax_history_len 0: must be at least 1"),
        ({"fp8": True, "fp8_recipe_kwargs": '{"amax_compute_algo": "min"}'}, "choose max, most_recent"),
    ],
)
def test_plan_refuses_bad_flags(flags, message):
    with pytest.raises(UserError) as error:
        plan_of(**flags)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_plan_recipe_has_formats_and_arguments():
    def recipe(**flags):
        return recipes(PrecisionFlags(**flags)).popitem()[1]

    assert recipe(fp8=True) == DelayedScaling("hybrid", 0, 1024, "max")
    assert recipe(fp8=True, fp8_recipe="current") == CurrentScaling("hybrid")
    assert recipe(fp8=True, fp8_recipe="block") == BlockScaling("e4m3")
    assert recipe(fp8=True, fp8_recipe="mxfp8") == MXFP8BlockScaling("e4m3")
    assert recipe(fp8=True, fp8_recipe="mxfp8", fp8_format="hybrid") == MXFP8BlockScaling("hybrid")
    kwargs = '{"margin": 1, "amax_history_len": 16, "amax_compute_algo": "most_recent"}'
    assert recipe(fp8=True, fp8_recipe_kwargs=kwargs) == DelayedScaling("hybrid", 1, 16, "most_recent")
    assert recipe(fp4=True, fp4_recipe_kwargs='{"disable_rht": true}') == NVFP4BlockScaling("e4m3", True)


def test_plan_is_read_from_flags():
    argv = ["--fp8", "--fp8_layers", "1-3", "--fp4", "True", "--fp4_layers=4-6", "--emulate_precision"]
    args = parse_arguments("", PrecisionFlags, argv=argv)
    assert "".join(LETTERS[type(r)] for r in resolve(args, 6)) == "888444"


@pytest.mark.parametrize(
    ("given", "recipe"),
    [
        ("transformer_engine.common.recipe.DelayedScaling", "delayed"),
        ("transformer_engine.common.recipe.Float8CurrentScaling", "current"),
        ("Float8BlockScaling", "block"),
        ("MXFP8BlockScaling", "mxfp8"),
        ("MXFP8", "mxfp8"),
    ],
)
def test_plan_reads_names_of_transformer_engine(given, recipe):
    argv = ["--fp8", "--fp8_recipe", given, "--fp8_format", "HYBRID", "--fp4_format=E2M1"]
    args = parse_arguments("", PrecisionFlags, argv=argv)
    assert (args.fp8_recipe, args.fp8_format, args.fp4_format) == (recipe, "hybrid", "e2m1")


def test_plan_refuses_a_class_of_another_module():
    with pytest.raises(UserError, match="choose delayed, current, block, mxfp8"):
        parse_arguments("", PrecisionFlags, argv=["--fp8", "--fp8_recipe=os.path.DelayedScaling"])


def test_plan_is_logged():
    flags = {
        "fp8": True,
        "fp4": True,
        "fp8_layers": "1-2",
        "fp4_layers": "4",
        "fp4_recipe_kwargs": '{"disable_rht": true}',
    }
    assert describe(resolve(PrecisionFlags(**flags), 6), "BF16") == (
        "  layers  format\n"
        "  1-2     FP8, delayed scaling, hybrid\n"
        "  3       BF16\n"
        "  4       NVFP4, disable_rht=True\n"
        "  5-6     BF16\n"
        "  rest    BF16 (embeddings, final norm, LM head)"
    )


WORKS = "--fp8 with --fp8_recipe delayed, current or block works on it; or add --emulate_precision"


@pytest.mark.parametrize(
    ("flags", "device", "capability", "message"),
    [
        ({"fp8": True}, "NVIDIA H200", (9, 0), None),
        ({"fp8": True, "fp8_recipe": "current"}, "NVIDIA H200", (9, 0), None),
        ({"fp8": True, "fp8_recipe": "block"}, "NVIDIA B200", (10, 0), None),
        ({"fp8": True, "fp8_recipe": "mxfp8"}, "NVIDIA B300", (10, 3), None),
        ({"fp4": True}, "NVIDIA B200", (10, 0), None),
        ({"fp8": True}, "NVIDIA L40S", (8, 9), None),
        ({"fp8": True, "fp8_recipe": "current"}, "NVIDIA L4", (8, 9), None),
        (
            {"fp8": True, "fp8_recipe": "block"},
            "NVIDIA L4",
            (8, 9),
            "9.0 (Hopper) or later; NVIDIA L4 has 8.9: --fp8 with --fp8_recipe delayed or current works on it",
        ),
        ({"fp8": True}, "a CPU", None, "(Ada) or later; this is a CPU: add --emulate_precision to try it here"),
        ({"fp8": True}, "NVIDIA A100", (8, 0), "8.9 (Ada) or later; NVIDIA A100 has 8.0: add --emulate_precision"),
        ({"fp8": True, "fp8_recipe": "mxfp8"}, "NVIDIA H200", (9, 0), f"NVIDIA H200 has 9.0: {WORKS}"),
        ({"fp4": True}, "NVIDIA H200", (9, 0), "--fp4: NVFP4 needs a GPU of compute capability 10.0 (Blackwell)"),
        ({"fp4": True}, "NVIDIA H200", (9, 0), f"NVIDIA H200 has 9.0: {WORKS}"),
        ({"fp4": True, "fp8": True, "fp8_layers": "1"}, "NVIDIA H200", (9, 0), "--fp4: NVFP4 needs"),
        ({"fp4": True}, "NVIDIA A100", (8, 0), "NVIDIA A100 has 8.0: add --emulate_precision"),
    ],
)
def test_plan_refuses_unsupported_device(flags, device, capability, message):
    plan = resolve(PrecisionFlags(**flags), 6)
    if message is None:
        check_device(plan, device, capability)
    else:
        with pytest.raises(UserError) as error:
            check_device(plan, device, capability)
        assert message in str(error.value)


@pytest.mark.parametrize(("recipe", "multiple"), [("delayed", 16), ("current", 16), ("block", 16), ("mxfp8", 32)])
def test_plan_requires_size_multiples(recipe, multiple):
    plan = resolve(PrecisionFlags(fp8=True, fp8_recipe=recipe), 2)
    check_dimensions(plan, {"hidden_size": multiple * 3}, "")
    with pytest.raises(
        UserError, match=f"multiples of {multiple}.*--config_overrides intermediate_size={multiple * 2}"
    ):
        check_dimensions(plan, {"hidden_size": multiple, "intermediate_size": multiple + 8}, Esm2Config.set_by)
    check_dimensions((None, None), {"hidden_size": 7}, "")


def test_plan_every_esm2_fits_every_format():
    multiples = {kind.multiple for kind in (*fp8_formats().values(), NVFP4BlockScaling)}
    assert multiples == {16, 32}
    for name in ESM2_SIZES:
        config = load_config(name)
        assert not any(size % m for size in (config.hidden_size, config.intermediate_size) for m in multiples)
    # whatever --tokens_per_pack is: the model fills its tokens up to this
    assert not any(SHAPE_MULTIPLE % m for m in multiples)
