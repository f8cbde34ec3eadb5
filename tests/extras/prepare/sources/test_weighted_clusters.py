"""sample_clusters_exponent: draws in proportion to a power of clusters' sizes, against the definition."""

import pickle

import numpy as np
import pytest
from scipy.stats import binom

from common.cli import UserError
from common.data.counter_rng import MEMBER, derive_key
from extras.prepare.sources.weighted_clusters import WeightedClusters
from tests.data.test_clusters import drawn, plan_of, write_clusters
from tests.extras.prepare.test_clusters import make_input, tokenize
from tests.training_fixtures import losses, train

EPOCHS = 50


@pytest.mark.parametrize("exponent", [0.3, 0.5, 1.0])
def test_draws_are_proportional_to_a_power_of_the_size(tmp_path, exponent):
    """In every epoch a cluster is drawn as often as it weighs, up or down to a whole number; so in 50 within one."""
    sizes = np.random.default_rng(0).geometric(0.1, 3000)
    weighted = WeightedClusters(write_clusters(tmp_path, sizes), exponent)
    expected = len(sizes) * sizes**exponent / (sizes**exponent).sum()
    total, firsts = np.zeros(len(sizes)), np.zeros(len(sizes))
    for epoch in range(EPOCHS):
        clusters = weighted.drawn(np.arange(len(sizes)), derive_key(0, epoch, MEMBER))
        counts = np.bincount(clusters, minlength=len(sizes))
        assert (np.abs(counts - expected) < 1 + 1e-3).all()
        total += counts
        firsts += np.bincount(clusters[: len(sizes) // 10], minlength=len(sizes))
    # The fraction of an expected count is drawn with its probability, anew each epoch.
    extra = total - EPOCHS * np.floor(expected)
    rare = 1e-4 / len(sizes)
    assert binom.sf(extra - 1, EPOCHS, expected % 1).min() > rare
    assert binom.cdf(extra, EPOCHS, expected % 1).min() > rare
    largest = np.argsort(sizes)[-100:]  # the draws of a cluster lie all over the epoch: a tenth has a tenth of them
    assert firsts[largest].sum() == pytest.approx(total[largest].sum() / 10, rel=0.1)


def test_members_are_drawn_uniformly_and_independently(tmp_path):
    """A family of eight has half of the weight, each member an eighth of its draws: within 4 deviations."""
    sizes = np.array([8] + [1] * 8)
    clusters = write_clusters(tmp_path, sizes)
    plan = plan_of(WeightedClusters(clusters, 1.0), np.full(sizes.sum(), 100))
    draws = np.concatenate([drawn(plan, epoch) for epoch in range(800)])
    counts = np.bincount(draws, minlength=16)
    expected = 800 * 9 / 16
    assert (np.abs(counts - expected) < 4 * np.sqrt(expected)).all()
    again = pickle.loads(pickle.dumps(plan.clusters))
    assert np.array_equal(again.draw(np.arange(9), 5), plan.clusters.draw(np.arange(9), 5))


def test_run_with_weighted_clusters_resumes(tmp_path):
    """Stopped half-way: the same losses as a run that was not. Another exponent is another run."""
    make_input(tmp_path / "csv", count=1000)
    tokenize(tmp_path / "csv", tmp_path / "out")
    splits = tmp_path / "out/arrow"
    flags = {"sample_clusters": True, "sample_clusters_exponent": 0.5, "max_steps": 8}
    said = train(splits, tmp_path / "whole", **flags)
    assert "Sampling clusters by their size to the power 0.5, then a member of each" in said
    train(splits, tmp_path / "part", stop_at_step=4, **flags)
    train(splits, tmp_path / "part", **flags)
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    said = train(splits, tmp_path / "part", expect=2, **flags | {"sample_clusters_exponent": 0.7})
    assert "sample_clusters '0.5:" in said
    said = train(splits, tmp_path / "none", expect=2, **flags | {"sample_clusters": False})
    assert "missing: --sample_clusters (sample_clusters_exponent goes with it)" in said


@pytest.mark.parametrize("exponent", [-0.1, 1.5, float("nan")])
def test_exponent_is_between_0_and_1(tmp_path, exponent):
    with pytest.raises(UserError, match=r"sample_clusters_exponent .*: from 0 \(each cluster alike\) to 1"):
        WeightedClusters(write_clusters(tmp_path, np.ones(3, int)), exponent)
