"""embed.py against stock transformers, one sequence at a time: numbers, windows, what is refused."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, EsmModel

from common.cli import UserError
from common.models.layers.hf_directory import model_hash
from extras.after.inference.packed import windows
from extras.prepare.sample import make_proteins
from tests.data_fixtures import everything_in, write_fasta
from tests.extras.after.inference.embed_fixtures import call_embed, change_weights, make_model, ran, refused


@pytest.mark.parametrize("longest", [6, 7, 62, 1022])
@pytest.mark.parametrize("times", [0.5, 1, 1.01, 1.5, 2, 2.3, 7.7])
def test_windows_use_each_residue_once_near_a_centre(longest, times):
    residues = max(1, int(longest * times))
    found = list(windows(residues, longest))
    taken = [window.start + n for window in found for n in range(window.begin, window.end)]
    assert taken == list(range(residues))
    assert {window.length for window in found} == {min(residues, longest)}
    for window in found:
        assert 0 <= window.start <= residues - window.length
        # Away from the protein's own ends, a quarter of a window is seen on both sides.
        if window.start:
            assert window.begin >= longest // 4 - 1
        if window.start + window.length < residues:
            assert window.length - window.end >= longest // 4 - 1


@pytest.mark.parametrize("longest", [6, 7, 30, 31])
def test_windows_of_a_residue_are_the_nearest_and_of_two_the_later(longest):
    """For each residue of proteins of all lengths, beside all windows that contain it; in doubled residues."""
    ties = 0
    for residues in range(longest + 1, 5 * longest):
        found = list(windows(residues, longest))
        for window in found:
            for place in range(window.start + window.begin, window.start + window.end):
                seen_in = [other.start for other in found if other.start <= place < other.start + longest]
                away = {start: abs(2 * place - (2 * start + longest - 1)) for start in seen_in}
                nearest = [start for start in seen_in if away[start] == min(away.values())]
                ties += len(nearest) > 1
                assert window.start == max(nearest)
    assert ties


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def proteins(tmp_path_factory, real) -> list[tuple[str, str]]:
    return real or [(header.split()[0], text) for header, text in make_proteins(25, 5, 4, (0.1, 0.4), seed=3)]


@pytest.fixture(scope="module")
def real() -> list[tuple[str, str]]:
    """25 of UniRef90's, where they are beside the checkout: the shortest and the longest among them."""
    from tests.data_fixtures import REAL_SAMPLE

    if not REAL_SAMPLE.exists():
        return []
    records = [part.split("\n") for part in gzip.decompress(REAL_SAMPLE.read_bytes()).decode()[1:].split("\n>")]
    found = sorted(((lines[0].split()[0], "".join(lines[1:])) for lines in records), key=lambda each: len(each[1]))
    return [found[n] for n in np.linspace(0, len(found) * 0.99, 25).astype(int)]


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


def test_embed_equals_transformers(model, proteins, tmp_path):
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


def test_embed_ignores_the_dropout_of_a_given_model(model, proteins, tmp_path):
    with_dropout = Path(shutil.copytree(model, tmp_path / "model"))
    config = json.loads((with_dropout / "config.json").read_text())
    changes = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    (with_dropout / "config.json").write_text(json.dumps(config | changes))
    fasta = write_fasta(tmp_path / "my.fasta", proteins[:3])
    for kind, name in (("plain", model), ("dropout", with_dropout)):
        call_embed(name, fasta, tmp_path / kind)
    expected, found = (embeddings(tmp_path / kind) for kind in ("plain", "dropout"))
    assert len(found) == 3
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", None])
def test_embed_layers_and_poolings_equal_transformers(model, tmp_path, pooling):
    """0 is the embeddings' output, the last one comes after the LayerNorm; a column each."""
    proteins = [(f"P{n}", "MKVLAGTYRR"[: 5 + n] * (n + 1)) for n in range(4)]
    fasta = write_fasta(tmp_path / "my.fasta", proteins)
    flags = ["--pooling", pooling] if pooling else ["--per_residue"]
    call_embed(model, fasta, tmp_path, *flags, "--repr_layers", -1, 0, 1, -3, "--tokens_per_pack", 40)
    found = pq.read_table(tmp_path / "embeddings")
    assert found.column_names == ["id", "length", "embedding_2", "embedding_0", "embedding_1"]
    settings = json.loads(found.schema.metadata[b"settings"])
    assert (settings["repr_layers"], settings.get("pooling", "mean")) == ([2, 0, 1], pooling or "mean")
    tokenizer = AutoTokenizer.from_pretrained(model)
    stock = EsmModel.from_pretrained(model, add_pooling_layer=False).eval()
    for row, (_, text) in zip(found.to_pylist(), proteins, strict=True):
        with torch.no_grad():
            states = stock(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        for number in (0, 1, 2):
            inside = states[number][0, 1:-1]
            expected = {"mean": inside.mean(0), "max": inside.amax(0), "cls": states[number][0, 0], None: inside}
            np.testing.assert_allclose(np.array(row[f"embedding_{number}"]), expected[pooling], atol=1e-5)


def test_embed_layer_alone_has_the_usual_column_and_the_last_one_is_the_default(model, tmp_path):
    (_, text), *_ = make_proteins(1, 1, 4, (0.1, 0.4), seed=9)
    fasta = write_fasta(tmp_path / "my.fasta", [("long", text), ("short", "MKVLAG")])
    for name, flags in {"plain": [], "last": ["--repr_layers", "2", "-1"], "first": ["--repr_layers", "1"]}.items():
        call_embed(model, fasta, tmp_path / name, "--max_seq_length", 30, *flags)
    assert everything_in(tmp_path / "plain") == everything_in(tmp_path / "last")
    first = pq.read_table(tmp_path / "first/embeddings")
    assert first.column_names == ["id", "length", "embedding"]
    assert json.loads(first.schema.metadata[b"settings"])["repr_layers"] == [1]
    with pytest.raises(UserError, match="--repr_layers 3: the model has layers 0 to 2"):
        call_embed(model, fasta, tmp_path / "none", "--repr_layers", 3)
    with pytest.raises(UserError, match="--pooling max: of a protein's residues"):
        call_embed(model, fasta, tmp_path / "none", "--per_residue", "--pooling", "max")
    assert not (tmp_path / "none").exists()


def test_embed_splits_long_proteins_into_windows(model, tmp_path):
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


def test_embed_reports_errors_in_one_line(model, tmp_path):
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


def test_embed_refuses_an_output_that_holds_its_input(model, tmp_path):
    (tmp_path / "embeddings").mkdir()
    fasta = write_fasta(tmp_path / "embeddings" / "my.fasta", [("one", "MKV")])
    with pytest.raises(UserError, match="--fasta .* is in there: choose another"):
        call_embed(model, fasta, tmp_path, "--overwrite")
    assert fasta.exists()


def test_embed_parts_record_their_input(model, tmp_path):
    fasta = write_fasta(tmp_path / "my.fasta", [(f"P{n}", "MKVLAG" * n) for n in range(1, 6)])
    call_embed(model, fasta, tmp_path / "out", "--proteins_per_part", 3, "--max_seq_length", 20)
    settings = {"bf16": False, "max_seq_length": 20, "per_residue": False, "proteins_per_part": 3}
    for number in (0, 1):
        facts = pq.read_schema(tmp_path / f"out/embeddings/part-0000{number}.parquet").metadata
        assert json.loads(facts.pop(b"settings")) == settings
        assert facts == {
            b"fasta_hash": hashlib.sha256(fasta.read_bytes()).hexdigest().encode(),
            b"model_hash": model_hash(str(model)).encode(),
        }


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([("a", "MKVLAG"), ("digits", "0123456789")], "record digits has 10 characters of 10 that are not residues"),
        (
            [("a", "MKVLAG" * 20_000), ("dots", "?!;_" * 40)],
            "record dots has 160 characters of 160 that are not residues",
        ),
        ([("a", "MKVLAG"), ("none", "")], "line 3: record 2 (none) has no sequence"),
        ([("a", "MKVLAG"), ("stop", "**")], "record stop has no residues"),
    ],
)
def test_embed_refuses_text_that_is_not_protein(model, tmp_path, records, said):
    with pytest.raises(UserError, match=re.escape(said)):
        call_embed(model, write_fasta(tmp_path / "my.fasta", records), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_embed_counts_unknown_characters_and_duplicate_ids(model, tmp_path, caplog):
    tail = "LAGVSERTIDPKQNFY"
    records = [("a", f"MKVL1AG*A{tail}"), ("a", "mkvlag"), ("b", f"MK7LAG{tail}"), ("a", "MKVLAG"), ("c", "MKVLAG")]
    call_embed(model, write_fasta(tmp_path / "my.fasta", records), tmp_path / "out")
    warnings = [record.getMessage().partition(": ")[2] for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "3 characters in 2 records are not residues: <unk> (record a, record b)",
        "2 ids are repeated: each gets a row",
    ]
    assert json.loads((tmp_path / "out/embeddings/.complete.json").read_text())["results"] == {
        "proteins": 5,
        "residues": 65,
        "unknown": 3,
        "with_unknown": 2,
        "duplicates": 2,
    }
    found = pq.read_table(tmp_path / "out/embeddings")
    assert found["id"].to_pylist() == ["a", "a", "b", "a", "c"]
    assert found["embedding"][1] == found["embedding"][3] == found["embedding"][4], "lower case is upper case"


def test_embed_checks_the_input_before_loading_the_model(model, tmp_path):
    """A bad byte at the end, and a model that is refused when it is loaded: the byte is reported."""
    broken = shutil.copytree(model, tmp_path / "model")
    change_weights(broken, lambda tensors: tensors["lm_head.bias"].fill_(math.nan))
    fasta = write_fasta(tmp_path / "my.fasta", [(f"P{n}", "MKVLAGTYRR" * 30) for n in range(2000)])
    fasta.write_bytes(fasta.read_bytes()[:-1] + b"\xff\n")
    with pytest.raises(UserError, match="line 4000: non-ASCII byte 0xff in the sequence of P1999"):
        call_embed(broken, fasta, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_embed_refuses_a_model_that_gives_nan(model, tmp_path):
    """Weights that are not finite, and finite ones whose sums are not."""
    fasta = write_fasta(tmp_path / "my.fasta", [("one", "MKVLAG")])
    name = "esm.encoder.layer.1.attention.self.value.weight"
    for value, said in (
        (math.nan, f"tensor {name} holds NaN or infinity"),
        (-math.inf, f"tensor {name} holds NaN or infinity"),
        (3e38, "gives NaN or infinity for the sequence MKVLAG"),
    ):
        broken = shutil.copytree(model, tmp_path / f"model{value}")
        change_weights(broken, lambda tensors, value=value: tensors[name][3].fill_(value))
        with pytest.raises(UserError, match=said):
            call_embed(broken, fasta, tmp_path / "out")
        assert not list(tmp_path.glob("out/embeddings"))
