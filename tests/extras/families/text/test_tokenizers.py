"""Tokenizers of text: the built-in one, those of transformers, and each way in which one cannot be had."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import sys
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.cli import UserError
from extras.families.text.tokenizers import BYTES, ByteTokenizer, check_vocabulary, load_tokenizer, tokenize
from tests.extras.prepare.sources.hub_server import COMMIT, hub_server
from tests.forked import ROOT, run_script

TEXTS = ["The quick brown fox", "Übung macht den\nMeister …  ", "", "\x00\x7f</s><eos>"]


def trained(directory, **special):
    """A byte-pair tokenizer of a few merges, as transformers saves it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = special or {"eos_token": "</s>"}
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=[*names.values()])
    tokenizer.train_from_iterator(TEXTS * 3 + ["the den the den quick"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)
    return directory


def test_byte_tokenizer_export_gives_the_same_ids(tmp_path):
    tokenizer, revision = load_tokenizer(BYTES)
    assert revision is None
    ids = tokenizer.encode(TEXTS[:3])
    assert [bytes(some.tolist()).decode() for some in ids] == TEXTS[:3]
    assert tokenizer.dtype == np.uint16
    tokenizer.save(tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    every_byte = "".join(map(chr, range(0x800))) + "€😀"
    for text in (*TEXTS[:3], every_byte):
        assert exported(text)["input_ids"] == tokenizer.encode([text])[0].tolist()
    assert exported.decode(tokenizer.encode([every_byte])[0].tolist()) == every_byte
    assert (len(exported), exported.eos_token_id) == (tokenizer.vocab_size, tokenizer.eos_id)


def test_tokenizer_equals_transformers(tmp_path):
    tokenizer, _ = load_tokenizer(str(trained(tmp_path)))
    stock = AutoTokenizer.from_pretrained(tmp_path)
    assert [ids.tolist() for ids in tokenizer.encode(TEXTS)] == [
        stock(text, add_special_tokens=False)["input_ids"] for text in TEXTS
    ]
    assert tokenizer.eos_id == stock.eos_token_id
    assert tokenizer.vocab_size == len(stock)
    tokenizer.save(tmp_path / "copy")
    assert load_tokenizer(str(tmp_path / "copy"))[0].identity == tokenizer.identity


def test_tokenizer_identity_depends_on_content(tmp_path):
    first = load_tokenizer(str(trained(tmp_path / "a")))[0]
    assert load_tokenizer(str(trained(tmp_path / "b")))[0].identity == first.identity
    file = tmp_path / "b" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"].pop()
    file.write_text(json.dumps(content))
    assert load_tokenizer(str(tmp_path / "b"))[0].identity != first.identity


def test_tokenize_concatenates_documents():
    ids, bounds = tokenize(ByteTokenizer(), pa.array(["ab", "", "c"]))
    assert ids.tolist() == [97, 98, 257, 99, 257]
    assert bounds.tolist() == [0, 3, 3, 5]
    ids, bounds = tokenize(ByteTokenizer(), pa.array([], pa.string()))
    assert (len(ids), bounds.tolist()) == (0, [0])


def with_code(directory, **config):
    """The same with a tokenizer of its own, in code that leaves a file."""
    trained(directory)
    (directory / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(directory / 'ran')!r}).touch()\nEvil = int\n"
    )
    code = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}} | config
    for name in ("tokenizer_config.json", "config.json"):
        file = directory / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | code))
    return directory


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "Evil"}, {"model_type": "evil"}])
def test_tokenizer_never_runs_remote_code(tmp_path, monkeypatch, config):
    """It is refused or read without, and what is saved of it does not name it."""
    ours, theirs = pty.openpty()
    os.write(ours, b"y\n" * 4)
    monkeypatch.setattr(sys, "stdin", os.fdopen(theirs))
    directory = with_code(tmp_path / "evil", **config)
    with suppress(UserError):
        tokenizer, _ = load_tokenizer(str(directory))
        tokenizer.save(tmp_path / "saved")
    for path in tmp_path.glob("saved/*"):
        assert not re.search(b"auto_map|evil.Evil", path.read_bytes()), path
    assert not (directory / "ran").exists()
    assert sys.stdin.readline() == "y\n"  # no prompt read it
    os.close(ours)


def test_auto_classes_never_ask():
    """Without trust_remote_code=False one asks a terminal whether to run a stranger's code."""
    calls = 0
    for path in (
        *ROOT.glob("*.py"),
        *ROOT.glob("common/**/*.py"),
        *ROOT.glob("extras/**/*.py"),
        *ROOT.glob("benchmarks/**/*.py"),
    ):
        for call in ast.walk(ast.parse(path.read_text())):
            function = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if re.search(r"\bAuto\w+\.from_(pretrained|config)$", function):
                calls += 1
                trusts = [ast.unparse(word.value) for word in call.keywords if word.arg == "trust_remote_code"]
                assert trusts == ["False"], f"{path}:{call.lineno}"
    assert calls


def test_tokenizer_error_is_one_line(tmp_path):
    trained(tmp_path / "no end", pad_token="<pad>")
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "tokenizer.json").write_text('{"model": ')
    (tmp_path / "torn" / "tokenizer_config.json").write_text("{}")
    for name, message in (
        ("no end", "it has no end-of-text token"),
        ("empty", "not a tokenizer that transformers can open"),
        ("torn", "not a tokenizer that transformers can open"),
        ("nowhere", "neither `bytes`, `residues`, a directory of a tokenizer, nor a name on the Hub"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            load_tokenizer(str(tmp_path / name))
        assert "\n" not in str(raised.value)
        assert str(raised.value).startswith(f"--tokenizer {tmp_path / name}: ")
    with pytest.raises(UserError, match="its 259 tokens do not fit into the model's vocabulary of 256"):
        check_vocabulary(ByteTokenizer(), 256)
    check_vocabulary(ByteTokenizer(), 259)


LOAD = """
import sys
from common import cli
from extras.prepare.sources import hub
from extras.families.text.tokenizers import load_tokenizer
hub.ATTEMPTS, hub.FIRST_WAIT_S = 2, 0.0
with cli.user_errors():
    tokenizer, revision = load_tokenizer("org/llama")
    again = load_tokenizer("org/llama", revision)[0]
    print(revision, tokenizer.identity, again.identity)
"""


def load(home, url: str, **variables):
    """What another process makes of --tokenizer org/llama on that Hub, whose address is read by an import."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"} | variables
    script = home.with_suffix(".py")
    script.write_text(LOAD)
    return run_script(str(script), env=environment, anew=("huggingface_hub", "transformers", "common", "extras"))


def test_tokenizer_downloads_once_and_no_weights(tmp_path):
    (trained(tmp_path / "repo") / "model.safetensors").write_bytes(b"weights")
    with hub_server("org/llama", tmp_path / "repo", kind="models") as hub:
        done = load(tmp_path / "home", hub.url)
        calls = dict(hub.calls)
    identity = load_tokenizer(str(tmp_path / "repo"))[0].identity
    assert done.stdout.split() == [COMMIT, identity, identity], done.stderr
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    files = len(list((tmp_path / "repo").glob("*token*")))
    assert (calls["HEAD"], calls["GET"]) == (files, files), "loaded twice, fetched once"
    offline = load(tmp_path / "home", "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert offline.stdout.split() == [COMMIT, identity, identity], offline.stderr


@pytest.mark.parametrize(
    ("repo", "behaviour", "variables", "message"),
    [
        (
            "org/llama",
            {"status": 403, "code": "GatedRepo"},
            {},
            "accept the terms on its page of the Hub, and set HF_",
        ),
        ("org/llama", {"status": 429}, {}, "429 (too many requests, usually from many nodes at once): set HF_TOKEN"),
        ("org/other", {}, {}, "no such model on the Hub, or it is private: set HF_TOKEN"),
        ("org/llama", {}, {"HF_HUB_OFFLINE": "1"}, "hf download org/llama --local-dir DIR, then --tokenizer DIR"),
    ],
)
def test_hub_refusal_is_one_line(tmp_path, repo, behaviour, variables, message):
    trained(tmp_path / "repo")
    with hub_server(repo, tmp_path / "repo", kind="models", refuse=10**6, **behaviour) as hub:
        failed = load(tmp_path / "home", hub.url, **variables)
    assert failed.returncode == 2, failed.stderr
    last = failed.stderr.strip().splitlines()[-1]
    assert last.startswith("error: --tokenizer org/llama: ")
    assert message in last
