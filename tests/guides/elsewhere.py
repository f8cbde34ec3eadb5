"""Checks of rows that other tests hold, and of what the documents say of them."""

from __future__ import annotations

import ast

from tests.data_fixtures import load_script
from tests.guides.checks import Check, Here
from tests.guides.session import ROOT


def held(*tests: str, slow: bool = False) -> Check:
    """By these tests, FILE::NAME below tests/: they exist, and run.

    slow: only with `./test.sh --slow`. Tests that need a program, such as Slurm's, run where it is installed.
    """

    def check(here: Here) -> None:
        for test in tests:
            file, _, name = test.partition("::")
            tree = ast.parse((ROOT / "tests" / file).read_text())
            found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in found, test
            marks = [ast.unparse(mark) for mark in found[name].decorator_list]
            assert [mark for mark in marks if mark.startswith(("pytest.mark.skip(", "pytest.mark.xfail"))] == []
            assert bool({"pytest.mark.slow", "pytest.mark.soak"}.intersection(marks)) == slow, test

    return check


def differs(phrase: str, page: str = "docs/differences.md") -> Check:
    """By design, with a reason: a row of the page's table of what the guides have has the phrase."""

    def check(here: Here) -> None:
        rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
        assert [line for line in rows if phrase in line.split(" | ")[0]], f"no row of {page} begins with {phrase}"

    return check


def made(*paths: str) -> Check:
    """These jobs are there, as docs/make_guide_jobs.py makes them."""

    def check(here: Here) -> None:
        jobs = load_script("docs/make_guide_jobs.py").files()
        assert {path: (ROOT / path).read_text() for path in paths} == {path: jobs[ROOT / path] for path in paths}

    return check


def documented(page: str, text: str) -> Check:
    def check(here: Here) -> None:
        assert text in (ROOT / page).read_text()

    return check
