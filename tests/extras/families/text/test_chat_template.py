"""A chat template's text is transformers'; one that fails or has no end is refused in one line."""

from __future__ import annotations

import multiprocessing

import pytest
from transformers import AutoTokenizer

from common.cli import UserError
from extras.families.text import chat_template
from extras.families.text.chat_template import render
from extras.families.text.tokenizers import ByteTokenizer

CONVERSATION = [{"role": "user", "content": "caf\u00e9"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture
def tokenizer(tmp_path):
    ByteTokenizer().save(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def test_render_is_what_transformers_writes(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ messages | tojson }}"
    expected = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    assert expected.startswith("<user>caf\u00e9<assistant>yes[")
    assert render(tokenizer, CONVERSATION) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].role.x.y }}", "has no attribute 'x'"),
        ("{{ messages.__class__ }}{{ messages.__class__.__name__ }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{% include 'a_file' %}", "no loader"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{% for i in range(9999) %}{{ 'x' * 1000 }}{% endfor %}", "writes more than 4,194,304 bytes"),
        ("{{ 'x' * 10000000000 }}", "takes more than 256 MiB"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than 1 s"),
    ],
)
def test_render_refuses_in_one_line(tokenizer, monkeypatch, template, message):
    monkeypatch.setattr(chat_template, "CPU_S", 1)
    tokenizer.chat_template, before = template, multiprocessing.active_children()
    with pytest.raises(UserError, match="^the tokenizer's chat template fails: ") as error:
        render(tokenizer, CONVERSATION)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert set(multiprocessing.active_children()) <= set(before)
