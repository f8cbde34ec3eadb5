"""Batches filled up to one shape: what the fillers are, that they change nothing, and that layers are one graph."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from common.data.collators import IGNORE, INPUTS, Collator, Counts, FillingCollator, MaskingCollator, to_device
from common.data.crops import Pack
from common.data.flags import DataFlags
from common.data.packing import BatchPlan, Position
from common.data.training_data import evaluation_masks, masked_batches
from common.distributed.world import Mesh
from common.models.esm2.alphabet import ESM2_TOKENS, PAD
from common.models.esm2.config import esm2_config
from common.models.esm2.model import Esm2ForMaskedLM, build_model
from common.models.layers.compiling import compile_layers
from common.shape_buckets import most_predicted, sequences_of_packs
from tests.data_fixtures import REAL_SAMPLE
from tests.models.reference import packed, random_batch

CPU = torch.device("cpu")


@cache
def protein_lengths() -> np.ndarray:
    """Of real proteins where the sample is at hand, else of the same median and spread (log-normal)."""
    if not REAL_SAMPLE.exists():
        return np.random.default_rng(0).lognormal(5.6, 0.7, 8000).astype(np.int64).clip(15) + 2
    lengths: list[int] = []
    with gzip.open(REAL_SAMPLE, "rt") as file:
        for line in file:
            if line.startswith(">"):
                lengths.append(2)  # <cls> and <eos>
            else:
                lengths[-1] += len(line.strip())
    return np.array(lengths)


def packs(tokens: int, longest: int, number: int) -> Iterator[tuple[Pack, np.ndarray]]:
    lengths, rng = protein_lengths(), np.random.default_rng(1)
    plan = BatchPlan(lambda records: lengths[records], len(lengths), 1, longest, tokens_per_pack=tokens)
    for _, (_, pack) in zip(range(number), plan.packs(Position()), strict=False):
        yield pack, rng.integers(4, 24, pack.lengths.sum()).astype(np.uint8)


def shape_of(batch: dict) -> tuple:
    inputs = to_device(batch, CPU)
    fields = inputs | (vars(inputs.pop("cp_pack")) if "cp_pack" in inputs else {})
    return tuple((name, x.shape if isinstance(x, torch.Tensor) else x) for name, x in sorted(fields.items()))


@pytest.mark.parametrize(
    ("tokens", "longest", "ranks", "flags"),
    [
        (16384, 1024, 1, {}),
        (4096, 512, 1, {"mlm_probability": 0.4, "mlm_probability_end": 0.1}),
        (1024, 512, 1, {}),
        (8192, 1024, 2, {"mlm_probability": 0.3}),
        (8192, 1024, 4, {"cp_layout": "contiguous"}),
    ],
)
def test_filling_collator_gives_fifty_packs_one_shape(tokens, longest, ranks, flags):
    given = DataFlags(max_seq_length=longest, tokens_per_pack=tokens, **flags)
    for rank in range(ranks):
        collators = [
            masked_batches(given, ESM2_TOKENS, Mesh(rank, ranks, ranks), 50, fills) for fills in (False, True)
        ]
        found = [[], []]
        for step, pack in enumerate([*packs(tokens, longest, 50), (Pack.empty(), np.zeros(0, np.uint8))]):
            plain, filled = (collator(*pack, step) for collator in collators)
            assert Counts.of([plain]) == Counts.of([filled])
            for shapes, batch in zip(found, (plain, filled), strict=True):
                batch.pop("mask_ratio")
                shapes.append(shape_of(batch))
        before, after = map(set, found)
        assert len(after) == 1
        assert len(before) > 10


def test_filling_collator_adds_fillers_then_empty_sequences():
    batch = random_batch([70, 30])
    pack = packed(batch) | dict.fromkeys(Counts._fields, 7) | {"predicted": torch.tensor([3, 80])}
    filled = FillingCollator(lambda *_: pack, 320, 8, 70, 4, PAD)(None, None)
    assert filled["cu_seqlens"].tolist() == [0, 70, 100, 110, 180, 250, 320, 320, 320]
    assert filled["max_seqlen"] == 70
    assert filled["predicted"].tolist() == [3, 80, -1, -1]
    for name, filler in (("input_ids", PAD), ("labels", IGNORE)):
        assert torch.equal(filled[name][:100], pack[name])
        assert (filled[name][100:] == filler).all()
    doubled = FillingCollator(lambda *_: pack, 320, 4, 70, 1, PAD)(None, None)
    assert doubled["cu_seqlens"].tolist() == filled["cu_seqlens"].tolist()
    few = FillingCollator(lambda *_: pack, 64, 16, 70, 1, PAD)(None, None)  # a batch that is larger
    assert few["predicted"].tolist() == [3, 80]
    assert few["cu_seqlens"].tolist() == [0, 70, 100] + [128] * 14


def test_evaluation_masks_fill_up_to_their_own_size():
    flags = DataFlags(max_seq_length=256, per_device_eval_batch_size=3, tokens_per_pack=4096)
    collator = evaluation_masks(flags, ESM2_TOKENS, Mesh(), static_shape=True)
    assert len({shape_of(collator(*pack)) for pack in packs(768, 256, 20)}) == 1
    assert len(collator(Pack.empty(), np.zeros(0, np.uint8))["input_ids"]) == 768


def test_most_predicted_is_six_deviations():
    """Of binomial counts: none in 2,000 draws exceeds it, and a twentieth less is exceeded."""
    for tokens, fraction in ((1024, 0.15), (16384, 0.15), (16384, 0.5)):
        drawn = np.random.default_rng(0).binomial(tokens, fraction, 2000).max()
        assert drawn < most_predicted(tokens, fraction) < 1.4 * drawn
    assert most_predicted(64, 0.9) == 64
    assert [sequences_of_packs(*sizes) for sizes in ((16384, 1024), (512, 512), (8192, 128))] == [128, 16, 128]


def loss_and_gradients(model: Esm2ForMaskedLM, batch: dict, bf16: bool = False) -> list[torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = model(**{name: batch[name] for name in INPUTS if name in batch})
    output.loss_sum.backward()
    return [output.loss_sum.detach(), output.correct, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("path", ["fp32", "bf16", "float64, sequence by sequence"])
def test_empty_sequences_and_static_bound_change_no_bit(path):
    """Token dropout included: sequences have different fractions of <mask>."""
    model = build_model(esm2_config(layers=2, hidden_size=64, heads=4), seed=1)
    if path.startswith("float64"):
        model.double()
    pack, bf16 = packed(random_batch([1, 70, 2, 64, 55], mask_ratio=0.4)), path == "bf16"
    filled = FillingCollator(lambda *_: pack, 0, 16, 512, 0, PAD)(None, None)
    assert filled["cu_seqlens"].tolist()[5:] == [192] * 12
    for ours, theirs in zip(*(loss_and_gradients(model, x, bf16) for x in (filled, pack)), strict=True):
        assert torch.equal(ours, theirs)


def test_filled_packs_are_one_graph():
    """Compiled for one shape, with the losses and gradients of plain layers on batches as they come."""
    torch._dynamo.reset()
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: list):
        graphs.append([x for x in inputs if isinstance(x, torch.SymInt)])
        return graph.forward

    config = esm2_config(layers=2, hidden_size=64, heads=4)
    plain, compiled = build_model(config, seed=1), build_model(config, seed=1)
    compile_layers(compiled, "cpu", counting, static_shape=True)
    flags = DataFlags(max_seq_length=512, tokens_per_pack=1024)
    collators: list[Collator] = [MaskingCollator(ESM2_TOKENS, flags.seed)]
    collators.append(masked_batches(flags, ESM2_TOKENS, Mesh(), static_shape=True))
    for number, pack in enumerate(packs(1024, 512, 50)):
        as_it_is, filled = (collate(*pack) for collate in collators)
        ours = loss_and_gradients(compiled, filled)
        if number % 10 == 0:
            for mine, theirs in zip(ours, loss_and_gradients(plain, as_it_is), strict=True):
                assert (mine - theirs).double().norm() <= 1e-5 * theirs.double().norm()
    assert graphs == [[]]
    torch._dynamo.reset()
