"""What proteingym.py refuses, in one line, before it computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.cli import UserError
from tests.data_fixtures import expect_error
from tests.extras.after.inference.embed_fixtures import make_model
from tests.extras.after.inference.test_causal import make_decoder
from tests.extras.after.proteingym.gym_fixtures import make_gym, run_gym


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("DMS_filename", "file", r"reference.csv: no column 'DMS_filename', only 'DMS_id'"),
        ("UniProt_ID", "id", r"no column 'UniProt_ID', only"),
        ("coarse_selection_type", "type", r"no column 'coarse_selection_type', only"),
        ("UniProt_ID,coarse_selection_type", "id,type", r"by which assays are averaged: add them \(clinical assays"),
        ("S1,S1.csv", "S0,S1.csv", r"reference.csv, row 3: a second DMS_id 'S0': rename or remove it"),
        ("S1.csv,P0", "S1.csv,", r"row 3: no UniProt_ID: add it, or remove the row"),
        (",MKV", ",MK*V", r"row 7: target_seq 'MK\*V' is not a protein"),
    ],
)
def test_reference_is_refused(model, tmp_path, old, new, error):
    gym = make_gym(tmp_path, rows=12)
    gym.reference.write_text(gym.reference.read_text().replace(old, new))
    with pytest.raises(UserError, match=error):
        run_gym(gym, model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


TABLES = [
    ("mutant\nM1A\n", r"S3.csv: no column 'DMS_score', only 'mutant': add it"),
    ("change,DMS_score\nM1A,1\n", r"no column 'mutant' and no 'mutated_sequence', only 'change', 'DMS_score'"),
    ("mutant,DMS_score\nWILD,1\nWILD,1\n", r"DMS_score has fewer than 2 different values: remove S3 from .*reference"),
    ("mutant,DMS_score\nWILD,\nWILD,NA\n", r"fewer than 2 different values"),
    ("mutant,DMS_score\nWILD,1\nM1A,2\n", r"S3.csv, row 3: M1A: residue 1 .*\(target_seq of S3 in .*reference.csv\)"),
    ("mutant,DMS_score\nWILD,1\nWILD,high\n", r"row 3: DMS_score 'high' is not a number: correct it, leave it empty$"),
    ("mutant,DMS_score,DMS_score_bin\nWILD,1,1\nWILD,2,2\n", r"row 3: DMS_score_bin '2' is not 0 or 1"),
    (
        "mutant,DMS_score,masked_marginal\nWILD,1,0\nWILD,2,0\n",
        r"has a column 'masked_marginal' already: rename",
    ),
    ("", r"S3.csv: it has no rows"),
]


@pytest.mark.parametrize(("table", "error"), TABLES)
def test_assay_is_refused_before_any_is_scored(model, tmp_path, table, error):
    gym = make_gym(tmp_path, assays=4, rows=12)
    wild = "L" + gym.proteins["S3"][1:]  # no M
    gym.reference.write_text(gym.reference.read_text().replace(gym.proteins["S3"], wild))
    (gym.data / "S3.csv").write_text(table.replace("WILD", f"{wild[1]}2{'A' if wild[1] != 'A' else 'C'}"))
    with pytest.raises(UserError, match=error):
        run_gym(gym, model, tmp_path / "out")
    assert not list(tmp_path.glob("out/scores/*"))


def test_flags_are_refused(model, tmp_path):
    gym, out = make_gym(tmp_path, assays=2), tmp_path / "out"
    good = gym.flags(model, out)
    assert "--data x: no such directory" in expect_error("proteingym.py", *good, "--data", "x")
    (tmp_path / "empty").mkdir()
    said = expect_error("proteingym.py", *good, "--data", tmp_path / "empty")
    assert "none of the 3 assays of" in said
    assert "S0.csv" in said
    said = expect_error("proteingym.py", *good, "--output_dir", tmp_path)
    assert "--reference" in said
    assert "is in there" in said
    with pytest.raises(UserError, match="--directions: is of protein decoders"):
        run_gym(gym, model, out, "--directions", "both")
    decoder = make_decoder(tmp_path / "decoder")
    with pytest.raises(UserError, match="--wild_type_marginal_only: is of encoders"):
        run_gym(gym, decoder, out, "--one_pass")
    assert not out.exists()
