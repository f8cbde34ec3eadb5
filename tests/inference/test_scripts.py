"""embed.py against stock transformers, one sequence at a time: numbers, windows, restarts, mistakes."""

from __future__ import annotations

import gzip
import json
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, EsmModel

from common.esm2.presets import esm2_config
from common.esm2.pretrained import write_tokenizer
from common.prepare.sample import make_proteins
from tests.data_fixtures import environment, write_fasta
from tests.esm2.reference import reference_model
from tests.forked import Script, run_script


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A directory of transformers' own: every weight random and of a size that shows."""
    directory = tmp_path_factory.mktemp("model")
    reference_model(esm2_config(2, 32, 4, initializer_range=0.2), seed=5).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def proteins(tmp_path_factory, real) -> list[tuple[str, str]]:
    return real or [(name, text) for name, text in make_proteins(25, 5, 4, (0.1, 0.4), seed=3)]


@pytest.fixture(scope="module")
def real() -> list[tuple[str, str]]:
    """25 of UniRef90's, where they are beside the checkout: the shortest and the longest among them."""
    from tests.data_fixtures import REAL_SAMPLE

    if not REAL_SAMPLE.exists():
        return []
    records = [part.split("\n") for part in gzip.decompress(REAL_SAMPLE.read_bytes()).decode()[1:].split("\n>")]
    found = sorted(((lines[0].split()[0], "".join(lines[1:])) for lines in records), key=lambda each: len(each[1]))
    return [found[n] for n in np.linspace(0, len(found) * 0.99, 25).astype(int)]


def refused(script: str, *flags) -> str:
    done = run_script(script, *flags, env=environment())
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(errors)) == (2, 1), done.stderr
    return errors[0]


def ran(script: str, *flags) -> str:
    done = run_script(script, *flags, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stderr


@torch.no_grad()
def stock_hidden(model: Path, text: str) -> np.ndarray:
    """transformers' own, without <cls> and <eos>."""
    tokenizer, stock = AutoTokenizer.from_pretrained(model), EsmModel.from_pretrained(model, add_pooling_layer=False)
    return stock.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 1:-1].numpy()


def embeddings(out: Path) -> dict[str, np.ndarray]:
    found = {}
    for part in sorted((out / "embeddings").glob("*.parquet")):
        for row in pq.read_table(part).to_pylist():
            found[row["id"]] = np.array(row["embedding"], np.float32)
            assert row["length"] > 0
    return found


def test_embeddings_are_those_of_transformers(model, proteins, tmp_path):
    """In packs of several; the means, and each residue; in the order of the file."""
    fasta = write_fasta(tmp_path / "my.fasta", proteins)
    flags = ("--model_name_or_path", model, "--fasta", fasta, "--max_seq_length", 100_000, "--proteins_per_part", 10)
    ran("embed.py", *flags, "--output_dir", tmp_path / "mean", "--tokens_per_pack", 700)
    ran("embed.py", *flags, "--output_dir", tmp_path / "each", "--per_residue")
    means, each = embeddings(tmp_path / "mean"), embeddings(tmp_path / "each")
    assert list(means) == list(each) == [name for name, _ in proteins]
    assert len(list((tmp_path / "mean" / "embeddings").glob("part-*.parquet"))) == 3
    for name, text in proteins:
        expected = stock_hidden(model, text)
        assert each[name].shape == (len(text), 32)
        np.testing.assert_allclose(each[name], expected, atol=1e-5)
        np.testing.assert_allclose(means[name], expected.mean(0), atol=1e-5)


def test_long_proteins_are_seen_in_windows(model, tmp_path):
    """Each residue as transformers has it in the window in whose middle it lies most nearly."""
    (_, text), *_ = make_proteins(1, 1, 4, (0.1, 0.4), seed=9)
    text = (text * 10)[:145]
    fasta = write_fasta(tmp_path / "long.fasta", [("long", text)])
    flags = ("--model_name_or_path", model, "--fasta", fasta, "--output_dir", tmp_path, "--per_residue")
    ran("embed.py", *flags, "--max_seq_length", 62)  # windows of 60 residues, at 0, 28, 57, 85
    found = embeddings(tmp_path)["long"]
    for start, begin, end in ((0, 0, 44), (28, 44, 72), (57, 72, 101), (85, 101, 145)):
        expected = stock_hidden(model, text[start : start + 60])[begin - start : end - start]
        np.testing.assert_allclose(found[begin:end], expected, atol=1e-5)


def test_embedding_goes_on_where_it_was_stopped(model, tmp_path):
    proteins = [(f"P{n}", "MKVLAGTYRR" * 30) for n in range(600)]
    flags = ["--model_name_or_path", model, "--fasta", write_fasta(tmp_path / "my.fasta", proteins)]
    flags += ["--proteins_per_part", 20, "--output_dir"]
    stopped = Script("embed.py", *flags, tmp_path / "out", env=environment())
    work, deadline = tmp_path / "out/.building/embeddings", time.monotonic() + 60
    while not (work / "part-00002.parquet").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait() == 143, stopped.said()
    assert not (tmp_path / "out/embeddings").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in work.glob("part-*.parquet")}
    assert 3 <= len(kept) < 30
    ran("embed.py", *flags, tmp_path / "out")
    made = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out/embeddings").glob("part-*.parquet")}
    assert len(made) == 30
    assert kept.items() <= made.items()
    assert len(embeddings(tmp_path / "out")) == 600
    assert "nothing to do" in ran("embed.py", *flags, tmp_path / "out")
    assert "give --overwrite" in refused("embed.py", *flags, tmp_path / "out", "--per_residue")


def test_mistakes_are_said_in_one_line(model, tmp_path):
    fasta = write_fasta(tmp_path / "my.fasta", [("one", "MKVLAG")])
    base = ["--model_name_or_path", model, "--fasta", fasta]
    assert "--fasta (the proteins)" in refused(
        "embed.py", "--model_name_or_path", model, "--output_dir", tmp_path / "x"
    )
    assert "no such file" in refused("embed.py", *base[:2], "--fasta", "none.fasta", "--output_dir", tmp_path / "x")
    nothing = ["--model_name_or_path", tmp_path, "--fasta", fasta, "--output_dir", tmp_path / "x"]
    assert "has no config.json" in refused("embed.py", *nothing)
    assert not (tmp_path / "x").exists()
    assert json.loads((model / "config.json").read_text())["model_type"] == "esm"
