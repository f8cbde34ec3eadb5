"""A small model for all downstream tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.models.esm2.config import load_config, override
from common.models.esm2.convert import ADAPTER
from common.models.esm2.model import Esm2ForMaskedLM
from common.models.layers.initialise import initialise
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
