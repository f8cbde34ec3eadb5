"""benchmarks/draws_by_length.py against a loop over all packs."""

from __future__ import annotations

import numpy as np

from benchmarks.draws_by_length import draws, table
from common.data.packing import BatchPlan


def test_draws_are_those_of_a_loop_over_packs():
    lengths = np.random.default_rng(0).integers(5, 200, 700)
    plan = BatchPlan(lambda records: lengths[records], len(lengths), 1, max_seq_length=64, tokens_per_pack=128)
    found = draws(plan, lengths, packs_per_step=3, epochs=2)
    assert (found.times == 1).all()  # every protein once an epoch, whatever its length
    packs, first_read = [], np.zeros(len(lengths))
    for position, pack in plan.packs():
        if position.epoch == 2:
            break
        packs.append(pack)
        first_read[pack.records[pack.starts == 0]] += 0.5
    np.testing.assert_array_equal(found.read[:, 0], first_read)
    of_first = [pack for pack in packs if pack.epoch == 0]
    steps = [of_first[at : at + 3] for at in range(0, len(of_first), 3)]
    mean = sum(pack.lengths.sum() for pack in of_first) / len(steps)
    for step in steps:
        for pack in step:
            weight = mean / sum(each.lengths.sum() for each in step)
            np.testing.assert_allclose(found.weight[0, pack.records], weight)
    for number, pack in enumerate(of_first):
        np.testing.assert_allclose(found.when[0, pack.records], (number + 0.5) / len(of_first))
    assert [line.split(" | ")[2] for line in table(found, lengths)[2:]] == ["1"] * 3


def test_no_length_comes_early_or_late():
    lengths = np.random.default_rng(0).integers(5, 400, 1000)
    plan = BatchPlan(lambda records: lengths[records], len(lengths), 1, max_seq_length=256, tokens_per_pack=1024)
    when = draws(plan, lengths, packs_per_step=1, epochs=60).when
    for low in range(0, 400, 100):
        means = when[:, (low < lengths) & (lengths <= low + 100)].mean(1)
        assert abs(means.mean() - 0.5) < 4 * means.std(ddof=1) / 60**0.5
