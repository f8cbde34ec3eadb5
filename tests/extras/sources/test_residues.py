"""extras/sources/records.py: letters that stand for residues and mean bases."""

import gzip
import logging

import numpy as np
import pytest

from extras.sources import records as residues
from tests.data_fixtures import REAL_SAMPLE, needs_real_sample


def looked_at(text: bytes, caplog, monkeypatch) -> str:
    """The warnings of two batches of a text."""
    monkeypatch.setattr(residues, "_warned", [])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            residues.clean(np.frombuffer(text, np.uint8), np.array([0, len(text)]), "my.fasta")
    return caplog.text


@pytest.mark.parametrize("bases", [b"ACGT", b"acgu", b"ACGTN"])
def test_clean_warns_once_of_nucleotides(bases, caplog, monkeypatch):
    said = looked_at(bases * 300 + b"MKV" * 20, caplog, monkeypatch)
    assert said.count("looks like DNA or RNA, not protein: translate it first") == 1
    assert "my.fasta: 9" in said


@needs_real_sample
def test_clean_does_not_warn_of_proteins(caplog, monkeypatch):
    text = b"".join(line for line in gzip.decompress(REAL_SAMPLE.read_bytes()).split(b"\n") if line[:1] != b">")
    assert looked_at(text, caplog, monkeypatch) == ""
    assert looked_at(b"GATTACA", caplog, monkeypatch) == "", "too few to tell"
