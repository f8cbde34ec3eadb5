"""generate.py with encoders: what stays, what is drawn, seeds, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import EsmForMaskedLM

import generate as script
from common.cli import UserError
from common.models.esm2.alphabet import ESM2_TOKENS, MASK
from common.models.esm2.config import esm2_config
from extras.after.generation.fasta import STANDARD
from extras.prepare.sources.proteins import read_proteins
from tests.data_fixtures import call
from tests.models.reference import reference_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("encoder")
    stock = reference_model(esm2_config(2, 32, 4), seed=5)
    with torch.no_grad():
        stock.lm_head.bias[ESM2_TOKENS.byte_to_id[ord("X")]] = 9.0  # which must never be drawn
        stock.lm_head.bias[:4] = 9.0
    stock.save_pretrained(directory)
    return directory


@pytest.fixture
def proteins(model, tmp_path):
    """Runs the script in this process and returns {header: residues}."""

    def run(*flags, model: Path = model) -> dict[str, str]:
        output = tmp_path / "out.fasta"
        call(script, "--model_name_or_path", model, "--use_cpu", "--output", output, "--overwrite", *flags)
        lines = output.read_text().split(">")[1:]
        return {record.split("\n")[0]: "".join(record.split("\n")[1:]) for record in lines}

    return run


@pytest.mark.parametrize(
    "flags",
    [(), ("--steps", 5), ("--unmask", "confidence", "--steps", 4, "--remask", 0.5), ("--top_p", 0.9, "--steps", 5)],
)
def test_a_sample_is_a_function_of_seed_and_number(proteins, flags):
    few = list(proteins("--length", 12, "--num_samples", 3, *flags).items())
    many = list(proteins("--length", 12, "--num_samples", 9, "--tokens_per_pack", 30, *flags).items())
    assert many[:3] == few
    assert len({residues for _, residues in many}) == 9
    other = proteins("--length", 12, "--num_samples", 3, "--seed", 7, *flags)
    assert not set(other.values()) & {residues for _, residues in few}
    for header, residues in many:
        assert set(residues) <= set(STANDARD)
        assert len(residues) == 12
        assert "length=12 generated=12 log_p=" in header


def test_the_score_is_the_log_probability_of_the_last_letter_by_transformers(proteins, model, tmp_path):
    """With one residue to generate: stock logits there, among the 20 residues."""
    (tmp_path / "t.fasta").write_text(">t\nMKVXLLAG\n")
    ((header, residues),) = proteins("--fasta", tmp_path / "t.fasta").items()
    ids = ESM2_TOKENS.encode(residues).astype(np.int64)
    letter, ids[4] = ids[4], MASK
    with torch.no_grad():
        logits = EsmForMaskedLM.from_pretrained(model).eval()(torch.from_numpy(ids)[None]).logits[0, 4]
    drawable = [int(ESM2_TOKENS.byte_to_id[ord(each)]) for each in STANDARD]
    expected = torch.log_softmax(logits[drawable], 0)[drawable.index(int(letter))]
    assert float(header.split("log_p=")[1]) == pytest.approx(float(expected), abs=1e-4)
    assert residues[:3] + residues[4:] == "MKVLLAG"


def test_fixed_residues_stay(proteins, tmp_path):
    (tmp_path / "t.fasta").write_text(">a\nMKWXCHWYBLLAGGSW\n>b\nWWWWWWWWWWWWWWWWWWWW\n")
    made = proteins("--fasta", tmp_path / "t.fasta", "--fix", "2-3, 9,14", "--num_samples", 4)
    assert [header.split()[0] for header in made] == [f"{name}_{n}" for name in "ab" for n in (1, 2, 3, 4)]
    for header, residues in made.items():
        template = "MKWXCHWYBLLAGGSW" if header[0] == "a" else "W" * 20
        assert [residues[n - 1] for n in (2, 3, 9, 14)] == [template[n - 1] for n in (2, 3, 9, 14)]
        assert f"generated={len(template) - 4}" in header
    assert len(set(made.values())) == 8


def test_lengths_are_those_of_a_fasta(proteins, tmp_path, caplog):
    (tmp_path / "l.fasta").write_text(f">a\n{'M' * 5}\n>b\n{'M' * 9}\n>c\n{'M' * 1100}\n")
    made = proteins("--length_from", tmp_path / "l.fasta", "--num_samples", 20)
    assert {len(residues) for residues in made.values()} == {5, 9}
    assert "1 proteins of more than 1,022 residues are left out" in caplog.text


def test_it_prints_fasta_that_other_scripts_read(model, capsys, tmp_path):
    call(script, "--model_name_or_path", model, "--use_cpu", "--length", 200, "--num_samples", 2, "--steps", 2)
    (tmp_path / "printed.fasta").write_text(capsys.readouterr().out)
    read = read_proteins(str(tmp_path / "printed.fasta"))
    assert {name: len(residues) for name, residues in read.items()} == {"sample_1": 200, "sample_2": 200}


def test_what_it_refuses(proteins, model, tmp_path):
    (tmp_path / "t.fasta").write_text(">t\nMKVXLLAG\n")
    (tmp_path / "whole.fasta").write_text(">t\nMKVLLAG\n")
    broken = Path(shutil.copytree(model, tmp_path / "nan"))
    tensors = load_file(broken / "model.safetensors")
    name = "lm_head.dense.weight"
    save_file(tensors | {name: torch.full_like(tensors[name], 3e38)}, broken / "model.safetensors", {"format": "pt"})
    template = ("--fasta", tmp_path / "t.fasta")
    for message, *flags in (
        ("missing: --length, --length_from or --fasta",),
        ("--length 2000: 2,000 residues, and at most 1,022", "--length", 2000),
        ("--length 0: must be at least 1", "--length", 0),
        ("--length and --fasta: give one", "--length", 9, *template),
        ("--fix 1-2: of which protein", "--length", 9, "--fix", "1-2"),
        ("t has residues 1 to 8: --fix 7-9", *template, "--fix", "7-9"),
        ("--fix 0 is not among", *template, "--fix", "0"),
        ("--fix 5-3 is not among", *template, "--fix", "5-3"),
        ("'a' is no range", *template, "--fix", "1,a"),
        ("'' is no range", *template, "--fix", "1,"),
        ("residue 4 is X and cannot stay", *template, "--fix", "3-5"),
        ("every residue stays", "--fasta", tmp_path / "whole.fasta"),
        ("every residue stays", "--fasta", tmp_path / "whole.fasta", "--fix", "1-7"),
        ("no such file", "--fasta", tmp_path / "nowhere.fasta"),
        ("--remask 2.0: must be at most 1", "--length", 9, "--remask", 2),
        ("--unmask greedy: choose", "--length", 9, "--unmask", "greedy"),
        ("--direction: .* is an encoder", "--length", 9, "--direction", "reverse"),
        (
            "all the same at --temperature 0",
            *("--length", 9, "--num_samples", 2),
            *("--temperature", 0, "--unmask", "confidence"),
        ),
    ):
        with pytest.raises(UserError, match=message):
            proteins(*flags)
    (tmp_path / "out.fasta").write_text("mine")
    with pytest.raises(UserError, match="exists: give --overwrite"):
        call(script, "--model_name_or_path", model, "--length", 9, "--output", tmp_path / "out.fasta")
    with pytest.raises(UserError, match="NaN or infinity"):
        proteins("--length", 9, model=broken)
    assert (tmp_path / "out.fasta").read_text() == "mine"  # nothing half-written
    assert not list(tmp_path.glob("*.partial"))


def test_it_warns_of_token_dropout(proteins, model, tmp_path, caplog):
    proteins("--length", 5)
    assert "was trained at 15 % masks with token dropout" in caplog.text
    caplog.clear()
    directory = Path(shutil.copytree(model, tmp_path / "without"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"token_dropout": False}))
    proteins("--length", 5, model=directory)
    assert "token dropout" not in caplog.text
