"""--eval_mutations: the correlations of score.py on the exported model, and what it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import score as script
from common.cli import UserError
from common.files.safe_files import read_json_lines
from extras.after.downstream.mutations import MOST, MutationEvaluation, read_table
from extras.after.downstream.stock_model import Tensors
from extras.after.inference.contexts import ContextFlags, Contexts
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.after.inference.homologs import read_homologs
from extras.after.inference.mutation_scores import RESIDUES, score
from extras.families.e1.alphabet import ALPHABET
from extras.families.e1.config import e1_config
from tests.data_fixtures import call, write_fasta
from tests.extras.families.e1.reference import Reference
from tests.forked import run_script
from tests.training_fixtures import environment, flags_of

WILD_TYPE = "MKVLAGTYRRWCDEHIKLNPQS"


def write_gym(
    path: Path, rows: int = 40, columns: tuple[str, ...] = ("mutant", "mutated_sequence", "DMS_score")
) -> Path:
    """Random single and double mutants of WILD_TYPE with random effects; the first has none."""
    random = np.random.default_rng(2)
    made = []
    for number in range(rows):
        letters, words = list(WILD_TYPE), []
        for at in sorted(random.choice(len(WILD_TYPE), 1 + number % 2, replace=False)):
            letters[at] = RESIDUES[random.integers(20)]
            words.append(f"{WILD_TYPE[at]}{at + 1}{letters[at]}")
        effect = f"{random.normal():.3f}" if number else ""
        made.append({"mutant": ":".join(words), "mutated_sequence": "".join(letters), "DMS_score": effect})
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(made)
    return path


def test_run_evaluates_mutations_as_score_py_does(dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gym, out = write_gym(tmp_path / "a gym.csv"), tmp_path / "out"
    ours = write_gym(tmp_path / "ours.csv", columns=("mutant", "DMS_score"))
    write_fasta(tmp_path / "ours.fasta", [("wild", WILD_TYPE)])
    flags = flags_of(dataset, out, max_steps=4, do_eval=True, eval_downstream_steps=2, use_cpu=True)
    done = run_script("train_ddp.py", *flags, "--eval_mutations", gym, ours, env=environment())
    assert done.returncode == 0, done.stderr
    rows = [row for row in read_json_lines(out / "metrics.jsonl") if "eval_mutations_ours_masked" in row]
    assert [row["step"] for row in rows] == [2, 4]
    final = json.loads((out / "eval_results.json").read_text())
    fasta = tmp_path / "ours.fasta"
    scoring = ("--model_name_or_path", out, "--fasta", fasta, "--mutations", gym, "--use_cpu")
    call(script, *scoring, "--output", tmp_path / "scored.csv")
    (record,) = json.loads((tmp_path / "scored.csv.json").read_text())["correlations"]["proteins"].values()
    for theirs, name in (("masked_marginal", "masked"), ("wild_type_marginal", "wild_type")):
        for table in ("a_gym", "ours"):
            key = f"eval_mutations_{table}_{name}"
            assert rows[-1][key] == final[key] == pytest.approx(record[theirs]["spearman"], abs=1e-5)
    with open(tmp_path / "scored.csv", newline="") as file:
        scored = [row for row in csv.DictReader(file) if row["DMS_score"]]
    pairs = [(float(row["masked_marginal"]), float(row["DMS_score"])) for row in scored]
    assert final["eval_mutations_ours_masked"] == pytest.approx(
        spearmanr(*zip(*pairs, strict=True)).statistic, abs=1e-3
    )


def test_read_table_samples_a_large_one(tmp_path):
    small, large = (read_table(write_gym(tmp_path / "x.csv", rows)) for rows in (40, MOST + 2000))
    again = read_table(tmp_path / "x.csv")
    assert len(small.variants) == 39
    assert len(large.variants) == len(large.measured) == MOST
    assert large == again


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "mutant,DMS_score\nK2R,1\n",
            "no column 'mutated_sequence', only .* put the wild type into x.fasta beside it",
        ),
        ("mutant,mutated_sequence\nK2R,MRV\n", "no column 'DMS_score', only"),
        (
            "mutant,mutated_sequence,DMS_score\nK2R,MRV,1\nK2A,MAL,2\n",
            "row 3: 'K2A': without it .* is another protein",
        ),
        ("mutant,mutated_sequence,DMS_score\nK2R,MKV,1\n", "row 2: 'K2R': the mutated sequence has no R at 2"),
        ("mutant,mutated_sequence,DMS_score\nK2R,MRV,1\nK2del,MV,2\n", "'K2del' is not a mutation: .* of score.py"),
        ("mutant,mutated_sequence,DMS_score\nK2R,MRV,1\nK2A,MAV,\n", "fewer than 2 different values"),
        (None, "no such file"),
    ],
)
def test_read_table_refuses(tmp_path, text, said):
    if text is not None:
        (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UserError, match=said):
        read_table(tmp_path / "x.csv")


def test_evaluation_refuses_two_tables_of_one_name(tmp_path):
    (tmp_path / "more").mkdir()
    paths = [str(write_gym(where / "x.csv")) for where in (tmp_path, tmp_path / "more")]
    with pytest.raises(UserError, match="two files are named x: rename one"):
        MutationEvaluation(paths, 1024)


def test_evaluation_reads_homologs_beside_the_table(tmp_path):
    """Of a family that reads sets: as scores by hand, means over its two contexts."""
    config = e1_config(3, 32, 4, 48)
    stock = Tensors(config, Reference(config).state_dict(), torch.device("cpu"))
    gym = write_gym(tmp_path / "gym.csv")
    rows = [("query", WILD_TYPE), ("half", WILD_TYPE[:11] + "W" * 11), ("most", WILD_TYPE[:14] + "G" * 8)]
    write_fasta(tmp_path / "gym.a3m", rows)
    found = MutationEvaluation([str(gym)], 200, ALPHABET, reads_sets=True).evaluate(stock)
    encoder = Encoder(EncoderFlags("it", max_seq_length=200), stock.device, stock)
    table = read_table(gym)
    families = read_homologs(tmp_path / "gym.a3m", WILD_TYPE.encode())
    flags = ContextFlags(contexts=2, context_tokens=[4096], max_similarity=[0.95, 0.7])
    readers = Contexts(flags, encoder, lambda *_: families).readers({"gym": WILD_TYPE.encode()})
    for ending, contexts in (("", [None]), ("_homologs", readers)):
        scores = np.mean([score(encoder, table.variants, True, context_of=each) for each in contexts], 0)
        expected = spearmanr(scores, table.measured).statistic
        assert found[f"eval_mutations_gym_masked{ending}"] == pytest.approx(expected)
    assert found["eval_mutations_gym_masked"] != found["eval_mutations_gym_masked_homologs"]
    # Without such a family the file is not read.
    (tmp_path / "gym.a3m").write_text(">bad\n123456\n")
    assert len(MutationEvaluation([str(gym)], 200).tables) == 1
    with pytest.raises(UserError, match=r"--eval_mutations .*gym.a3m: record bad has 6 characters of 6"):
        MutationEvaluation([str(gym)], 200, ALPHABET, reads_sets=True)
