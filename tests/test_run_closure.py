"""How much of the project a command loads, and which files need each other in a circle.

Imports inside functions count: a core whose imports move there does not get smaller. The limits are what was reached;
lower them as they fall.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import networkx as nx

from tests.data_fixtures import numbered, write_fasta
from tests.training_fixtures import TINY_OVERRIDES, environment

ROOT = Path(__file__).resolve().parent.parent
LOADED = """
import atexit, runpy, sys
from pathlib import Path

def report():
    files = {Path(str(getattr(module, "__file__", None) or "/")) for module in [*sys.modules.values()]}
    own = [file for file in files if root in file.parents and ".venv" not in file.parts]
    lines = sum(len(file.read_bytes().splitlines()) for file in own)
    print(len(own), lines, sum(root / "extras" in file.parents for file in own))

root = Path.cwd()
sys.path.insert(0, str(root))
sys.argv = sys.argv[1:]
atexit.register(report)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def loaded(*words: str) -> list[int]:
    """[files, lines, files of extras] of this project that a command has loaded when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *words], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()[-3:]]


def test_closure_of_commands(dataset, tmp_path):
    """Training on prepared data with evaluations; embeddings of its model."""
    model = ("--config_name=facebook/esm2_t6_8M_UR50D", f"--config_overrides={TINY_OVERRIDES}", "--bf16", "--do_eval")
    run = ("--max_steps=1", f"--dataset_dir={dataset}", f"--output_dir={tmp_path / 'out'}", "--max_eval_samples=8")
    proteins = write_fasta(tmp_path / "proteins.fasta", numbered(3))
    given = (
        f"--model_name_or_path={tmp_path / 'out'}",
        f"--fasta={proteins}",
        f"--output_dir={tmp_path / 'embedded'}",
    )
    files, lines, extras = loaded("train_ddp.py", *model, *run)
    assert (files <= 94, lines <= 16_202) == (True, True), f"train_ddp.py: {files} files, {lines} lines"
    assert extras == 2  # extras/__init__.py and the catalogue
    files, lines, _ = loaded("embed.py", *given)
    assert (files <= 65, lines <= 9_523) == (True, True), f"embed.py: {files} files, {lines} lines"


def imports(path: Path, known: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & known


def test_no_files_need_each_other_in_a_circle():
    paths = [path for part in ("common", "extras") for path in sorted((ROOT / part).rglob("*.py"))]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    known = set(names.values())
    graph = nx.DiGraph([(name, other) for path, name in names.items() for other in imports(path, known - {name})])
    circles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    assert circles == []
