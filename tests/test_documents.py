"""What documents say can be typed: their commands run as they stand (smaller), flags and links are there."""

from __future__ import annotations

import ast
import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from extras.after.adapting.one_protein import CAN_HURT
from extras.after.inference.scored_files import SAY_NOTHING
from extras.prepare.sample import write_structures
from extras.prepare.synthetic_structures import COIL_STRUCTURES, coil_structures
from tests.conftest import ROOT
from tests.typed import TWO_LAYERS, alarming, blocks, checkout_in, sh, smaller

MODEL = "--config_name facebook/esm2_t6_8M_UR50D"
PAGES = sorted((ROOT / "docs").glob("*.md"))
TYPED = [page for page in PAGES if blocks(page.read_text(), "bash")]
# A block without a language is no command: a picture, a log, a list of names.
PROGRAMS = "python3?|torchrun|docker|kubectl|sbatch|helm|pip|hf|mmseqs|source|export"
EMPTY_SHARD = "this one is empty; fewer do as well"
EXPECTED = (SAY_NOTHING, EMPTY_SHARD, CAN_HURT)
COMMAND = re.compile(rf"^\s*([A-Z_]+=\S+ )?((\./|slurm/|kubernetes/)\w+\.sh|({PROGRAMS})\b)")


def smallest(command: str) -> str:
    """Without the whole 8M model: test_readme.py types the README's commands with it."""
    return re.sub(rf"{MODEL}(?!.*--config_overrides)", rf"{MODEL} {TWO_LAYERS}", smaller(command))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """With what the README's laptop commands leave, which the other pages begin from."""
    directory = checkout_in(tmp_path_factory.mktemp("checkout"))
    (directory / "texts").mkdir()
    shutil.copy(directory / "my_texts.jsonl", directory / "texts")
    (directory / "wild_type.fasta").write_text(">a\nMKTAYIAKQR\n")
    write_structures(directory / "pdb", coil_structures(COIL_STRUCTURES, 42))
    (directory / "family.a3m").write_text(">a\nMKTAYIAKQR\n>b\nMKSGWIGHEV\n>c\nMPSAY-GHaaEV\n")
    (directory / "mutants.csv").write_text("mutant\nK2R\nT3A:Y5F\n")
    (directory / "indels.csv").write_text("mutated_sequence\nMKTAIAKQR\nMKTAYLLIAKQR\n")
    records = (directory / "my_proteins.fasta").read_text()[1:].split("\n>")
    rows = [f"{each.split()[0]},{each.count('A')},{'train' if n % 4 else 'test'}" for n, each in enumerate(records)]
    (directory / "labels.csv").write_text("\n".join(["id,label,split", *rows]) + "\n")
    (commands,) = [block for block in blocks((ROOT / "README.md").read_text(), "bash") if "0.download" in block]
    done = sh(smallest(commands), directory)
    assert done.returncode == 0, done.stderr[-2000:]
    (directory / "out" / "checkpoint-2").rename(directory / "out" / "checkpoint-500")
    (directory / "quickstart" / "my_proteins").mkdir(parents=True)
    (directory / "quickstart" / "my_proteins" / "model").symlink_to(directory / "out")  # what quickstart.sh leaves
    return directory


@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.stem)
def test_commands_run_in_order(page, checkout):
    for block in blocks(page.read_text(), "bash"):
        # Published weights are fetched; a model of our own takes their place.
        command = re.sub(r"(--model_name_or_path) facebook/\S+", r"\1 out/final_model", block)
        if find_spec("peft") is None:
            command = command.replace("finetune.py", "finetune.py --full")
        done = sh(smallest(command), checkout)
        assert done.returncode == 0, f"{block}\n{done.stderr[-2000:]}"
        # A model of two steps knows no positions, and score.py says so; the one small file fills no three shards.
        assert [line for line in alarming(done) if not any(text in line for text in EXPECTED)] == []


def test_notebook_runs(checkout):
    """As `jupyter nbconvert --execute` runs it, where the files that it speaks of are the user's own."""
    notebook = json.loads((ROOT / "docs" / "my_proteins.ipynb").read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"source": smallest("".join(cell["source"])), "outputs": [], "execution_count": None}
    (checkout / "docs").mkdir()
    (checkout / "docs" / "my_proteins.ipynb").write_text(json.dumps(notebook))
    done = sh("python -m nbconvert --execute --to notebook --inplace docs/my_proteins.ipynb", checkout)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = json.loads((checkout / "docs" / "my_proteins.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert "Verdict" in "".join(piece for output in outputs for piece in output.get("text", []))  # it comes in pieces


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_commands_are_in_bash_or_sh_blocks(page):
    for block in blocks(page.read_text(), ""):
        assert [line for line in block.splitlines() if COMMAND.match(line)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_exist(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["differences", "models", "security", "supply_chain", "upgrading"])
def test_page_names_tests_that_exist(page):
    named = set(re.findall(r"`(test_\w+)(?:\.py)?`", (ROOT / "docs" / f"{page}.md").read_text()))
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    there = {path.stem for path in files} | set(re.findall(r"def (test_\w+)\(", "".join(map(Path.read_text, files))))
    assert named
    assert named <= there, named - there


def test_models_page_marks_slow_tests():
    page = (ROOT / "docs" / "models.md").read_text()
    functions = [
        node
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    ]
    slow = {
        node.name for node in functions if any(re.search(r"\bslow\b", ast.unparse(d)) for d in node.decorator_list)
    }
    assert set(re.findall(r"`(test_\w+)`\\\*", page)) == set(re.findall(r"`(test_\w+)`", page)) & slow


def test_each_difference_has_a_reason():
    page = (ROOT / "docs" / "differences.md").read_text()
    rows = [re.split(r" \| ", line.strip("| ")) for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) > 20
    assert [row for row in rows if len(row) != 3 or not all(row)] == []
