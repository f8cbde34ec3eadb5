"""docs/reference_metrics.md and docs/reference_files.md have each key and file of a run, and no other."""

from __future__ import annotations

import csv
import json
import re
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.files.safe_files import read_json, read_json_lines
from common.training.run_directory import OWN_FILES, TRACES, TRACKER_FILES
from extras.after.downstream.contacts import RANGES, precisions
from extras.after.downstream.labels import is_number
from extras.after.downstream.metrics import values_of
from extras.after.downstream.structures import Chain
from extras.after.proteingym.metrics import METRICS
from extras.prepare.sample import write_structures
from extras.prepare.synthetic_structures import COIL_STRUCTURES, coil_structures
from tests.conftest import ROOT
from tests.data_fixtures import call, load_script, proteins, write_fasta
from tests.extras.after.inference.embed_fixtures import EMBED, make_model
from tests.extras.after.proteingym.gym_fixtures import make_gym, run_gym
from tests.training_fixtures import train

REFERENCE = load_script("docs/make_reference.py")
CONTACTS, FINETUNE, MAP, PREDICT, PROBE, SCORE = (
    load_script(f"{name}.py") for name in ("contacts", "finetune", "map", "predict", "probe", "score")
)
FLAGS = {"max_steps": 2, "do_eval": True, "eval_on_start": True, "eval_steps": 2, "straggler_every": 1}
FLAGS |= {"peak_tflops_per_gpu": 1, "profile_steps": "1-1", "save_steps": 1, "save_hf": True}
OF_DECODERS = {
    *("eval_tokens",),
    *(f"eval_{name}_residues" for name in ("loss", "perplexity", "tokens", "unigram_loss", "below_unigram")),
    *("eval_loss_residues_stderr", "eval_below_unigram_residues_stderr"),
}
ON_GPUS = {"attention", "attention_kernels"}
OF_SOME_RUNS = {"eval_clusters", "best_global_step"}  # tests/training/test_evaluation.py, test_best.py
OF_SOME_RUNS |= {"eval_loss_masked_with_homologs", "eval_loss_masked_without_homologs"}
OF_SOME_RUNS |= {f"eval_homologs_{name}" for name in ("gain_masked", "gain_masked_stderr", "samples")}
OF_SOME_RUNS |= {"eval_nelbo", "eval_nelbo_stderr", "eval_unigram_nelbo"}  # tests/extras/families/diffusion


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """The output directory of a run on two ranks with all that the tables name and takes no other package."""
    out = tmp_path_factory.mktemp("run")
    train(dataset, out, 2, **FLAGS)
    return out


def keys(table: list[tuple[str, ...]]) -> set[str]:
    return {key for key, *_ in table}


def test_reference_pages_are_those_of_the_tables():
    for name, page in REFERENCE.PAGES.items():
        assert (ROOT / "docs" / name).read_text() == page(), "python docs/make_reference.py makes it anew"


def test_reference_has_the_metrics_of_a_run(run):
    written = {key for row in read_json_lines(run / "metrics.jsonl") for key in row}
    assert keys(REFERENCE.TRAINING) == {key for key in written if "eval" not in key and key != "perplexity"}
    results = {name: set(read_json(run / f"{name}_results.json")) for name in ("train", "eval", "test")}
    listed = {key for key in keys(REFERENCE.EVALUATION) if "<" not in key} - OF_DECODERS - OF_SOME_RUNS
    assert listed == results["eval"] - {"epoch"}, "and of the test split"
    of_test = {"test_perplexity" if key == "perplexity" else key.replace("eval_", "test_") for key in listed}
    assert of_test == results["test"] - {"epoch"}
    assert keys(REFERENCE.RESULTS) - ON_GPUS == results["train"] - {"epoch"}


def test_reference_has_the_metrics_of_downstream_tasks():
    rng = np.random.default_rng(0)
    chain = Chain("a", "A" * 60, np.cumsum(rng.normal(size=(60, 3)), 0, dtype=np.float32))
    contacts = {f"eval_contacts_{name}" for name in precisions(chain, rng.random((60, 60)))}
    listed = {key for key in keys(REFERENCE.EVALUATION) if key.startswith("eval_contacts")}
    assert {key.replace("<range>", name) for key in listed for name in RANGES} == contacts
    numbers = values_of(np.array([1.0, 2.0]), np.array([1.0, 3.0]), None)
    classes = values_of(np.array(["a", "b"]), np.array(["a", "b"]), np.array([0.1, 0.9]))
    probes = {f"eval_probe_<file>_{of}{name}" for of in ("", "baseline_") for name in (*numbers, *classes)}
    assert {key for key in keys(REFERENCE.EVALUATION) if key.startswith("eval_probe")} == probes


def test_reference_has_the_files_of_a_run(run):
    patterns = [re.sub(r"<\w+>", "*", name) for name, *_ in REFERENCE.FILES]
    files = [path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()]
    assert len(files) > 25
    others = [*OWN_FILES, TRACKER_FILES, TRACES.replace("steps-*", "steps-*-*")]
    unlisted = [name for name in files + others if not any(fnmatch(name, pattern) for pattern in patterns)]
    assert [name for name in unlisted if ".partial" not in name] == []
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in files + others)] == [
        *("wandb/*", "find_learning_rate/*", "sample/*", ".starts"),
        *("superseded-checkpoint-*/*", "tmp-checkpoint-*/*", "final_model/tokenizer.json"),
    ]


NAMES = {"range": "|".join(RANGES), "split": "train|validation|test", "residue": "[A-Y]", "number": "[0-9]+"}
NAMES |= {"which": "(?:query_)?"}
NAMES |= {"score": "masked_marginal|wild_type_marginal|blosum62|residue_frequency"}
NAMES |= {"metric": "|".join((*values_of(*np.eye(2), None), *values_of(*np.array([["a", "b"]] * 2), np.arange(2.0))))}
NAMES |= {"gym_metric": "|".join(METRICS), "assay": "S[0-9]", "column": "masked_marginal|wild_type_marginal"}
NO_FIGURES = {"arguments", "made_from", "files", "finished"}  # flags, versions, checksums, and whether all is there


def numbers_in(content: object, name: str = "") -> set[str]:
    """The dotted names of the numbers of a JSON file; lists are one name."""
    if isinstance(content, dict):
        parts = ((f"{name}.{key}" if name else key, value) for key, value in content.items() if key not in NO_FIGURES)
        return {found for key, value in parts for found in numbers_in(value, key)}
    if isinstance(content, list):
        return {found for value in content for found in numbers_in(value, name)}
    return {name} if isinstance(content, int | float) else set()


def figures(directory: Path, stem: str = "") -> set[str]:
    """All numbers of the JSON, CSV and Parquet files there, as `file: key`; stem: of file names, to be NAME."""
    found = set()
    for path in directory.rglob("*"):
        if path.suffix == ".json":
            names = numbers_in(json.loads(path.read_text()))
        elif path.suffix == ".csv":
            names = {key for row in csv.DictReader(path.open()) for key, text in row.items() if is_number(text)}
        elif path.suffix == ".parquet":
            names = {field.name for field in pq.read_schema(path) if field.type != pa.string()}
        else:
            continue
        file = re.sub(f"^{stem}(?=[.])", "NAME", path.name) if stem else path.name
        found |= {f"{file}: {name}" for name in names}
    return found


def check_figures(script: str, found: set[str]) -> None:
    """Each number has a row of the script's table, and each row a number."""
    patterns = {
        key: re.sub(r"<(\w+)>", lambda match: f"({NAMES.get(match[1], '[^:]+')})", re.sub(r"[.*]", r"\\\g<0>", key))
        for key in keys(REFERENCE.SCRIPTS[script])
    }
    assert {name for name in found if not any(re.fullmatch(each, name) for each in patterns.values())} == set()
    assert {key for key, each in patterns.items() if not any(re.fullmatch(each, name) for name in found)} == set()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """(a FASTA file, a table of numbers of its proteins, one of numbers of their residues)."""
    directory, texts = tmp_path_factory.mktemp("labelled"), proteins(80, seed=4)
    generator = np.random.default_rng(0)
    for name, labels in (
        ("one.csv", [f"{value:.3f}" for value in generator.normal(size=80)]),
        ("each.csv", [" ".join(f"{value:.2f}" for value in generator.random(len(text))) for _, text in texts]),
        ("classes.csv", [("yes", "no")[n % 2] for n in range(80)]),
    ):
        rows = [f"{text[0]},{text[1]},{label}" for text, label in zip(texts, labels, strict=True)]
        (directory / name).write_text("\n".join(["id,sequence,label", *rows]))
    write_fasta(directory / "my.fasta", texts)
    return directory


def test_reference_has_the_numbers_of_score(model, tmp_path):
    fasta, table = write_fasta(tmp_path / "my.fasta", [("one", "MKVLAG" * 2)]), tmp_path / "mutants.csv"
    table.write_text("mutant,DMS_score\nK2R,0.5\nA5G,-1.5\nL4W,0.1\nV3I,0.9\n")
    flags = ("--model_name_or_path", model, "--fasta", fasta, "--use_cpu")
    given = ("--mutations", table, "--output", tmp_path / "out" / "scored.csv", "--leave_out", "stops")
    call(SCORE, *flags, *given)
    call(SCORE, *flags, "--all_single_mutants", "--output", tmp_path / "out" / "matrices")
    check_figures("score.py", figures(tmp_path / "out", "one") - {"scored.csv: DMS_score"})


def test_reference_has_the_numbers_of_proteingym(model, tmp_path):
    run_gym(make_gym(tmp_path), model, tmp_path / "out")
    of_assays = re.compile(r"S\d\.csv: DMS_score(_bin)?")
    check_figures("proteingym.py", {name for name in figures(tmp_path / "out") if not of_assays.fullmatch(name)})


def test_reference_has_the_numbers_of_contacts(model, tmp_path):
    write_structures(tmp_path / "coils", coil_structures(COIL_STRUCTURES, 5))
    for path in sorted((tmp_path / "coils").iterdir())[6:]:
        path.unlink()
    fasta = write_fasta(tmp_path / "my.fasta", [("one", "MKVLAGMKTAYIAKQRQISF")])
    flags = ("--model_name_or_path", model, "--structures", tmp_path / "coils", "--use_cpu", "--maps", 0)
    call(CONTACTS, *flags, "--output_dir", tmp_path / "out" / "evaluated")
    call(CONTACTS, *flags, "--fasta", fasta, "--output_dir", tmp_path / "out" / "predicted")
    check_figures("contacts.py", figures(tmp_path / "out", "one"))


def test_reference_has_the_numbers_of_embed_and_probe(model, labelled, tmp_path):
    flags = ("--model_name_or_path", model, "--fasta", labelled / "my.fasta", "--use_cpu")
    call(EMBED, *flags, "--output_dir", tmp_path / "embedded")
    check_figures("embed.py", figures(tmp_path / "embedded"))
    for n, (name, more) in enumerate((("each.csv", ("--per_residue",)), ("classes.csv", ("--folds", 3)))):
        call(PROBE, *flags, "--labels", labelled / name, "--output_dir", tmp_path / "out" / str(n), *more)
        call(
            PREDICT, *flags[2:], "--model", tmp_path / "out" / str(n), "--output_dir", tmp_path / "predicted" / str(n)
        )
    check_figures("predict.py", figures(tmp_path / "predicted"))
    check_figures("probe.py", {name for name in figures(tmp_path / "out") if not name.startswith("probe.json")})


def test_reference_has_the_numbers_of_map(model, labelled, tmp_path):
    source = ("--model_name_or_path", model, "--fasta", labelled / "my.fasta", "--use_cpu", "--method", "pca")
    column = ("--table", labelled / "classes.csv", "--colour_by", "label")
    call(MAP, *source, *column, "--query", labelled / "my.fasta", "--output_dir", tmp_path / "out")
    call(MAP, *source, "--num_clusters", 3, "--output_dir", tmp_path / "again")
    by_faiss = {f"results.json: neighbours.{name}" for name in ("recall", "sample")}  # which is optional
    check_figures("map.py", figures(tmp_path) | by_faiss)


def test_reference_has_the_numbers_of_finetune(model, labelled, tmp_path):
    flags = ("--model_name_or_path", model, "--full", "--use_cpu", "--num_train_epochs", 1)
    for name in ("each.csv", "classes.csv"):
        call(FINETUNE, *flags, "--dataset", labelled / name, "--output_dir", tmp_path / Path(name).stem)
    found = {name for name in figures(tmp_path) if name.startswith(("results.json", "predictions.csv"))}
    check_figures("finetune.py", found)
