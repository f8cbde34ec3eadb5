"""The program behind docs/compatibility.md: it sees a lost tensor, and the page is of the versions that are pinned."""

from __future__ import annotations

import re

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.compatibility import peer
from benchmarks.compatibility.__main__ import BEGIN, END, Cells, Found, names_in, read_ours
from benchmarks.compatibility.environments import ENVIRONMENTS, FROM_NPM, TRANSFORMERS
from benchmarks.compatibility.models import KINDS, begin, inputs
from tests.conftest import ROOT
from tests.models.reference import as_transformers_5_24

PAGE = ROOT / "docs" / "compatibility.md"


@pytest.fixture
def export(tmp_path):
    begin(KINDS["ESM-2"], tmp_path / "model")
    return tmp_path / "model"


def test_stock_model_agrees_and_one_that_keeps_initial_norms_does_not(export):
    ids, reference, cells = inputs(export), read_ours(export).arrays, Cells()
    assert names_in(export) == "published"
    found = Found(peer.by_transformers(export, ids, [], None), "")
    assert re.fullmatch(r"\de-0\d", cells.cell(found, reference, "stock"))
    weights = export / "model.safetensors"
    save_file(as_transformers_5_24(load_file(weights)), weights, {"format": "pt"})
    assert names_in(export) == "gamma, beta; `*`"
    found = Found(peer.by_load_state_dict(export, ids, strict=False), "lacks some")
    assert re.fullmatch(r"\*\*off by [\d.]+\*\* \(1\)", cells.cell(found, reference, "lenient"))
    assert [line.partition(":")[0] for line in cells.wrong] == ["lenient"]
    assert cells.notes == ["lacks some"]


def test_page_is_of_the_pinned_versions():
    """After a change of the pins: ./test.sh --compat."""
    tables = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    for name, pins in ENVIRONMENTS.items():
        (row,) = [line for line in tables.splitlines() if line.startswith(f"| `{name}` |")]
        assert {pin.replace("==", " ") for pin in pins} <= set(re.split(r"[|,] *", row.replace(" |", "|")))


def test_pins_are_those_of_the_requirements():
    lines = {line for path in ROOT.glob("requirements*.txt") for line in path.read_text().splitlines()}
    assert {pin for pin in ENVIRONMENTS["onnx"] if not pin.startswith(FROM_NPM)} < lines
    assert {pin for pin in ENVIRONMENTS["peft"] if pin.startswith(("peft", "accelerate"))} < lines
    (installed,) = [line.partition("==")[2] for line in lines if line.startswith("transformers==")]
    assert installed in TRANSFORMERS
