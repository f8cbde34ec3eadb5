"""proteingym.py from reference file to tables: beside score.py and pandas, killed, on ranks; indels, clinical ones."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

import score as script
from common.cli import UserError
from extras.after.proteingym.assays import read_reference
from tests.data_fixtures import call, environment, everything_in, write_fasta
from tests.extras.after.inference.embed_fixtures import make_model
from tests.extras.after.inference.test_causal import make_decoder
from tests.extras.after.proteingym.gym_fixtures import Gym, make_gym, read, run_gym, write_rows
from tests.forked import Script
from tests.live_runs import LiveRun

LIKELIHOODS = ("log_likelihood", "log_likelihood_mean")
COLUMNS = ["masked_marginal", "wild_type_marginal", "blosum62", "residue_frequency"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gym(tmp_path_factory) -> Gym:
    return make_gym(tmp_path_factory.mktemp("gym"))


@pytest.fixture(scope="module")
def out(model, gym, tmp_path_factory) -> Path:
    """What a run that nothing interrupts leaves."""
    directory = tmp_path_factory.mktemp("whole") / "out"
    run_gym(gym, model, directory)
    return directory


def made_in(out: Path) -> dict[str, bytes]:
    """All files but those that name the directory."""
    return {
        name: content
        for name, content in everything_in(out).items()
        if Path(name).suffix != ".json" or "scores" in name
    }


def test_scores_are_those_of_score(model, gym, out, tmp_path):
    for name in ("S0", "S3"):
        fasta = write_fasta(tmp_path / "one.fasta", [(name, gym.proteins[name])])
        given = ("--model_name_or_path", model, "--fasta", fasta, "--mutations", gym.data / f"{name}.csv")
        call(script, *given, "--output", tmp_path / f"{name}.csv", "--use_cpu")
        assert (tmp_path / f"{name}.csv").read_bytes() == (out / f"scores/{name}.csv").read_bytes()
        found = json.loads((tmp_path / f"{name}.csv.json").read_text())["correlations"]["proteins"][name]
        record = json.loads((out / f"scores/{name}.csv.json").read_text())
        assert record["metrics"].keys() == set(COLUMNS)
        for column in COLUMNS:
            assert record["metrics"][column]["spearman"] == found[column]["spearman"]


def test_tables_equal_pandas_on_the_scores(gym, out):
    reference = pd.read_csv(gym.reference).set_index("DMS_id").drop("GONE")
    values = {
        name: [
            spearmanr(table["DMS_score"], table[column]).statistic.round(3)
            for name in reference.index
            for table in [pd.read_csv(out / f"scores/{name}.csv")]
        ]
        for name, column in (("masked", "masked_marginal"), ("visible", "wild_type_marginal"))
    }
    reference = reference.assign(**values)
    of_assays = pd.read_csv(out / "spearman/assays.csv").set_index("DMS_id")
    assert of_assays["masked_marginal"].tolist() == pytest.approx(values["masked"], abs=1e-9)
    assert of_assays["variants"].tolist() == [24] * 5
    of_ids = pd.read_csv(out / "spearman/uniprot_ids.csv").set_index("UniProt_ID")["masked_marginal"]
    expected = reference.groupby("UniProt_ID")["masked"].mean()
    assert of_ids.drop("Average").to_dict() == pytest.approx(expected.to_dict(), abs=5.1e-4)
    assert of_ids["Average"] == pytest.approx(expected.mean(), abs=5.1e-4)
    by_type = reference.groupby(["UniProt_ID", "coarse_selection_type"])["masked"].mean()
    by_type = by_type.groupby("coarse_selection_type").mean()
    of_types = pd.read_csv(out / "spearman/function_types.csv").set_index("coarse_selection_type")["masked_marginal"]
    expected = {**by_type.to_dict(), "Average": by_type.mean()}
    assert of_types.to_dict() == pytest.approx(expected, abs=5.1e-4)
    summary = pd.read_csv(out / "summary.csv").set_index(["metric", "score"])
    row = summary.loc["spearman", "masked_marginal"]
    assert row["average"] == pytest.approx(by_type.mean(), abs=5.1e-4)
    assert row["function_Binding"] == pytest.approx(by_type["Binding"], abs=5.1e-4)
    depths = reference.groupby(["UniProt_ID", "MSA_Neff_L_category"])["masked"].mean()
    depths = depths.groupby("MSA_Neff_L_category").mean()
    assert row["msa_depth_Low"] == pytest.approx(depths["low"], abs=5.1e-4)
    assert row["assays"] == 5
    assert list(summary.loc["spearman"].index) == list(summary.loc["spearman"].sort_values("average").index[::-1])


def test_printed_table_says_over_what(model, gym, out, tmp_path, caplog, capsys):
    caplog.set_level("INFO")
    shutil.copytree(out, tmp_path / "out")
    (tmp_path / "out/scores/S1.csv").unlink()
    manifest = json.loads((out / ".files.json").read_text()) | {"finished": False}
    (tmp_path / "out/.files.json").write_text(json.dumps(manifest))
    run_gym(gym, model, tmp_path / "out", "--max_seq_length", 1024)
    assert made_in(tmp_path / "out") == made_in(out)
    assert "1 of 6 assays are missing: GONE" in caplog.text
    assert "4 of 5 assays have scores already" in caplog.text
    assert "5 assays, 120 variants (1 missing), 3 UniProt ids, 3 function types: means by UniProt id" in caplog.text
    printed = capsys.readouterr().out
    average = json.loads((out / "results.json").read_text())["averages"]["ndcg"]["blosum62"]
    line = next(line for line in printed.splitlines() if line.startswith("blosum62"))
    assert f"{average['average']:.3f} ± {average['standard_error']:.3f}" in line


def test_finished_does_nothing_and_other_input_needs_overwrite(model, gym, out, tmp_path, caplog):
    caplog.set_level("INFO")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    run_gym(gym, model, out)
    assert "was made by the same command: nothing to do" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    with pytest.raises(UserError, match="was made from other input or arguments: --overwrite it"):
        run_gym(gym, model, out, "--one_pass")
    shutil.copytree(out, tmp_path / "out")
    run_gym(gym, model, tmp_path / "out", "--one_pass", "--overwrite")
    assert "masked_marginal" not in read(tmp_path / "out/scores/S0.csv")[0]


def test_reference_may_have_titles_over_lines(gym, tmp_path):
    rows = [[*row.values(), 'On "deep"\nscanning, so to say'] for row in read(gym.reference)]
    reference = write_rows(tmp_path / "titles.csv", [*read(gym.reference)[0], "title"], rows)
    assert read_reference(str(reference), str(gym.data)) == read_reference(str(gym.reference), str(gym.data))


def finished(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("scores/*.csv"))


def test_killed_run_resumes(model, tmp_path):
    gym = make_gym(tmp_path, assays=12, length=90, rows=60)
    run_gym(gym, model, tmp_path / "whole")
    killed = tmp_path / "killed"
    for _ in range(3):
        run = Script("proteingym.py", *gym.flags(model, killed), env=environment())
        there = len(finished(killed))
        while run.poll() is None and len(finished(killed)) < there + 2:
            time.sleep(0.002)
        run.send_signal(signal.SIGKILL)
        run.wait()
    kept = {name: (killed / "scores" / name).stat().st_mtime_ns for name in finished(killed)}
    assert 6 <= len(kept) < 12
    assert not (killed / "summary.csv").exists()
    run_gym(gym, model, killed)
    assert made_in(killed) == made_in(tmp_path / "whole")
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in killed.glob("scores/*.csv")}.items()


def test_ranks_give_the_same_bytes(model, gym, out, tmp_path):
    command = gym.flags(model, tmp_path / "out")
    for said in ("5 assays, 120 variants", "nothing to do"):
        with LiveRun(None, tmp_path / "out", tmp_path / "logs", 2, script="proteingym.py", argv=command) as run:
            assert run.end() == [0, 0]
            assert said in run.said()
            assert not run.said(1)
    assert made_in(tmp_path / "out") == made_in(out)


INDELS = ["DMS_id", "DMS_filename", "UniProt_ID", "coarse_selection_type", "target_seq"]


def test_indels_get_likelihoods_of_whole_sequences(model, tmp_path, capsys):
    wild = "MKVLAGTWYEDR"
    rows = [[wild[:n] + wild[n + 1 :], n] for n in range(1, 12)] + [[wild[:4] + "LL" + wild[4:], 2.5]]
    write_rows(tmp_path / "data/I.csv", ["mutated_sequence", "DMS_score"], rows)
    reference = write_rows(tmp_path / "indels.csv", INDELS, [["I", "I.csv", "P", "Stability", wild]])
    gym = Gym(reference, tmp_path / "data", {})
    run_gym(gym, model, tmp_path / "out")
    record = json.loads((tmp_path / "out/scores/I.csv.json").read_text())["metrics"]
    likelihoods = [
        f"{name}{ending}" for name in ("pseudo_log_likelihood", "one_pass_log_likelihood") for ending in ("", "_mean")
    ]
    assert list(record) == [*likelihoods, "length_change"]
    scored = read(tmp_path / "out/scores/I.csv")
    measured = np.array([float(row["DMS_score"]) for row in scored])
    values = [float(row["pseudo_log_likelihood"]) for row in scored]
    assert record["pseudo_log_likelihood"]["spearman"] == pytest.approx(spearmanr(values, measured).statistic)
    auc = roc_auc_score(measured >= np.median(measured), values)  # without DMS_score_bin
    assert record["pseudo_log_likelihood"]["auc"] == pytest.approx(auc)
    assert "pseudo_log_likelihood_mean" in capsys.readouterr().out


def test_decoder_leaves_out_what_it_cannot_read(tmp_path, caplog):
    decoder = make_decoder(tmp_path / "model", max_position_embeddings=32)
    gym = make_gym(tmp_path, assays=2, length=28)
    longer = "MKVLAGTWYE" * 4
    write_rows(gym.data / "S1.csv", ["mutant", "DMS_score"], [["M1A", 1], ["K2A", 2]])
    gym.reference.write_text(gym.reference.read_text().replace(gym.proteins["S1"], longer))
    run_gym(gym, decoder, tmp_path / "out")
    assert "S1 is left out: 40 residues, and the model reads 28" in caplog.text
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert (results["assays"], results["missing"]) == (1, ["GONE"])
    assert list(results["skipped"]) == ["S1"]
    assert results["averages"]["auc"].keys() == {*LIKELIHOODS, "blosum62", "residue_frequency"}


@pytest.mark.parametrize(
    ("column", "pathogenic", "benign"), [("DMS_bin_score", "Pathogenic", "Benign"), ("DMS_score_bin", 1, 0)]
)
def test_clinical_variants_have_the_other_sign(model, tmp_path, caplog, column, pathogenic, benign):
    """Pathogenic is 1 there: a higher score, which is a likelier residue, speaks for Benign."""
    caplog.set_level("INFO")
    about = []
    for name, protein in (("NP_1", "MKVLAGTWYEDR"), ("NP_2", "AGTWYEDRMKVL")):
        mutants = [f"{letter}{n}{'A' if letter == 'W' else 'W'}" for n, letter in enumerate(protein, 1)]
        rows = [[mutant, (pathogenic, benign)[n % 2]] for n, mutant in enumerate(mutants)]
        write_rows(tmp_path / f"data/{name}.csv", ["mutant", column], rows)
        about.append([name, f"{name}.csv", protein])
    reference = write_rows(tmp_path / "clinical.csv", ["DMS_id", "DMS_filename", "target_seq"], about)
    run_gym(Gym(reference, tmp_path / "data", {}), model, tmp_path / "out")
    expected = []
    for name, *_ in about:
        scored = pd.read_csv(tmp_path / f"out/scores/{name}.csv")
        expected.append(roc_auc_score(scored[column] == pathogenic, -scored["masked_marginal"]))
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert list(results["averages"]) == ["auc"]
    assert results["averages"]["auc"]["masked_marginal"]["average"] == pytest.approx(np.mean(np.round(expected, 3)))
    assert "± bootstrap standard error over proteins" in caplog.text
    assert not (tmp_path / "out/spearman").exists()
    table = tmp_path / "data/NP_2.csv"
    table.write_text(table.read_text().replace(f",{benign}", ",perhaps"))
    with pytest.raises(UserError, match=f"row 3: {column} 'perhaps' is neither Benign nor Pathogenic"):
        run_gym(Gym(reference, tmp_path / "data", {}), model, tmp_path / "new")


def test_wild_types_above_the_context_are_said_and_read_in_windows(model, gym, tmp_path, caplog):
    caplog.set_level("INFO")
    run_gym(gym, model, tmp_path / "out", "--max_seq_length", 20, "--one_pass")
    assert "5 of 5 wild types exceed --max_seq_length 20: read in overlapping windows" in caplog.text
