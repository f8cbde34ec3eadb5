"""python -m extras.onnx: onnxruntime computes what transformers' model does; bad input is one line."""

from __future__ import annotations

import subprocess
import sys
from shutil import which

import numpy as np
import pytest
import torch
from transformers import BertConfig, EsmConfig, EsmForMaskedLM

from common.cli import UserError
from common.models.esm2.alphabet import TOKENS
from extras import onnx as command
from extras.onnx import OUTPUTS, check, load, save
from tests.conftest import ROOT
from tests.typed import blocks

PROTEINS = ["MKTAYIAKQR", "MK<mask>L", "GG"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory of EsmForMaskedLM with random weights, as final_model/ is."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    tokens = {"vocab_size": len(TOKENS), "pad_token_id": 1, "mask_token_id": 32}
    config = EsmConfig(**sizes, **tokens, position_embedding_type="rotary", token_dropout=True)
    directory = tmp_path_factory.mktemp("model")
    EsmForMaskedLM(config).save_pretrained(directory)
    return directory


def padded(proteins: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """ESM-2's ids as a program without our tokenizer makes them, with <cls> and <eos>; (input_ids, attention_mask)."""
    rows = []
    for protein in proteins:
        letters = protein.replace("<mask>", "#")
        rows.append([0, *(32 if letter == "#" else TOKENS.index(letter) for letter in letters), 2])
    ids = np.full((len(rows), max(map(len, rows))), 1, np.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
    return ids, (ids != 1).astype(np.int64)


def test_file_computes_what_transformers_computes(model, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert save(str(model), tmp_path / "model.onnx") < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    content = (tmp_path / "model.onnx").read_bytes()
    assert [place for place in (str(ROOT), sys.prefix, str(model), ".py") if place.encode() in content] == []
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    ids, present = padded(PROTEINS)
    found = session.run(list(OUTPUTS), {"input_ids": ids, "attention_mask": present})
    stock = EsmForMaskedLM.from_pretrained(model).eval()
    for row in range(len(ids)):  # alone, without padding
        real = torch.from_numpy(ids[row : row + 1, : present[row].sum()])
        with torch.inference_mode():
            alone = stock(input_ids=real, output_hidden_states=True)
        for theirs, ours in zip(found, (alone.logits, alone.hidden_states[-1]), strict=True):
            np.testing.assert_allclose(theirs[row, : real.shape[1]], ours[0].numpy(), atol=1e-4)

    outputs = load(str(model))
    with torch.no_grad():
        outputs.model.lm_head.bias.add_(0.01)
    with pytest.raises(UserError, match="the ONNX file differs from the model by "):
        check(outputs, tmp_path / "model.onnx")
    with pytest.raises(UserError, match=r"model.onnx exists: remove it, or give another name"):
        save(str(model), tmp_path / "model.onnx")


def test_cpp_of_the_docs_gives_the_embedding(model, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    header = b"#include <onnxruntime_cxx_api.h>"
    if not which("g++") or subprocess.run(["g++", "-E", "-xc++", "-"], input=header, capture_output=True).returncode:
        pytest.skip("needs g++ and ONNX Runtime's C++ header")
    (code,) = blocks((ROOT / "docs" / "serving.md").read_text(), "cpp")
    (tmp_path / "main.cpp").write_text(code)
    save(str(model), tmp_path / "model.onnx")
    compile_it = ["g++", "-std=c++17", "main.cpp", "-lonnxruntime", "-o", "main"]
    subprocess.run(compile_it, cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "main"], cwd=tmp_path, check=True, capture_output=True, text=True)
    ids, present = padded(["MKTAYIAKQR"])
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (hidden,) = session.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": present})
    found = np.array(done.stdout.split(), float)
    np.testing.assert_allclose(found, hidden[0, 1:-1].mean(axis=0), rtol=1e-4, atol=1e-5)


def test_bad_input_is_one_line_and_leaves_nothing(model, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: object())
    BertConfig().save_pretrained(tmp_path / "bert")
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(UserError, match=r"model_type bert: extras.onnx writes ESM-2 \(esm\) alone"):
        save(str(tmp_path / "bert"), out / "model.onnx")
    with pytest.raises(UserError, match="not a model of transformers: "):
        save(str(out), out / "model.onnx")
    with pytest.raises(UserError, match="missing: no such directory"):
        save(str(model), tmp_path / "missing" / "model.onnx")
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(UserError, match="needs onnxruntime: pip install -r requirements-onnx.txt"):
        save(str(model), out / "model.onnx")
    monkeypatch.setattr(sys, "argv", ["extras.onnx", str(model)])
    with pytest.raises(UserError, match="usage: python -m extras.onnx MODEL OUT.onnx"):
        command.main()
    assert list(out.iterdir()) == []
