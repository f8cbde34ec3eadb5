"""A small model for all downstream tests; proteins and their embeddings for those of probe.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.models.esm2.config import load_config
from common.models.esm2.convert import ADAPTER
from common.models.esm2.model import Esm2ForMaskedLM
from common.models.layers.config_base import override
from common.models.layers.initialise import initialise
from tests.data_fixtures import proteins as random_proteins
from tests.data_fixtures import write_fasta
from tests.extras.after.downstream.probing import COUNT
from tests.extras.after.inference.embed_fixtures import call_embed, make_model
from tests.training_fixtures import TINY_OVERRIDES


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> Path:
    """A directory of an EsmForMaskedLM whose weights are larger than at the start of training: attention differs."""
    directory = tmp_path_factory.mktemp("model") / "final_model"
    config = override(load_config("facebook/esm2_t6_8M_UR50D"), TINY_OVERRIDES)
    model = Esm2ForMaskedLM(config)
    initialise(model, 1, 0.3)
    ADAPTER.save(ADAPTER.to_hf(model.state_dict().__getitem__, config), config, directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def proteins() -> list[tuple[str, str]]:
    return random_proteins(COUNT, seed=4)


@pytest.fixture(scope="module")
def fasta(proteins, tmp_path_factory) -> Path:
    return write_fasta(tmp_path_factory.mktemp("fasta") / "my.fasta", proteins)


@pytest.fixture(scope="module")
def embedded(model, fasta, tmp_path_factory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("embedded") / name for name in ("mean", "residues")}
    call_embed(model, fasta, made["mean"])
    call_embed(model, fasta, made["residues"], "--per_residue")
    return made
