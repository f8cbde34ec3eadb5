"""Averages over assays beside the same done by pandas, on a table of the official one's shape."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from extras.after.proteingym.averages import averages, by_category, nan_mean

SCORES = ["one", "two", "three"]
TYPES = ["Activity", "Binding", "Expression", "OrganismalFitness", "Stability"]


@pytest.fixture
def assays() -> pd.DataFrame:
    """217 assays of 186 UniProt ids, some ids in two types, with gaps; one type has no value of `three`."""
    generator = np.random.default_rng(1)
    ids = [f"P{n}" for n in range(186)]
    table = pd.DataFrame({"id": ids + list(generator.choice(ids, 31))})
    table["type"] = generator.choice(TYPES, len(table), p=[0.2, 0.06, 0.09, 0.35, 0.3])
    table["depth"] = [("Low", "Medium", "High")[int(name[1:]) % 3] for name in table["id"]]
    values = generator.uniform(-0.2, 0.9, (len(table), 3))
    values[generator.random(values.shape) < 0.05] = np.nan
    values[table["type"] == "Binding", 2] = np.nan
    return table.join(pd.DataFrame(values, columns=SCORES))


def test_averages_equal_pandas(assays):
    found = averages(list(assays["id"]), list(assays["type"]), assays[SCORES].to_numpy())
    rounded = assays.assign(**{name: assays[name].round(3) for name in SCORES})
    of_ids = rounded.groupby("id")[SCORES].mean()
    of_types = rounded.groupby(["id", "type"])[SCORES].mean().groupby("type").mean()
    assert len(of_ids) == len(found.of_ids) == 186
    for name, row in of_ids.iterrows():
        np.testing.assert_allclose(found.of_ids[name], row)
    assert list(found.of_types) == TYPES
    np.testing.assert_allclose(np.array(list(found.of_types.values())), of_types)
    np.testing.assert_allclose(found.average, of_types.mean())
    # What it is not: a mean over assays, or over UniProt ids.
    assert np.abs(found.average - rounded[SCORES].mean()).min() > 1e-4
    assert np.abs(found.average - of_ids.mean()).min() > 1e-4


def test_means_by_msa_depth_equal_pandas(assays):
    found = by_category(list(assays["id"]), list(assays["depth"]), assays[SCORES].to_numpy())
    expected = assays.groupby(["id", "depth"])[SCORES].mean().groupby("depth").mean()
    assert {name: nan_mean(rows).tolist() for name, rows in found.items()} == {
        name: pytest.approx(row.tolist()) for name, row in expected.iterrows()
    }


def test_values_are_rounded_for_each_assay_first():
    found = averages(["a", "b"], ["x", "x"], np.array([[0.1004], [0.2004]]))
    assert found.average[0] == pytest.approx(0.15, abs=1e-9)


def test_standard_errors_equal_resampling_by_pandas(assays):
    """As ProteinGym's: each type's (id, type) means drawn anew, their mean, the mean over types; 400 resamples."""
    found = averages(list(assays["id"]), list(assays["type"]), assays[SCORES].to_numpy())
    means = assays.assign(**{name: assays[name].round(3) for name in SCORES}).groupby(["type", "id"])[SCORES].mean()
    best = SCORES[int(np.argmax(found.average))]
    assert found.error_to_best[SCORES.index(best)] == 0
    for values, errors in ((means, found.error), (means.subtract(means[best], axis=0), found.error_to_best)):
        drawn = pd.DataFrame(
            pd.DataFrame(
                [rows.sample(frac=1, replace=True, random_state=n).mean() for _, rows in values.groupby("type")]
            ).mean()
            for n in range(400)
        )
        np.testing.assert_allclose(errors, drawn.std(ddof=1), rtol=0.2)  # 5 standard errors of 400 resamples


def test_standard_error_of_one_type_is_that_of_a_mean():
    values = np.random.default_rng(2).normal(size=(50, 1)).round(3)
    found = averages([str(n) for n in range(50)], ["x"] * 50, values)
    assert found.error[0] == pytest.approx(values.std() / np.sqrt(50), rel=0.05)
    assert np.isnan(averages(["a", "b"], ["x", "y"], values[:2]).error[0])
