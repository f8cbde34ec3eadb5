"""embed.py and score.py of an AMPLIFY, beside the float64 module; what its alphabet lacks is said in one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.cli import UserError
from extras.after.downstream.mutations import MutationEvaluation
from extras.after.inference.encoder import Encoder, EncoderFlags, embed, look_through
from extras.after.inference.mutation_scores import RESIDUES, parse_variant, score, single_mutants
from extras.families.amplify.alphabet import ALPHABET, TOKENS
from extras.families.amplify.config import amplify_config
from extras.families.amplify.convert import ADAPTER
from tests.extras.families.amplify.test_model import Reference

PROTEINS = [("a", b"MKTAYIAKQRQISFVKSHFSRQ"), ("b", b"mlkXvqUqlv")]  # X and U are no letters of AMPLIFY
CONFIG = amplify_config(2, 32, 4, 48)


@pytest.fixture(scope="module")
def reference():
    return Reference(CONFIG)


@pytest.fixture(scope="module")
def encoder(reference, tmp_path_factory):
    directory = tmp_path_factory.mktemp("amplify") / "final_model"
    ADAPTER.save(iter(reference.state_dict().items()), CONFIG, directory)
    return Encoder(EncoderFlags(str(directory)), torch.device("cpu"))


def ids_of(text: bytes) -> torch.Tensor:
    known = [letter if letter in TOKENS else "<unk>" for letter in text.decode().upper()]
    return torch.tensor([TOKENS.index(token) for token in ("<bos>", *known, "<eos>")])


@torch.no_grad()
def test_amplify_embeddings_and_scores_are_the_references(reference, encoder):
    for (_, text), ours in zip(PROTEINS, embed(encoder, PROTEINS), strict=True):
        x = reference.encoder(ids_of(text))
        for layer in reference.transformer_encoder:
            x = layer(x)
        torch.testing.assert_close(ours.double(), reference.layer_norm_2(x)[1:-1], rtol=1e-4, atol=1e-5)
    text = PROTEINS[0][1]
    wild, mutant = TOKENS.index("T"), TOKENS.index("W")
    for masked in (True, False):
        ids = ids_of(text)
        ids[3] = TOKENS.index("<mask>") if masked else wild
        log_p = reference(ids)[3].log_softmax(-1)
        found = score(encoder, [parse_variant("T3W", text, "here")], masked)
        assert found[0] == pytest.approx((log_p[mutant] - log_p[wild]).item(), abs=1e-5)


def test_amplify_has_no_score_of_a_residue_that_it_lacks(encoder, tmp_path):
    protein = PROTEINS[1][1]
    matrix = single_mutants(encoder, [protein], masked=False)[0]
    assert np.flatnonzero(np.isnan(matrix).all(1)).tolist() == [3, 6]
    assert np.isfinite(np.delete(matrix, [3, 6], 0)).all()
    assert matrix[0, RESIDUES.index("M")] == 0.0
    said = "U7A: the model's alphabet has no U: leave this mutation out"
    with pytest.raises(UserError, match=said):
        score(encoder, [parse_variant("U7A", protein, "here")], masked=False)
    table = tmp_path / "gym.csv"  # of a run: before it trains
    table.write_text("mutant,mutated_sequence,DMS_score\nU7A,MLKXVQAQLV,1\nM1A,ALKXVQUQLV,2\n")
    MutationEvaluation([str(table)], 100)
    with pytest.raises(UserError, match=said):
        MutationEvaluation([str(table)], 100, ALPHABET)


def test_amplify_counts_what_becomes_unknown(tmp_path):
    fasta = tmp_path / "a.fasta"
    fasta.write_bytes(b"".join(b">%s\n%s\n" % (name.encode(), text) for name, text in PROTEINS))
    assert (look_through(str(fasta)).unknown, look_through(str(fasta), ALPHABET).unknown) == (0, 2)
