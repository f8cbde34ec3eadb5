"""Matmuls of 8-bit integers beside float64, on any CPU; and --int8 of the scripts, where the CPU has instructions."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import EsmForMaskedLM

from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.family import encoder_family
from common.models.layers.config_base import override
from common.models.layers.cpu_features import Cpu
from common.models.layers.initialise import initialise
from extras.after.downstream.contacts import attention_features
from extras.after.inference import int8
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.after.inference.int8 import INT8_MATMULS, LEVELS, ROWS, Int8Matmul, fit_int8, fit_linears, smoothing_of
from extras.prepare.sample import write_structures
from extras.prepare.synthetic_structures import coil_structures
from tests.data_fixtures import write_fasta
from tests.extras.after.inference.embed_fixtures import make_model, ran, refused

AMD, INTEL = "AuthenticAMD", "GenuineIntel"
AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def proteins(number: int, longest: int = 90) -> list[tuple[str, str]]:
    letters = np.random.default_rng(4)
    return [
        (f"p{n}", "".join(letters.choice(list("ACDEFGHIKLMNPQRSTVWY"), letters.integers(20, longest))))
        for n in range(number)
    ]


def means(out: Path) -> Tensor:
    tables = [pq.read_table(part) for part in sorted((out / "embeddings").glob("*.parquet"))]
    return torch.tensor([row for table in tables for row in table["embedding"].to_pylist()])


@pytest.mark.parametrize("plain", [False, True], ids=["as here", "without instructions"])
@pytest.mark.parametrize("tokens", [1, ROWS, 2 * ROWS + 3])
def test_matmul_is_that_of_the_rounded_numbers(monkeypatch, tokens, plain):
    """Beside float64 of numbers rounded by NumPy; a number half-way between two codes may get the other one."""
    if plain:
        monkeypatch.setattr(int8, "INT8_MATMULS", False)
    x, weight, bias = torch.randn(tokens, 96) * 3, torch.randn(40, 96), torch.randn(40)
    smoothing = torch.rand(96) + 0.5
    got = Int8Matmul(weight, smoothing)(x, None, bias).numpy()
    smooth, scaled = (x / smoothing).double().numpy(), (weight * smoothing).double().numpy()
    steps, weight_steps = (np.abs(each).max(1, keepdims=True) / LEVELS for each in (smooth, scaled))
    codes, weight_codes = np.rint(smooth / steps), np.rint(scaled / weight_steps)
    expected = codes @ weight_codes.T * steps * weight_steps.T + bias.double().numpy()
    one_code = (steps * np.abs(scaled).max(1)).max()
    difference = np.abs(got - expected)
    assert np.median(difference) < 1e-5
    assert difference.max() < 1.01 * one_code


def test_matmul_is_within_what_rounding_can_do():
    """Half a step of each activation times the weights, and half a step of each weight times the activations."""
    x, weight = torch.randn(50, 256) * torch.logspace(-3, 3, 50)[:, None], torch.randn(30, 256)
    difference = (Int8Matmul(weight, torch.ones(256))(x, None, None) - x @ weight.t()).abs()
    half_x, half_w = (each.abs().amax(1) / LEVELS / 2 for each in (x, weight))
    bound = half_x[:, None] * weight.abs().sum(1) + half_w * x.abs().sum(1)[:, None] + 256 * half_x[:, None] * half_w
    assert (difference <= 1.001 * bound).all()
    assert (difference > bound / 100).any()


def test_empty_rows_and_zeros():
    weight, bias = torch.randn(8, 16), torch.randn(8)
    weight[3] = 0
    matmul = Int8Matmul(weight, torch.ones(16))
    assert matmul(torch.zeros(0, 16), None, bias).shape == (0, 8)
    torch.testing.assert_close(matmul(torch.zeros(2, 16), None, bias), bias.expand(2, 8), atol=1e-6, rtol=0)
    got = matmul(torch.randn(2, 3, 16), None, None)
    assert got.shape == (2, 3, 8)
    assert (got[..., 3] == 0).all()


def test_smoothing_keeps_what_one_large_channel_would_cost():
    """The mean error over all outputs is less than half of that without."""
    x, weight = torch.randn(200, 128), torch.randn(64, 128) / 10
    x[:, 7] *= 100
    exact = (x.double() @ weight.double().t()).float()
    smoothing = smoothing_of(x.abs().amax(0), weight)
    errors = [(Int8Matmul(weight, s)(x, None, None) - exact).abs().mean() for s in (torch.ones(128), smoothing)]
    assert errors[1] < errors[0] / 2


def test_smoothing_of_unused_channels_is_one():
    weight = torch.tensor([[1.0, 0.0, 4.0], [0.5, 0.0, 1.0]])
    torch.testing.assert_close(smoothing_of(torch.tensor([0.0, 3.0, 1.0]), weight), torch.tensor([1.0, 1.0, 0.5]))


def write_tiny(name: str, directory: Path) -> None:
    family = encoder_family(name)
    sizes = "num_hidden_layers=2,hidden_size=64,num_attention_heads=2,intermediate_size=128"
    config = override(family.load_config(name), sizes)
    with torch.device("meta"):
        model = family.make(config)
    model.to_empty(device="cpu")
    initialise(model, 3, 0.1)
    family.adapter.save(family.adapter.to_hf(model.state_dict().__getitem__, config), config, directory)


@pytest.mark.parametrize(
    "name",
    ["facebook/esm2_t6_8M_UR50D", "biohub/ESMC-300M-hf", "chandar-lab/AMPLIFY_120M", "Profluent-Bio/E1-150m"],
)
def test_model_of_every_family(name, tmp_path):
    write_tiny(name, tmp_path)
    encoder, exact = (Encoder(EncoderFlags(str(tmp_path), use_cpu=True)) for _ in range(2))
    sequences = [encoder.alphabet.encode(text.encode()) for _, text in proteins(12)]
    fit_int8(encoder, sequences[:4])
    assert all(getattr(module, name).numel() == 0 for module, _, name in int8.matmuls_of(encoder.model))
    for got, expected in zip(encoder.hidden(sequences), exact.hidden(sequences), strict=True):
        assert F.cosine_similarity(got, expected, dim=1).min() > 0.99
        assert (got - expected).abs().max() > 1e-4


def test_stock_encoder_and_its_contacts(model):
    """What contacts.py reads: attention maps, of transformers' own model."""
    stock = EsmForMaskedLM.from_pretrained(model, attn_implementation="eager").eval()
    ids = torch.from_numpy(ESM2_TOKENS.encode(proteins(1)[0][1].encode())).long()[None]
    with torch.inference_mode():
        before = attention_features(stock, ids[0].numpy())
        fit_linears(stock.esm.encoder, lambda: stock(ids))
        after = attention_features(stock, ids[0].numpy())
    assert not any(part.weight.numel() for part in stock.esm.encoder.modules() if isinstance(part, torch.nn.Linear))
    assert np.corrcoef(before.ravel(), after.ravel())[0, 1] > 0.99
    assert np.abs(before - after).max() > 1e-6


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ({"avx2"}, {}, False),
        (AVX512, {}, False),
        (AVX512 | {"avx512_vnni"}, {}, True),
        ({"avx2", "avx_vnni"}, {}, True),
        (AVX512 | {"amx_int8"}, {}, True),
        (AVX512 | {"avx512_vnni"}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, False),
        (AVX512 | {"avx512_vnni"}, {"ONEDNN_MAX_CPU_ISA": "avx512_core_vnni"}, True),
        (AVX512 | {"avx512_vnni"}, {"DNNL_MAX_CPU_ISA": "avx2_vnni"}, False),
        ({"avx2", "avx_vnni"}, {"ONEDNN_MAX_CPU_ISA": "avx2_vnni"}, True),
        (set(), {}, False),
    ],
)
def test_which_cpus_have_instructions(flags, environment, expected):
    assert int8.has_int8_matmuls(Cpu(AMD, frozenset(flags)), environment) == expected


def test_embed_int8(model, tmp_path):
    """Of cosine 0.99 with fp32's even in a model of 32 channels; fitted to the file, so the same in any parts."""
    fasta = write_fasta(tmp_path / "my.fasta", proteins(9))
    flags = ("--model_name_or_path", model, "--fasta", fasta, "--use_cpu")
    if not INT8_MATMULS:
        assert "VNNI" in refused("embed.py", *flags, "--int8", "--output_dir", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    ran("embed.py", *flags, "--output_dir", tmp_path / "fp32")
    ran("embed.py", *flags, "--output_dir", tmp_path / "int8", "--int8")
    ran("embed.py", *flags, "--output_dir", tmp_path / "parts", "--int8", "--proteins_per_part", 4)
    ran("embed.py", *flags, "--output_dir", tmp_path / "again", "--int8")
    fp32, whole, parts, again = (means(tmp_path / name) for name in ("fp32", "int8", "parts", "again"))
    assert F.cosine_similarity(whole, fp32, dim=1).min() > 0.99
    assert (whole - fp32).abs().max() > 1e-4
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)
    assert torch.equal(again, whole)
    assert "--overwrite" in refused("embed.py", *flags, "--output_dir", tmp_path / "int8")


def test_encoder_of_sets_is_fitted_before_its_maps_are_read(tmp_path):
    """contacts.py of an E1: features of the first chain are of one pass."""
    write_tiny("Profluent-Bio/E1-150m", tmp_path / "e1")
    write_structures(tmp_path / "pdb", coil_structures(8, 5))
    flags = ("--model_name_or_path", tmp_path / "e1", "--structures", tmp_path / "pdb", "--maps", 0, "--use_cpu")
    if INT8_MATMULS:
        ran("contacts.py", *flags, "--output_dir", tmp_path / "out", "--int8")
    else:
        assert "VNNI" in refused("contacts.py", *flags, "--output_dir", tmp_path / "out", "--int8")


def test_score_int8(model, tmp_path):
    (name, text), *_ = proteins(1, 40)
    fasta = write_fasta(tmp_path / "wild.fasta", [(name, text)])
    table = tmp_path / "mutants.csv"
    words = [f"{letter}{n}{'A' if letter != 'A' else 'G'}" for n, letter in enumerate(text, 1)]
    table.write_text("\n".join(["mutant", *words]) + "\n")
    flags = ("--model_name_or_path", model, "--fasta", fasta, "--mutations", table, "--use_cpu")
    assert "one or the other" in refused("score.py", *flags, "--int8", "--bf16", "--output", tmp_path / "no.csv")
    if not INT8_MATMULS:
        assert "VNNI" in refused("score.py", *flags, "--int8", "--output", tmp_path / "no.csv")
        return
    few = tmp_path / "few.csv"
    few.write_text("\n".join(["mutant", *words[:3]]) + "\n")
    columns = []
    for number, more in enumerate(((), ("--int8",), ("--int8", "--mutations", few))):
        out = tmp_path / f"scored{number}.csv"
        ran("score.py", *flags, *more, "--output", out)
        with out.open() as file:
            columns.append(np.array([float(row["masked_marginal"]) for row in csv.DictReader(file)]))
    assert np.corrcoef(*columns[:2])[0, 1] > 0.99
    assert np.abs(columns[0] - columns[1]).max() > 1e-5
    np.testing.assert_allclose(columns[2], columns[1][:3], atol=2e-6)  # fitted to the FASTA file, whatever is scored
