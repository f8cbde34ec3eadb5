"""Scores of proteins longer than a window, against stock transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.after.inference.mutation_scores import parse_variant, score
from extras.prepare.sample import make_proteins
from tests.extras.after.inference.embed_fixtures import make_model, stock_log_p

LONGEST = 60  # residues of a window in the tests of long proteins

BOUNDS = ((0, 0, 44), (28, 44, 72), (57, 72, 101), (85, 101, 145))  # of 145: (start, begin, end)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


class CountingEncoder(Encoder):
    def logits(self, sequences, *more):
        self.passes = getattr(self, "passes", 0) + len(sequences)
        return super().logits(sequences, *more)


def test_score_splits_a_long_protein_into_windows(model):
    """One pass a window without masks, one a position with them; each position from the window it is central in."""
    (_, text), *_ = make_proteins(1, 1, 4, (0.1, 0.4), seed=9)
    text = (text * 10)[:145]
    positions = [0, 30, 43, 44, 71, 72, 100, 101, 144]
    variants = [parse_variant(f"{text[at]}{at + 1}{new}", text.encode(), "") for at in positions for new in "AWC"]
    encoder = CountingEncoder(EncoderFlags(str(model), max_seq_length=LONGEST + 2, use_cpu=True))
    plain = score(encoder, variants, masked=False)
    assert encoder.passes == len(BOUNDS)
    masked = score(encoder, variants, masked=True)
    assert encoder.passes == len(BOUNDS) + len(positions)
    for start, begin, end in BOUNDS:
        window = text[start : start + LONGEST]
        for (_, (mutation,)), with_mask, without in zip(variants, masked, plain, strict=True):
            if begin <= mutation.position < end:
                at = mutation.position - start
                for found, log_p in (
                    (with_mask, stock_log_p(model, window, at)),
                    (without, stock_log_p(model, window)),
                ):
                    expected = float(log_p[at, mutation.mutant] - log_p[at, mutation.wild])
                    assert found == pytest.approx(expected, abs=1e-5)


def test_score_of_a_double_mutant_is_the_sum_of_its_singles(model):
    """Also of positions further apart than a window."""
    text = ("MKVLAGTYRRWCDE" * 11)[:145]
    words = [f"{text[at]}{at + 1}G" for at in (2, 3, 140)]
    joined = [words[0] + ":" + words[1], words[0] + ":" + words[2]]
    variants = [parse_variant(word, text.encode(), "") for word in words + joined]
    encoder = Encoder(EncoderFlags(str(model), max_seq_length=LONGEST + 2, use_cpu=True))
    for masked in (True, False):
        one, two, three, near, far = score(encoder, variants, masked)
        assert (near, far) == (one + two, one + three)
