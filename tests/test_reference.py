"""docs/reference_metrics.md and docs/reference_files.md have each key and file of a run, and no other."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import numpy as np
import pytest

from common.files.json_files import read_json, read_json_lines
from common.training.run_directory import OWN_FILES, TRACES, TRACKER_FILES
from extras.downstream.contacts import RANGES, precisions
from extras.downstream.probes import values_of
from extras.downstream.structures import Chain
from tests.conftest import ROOT
from tests.data_fixtures import load_script
from tests.training_fixtures import train

REFERENCE = load_script("docs/make_reference.py")
FLAGS = {"max_steps": 2, "do_eval": True, "eval_on_start": True, "straggler_every": 1}
FLAGS |= {"peak_tflops_per_gpu": 1, "profile_steps": "1-1", "save_steps": 1, "save_hf": True}
OF_DECODERS = {"eval_tokens"}
ON_GPUS = {"attention"}


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
    listed = {key for key in keys(REFERENCE.EVALUATION) if "<" not in key} - OF_DECODERS
    assert listed == results["eval"] - {"epoch"}
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
