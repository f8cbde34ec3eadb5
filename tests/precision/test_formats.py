"""Every format against its definition (tests/precision/format_reference.py), bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.data.counter_rng import hash_counters
from extras.formats import casts as formats
from extras.formats import fp8_block, mxfp8, nvfp4
from extras.formats.fp8_block import BlockScaling
from extras.formats.fp8_current import CurrentScaling
from extras.formats.mxfp8 import MXFP8BlockScaling
from extras.formats.nvfp4 import NVFP4BlockScaling
from extras.formats.recipe import Recipe
from tests.precision import format_reference as reference
from tests.precision.samples import samples

NUMBERS = {formats.E4M3: reference.E4M3, formats.E5M2: reference.E5M2}
TORCH = {formats.E4M3: torch.float8_e4m3fn, formats.E5M2: torch.float8_e5m2}
FORMATS = pytest.mark.parametrize("element", NUMBERS, ids=["E4M3", "E5M2"])


def equal(ours: torch.Tensor, expected: np.ndarray) -> bool:
    """As numbers: NaN equals NaN, 0 equals -0."""
    return np.array_equal(ours.double().numpy(), expected, equal_nan=True)


def all_bf16() -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)


# ---- FP8 ---------------------------------------------------------------------------------------------------------


@FORMATS
def test_fp8_rounds_every_bf16_value(element):
    x = all_bf16().float()
    found = formats.round_to(x.clone(), element).double()
    assert equal(found, np.array([reference.nearest_even(v, NUMBERS[element]) for v in x.tolist()]))
    within = x.abs() <= element.largest
    assert torch.equal(
        found[within], x[within].to(TORCH[element]).double()
    )  # torch's own cast, where it does not overflow
    assert torch.equal(found[x == torch.inf], torch.tensor([element.largest]).double())


@FORMATS
def test_fp8_rounds_fp32_values_around_ties(element):
    numbers = torch.tensor(NUMBERS[element])
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat((numbers, ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(torch.inf))))
    x = torch.cat((x, -x))
    assert torch.equal(formats.round_to(x.clone(), element), x.to(TORCH[element]).float())
    assert equal(
        formats.round_to(x.clone(), element),
        np.array([reference.nearest_even(v, NUMBERS[element]) for v in x.tolist()]),
    )


@FORMATS
@pytest.mark.parametrize("power_of_2", [False, True])
def test_fp8_scales_by_tensor(element, power_of_2):
    for name, x in samples((8, 48)).items():
        scale = formats.fp8_scale(formats.tensor_amax(x), element, power_of_2=power_of_2)
        expected_scale = reference.fp8_scale(x.abs().max().item(), element.largest, power_of_2)
        assert scale.item() == expected_scale, name
        values, decode, _ = formats.quantize_tensor(x, scale, element)
        assert equal(values, reference.fp8_tensor(x.numpy(), expected_scale, NUMBERS[element])), name
        assert decode.item() == np.float32(1) / expected_scale, name


def test_fp8_scale_is_unchanged_without_amax():
    amax = torch.tensor([0.0, torch.inf, torch.nan, 2.0, 1e-45])
    expected = torch.tensor([3.0, 3.0, 3.0, 224.0, torch.finfo(torch.float32).max])
    assert torch.equal(formats.fp8_scale(amax, formats.E4M3, torch.tensor(3.0)), expected)


# ---- blocks ------------------------------------------------------------------------------------------------------


@FORMATS
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
def test_fp8_blocks_may_be_partial(element, power_of_2, block):
    for name, x in samples((130, 160)).items():
        values, scale, _ = fp8_block.quantize_fp8_blocks(x, block, element, power_of_2)
        assert equal(values, reference.fp8_blocks(x.numpy(), block, NUMBERS[element], power_of_2)), name
        assert scale == 1


@FORMATS
@pytest.mark.parametrize("block", [(1, 32), (32, 1)])
@pytest.mark.parametrize("shape", [(64, 64), (33, 40)])
def test_mxfp8_equals_reference(element, block, shape):
    for name, x in samples(shape).items():
        values, scale, _ = mxfp8.quantize_mx(x, block, element)
        assert equal(values, reference.mx(x.numpy(), block, NUMBERS[element])), name
        assert scale == 1


def test_mxfp8_scale_is_smallest_that_fits():
    """Of a bf16 amax, by the exact ratio: no rounding of amax / 448 may tip it."""
    amax = all_bf16().float()
    amax = amax[(amax > 1e-30) & (amax < 2.0**127)]
    x = torch.zeros(len(amax), 32)
    x[:, 0] = amax
    values, *_ = mxfp8.quantize_mx(x, (1, 32))
    found, exact = values[:, 0].double().numpy(), amax.double().numpy()
    step = 2.0 ** np.ceil(np.log2(exact / 448))
    # At half the step, amax would not fit; at twice the step, it would be below 224 steps.
    assert (found <= 448 * step).all()
    assert (found >= 224 * step).all()
    assert np.abs(found / exact - 1).max() <= 2**-4


@pytest.mark.parametrize("block", [(1, 16), (16, 1), (16, 16)])
@pytest.mark.parametrize("shape", [(32, 48), (17, 40)])
def test_nvfp4_equals_reference(block, shape):
    for name, x in samples(shape).items():
        values, scale, _ = nvfp4.quantize_nvfp4(x, block)
        expected, expected_scale = reference.nvfp4(x.numpy(), block)
        assert scale.item() == expected_scale, name
        assert equal(values, expected), name


def test_e2m1_rounds_every_bf16_value():
    x = all_bf16().float()
    expected = np.array([reference.nearest_even(v, reference.E2M1) for v in x.tolist()])
    assert equal(formats.round_to(x.clone(), formats.E2M1), expected)


@pytest.mark.parametrize("x", [torch.inf, torch.nan])
def test_formats_keep_nan_and_saturate_inf(x):
    """NaN makes its block NaN, or its tensor for NVFP4, and so the loss. Infinity saturates, as on the hardware: at
    448 times the largest scale, which is infinity in fp32, for MX."""
    tensor = torch.ones(32, 64)
    tensor[0, 0] = x
    for values, scale, _ in (
        mxfp8.quantize_mx(tensor, (1, 32)),
        nvfp4.quantize_nvfp4(tensor, (1, 16)),
        fp8_block.quantize_fp8_blocks(tensor, (1, 128)),
        formats.quantize_tensor(tensor, formats.fp8_scale(formats.tensor_amax(tensor), formats.E4M3), formats.E4M3),
    ):
        result = values * scale
        assert result[0, 0].isnan() == (x != x)
        assert x != x or not result.isnan().any()


@pytest.mark.parametrize(
    "quantize",
    [
        lambda x: formats.quantize_tensor(x, torch.tensor(37.0), formats.E4M3),
        lambda x: fp8_block.quantize_fp8_blocks(x, (1, 128)),
        lambda x: mxfp8.quantize_mx(x, (32, 1)),
        lambda x: nvfp4.quantize_nvfp4(x, (1, 16)),
    ],
)
def test_formats_are_exact_in_bf16_and_keep_input(quantize):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = x.clone()
    values, scale, _ = quantize(x)
    wide, wide_scale, _ = quantize(x.float())
    assert values.dtype == torch.bfloat16
    assert torch.equal(values.float(), wide)
    assert torch.equal(scale, wide_scale)
    assert torch.equal(x, before)


# ---- stochastic rounding and the Hadamard transform --------------------------------------------------------------


def test_noise_is_keyed_hash():
    for key, count in ((5, 24), ((1 << 64) - 3, 1001)):
        words = hash_counters(key, np.arange(-(-count // 8)))
        expected = (words.view(np.uint8)[:count].astype(np.float32) - 127.5) / 256
        assert np.array_equal(nvfp4.rounding_noise(key, count).numpy(), expected)
    assert not torch.equal(nvfp4.rounding_noise(1, 64), nvfp4.rounding_noise(2, 64))


def test_stochastic_rounding_is_unbiased():
    """Every number from 0 to 6 in steps of 1/32: the mean of n roundings is within 5 standard errors.

    Of 385 numbers one strays that far by chance in 2,500 draws, and the draw is fixed; to nearest would be off by up
    to 0.5, at 4.5. With eight random bits, probabilities are multiples of 1/256: numbers a 32nd of a step apart are
    hit exactly.
    """
    n = 4096
    x = torch.arange(-192, 193).float()[:, None] / 32
    noise = nvfp4.rounding_noise(11, len(x) * n).view(len(x), n)
    rounded = formats.round_to(x.expand(-1, n).clone(), formats.E2M1, noise)
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    fraction = (x.abs() / step) % 1
    standard_error = step * (fraction * (1 - fraction) / n).sqrt()
    assert ((rounded.mean(1, keepdim=True) - x).abs() <= 5 * standard_error).all()
    assert (standard_error == 0).sum() == 15  # numbers of the format: never moved
    assert set(rounded.abs().unique().tolist()) == set(reference.E2M1)


def test_stochastic_nvfp4_is_keyed_and_unbiased():
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    first, scale, _ = nvfp4.quantize_nvfp4(x, (1, 16), key=1)
    assert torch.equal(first, nvfp4.quantize_nvfp4(x, (1, 16), key=1)[0])
    assert not torch.equal(first, nvfp4.quantize_nvfp4(x, (1, 16), key=2)[0])
    n = 2000
    mean = sum(nvfp4.quantize_nvfp4(x, (1, 16), key=k)[0].double() for k in range(n)) / n * scale
    block_amax = x.abs().unflatten(1, (4, 16)).amax(2, keepdim=True).expand(-1, -1, 16).flatten(1)
    # E4M3 rounds a block's scale by up to 1/16; where down, the largest values clip at 6: they alone are biased.
    inside = x.abs() < block_amax * (1 - 1 / 16)
    # A step is at most a third of amax, its standard deviation half of that.
    assert ((mean - x).abs()[inside] <= 5 * (block_amax[inside] / 6 * 1.07) / n**0.5).all()
    assert ((first * scale - x).abs() <= block_amax / 3 * 1.07).all()


def test_hadamard_is_orthogonal_and_keeps_product():
    matrix = nvfp4.hadamard_matrix()
    assert torch.equal(matrix @ matrix.t(), torch.eye(16))
    assert torch.equal(matrix.abs(), torch.full((16, 16), 0.25))
    assert len(set(matrix.sign()[:, 0].tolist())) == 2  # not Sylvester's, whose first column is all ones
    x, y = (torch.randn(48, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (8, 24))
    torch.testing.assert_close(nvfp4.hadamard_rows(x).t() @ nvfp4.hadamard_rows(y), x.t() @ y)
    by_hand = torch.cat([matrix.double().t() @ part for part in x.split(16)])
    torch.testing.assert_close(nvfp4.hadamard_rows(x), by_hand)
    outlier = torch.zeros(16, 1)
    outlier[3] = 16.0
    assert torch.equal(nvfp4.hadamard_rows(outlier).abs(), torch.full((16, 1), 4.0))


# ---- in bf16 -----------------------------------------------------------------------------------------------------


RECIPES = [
    CurrentScaling(),
    BlockScaling(),
    BlockScaling(use_f32_scales=True),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_format_says_whether_bf16_holds_its_values(recipe):
    """Of emulation under --bf16: a format whose values bf16 does not hold must not be rounded to it."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 256, generator=generator)
    for role in (formats.INPUT, formats.WEIGHT, formats.GRADIENT):
        values = recipe.quantize(x, role, formats.COLUMNS).values
        assert torch.equal(values.bfloat16().float(), values.float()) == recipe.exact_in_bf16


def test_format_that_does_not_say_is_refused():
    class Unsaid(Recipe):
        pass

    with pytest.raises(TypeError, match="exact_in_bf16"):
        Unsaid()
