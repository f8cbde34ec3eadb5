"""Documents, docstrings and comments have no phrase of tests/plain_words.txt."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
CODE = [*ROOT.glob("*.py"), *(path for name in ("common", "extras") for path in ROOT.glob(f"{name}/**/*.py"))]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def phrases() -> dict[re.Pattern[str], str]:
    """{phrase: what to write instead}."""
    lines = (ROOT / "tests" / "plain_words.txt").read_text().splitlines()
    pairs = [line.split(" -> ") for line in lines if line and not line.startswith("#")]
    whole = r"\b(?:{})\b".format
    return {re.compile(whole(phrase.replace(" ", r"\s+")), re.I): better for phrase, better in pairs}


def prose_of(source: str) -> str:
    """The docstrings and comments of Python code."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join([*(ast.get_docstring(node) or "" for node in nodes), *comments])


def found_in(path: Path, text: str) -> Iterator[str]:
    for phrase, better in phrases().items():
        for match in phrase.finditer(text):
            yield f"{path.name}: {' '.join(match[0].split())}: write: {better}"


def test_plain_words_prose_has_no_phrase_of_the_list():
    texts = {path: path.read_text() for path in DOCUMENTS}
    texts |= {path: prose_of(path.read_text()) for path in CODE}
    assert len(texts) > 200
    assert [line for path, text in texts.items() for line in found_in(path, text)] == []


def test_plain_words_finds_a_phrase():
    code = '"""Weights\\nare handed\\nout."""\n# What it says is taken at its\n# word.\nNAME = "the odd ones"\n'
    assert list(found_in(Path("a.py"), prose_of(code))) == [
        "a.py: taken at its word: write: used as given",
        "a.py: handed out: write: distribute, copy",
    ]
