"""benchmarks/window_ends.py: what it compares is embed.py's way, and a window of the whole protein changes nothing."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks import window_ends
from extras.after.inference.encoder import Encoder, EncoderFlags, embed
from extras.prepare.sample import make_proteins
from tests.data_fixtures import call, write_fasta
from tests.extras.after.inference.embed_fixtures import make_model


def test_windows_with_ends_are_those_of_embed(tmp_path):
    encoder = Encoder(EncoderFlags(model_name_or_path=str(make_model(tmp_path / "model")), max_seq_length=42))
    ((_, text),) = make_proteins(1, 2, 4, (0.1, 0.4), seed=3)
    text, masked = (text * 4)[:130].encode(), np.array([0, 17, 64, 129])
    ids = encoder.alphabet.encode(text)
    embedded, losses = window_ends.read(encoder, ids, masked, 40, inner_ends=True)
    torch.testing.assert_close(embedded, embed(encoder, [("a", text)])[0], rtol=0, atol=1e-6)
    without, _ = window_ends.read(encoder, ids, masked, 40, inner_ends=False)
    assert not torch.allclose(embedded, without, atol=1e-4)
    whole = [window_ends.read(encoder, ids, masked, 130, inner_ends=ends) for ends in (True, False)]
    torch.testing.assert_close(whole[0], whole[1], rtol=0, atol=0)
    hidden = ids.copy()
    hidden[1 + masked] = encoder.alphabet.mask
    (logits,) = encoder.logits([hidden])
    expected = -logits.log_softmax(-1)[1 + masked, ids[1 + masked].astype(int)]
    torch.testing.assert_close(whole[0][1], expected, rtol=1e-5, atol=1e-5)
    assert len(losses) == len(masked)


def test_window_ends_page_has_the_three_ways(tmp_path):
    proteins = list(make_proteins(5, 2, 4, (0.1, 0.4), seed=3))
    fasta, model, page = (
        write_fasta(tmp_path / "my.fasta", proteins),
        make_model(tmp_path / "model"),
        tmp_path / "page.md",
    )
    call(window_ends, "--model_name_or_path", model, "--fasta", fasta, "--window", 30, "--output", page)
    whole, with_ends, without = table_of(page.read_text())
    assert 0.9 < float(with_ends[0]) < 1
    assert with_ends != without
    # In a window that holds the whole protein, all are the same.
    encoder = Encoder(EncoderFlags(model_name_or_path=str(model)))
    lines = window_ends.compare(encoder, [text.encode() for _, text in proteins], 10_000)
    assert table_of("\n".join(lines)) == [["", whole[1]], ["1.0000", whole[1]], ["1.0000", whole[1]]]
    assert lines[-1].startswith("The losses differ by 0.00000 ± 0.00000 nats")


def table_of(page: str) -> list[list[str]]:
    """(cosine, loss) of the whole proteins, of windows with inner ends, and of windows without."""
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row[1:]] for row in rows[1:]]
