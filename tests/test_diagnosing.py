"""docs/diagnosing.md quotes this program's own messages as the source has them, and describes flags that exist."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "diagnosing.md").read_text()
VALUE = "\0"  # stands for what an f-string formats


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def literals(file: Path) -> list[str]:
    """The strings of a Python file, adjacent ones joined; of a script, its lines."""
    if file.suffix != ".py":
        return re.sub(r"\$\{[^}]*\}|\$\w+", VALUE, file.read_text()).splitlines()
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values))
    return found


def is_said(line: str, said: list[str]) -> bool:
    """Whether some string holds the line, with any text in place of each `...`."""
    pattern = re.compile(".*".join(re.escape(part) for part in line.strip().split("...")), re.DOTALL)
    return any(pattern.search(text) for text in said)


def test_our_messages_are_in_the_source():
    files = [
        *ROOT.glob("*.py"),
        *ROOT.glob("common/**/*.py"),
        *ROOT.glob("extras/**/*.py"),
        *(ROOT / "kubernetes").glob("*.sh"),
        *ROOT.glob("slurm/*.sh"),
    ]
    said = [text for file in files for text in literals(file)]
    quoted = [line for block in blocks("ours") for line in block.splitlines()]
    assert len(quoted) >= 15
    assert [line for line in quoted if not is_said(line, said)] == []
    assert not is_said("a message ... that is not in the source", said)


def test_errors_of_other_programs_have_their_names():
    """Exceptions are in the modules that the quoted lines say."""
    quoted = {
        name
        for block in blocks("log")
        for name in re.findall(r"\b(?:torch|wandb)(?:\.\w+)+(?:Error|Exception)\b", block)
    }
    assert len(quoted) >= 6
    for name in sorted(quoted):
        module, _, exception = name.rpartition(".")
        assert issubclass(getattr(import_module(module), exception), Exception), name


def test_flags_variables_and_links_exist():
    files = [*ROOT.glob("common/**/*.py"), *ROOT.glob("extras/**/*.py"), *ROOT.glob("*.py"), *ROOT.glob("*.sh")]
    sources = "".join(file.read_text() for file in files)
    flags = set(re.findall(r"(?<![\w-])--([a-z]+(?:_[a-z]+)+)", PAGE))
    torchrun = {"nproc_per_node", "rdzv_id", "rdzv_endpoint"}
    assert [flag for flag in sorted(flags - torchrun) if not re.search(rf"\b{flag}\b", sources)] == []
    for link in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link


def test_failures_have_a_log_and_advice():
    entries = re.split(r"```log\n", PAGE)[1:]
    assert len(entries) >= 15
    for entry in entries:
        text = re.sub(r"```\w*\n.*?```", "", entry.partition("```")[2], flags=re.DOTALL)
        assert len(text.split()) >= 15, entry  # says what to do
