"""Means over proteins with their errors, and the file of the losses."""

from __future__ import annotations

import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from common.cli import UserError
from common.training.protein_losses import ProteinLosses, mean_and_error, write_losses
from extras.compare.losses_file import read_losses

PROTEINS = 400


def sample(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Differences of two models, residues and clusters: a protein has its own mean, and so has a cluster of three."""
    counts = rng.integers(0, 120, PROTEINS)
    clusters = np.arange(PROTEINS) // 3
    means = 0.01 + rng.normal(0, 0.05, PROTEINS) + rng.normal(0, 0.1, PROTEINS)[clusters]
    return counts * means + rng.normal(0, 0.3, PROTEINS) * np.sqrt(counts), counts, clusters


def resampled(rng: np.random.Generator, differences: np.ndarray, counts: np.ndarray, units: np.ndarray) -> float:
    """The spread of the mean over 4,000 bootstrap samples of units with replacement."""
    d, n = np.bincount(units, differences), np.bincount(units, counts)
    drawn = rng.integers(0, len(d), (4000, len(d)))
    return float((d[drawn].sum(1) / n[drawn].sum(1)).std())


@pytest.mark.parametrize("by_cluster", [False, True])
def test_error_of_the_mean_equals_a_bootstrap(by_cluster):
    rng = np.random.default_rng(3)
    differences, counts, clusters = sample(rng)
    units = clusters if by_cluster else np.arange(PROTEINS)
    mean, error = mean_and_error(differences, counts, clusters if by_cluster else None)
    assert mean == pytest.approx(differences.sum() / counts.sum(), rel=1e-12)
    # 4,000 samples tell a spread to 1.1 %; the linearised error and a bootstrap differ by some percent at 134 units.
    assert error == pytest.approx(resampled(rng, differences, counts, units), rel=0.06)
    alone = mean_and_error(differences, counts)[1]
    assert by_cluster == (error > 1.15 * alone), "relatives tell less than strangers"


def test_error_covers_the_truth():
    """Of 400 samples, the true mean lies within two errors in 95.4 %; three standard deviations of that count."""
    rng = np.random.default_rng(4)
    means = []
    for _ in range(400):
        counts = rng.integers(1, 120, 100)
        mean, error = mean_and_error(counts * rng.normal(0.01, 0.05, 100), counts)
        means.append(abs(mean - 0.01) < 2 * error)
    assert abs(np.mean(means) - 0.954) < 3 * math.sqrt(0.954 * 0.046 / 400)


def test_proteins_without_a_residue_count_for_nothing():
    rng = np.random.default_rng(5)
    differences, counts, clusters = sample(rng)
    counts[::2], differences[::2] = 0, 0.0
    some = counts > 0
    assert mean_and_error(differences, counts) == mean_and_error(differences[some], counts[some])
    grouped = mean_and_error(differences[some], counts[some], clusters[some])
    assert mean_and_error(differences, counts, clusters) == grouped
    assert all(map(math.isnan, mean_and_error(np.zeros(3), np.zeros(3))))
    mean, error = mean_and_error(np.array([0.0, 3.0]), np.array([0, 10]))
    assert mean == 0.3
    assert math.isnan(error)


def test_losses_are_kept_as_they_are(tmp_path):
    losses = ProteinLosses(np.array([1.25, 0.0]), np.array([3, 0], np.int32), np.array([7, 9]), questions="ab12")
    write_losses(tmp_path / "a.parquet", losses, step=40)
    again, step = read_losses(tmp_path / "a.parquet")
    assert (again.loss_sum.tolist(), again.masked.tolist()) == ([1.25, 0.0], [3, 0])
    assert (again.clusters.tolist(), again.questions, step) == ([7, 9], "ab12", 40)
    write_losses(tmp_path / "b.parquet", ProteinLosses(losses.loss_sum, losses.masked), step=1)
    table = pq.read_table(tmp_path / "b.parquet")
    assert [str(field.type) for field in table.schema] == ["double", "int32"], "12 bytes a protein"
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    for name in ("c", "absent"):
        with pytest.raises(UserError, match=rf"{name}.parquet: not losses of proteins .*: remove it"):
            read_losses(tmp_path / f"{name}.parquet")
