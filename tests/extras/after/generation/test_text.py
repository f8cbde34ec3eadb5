"""generate.py with text: what it prints is what transformers' logits say, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import generate as script
from common.cli import UserError
from common.models.esm2.config import esm2_config
from extras.after.generation.text import printable
from extras.families.decoders.config import TRAINED_CONTEXT
from extras.families.text.tokenizers import ByteTokenizer
from tests.data_fixtures import call
from tests.extras.families.decoders.test_model import stock_model, tiny
from tests.models.reference import reference_model

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("decoder")
    config = tiny("llama3_2_1b", max_position_embeddings=48)
    config.vocab_size, config.eos_token_id = ByteTokenizer.vocab_size, ByteTokenizer.eos_id
    stock_model(config).save_pretrained(directory)
    ByteTokenizer().save(directory)
    return directory


@pytest.fixture
def said(model, capsys):
    """Runs the script in this process and returns what it printed."""

    def run(*flags, model: Path = model) -> str:
        call(script, "--model_name_or_path", model, "--use_cpu", *flags)
        return capsys.readouterr().out

    return run


def greedy(directory: Path, prompt: str, count: int) -> str:
    """Token after token by the largest logit, the whole text anew for each."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    ids = list(prompt.encode()) or [ByteTokenizer.eos_id]
    begun = len(ids)
    with torch.no_grad():
        while len(ids) < begun + count and (len(ids) == begun or ids[-1] != ByteTokenizer.eos_id):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[begun:], skip_special_tokens=True)


def test_generate_without_temperature_takes_the_largest_logit(said, model):
    for prompt in ("Once", ""):
        expected = printable(prompt + greedy(model, prompt, 12))
        assert said("--prompt", prompt, "--temperature", 0, "--max_new_tokens", 12) == expected + "\n"


def test_generate_samples_by_seed(said):
    flags = ("--prompt", "Once", "--max_new_tokens", 12)
    first = said(*flags)
    assert said(*flags) == first
    assert (second := said(*flags, "--seed", 43)) != first
    assert said(*flags, "--num_samples", 2) == first + "\n" + second
    assert said(*flags, "--top_k", 1) == said(*flags, "--temperature", 0)


def test_generate_ends_at_the_end_of_the_text(said, model, tmp_path):
    directory = Path(shutil.copytree(model, tmp_path / "ends"))
    end = list(greedy(model, "Once", 1).encode())[0]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [ByteTokenizer.eos_id, end]}))
    assert len(said("--prompt", "Once", "--temperature", 0, model=directory)) == len("Once") + 2


def test_generate_applies_no_other_settings_of_the_directory(said, model, tmp_path, caplog):
    """Of a generation_config.json with which transformers would search beams, ban tokens and stop at once."""
    directory = Path(shutil.copytree(model, tmp_path / "foreign"))
    settings = {"max_length": 1, "num_beams": 3, "suppress_tokens": [*range(0, 255, 2)], "no_repeat_ngram_size": 1}
    (directory / "generation_config.json").write_text(json.dumps(settings | {"max_time": 0.0, "unknown": {"a": 1}}))
    caplog.set_level("INFO")
    flags = ("--prompt", "Once", "--max_new_tokens", 12)
    assert said(*flags, model=directory) == said(*flags)
    assert (
        "not applied, flags say how to sample: 'max_length, max_time, no_repeat_ngram_size, num_beams" in caplog.text
    )


@pytest.mark.parametrize("end", ["x", -1, ByteTokenizer.vocab_size, 1 << 70, True, 1.0, [1, "x"], [[1]], {"id": 1}])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_generate_refuses_end_tokens_that_are_no_ids(model, tmp_path, name, end):
    directory = Path(shutil.copytree(model, tmp_path / "foreign"))
    content = json.loads((directory / "config.json").read_text()) if name == "config.json" else {}
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / name).write_text(json.dumps(content | {"eos_token_id": end}))
    ours, stocks = f"{name}: eos_token_id has .*: must be an id below vocab_size 259: mend it", "field 'eos_token_id'"
    with pytest.raises(UserError, match=f"{ours}|{stocks}" if name == "config.json" else ours) as error:
        call(script, "--model_name_or_path", directory, "--use_cpu", "--prompt", "x")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"a": ', "[" * 100_000, None], ids=["empty", "list", "torn", "deep", "fifo"]
)
def test_generate_refuses_settings_that_are_no_object(model, tmp_path, content):
    directory = Path(shutil.copytree(model, tmp_path / "foreign"))
    file = directory / "generation_config.json"
    file.unlink(missing_ok=True)
    os.mkfifo(file) if content is None else file.write_text(content)
    with pytest.raises(UserError, match="generation_config.json cannot be read: .*: mend or remove it") as error:
        call(script, "--model_name_or_path", directory, "--use_cpu", "--prompt", "x")
    assert "\n" not in str(error.value)


def test_generate_never_runs_code_of_the_directory(said, model, tmp_path):
    """Which its configuration names, or transformers finds by the file's name."""
    directory, ran = Path(shutil.copytree(model, tmp_path / "foreign")), tmp_path / "ran"
    (directory / "custom_generate").mkdir()
    for path in (directory / "foreign.py", directory / "custom_generate" / "generate.py"):
        path.write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\ngenerate = Any = int\n")
    kinds = ("AutoConfig", "AutoModelForCausalLM")
    codes = {"config.json": dict.fromkeys(kinds, "foreign.Any")}
    codes["tokenizer_config.json"] = {"AutoTokenizer": ["foreign.Any", "foreign.Any"]}
    for name, code in codes.items():
        content = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(content | {"auto_map": code}))
    flags = ("--prompt", "Once", "--temperature", 0, "--max_new_tokens", 4)
    assert said(*flags, model=directory) == said(*flags)
    assert not ran.exists()


def test_generate_stays_within_the_context(said, caplog):
    prompt = "x" * 46
    assert len(said("--prompt", prompt, "--temperature", 0, "--max_new_tokens", 9)) <= 46 + 2 + 1
    assert "Only 2 more tokens fit" in caplog.text


def test_generate_stays_within_the_contexts_of_the_training(said, model, tmp_path, caplog):
    """As a run records them in config.json; transformers computes the same with that entry."""
    directory = Path(shutil.copytree(model, tmp_path / "trained"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {TRAINED_CONTEXT: 16}))
    assert len(said("--prompt", "x" * 14, "--temperature", 0, "--max_new_tokens", 9, model=directory)) <= 14 + 2 + 1
    assert "Only 2 more tokens fit into the model's context: it was trained on contexts of 16" in caplog.text
    with pytest.raises(UserError, match="the prompt has 16 tokens, and the model was trained on contexts of 16: sho"):
        said("--prompt", "x" * 16, "--temperature", 0, model=directory)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours, theirs = (AutoModelForCausalLM.from_pretrained(each)(ids).logits for each in (directory, model))
    assert torch.equal(ours, theirs)


def test_generate_reads_prompts_of_a_file(said, tmp_path):
    (tmp_path / "prompts.txt").write_text("Once\n\nTwice\n")
    flags = ("--temperature", 0, "--max_new_tokens", 5)
    apart = [said("--prompt", prompt, *flags) for prompt in ("Once", "Twice")]
    assert said("--prompt_file", tmp_path / "prompts.txt", *flags) == "\n".join(apart)


def test_generate_keeps_a_conversation(said, model, tmp_path, monkeypatch):
    """Only with a chat template."""
    flags = ("--temperature", 0, "--max_new_tokens", 4)
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n\ncd\n"))
    assert said(*flags) == said("--prompt", "ab", *flags) + said("--prompt", "cd", *flags)

    directory = Path(shutil.copytree(model, tmp_path / "chats"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\ncd\n"))
    first = greedy(model, "u:ab;a:", 4)
    second = greedy(model, f"u:ab;a:{first};u:cd;a:", 4)
    assert said(*flags, model=directory) == "".join(printable(answer) + "\n" for answer in (first, second))


def test_printable_keeps_a_terminal_from_being_controlled():
    assert (
        printable("a\x1b[2Jé\n\tb\x00\x9b") == "a\N{REPLACEMENT CHARACTER}[2Jé\n\tb" + 2 * "\N{REPLACEMENT CHARACTER}"
    )


def test_generate_refuses_what_it_cannot_do(model, tmp_path):
    encoder, damaged = tmp_path / "encoder", Path(shutil.copytree(model, tmp_path / "damaged"))
    reference_model(esm2_config(1, 32, 4), seed=5).save_pretrained(encoder)
    (damaged / "model.safetensors").write_bytes(b"1234")
    (tmp_path / "empty.txt").write_text("\n")
    for message, named, *flags in (
        ("no such directory", tmp_path / "nowhere", "--prompt", "x"),
        ("--prompt: .* is an encoder, which takes --length", encoder, "--prompt", "x"),
        ("this directory has no config.json", tmp_path, "--prompt", "x"),
        ("--length: .* is a decoder of text: drop it", model, "--length", 9),
        ("cannot be opened", damaged, "--prompt", "x"),
        ("has 60 tokens, and the model reads 48", model, "--prompt", "x" * 60),
        ("give one of them", model, "--prompt", "x", "--prompt_file", "y"),
        ("it has no prompt", model, "--prompt_file", tmp_path / "empty.txt"),
        ("must be at most 1", model, "--prompt", "x", "--top_p", 2),
        ("--top_k: without effect at --temperature 0", model, "--prompt", "x", "--temperature", 0, "--top_k", 50),
        ("--top_p: without effect at --temperature 0", model, "--prompt", "x", "--temperature", 0, "--top_p", 1),
        ("all the same at --temperature 0", model, "--prompt", "x", "--temperature", 0, "--num_samples", 2),
        ("--num_samples 2: goes with --prompt", model, "--num_samples", 2),
    ):
        with pytest.raises(UserError, match=message):
            call(script, "--model_name_or_path", named, "--use_cpu", *flags)
