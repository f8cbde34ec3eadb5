"""Batches of masked diffusion: against an enumeration of all masks, a plain loop, and masked language modelling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import quad

from common.cli import UserError
from common.data import TokenSet
from common.data.collators import INPUTS, Counts, MaskingCollator, MaskRates, mask_tokens
from common.data.crops import Pack
from common.data.flags import DataFlags
from common.data.training_data import masked_batches
from common.distributed.world import Mesh
from common.models.esm2.alphabet import CLS, EOS, ESM2_TOKENS, MASK
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from extras.families.diffusion.bound import STRATA, StratumCollator
from extras.families.diffusion.masking import FIRST_TIME, SCHEDULES, DiffusionCollator, check_flags
from tests.extras.families.diffusion.enumeration import masked_sums, over_orders, over_rates, over_sizes

TOY = TokenSet(vocab_size=5, pad=3, mask=4, unknown=3, residues=(0, 2), replacements=(0, 1, 2))
PROTEIN = [0, 2, 1, 1]


def a_pack(lengths: list[int], epoch: int = 2) -> tuple[Pack, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.integers(4, 24, sum(lengths)).astype(np.uint8)
    ends = np.cumsum(lengths)
    ids[ends - np.array(lengths)], ids[ends - 1] = CLS, EOS
    return Pack(np.array([7, 3, 900, 41][: len(lengths)]), np.zeros(len(lengths), int), np.array(lengths), epoch), ids


def toy_table() -> np.ndarray:
    """A model of the toy alphabet: probabilities of each letter at each position under each mask."""
    return np.random.default_rng(3).dirichlet(np.ones(3), (1 << len(PROTEIN), len(PROTEIN)))


def test_three_definitions_are_one_number():
    sums = masked_sums(toy_table(), PROTEIN)
    expected = over_orders(sums, toy_table(), PROTEIN)
    assert over_rates(sums, len(PROTEIN)) == pytest.approx(expected, rel=1e-12)
    assert over_sizes(sums, len(PROTEIN)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine", "held-out"])
def test_weighted_loss_of_batches_is_the_enumerated_bound(kind):
    """Of many records with the same letters; 200,000 masks, and a model that knows which letters it sees."""
    records, length, table = 40_000, len(PROTEIN), toy_table()
    collators = [StratumCollator(TOY, k) for k in range(STRATA)] if kind == "held-out" else [None] * 5
    pack = Pack(np.arange(records), np.zeros(records, int), np.full(records, length), 0)
    estimates = []
    for epoch, collator in enumerate(collators):
        collator = collator or DiffusionCollator(TOY, 1, kind)
        batch = collator(replace(pack, epoch=epoch), np.tile(PROTEIN, records).astype(np.uint8))
        masked = (batch["labels"] >= 0).numpy().reshape(records, length)
        assert ((batch["input_ids"] == TOY.mask).numpy().reshape(records, length) == masked).all()
        losses = -np.log(table[masked @ (1 << np.arange(length))][:, np.arange(length), PROTEIN])
        weighted = (losses * masked * batch["weights"].numpy().reshape(records, length)).sum(1)
        assert batch["num_targets"] == records * length
        estimates.append(weighted)
    of_each = np.mean(estimates, 0)
    error = of_each.std() / records**0.5
    expected = over_rates(masked_sums(table, PROTEIN), length)
    assert error < 0.02 * expected
    assert of_each.mean() == pytest.approx(expected, abs=4 * error + FIRST_TIME * expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_have_the_weight_of_their_rate(name):
    """The weight is m'/m by differences, and the mean rate the integral of m."""
    schedule, t, h = SCHEDULES[name], np.linspace(0.01, 0.99, 50), 1e-6
    slope = (schedule.rate(t + h) - schedule.rate(t - h)) / (2 * h)
    np.testing.assert_allclose(schedule.weight(t), slope / schedule.rate(t), rtol=1e-6)
    assert quad(schedule.rate, 0, 1)[0] == pytest.approx(schedule.mean_rate, rel=1e-9)
    assert schedule.rate(np.array([0.0, 1.0])) == pytest.approx([0, 1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batch_equals_a_plain_loop(schedule):
    """Each sequence by itself: masks as `mask_tokens` has them at its rate, weights, and the loss of its own pass."""
    pack, ids = a_pack([30, 9, 50, 22])
    collator = DiffusionCollator(ESM2_TOKENS, 5, schedule)
    batch = collator(pack, ids, 0)
    model = build_model(esm2_config(2, 32, 4, token_dropout=False), seed=1).requires_grad_(False)
    whole = model(**{name: batch[name] for name in INPUTS if name in batch}).loss_sum
    total, at, rates = 0.0, 0, MaskRates(mask_replace_prob=1, random_replace_prob=0)
    for n, (t, length) in enumerate(zip(collator.times(pack), pack.lengths.tolist(), strict=True)):
        own, one = slice(at, at + length), slice(n, n + 1)
        rate = float(SCHEDULES[schedule].rate(np.array([t]))[0])
        rates = MaskRates(rate, 1.0, 0.0)
        shown, labels = mask_tokens(
            ids[own], pack.records[one], pack.starts[one], pack.lengths[one], ESM2_TOKENS, 5, 2, rates
        )
        assert shown.tolist() == batch["input_ids"][own].tolist()
        assert labels.tolist() == batch["labels"][own].tolist()
        assert set(shown[labels >= 0]) <= {MASK}
        logits = model(torch.from_numpy(shown.astype(np.int64))[None]).logits[0]
        loss = F.cross_entropy(logits, torch.from_numpy(labels), reduction="sum")
        total += float(loss) * float(SCHEDULES[schedule].weight(np.array([t]))[0])
        at += length
    assert batch["num_targets"] == sum(pack.lengths) - 2 * len(pack.lengths)
    assert (batch["weights"] == 0).sum() == 2 * len(pack.lengths)
    assert float(whole) == pytest.approx(total, rel=1e-5)


def test_times_differ_by_record_seed_and_epoch_alone():
    lengths = [30, 9, 50, 22]
    pack, _ = a_pack(lengths)
    times = DiffusionCollator(ESM2_TOKENS, 5).times(pack)
    assert len(set(times)) == len(times)
    assert (
        times[::-1].tolist()
        == DiffusionCollator(ESM2_TOKENS, 5)
        .times(Pack(pack.records[::-1], pack.starts, pack.lengths, pack.epoch))
        .tolist()
    )
    assert not set(times) & set(DiffusionCollator(ESM2_TOKENS, 6).times(pack))
    assert not set(times) & set(DiffusionCollator(ESM2_TOKENS, 5).times(a_pack(lengths, epoch=3)[0]))
    many = Pack(np.arange(20_000), np.zeros(20_000, int), np.ones(20_000, int), 0)
    counts = np.histogram(DiffusionCollator(ESM2_TOKENS, 0).times(many), bins=10, range=(0, 1))[0]
    assert abs(counts - 2000).max() < 5 * 2000**0.5
    assert DiffusionCollator(ESM2_TOKENS, 0).times(many).min() >= FIRST_TIME


class Fixed(DiffusionCollator):
    """All sequences at one rate, with a weight of 1."""

    def times(self, pack: Pack) -> np.ndarray:
        return np.full(len(pack.records), 0.15)


def test_fixed_rate_and_weight_of_1_are_masked_language_modelling_bit_for_bit():
    pack, ids = a_pack([130, 79, 150, 122])
    plain = MaskingCollator(ESM2_TOKENS, 5, MaskRates(0.15, 1.0, 0.0))(pack, ids)
    batch = Fixed(ESM2_TOKENS, 5)(pack, ids)
    batch["weights"] = batch["weights"].clamp(max=1)
    model = build_model(esm2_config(2, 32, 4), seed=1)
    found = []
    for inputs in (plain, batch):
        model.zero_grad()
        loss = model(**{name: inputs[name] for name in INPUTS if name in inputs}).loss_sum
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert "weights" in batch
    assert "weights" not in plain
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
def test_slices_of_ranks_that_share_a_pack_add_up(layout):
    flags = DataFlags(objective="mdlm", max_seq_length=64, tokens_per_pack=256, cp_layout=layout)
    for pack, ids in (a_pack([30, 9, 50, 22]), (Pack.empty(), np.zeros(0, np.uint8))):
        whole = masked_batches(flags, ESM2_TOKENS, Mesh())(pack, ids, 0)
        parts = [masked_batches(flags, ESM2_TOKENS, Mesh(rank, 2, 2), 1, True)(pack, ids, 0) for rank in range(2)]
        assert Counts.of(parts) == Counts.of([whole])
        for weigh in (lambda b: b["weights"], lambda b: b["weights"][b["predicted"][b["predicted"] >= 0]]):
            together = torch.cat([weigh(part)[weigh(part) > 0] for part in parts])
            assert sorted(together.tolist()) == sorted(weigh(whole)[weigh(whole) > 0].tolist())
        assert all(len(part["weights"]) == len(part["input_ids"]) for part in parts)


def test_predicted_positions_of_a_filled_pack_have_one_shape():
    """Of packs of some 60 proteins; a spare sixth holds what rates of their own add."""
    flags = DataFlags(objective="mdlm", max_seq_length=512, tokens_per_pack=16384)
    collator, shapes = masked_batches(flags, ESM2_TOKENS, Mesh(), static_shape=True), []
    for epoch in range(20):
        lengths = np.random.default_rng(epoch).integers(30, 500, 90)
        lengths = lengths[lengths.cumsum() <= 16384]
        pack = Pack(np.arange(len(lengths)), np.zeros(len(lengths), int), lengths, epoch)
        shapes.append(len(collator(pack, np.full(lengths.sum(), 5, np.uint8), 0)["predicted"]))
    assert len(set(shapes)) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"mlm_probability": 0.3}, "drop mlm_probability 0.3"),
        ({"mlm_probability_end": 0.1}, "drop mlm_probability_end 0.1"),
        ({"random_replace_prob": 0.2}, "drop random_replace_prob 0.2"),
        ({"set_tokens": "2048"}, "would bound no likelihood"),
    ],
)
def test_flags_of_masked_language_modelling_are_refused(flags, said):
    with pytest.raises(UserError, match=said):
        check_flags(DataFlags(objective="mdlm", **flags))
    check_flags(DataFlags(objective="mdlm", mask_replace_prob=1.0, random_replace_prob=0.0))
