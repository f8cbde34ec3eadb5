"""Contacts from a model that reads sets: its attention maps beside float64 with explicit masks, and contacts.py."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch

import contacts as script
from common.cli import UserError
from extras.after.downstream.contacts import fit, split
from extras.after.downstream.set_contacts import SetFeatures
from extras.after.downstream.structures import Chain, read_structures
from extras.after.inference.contexts import ContextFlags, Contexts, Sources
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.families.e1.config import e1_config
from extras.families.e1.convert import ADAPTER
from extras.prepare.sample import write_structures
from extras.prepare.synthetic_structures import COIL_STRUCTURES, coil_structures
from tests.data_fixtures import call, write_fasta
from tests.extras.after.inference.test_score_homologs import tokens_of
from tests.extras.families.e1.reference import Reference

CONFIG = e1_config(3, 32, 4, 48)  # the third layer attends to sets
OWN = ("--use_cpu", "--maps", 1)
FLAGS = (*OWN, "--contexts", 2, "--context_tokens", 300, 600)


class Recording(Reference):
    """Keeps the attention among the tokens of the last sequence, of each layer: float64 [heads, L, L]."""

    def attend(self, x, prefix, positions, base, mask):
        size, heads = self.config.hidden_size, self.config.num_attention_heads
        q, k = (self.matmul(x, f"{prefix}{n}_proj").clamp(-8, 8).view(len(x), heads, -1) for n in "qk")
        half = size // heads // 2
        angles = positions[:, None, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)

        def rotated(y):
            a, b = y.split(half, -1)
            return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

        scores = torch.einsum("qhd,khd->hqk", rotated(q), rotated(k)) / (2 * half) ** 0.5
        own = slice(len(x) - self.last, None)
        self.maps.append(scores[:, own, own].softmax(-1))
        return super().attend(x, prefix, positions, base, mask)

    def of(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        self.maps, self.last = [], len(sequences[-1])
        with torch.no_grad():
            self.logits(sequences)
        return torch.cat(self.maps)[:, 2:-2, 2:-2]


@pytest.fixture(scope="module")
def reference():
    return Recording(CONFIG)


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory):
    directory = tmp_path_factory.mktemp("e1") / "final_model"
    ADAPTER.save(iter(reference.state_dict().items()), CONFIG, directory)
    return directory


@pytest.fixture
def structures(tmp_path, monkeypatch):
    """Six coils, and a directory with homologs of each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "coils").mkdir()
    write_structures(tmp_path / "coils", coil_structures(COIL_STRUCTURES, 5))
    for path in sorted((tmp_path / "coils").iterdir())[6:]:
        path.unlink()
    (tmp_path / "homologs").mkdir()
    for chain in read_structures(str(tmp_path / "coils")):
        rows = [("query", chain.sequence)]
        rows += [
            (f"row{n}", "".join("A" if i % 5 == n else x for i, x in enumerate(chain.sequence))) for n in range(4)
        ]
        write_fasta(tmp_path / "homologs" / f"{chain.name}.a3m", rows)
    return tmp_path / "coils"


def test_maps_are_of_the_protein_behind_its_homologs(reference, model):
    encoder = Encoder(EncoderFlags(str(model)), torch.device("cpu"))
    features, query = SetFeatures(encoder), "MKVLAGWERTYHDN"
    alone, context = reference.of([tokens_of(query)]), ["MKVLAGW", "WERTYYYYYYY"]
    behind = reference.of([*map(tokens_of, context), tokens_of(query)])
    torch.testing.assert_close(features.maps(query).double(), alone, atol=1e-5, rtol=0)
    read = encoder.read([text.encode() for text in context])
    torch.testing.assert_close(features.maps(query, read).double(), behind, atol=1e-5, rtol=0)
    assert (alone - behind)[8:].abs().max() > 1e-3
    chain = Chain("a", query, np.full((14, 3), np.nan, np.float32))
    assert features(chain).shape == (14, 14, 12)


def test_contacts_with_homologs_are_means_over_contexts(model, structures, tmp_path):
    asked = ("--model_name_or_path", model, "--structures", structures, *FLAGS)
    homologs = ("--homologs", structures.parent / "homologs")
    alone = ("--model_name_or_path", model, "--structures", structures, *OWN)
    call(script, *alone, "--output_dir", tmp_path / "alone")
    call(script, *asked, "--output_dir", tmp_path / "sets", *homologs)
    with (tmp_path / "sets" / "contacts.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("alone", "sets")]
    assert "fitted on 3 chains" in results[1]["head"]

    # One protein with its homologs; the head is fitted on the structures' chains alone.
    chains = read_structures(str(structures))
    fasta = write_fasta(tmp_path / "my.fasta", [(chains[0].name, chains[0].sequence)])
    homologs = structures.parent / "homologs" / f"{chains[0].name}.a3m"
    call(script, *asked, "--fasta", fasta, "--output_dir", tmp_path / "one", "--homologs", homologs)
    with (tmp_path / "one" / f"{chains[0].name}.csv").open() as file:
        first = next(csv.DictReader(file))
    encoder = Encoder(EncoderFlags(str(model), max_seq_length=1026), torch.device("cpu"))
    head = fit(SetFeatures(encoder), split(chains)[0])
    flags = ContextFlags(str(homologs), contexts=2, context_tokens=[300, 600])
    contexts = Contexts(flags, encoder, Sources(flags, [chains[0].name]).of)
    probabilities = head.probabilities(SetFeatures(encoder, contexts, chains[:1])(chains[0]))
    found = probabilities[int(first["i"]) - 1, int(first["j"]) - 1]
    assert float(first["probability"]) == pytest.approx(found, abs=1e-5)


def test_contacts_refuse_homologs_that_are_lacking(model, structures, untrained, tmp_path):
    homologs = structures.parent / "homologs"
    next(homologs.iterdir()).unlink()
    asked = ("--structures", structures, *FLAGS, "--homologs", homologs, "--output_dir", tmp_path / "out")
    with pytest.raises(UserError, match="add it, with the protein alone if it has no homologs"):
        call(script, "--model_name_or_path", model, *asked)
    with pytest.raises(UserError, match="ESM-2 reads single proteins: give a model that reads sets"):
        call(script, "--model_name_or_path", untrained, *asked)
    assert not (tmp_path / "out").exists()
