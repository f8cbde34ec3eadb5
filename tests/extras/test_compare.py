"""python -m extras.compare: errors beside bootstraps and simulations, groups, refusals, and the files it writes."""

from __future__ import annotations

import csv
import json
import logging
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from common.cli import UserError
from common.training.protein_losses import ProteinLosses, write_losses
from extras.compare import __main__ as program
from extras.compare.paired import Difference, compare
from extras.compare.picture import figure_of
from extras.compare.runs import check_same_questions, group_runs, read_run
from tests.data_fixtures import numbered, write_fasta
from tests.training_fixtures import train

PROTEINS = 300
FLAGS = {"optim": "adamw_torch_fused", "mlm_probability": 0.15, "learning_rate": 1e-3, "logging_steps": 10}


def asked(proteins: int = PROTEINS) -> np.ndarray:
    """Hidden residues of each protein; the third has none."""
    counts = np.random.default_rng(0).integers(1, 60, proteins)
    counts[2] = 0
    return counts


def write_run(
    directory: Path,
    losses: np.ndarray | float,
    seed: int = 42,
    counts: np.ndarray | None = None,
    clusters: np.ndarray | None = None,
    ends: bool = True,
    **flags,
) -> Path:
    """What a train script leaves after 100 steps. losses: nats a hidden residue of each protein."""
    counts = asked() if counts is None else counts
    sums = losses * counts
    loss = sums.sum() / counts.sum()
    at_end = {"eval_loss": loss - 0.1, "eval_loss_masked": loss, "eval_samples": len(counts)}
    at_end["eval_masked_tokens"] = int(counts.sum())
    at_end |= {"eval_unigram_loss_masked": 2.9, "eval_neighbours_loss_masked": 2.8}
    directory.mkdir(parents=True)
    rows = [
        {"step": s, "tokens": s * 2000, "total_steps": 100, **at_end, "eval_loss_masked": loss + 1 / s}
        for s in (25, 50)
    ]
    if ends:
        rows.append({"step": 100, "tokens": 200_000, "total_steps": 100, "loss": 3.0})
        (directory / "all_results.json").write_text(json.dumps(at_end | {"train_loss": 3.0}))
        write_losses(
            directory / "eval_losses.parquet", ProteinLosses(sums, counts, clusters, questions="5a" * 32), 100
        )
        arguments = FLAGS | {"seed": seed, "output_dir": str(directory)} | flags
        state = {"step": 100, "arguments": arguments, "resolved": {"packs_per_step": 1}}
        state |= {"data": {"dataset": f"{'ab' * 32}-7200", "seed": seed}}
        (directory / "trainer_state.json").write_text(json.dumps(state))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "run_info.json").write_text(json.dumps({"device": "cpu x 1, fp32"}))
    return directory


def write_decoder_run(directory: Path, loss: float, tokens: int = 900, **flags) -> Path:
    row = {
        "step": 100,
        "tokens": 200_000,
        "total_steps": 100,
        "eval_loss": loss,
        "eval_tokens": tokens,
        "eval_samples": 9,
    }
    directory.mkdir()
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    state = {"step": 100, "arguments": FLAGS | {"seed": 42} | flags}
    (directory / "trainer_state.json").write_text(json.dumps(state))
    return directory


def noise(seed: int, size: float = 0.2) -> np.ndarray:
    return np.random.default_rng(seed).normal(2.7, size, PROTEINS)


def difference(*runs: Path) -> Difference:
    first, second = group_runs([read_run(path) for path in runs])
    return compare(first, second)


def printed(capsys, monkeypatch, *words) -> str:
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, words)])
    program.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("with_clusters", [False, True])
def test_error_over_proteins_is_that_of_a_bootstrap(with_clusters, tmp_path):
    """A bootstrap's standard error over 4,000 draws is known to 1.1 %; both have a bias of the order of one in 60
    clusters. Without clusters these differences, which a cluster shares, would have an error two thirds of it."""
    clusters = np.repeat(np.arange(60), 5) if with_clusters else None
    random = np.random.default_rng(1)
    better = 0.01 + random.normal(0, 0.05, PROTEINS) + np.repeat(random.normal(0, 0.04, 60), 5)
    a = write_run(tmp_path / "a", noise(2), clusters=clusters)
    b = write_run(tmp_path / "b", noise(2) - better, clusters=clusters, optim="muon")
    found, counts = difference(a, b), asked()
    unit = np.arange(PROTEINS) if clusters is None else clusters
    d, n = (np.bincount(unit, values) for values in (better * counts, counts))
    draws = random.integers(0, len(d), (4000, len(d)))
    bootstrap = (d[draws].sum(1) / n[draws].sum(1)).std()
    assert found.mean == pytest.approx((better * counts).sum() / counts.sum())
    assert found.over_proteins == pytest.approx(bootstrap, rel=0.06)
    assert (found.units, found.unit) == ((60, "clusters") if with_clusters else (PROTEINS - 1, "proteins"))


def test_error_counts_proteins_and_seeds(tmp_path):
    counts, gains = asked(), {1: 0.010, 2: 0.016, 3: 0.013}
    spread = np.random.default_rng(3).normal(0, 0.03, PROTEINS)
    for seed, gain in gains.items():
        write_run(tmp_path / f"a{seed}", noise(seed), seed)
        write_run(tmp_path / f"b{seed}", noise(seed) - gain - spread, seed, optim="muon")
    write_run(tmp_path / "b4", noise(4) - 1.0, 4, optim="muon")  # no partner: left out
    found = difference(*sorted(tmp_path.iterdir()))
    mean = 0.013 + (spread * counts).sum() / counts.sum()
    residuals = (0.013 + spread - mean) * counts
    over_proteins = np.sqrt(299 / 298 * np.square(residuals).sum()) / counts.sum()
    assert found.mean == pytest.approx(mean)
    assert found.over_proteins == pytest.approx(over_proteins)
    assert found.over_seeds == pytest.approx(0.003 / np.sqrt(3))
    assert found.error == pytest.approx(np.hypot(over_proteins, 0.003 / np.sqrt(3)))
    assert found.seeds == 3


def test_runs_without_a_common_seed_are_paired_over_proteins_only(tmp_path):
    for seed in (1, 2, 3, 4):
        write_run(tmp_path / f"{seed}", 2.7 + 0.01 * seed, seed, optim="muon" if seed > 2 else "adamw_torch_fused")
    found = difference(*sorted(tmp_path.iterdir()))
    assert found.mean == pytest.approx(-0.02)
    assert found.over_proteins == pytest.approx(0, abs=1e-12)  # all proteins differ alike
    assert found.over_seeds == pytest.approx(np.hypot(0.005, 0.005))


@pytest.mark.parametrize(("seeds", "of_seeds"), [(1, 0.0), (2, 0.0), (2, 0.002), (2, 0.02), (3, 0.005)])
def test_no_difference_is_reported_as_one_in_one_case_of_twenty(seeds, of_seeds):
    """Simulated, as the docstring of Difference has it. 1,000 tests of 5 %: at most 7 % but for one in 500 times."""
    random, proteins, seen = np.random.default_rng(4), 100, 0
    for _ in range(1000):
        of_pairs = random.normal(0, 0.02, (seeds, proteins))
        each = random.normal(0, of_seeds, (seeds, 1)) + random.normal(0, 0.02, proteins) + of_pairs
        over_proteins = each.mean(0).std(ddof=1) / np.sqrt(proteins)
        over_seeds = each.mean(1).std(ddof=1) / np.sqrt(seeds) if seeds > 1 else np.nan
        seen += Difference(each.mean(), over_proteins, over_seeds, proteins, "proteins", seeds).is_seen
    assert seen <= 70


def test_needed_proteins_see_the_difference_four_times_in_five():
    """A pilot of 100 proteins says how many it takes; as many are simulated 2,000 times: 80 % ± 0.9 %."""
    random, size = np.random.default_rng(5), 0.05
    pilot = Difference(0.0, size / np.sqrt(100), np.nan, 100, "proteins", 1)
    number = round(pilot.units_to_see(0.005))
    means = 0.005 + random.normal(0, size, (2000, number)).mean(1)
    seen = [Difference(mean, size / np.sqrt(number), np.nan, number, "proteins", 1).is_seen for mean in means]
    assert 750 < number < 850  # (2.8 x 0.05 / 0.005)^2 = 785
    assert np.mean(seen) == pytest.approx(0.8, abs=0.03)


def test_needed_seeds_where_more_proteins_do_not_help():
    found = Difference(0.001, 0.0005, 0.003, 400, "proteins", 3)
    assert found.units_to_see(0.005) == np.inf
    assert 8 <= found.seeds_to_see(0.005) <= 14  # errors of 0.0015 in all: 8 to 12 seeds, and Student's quantile
    assert found.seeds_to_see(0.001) == np.inf


def test_runs_that_differ_in_seed_and_harmless_flags_are_one_group(tmp_path):
    runs = [
        write_run(tmp_path / "muon-1", noise(1), 1, optim="muon", logging_steps=5, dataloader_prefetch_factor=4),
        write_run(tmp_path / "adamw-1", noise(1), 1, save_steps=7),
        write_run(tmp_path / "muon-2", noise(2), 2, optim="muon", dataloader_prefetch_factor=2),  # a flag of 0.4
        write_run(tmp_path / "muon-wide", noise(3), 2, optim="muon", mlm_probability=0.25),
        write_run(tmp_path / "muon-2-again", noise(4), 2, optim="muon"),
    ]
    groups = group_runs([read_run(path) for path in runs], baseline=runs[1])
    assert [[run.path.name for run in group.runs] for group in groups] == [
        ["adamw-1"], ["muon-1", "muon-2"], ["muon-wide"], ["muon-2-again"]
    ]  # fmt: skip
    assert [group.label for group in groups] == ["adamw-1", "muon", "muon-wide", "muon-2-again"]
    groups = group_runs([read_run(path) for path in runs[:4]])
    assert [group.label for group in groups] == [
        "optim muon, mlm_probability 0.15",
        "optim adamw_torch_fused, mlm_probability 0.15",
        "optim muon, mlm_probability 0.25",
    ]


def test_other_questions_are_refused(tmp_path):
    a = write_run(tmp_path / "a", noise(1))
    b = write_run(tmp_path / "b", noise(1)[:200], counts=asked(200))
    losses = ProteinLosses(noise(1), asked(), questions="0f" * 32)
    write_losses(write_run(tmp_path / "c", noise(1)) / "eval_losses.parquet", losses, 100)
    for other, said in ((b, "200 held-out proteins"), (tmp_path / "c", "hash 0f0f0f0f0f0f")):
        with pytest.raises(UserError, match=said) as error:
            check_same_questions([read_run(a), read_run(other)])
        assert all(word in str(error.value) for word in (str(a), str(other), "300 held-out proteins"))


def test_directories_that_are_no_comparable_runs_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    older = write_run(tmp_path / "older", noise(1))
    (older / "eval_losses.parquet").unlink()
    torn = write_run(tmp_path / "torn", noise(1))
    (torn / "eval_losses.parquet").write_bytes(b"PAR1")
    silent = write_run(tmp_path / "silent", noise(1))
    (silent / "all_results.json").unlink()
    (silent / "metrics.jsonl").write_text(json.dumps({"step": 100, "loss": 3.0}) + "\n")
    for name, said in (
        ("empty", "no run there"),
        ("older", "again with --do_eval"),
        ("torn", "not losses of proteins"),
        ("silent", "again with --do_eval"),
    ):
        with pytest.raises(UserError, match=said) as error:
            read_run(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)
    decoder = write_decoder_run(tmp_path / "decoder", 5.0)
    with pytest.raises(UserError, match="do not compare"):
        check_same_questions([read_run(decoder), read_run(write_run(tmp_path / "encoder", noise(1)))])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a"], "two runs or more"),
        (["a", "a/../a"], "two runs"),
        (["a", "b", "--baseline", "c"], "not one of the runs"),
    ],
)
def test_command_line_is_refused(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", noise(1))
    with pytest.raises(UserError, match=said):
        printed(capsys, monkeypatch, *words)


def test_unfinished_run_is_compared_by_its_last_evaluation(tmp_path, capsys, monkeypatch, caplog):
    a = write_run(tmp_path / "a", 2.7)
    b = write_run(tmp_path / "b", 2.6, ends=False)
    checkpoint = b / "checkpoint-50"
    checkpoint.mkdir()
    arguments = FLAGS | {"seed": 43}
    (checkpoint / "trainer_state.json").write_text(json.dumps({"step": 50, "arguments": arguments}))
    c = write_run(tmp_path / "c", 2.5, ends=False)
    with caplog.at_level(logging.WARNING):
        text = printed(capsys, monkeypatch, a, b, c)
    assert f"{b}: not finished: compared by its last evaluation, at step 50" in caplog.text
    assert "| stopped_at_step |     | 50  | 50  |" in text
    assert "2.6200" in text
    assert "B and A: no verdict" in text
    assert "What differs is not known: C saved no checkpoint, which records flags and data." in text


def test_best_model_is_compared_at_its_step(tmp_path):
    """--load_best_model_at_end: the results at the end are of that step."""
    path = write_run(tmp_path / "a", 2.7, load_best_model_at_end=True)
    results = json.loads((path / "all_results.json").read_text())
    (path / "all_results.json").write_text(json.dumps(results | {"best_global_step": 50}))
    write_losses(path / "eval_losses.parquet", ProteinLosses(2.7 * asked(), asked(), questions="5a" * 32), 50)
    run = read_run(path)
    assert (run.last["step"], run.last["tokens"], run.last["eval_loss_masked"]) == (50, 100_000, pytest.approx(2.7))
    assert run.losses is not None
    assert not run.is_stopped


def test_stopped_run_is_a_row_of_its_own(tmp_path):
    paths = [write_run(tmp_path / f"{seed}", noise(seed), seed, stop_at_step=seed) for seed in (1, 2)]
    rows = [{"step": 50, "tokens": 100_000, "total_steps": 100, "loss": 3.0}]
    (paths[1] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = json.loads((paths[1] / "trainer_state.json").read_text())
    (paths[1] / "trainer_state.json").write_text(json.dumps(state | {"step": 50}))
    write_losses(paths[1] / "eval_losses.parquet", ProteinLosses(noise(2) * asked(), asked(), questions="5a" * 32), 50)
    groups = group_runs([read_run(path) for path in paths])
    assert [group.label for group in groups] == ["no stopped_at_step", "stopped_at_step 50"]


def test_comparison_is_printed_and_written(tmp_path, capsys, monkeypatch):
    counts, out = asked(), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for seed in (1, 2, 3):
        write_run(tmp_path / f"adamw-{seed}", noise(seed), seed)
        write_run(tmp_path / f"muon-{seed}", noise(seed) - 0.05 - 0.001 * seed, seed, optim="muon")
    runs = sorted(tmp_path.glob("*-*"))
    text = printed(capsys, monkeypatch, *runs, "--output_dir", out)
    assert "| optim | adamw_torch_fused | muon |" in text
    assert "B is better than A by 0.0520 ± 0.0006 nats a hidden residue (over 299 proteins, 3 seeds)." in text
    assert "residue" in text
    assert sorted(path.name for path in out.iterdir()) == [
        *(f"comparison.{form}" for form in ("csv", "md", "png", "svg")), "notes.txt"
    ]  # fmt: skip
    assert text.partition("\nWritten")[0] in (out / "comparison.md").read_text()
    first, second = csv.DictReader((out / "comparison.csv").open())
    losses = [(noise(seed) * counts).sum() / counts.sum() for seed in (1, 2, 3)]
    assert float(first["eval_loss_masked"]) == pytest.approx(np.mean(losses))
    assert float(first["eval_loss_masked_stderr_over_seeds"]) == pytest.approx(np.std(losses, ddof=1) / np.sqrt(3))
    assert float(first["perplexity"]) == pytest.approx(np.exp(np.mean(losses)))
    assert (first["seeds"], first["tokens"], first["below_A"]) == ("1;2;3", "200000.0", "")
    assert float(second["below_A"]) == pytest.approx(0.052)
    assert float(second["over_seeds"]) == pytest.approx(0.001 / np.sqrt(3))
    assert (second["units"], second["unit"], second["runs"].count(";")) == ("299", "proteins", 2)


def test_figure_has_a_curve_a_seed_and_its_legend_beside_the_axes(tmp_path, capsys, monkeypatch):
    for seed in (1, 2):
        for optim in ("adamw_torch_fused", "muon"):
            write_run(tmp_path / f"{optim}-{seed}", noise(seed) - 0.1 * (optim == "muon"), seed, optim=optim)
    runs = sorted(tmp_path.iterdir())
    groups = group_runs([read_run(path) for path in runs])
    (axes,) = figure_of(groups).axes
    assert axes.get_legend().get_window_extent().x0 > axes.get_window_extent().x1
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["A: optim adamw_torch_fused", "B: optim muon", "unigram predictor", "neighbour predictor"]
    thin = [line for line in axes.get_lines() if line.get_linewidth() < 1]
    assert [list(line.get_xdata()) for line in thin] == [[50_000, 100_000, 200_000]] * 4
    colours = {line.get_color() for line in axes.get_lines()[:6]}
    assert len(colours) == 2
    printed(capsys, monkeypatch, *runs, "--output_dir", tmp_path / "out")
    height, width, _ = image.imread(tmp_path / "out" / "comparison.png").shape
    assert (width > 800, height > 400) == (True, True)
    svg = ElementTree.parse(tmp_path / "out" / "comparison.svg").getroot()
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert "B: optim muon" in "".join(svg.itertext())


def test_decoders_have_a_table_and_curves_and_no_paired_error(tmp_path, capsys, monkeypatch):
    a, b = (
        write_decoder_run(tmp_path / name, loss, seed=n) for n, (name, loss) in enumerate((("a", 5.0), ("b", 5.2)))
    )
    c = write_decoder_run(tmp_path / "c", 4.9, learning_rate=2e-3)
    text = printed(capsys, monkeypatch, a, b, c, "--output_dir", tmp_path / "out")
    assert "| A   | learning_rate 0.001 |     2 | 200,000 | 5.1000 ± 0.1000 |    164.022 |" in text
    assert "No paired error" in text
    assert (tmp_path / "out" / "comparison.svg").exists()
    other = write_decoder_run(tmp_path / "other", 4.9, tokens=901)
    with pytest.raises(UserError, match="901 tokens"):
        printed(capsys, monkeypatch, a, other)


def test_runs_of_a_train_script_compare(dataset, tmp_path, capsys, monkeypatch):
    """What the script writes is read: the paired mean is the difference of its losses, and a run whose losses of
    proteins are gone gets them back by the same command, without a step."""
    flags = {"max_steps": 2, "do_eval": True, "save_final_model": False}
    for name, optim, seed in (("a1", "adamw_torch_fused", 1), ("a2", "adamw_torch_fused", 2), ("m1", "muon", 1)):
        train(dataset, tmp_path / name, optim=optim, seed=seed, **flags)
    runs = {name: tmp_path / name for name in ("a1", "a2", "m1")}
    first, second = group_runs([read_run(path) for path in runs.values()])
    assert (first.label, [run.path for run in first.runs]) == ("optim adamw_torch_fused", [runs["a1"], runs["a2"]])
    losses = {name: json.loads((path / "all_results.json").read_text()) for name, path in runs.items()}
    mean = losses["a1"]["eval_loss_masked"] - losses["m1"]["eval_loss_masked"]
    assert compare(first, second).mean == pytest.approx(mean, abs=1e-9)
    (runs["m1"] / "eval_losses.parquet").unlink()
    with pytest.raises(UserError, match="again with --do_eval"):
        read_run(runs["m1"])
    assert "nothing to train" in train(dataset, runs["m1"], optim="muon", seed=1, **flags)
    assert "| B   | optim muon" in printed(capsys, monkeypatch, runs["a1"], runs["m1"])


def test_runs_compare_on_a_second_held_out_set(dataset, tmp_path, capsys, monkeypatch):
    """A run that trains nothing is the state before; its difference on each set is that of the two results."""
    proteins = [(name, text * 2) for name, text in numbered(30)]
    other = write_fasta(tmp_path / "other.fasta", proteins)
    flags = {"do_eval": True, "save_final_model": True, "eval_dataset": f"other={other}"}
    train(dataset, tmp_path / "base", max_steps=2)
    flags |= {"model_name_or_path": tmp_path / "base" / "final_model"}
    train(dataset, tmp_path / "before", do_train=False, **flags)
    train(dataset, tmp_path / "after", max_steps=3, **flags)
    results = [json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("before", "after")]
    for eval_set, key in (("", "eval_loss_masked"), ("other", "eval_other_loss_masked"), ("test", "test_loss_masked")):
        runs = [read_run(tmp_path / name, eval_set) for name in ("before", "after")]
        first, second = group_runs(runs)
        assert compare(first, second).mean == pytest.approx(results[0][key] - results[1][key], abs=1e-9)
    words = (tmp_path / "before", tmp_path / "after", "--eval_set", "other")
    assert "over 30 held-out proteins of other, " in printed(capsys, monkeypatch, *words)
    with pytest.raises(
        UserError, match="no held-out loss of own: run its command again with --do_eval and own=... of"
    ):
        read_run(tmp_path / "after", "own")
