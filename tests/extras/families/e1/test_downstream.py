"""embed.py and score.py of an E1 without homologs, beside float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from extras.after.inference.encoder import Encoder, EncoderFlags, embed
from extras.after.inference.mutation_scores import parse_variant, score
from extras.families.e1.alphabet import TOKENS
from extras.families.e1.config import e1_config
from extras.families.e1.convert import ADAPTER
from tests.extras.families.e1.reference import MASK, Reference

PROTEINS = [("a", b"MKTAYIAKQRQISFVKSHFSRQ"), ("b", b"mlkXvqUqlv")]
CONFIG = replace(e1_config(3, 32, 4, 48), max_num_sequences=16)


@pytest.fixture(scope="module")
def reference():
    return Reference(CONFIG)


@pytest.fixture(scope="module")
def encoder(reference, tmp_path_factory):
    directory = tmp_path_factory.mktemp("e1") / "final_model"
    ADAPTER.save(iter(reference.state_dict().items()), CONFIG, directory)
    return Encoder(EncoderFlags(str(directory)), torch.device("cpu"))


def ids_of(text: bytes) -> torch.Tensor:
    return torch.tensor([TOKENS.index(token) for token in ("<bos>", "1", *text.decode().upper(), "2", "<eos>")])


@torch.no_grad()
def test_e1_embeddings_and_scores_are_the_references(reference, encoder):
    for (_, text), ours in zip(PROTEINS, embed(encoder, PROTEINS), strict=True):
        torch.testing.assert_close(ours.double(), reference.hidden([ids_of(text)])[2:-2], rtol=1e-4, atol=1e-5)
    text = PROTEINS[0][1]
    for masked in (True, False):
        ids = ids_of(text)
        if masked:
            ids[4] = MASK
        log_p = reference.logits([ids])[4].log_softmax(-1)
        found = score(encoder, [parse_variant("T3W", text, "here")], masked)
        expected = (log_p[TOKENS.index("W")] - log_p[TOKENS.index("T")]).item()
        assert found[0] == pytest.approx(expected, abs=1e-5)
