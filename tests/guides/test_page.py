"""docs/guides.md: a table a guide, of what its sections have a user type and what to type here."""

from __future__ import annotations

import re
import shlex
from itertools import chain

import pytest

from extras.migrate import translate
from tests.guides.rows import GUIDES
from tests.guides.session import ROOT
from tests.guides.test_rows import of_guide, published

PAGE = ROOT / "docs" / "guides.md"
TITLES = {
    "eks": "ESM-2 on EKS",
    "slurm": "ESM-2 on Slurm",
    "recipe": "NVIDIA's recipe esm2_native_te",
    "fsdp-eks": "PyTorch FSDP on EKS",
    "fsdp-slurm": "PyTorch FSDP on Slurm",
}
# Sections of the recipe without anything to type or to expect: links and plots.
NOTHING_TO_TYPE = ("How to", "Low precision", "Convergence", "MXFP8", "NVFP4", "Performance", "See Also")
NOTHING_TO_TYPE += ("Developer Guide", "0. Prerequisites", "0.1. EKS Cluster")
PROGRAMS = (
    "kubectl ",
    "kc ",
    "docker ",
    "enroot ",
    "sbatch ",
    "squeue",
    "python ",
    "torchrun ",
    "hf ",
    "aws eks ",
    "./",
)
PROGRAMS += ("HF_DATASETS_OFFLINE=1 ", ". ./", "cat train", "cat down", "cat prep", "envsubst ")


def table(guide: str) -> list[tuple[str, list[str], str]]:
    """The rows of a guide's table: section, the commands typed there (or its words), and what is here."""
    (text,) = re.findall(rf"(?ms)^## {re.escape(TITLES[guide])}$(.*?)(?=^## |\Z)", PAGE.read_text())
    found = []
    for line in re.findall(r"(?m)^\| (?!section|---)(.*) \|$", text):
        section, there, here = (cell.strip() for cell in re.split(r" ?(?<!\\)\| ", f"{line} "))
        found.append((section or found[-1][0], re.findall(r"`([^`]+)`", there.replace("\\|", "|")), here))
    return found


def words(title: str) -> list[str]:
    return re.findall(r"[\w.]+", re.sub(r"(?<=\d)\. ", " ", title.lower()))


def plain(command: str) -> str:
    return " ".join(command.split())


@pytest.mark.parametrize("guide", GUIDES)
def test_guides_page_says_as_typed_of_what_works(guide):
    """A command that is said to work as it is typed stands in a row of that guide, which holds it."""
    rows = plain(" ".join(f"{row.says} {row.command} {row.before}" for row in of_guide(guide).values()))
    said = chain.from_iterable(there for _, there, here in table(guide) if here.startswith("as typed"))
    patterns = [re.sub("<.*?>", r"\\S+", re.escape(plain(command))) for command in said]  # <YOUR TOKEN>
    assert [pattern for pattern in patterns if not re.search(pattern, rows)] == []


def test_guides_page_has_the_translations_of_the_recipe():
    rows = [
        (there[0], here.strip("`"))
        for _, there, here in table("recipe")
        if here.startswith(("`python", "`torch", "`HF"))
    ]
    assert len(rows) >= 10
    for there, here in rows:
        assert str(translate(shlex.split(there))).splitlines()[0] == here


@pytest.mark.parametrize("guide", GUIDES)
def test_guides_page_has_every_section(guide):
    """Each heading below the guide's title, in a few of its words."""
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", published(guide))
    headings = re.findall(r"(?m)^##+ +(.*?)\s*$", text)
    labels = [set(words(section)) for section, *_ in table(guide)]
    missed = [heading for heading in headings if not any(label <= set(words(heading)) for label in labels)]
    assert [heading for heading in missed if not heading.startswith(NOTHING_TO_TYPE)] == []


@pytest.mark.parametrize("guide", GUIDES)
def test_guides_page_has_every_command(guide):
    """Each command of the guide's shell blocks, word for word."""
    blocks = re.findall(r"(?ms)^ *``` ?(?:bash|)\n(.*?)^ *```", published(guide).replace("\\\n", " "))
    typed = [plain(line) for block in blocks for line in block.split("\n--")[0].splitlines()]
    typed = [line for line in typed if line.startswith(PROGRAMS)]
    page = plain(PAGE.read_text().replace("\\|", "|"))
    assert [line for line in typed if line not in page] == []
