"""The README's commands work as written (with fewer steps and smaller models), and quickstart.sh does its job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from common.prepare.sample import make_proteins
from tests.conftest import ROOT
from tests.data_fixtures import write_fasta
from tests.decoder_fixtures import write_text
from tests.warm_python import programs

README = (ROOT / "README.md").read_text()
SMALLER = (
    (r"^\./install\.sh && \. \.venv/bin/activate$", ":"),
    (r"--max_steps \d+", "--max_steps 2"),
    (r"--nproc_per_node=8", "--standalone --nproc_per_node=2"),
    (r"esm2_t30_150M", "esm2_t6_8M"),
    (r"--tokens_per_pack 16384 --gradient_accumulation_steps 16", "--tokens_per_pack 1024"),
    (r"--num_layers 4", "--num_layers 4 --intermediate_size 256"),
    (r"--max_context_width 512", "--max_context_width 128"),
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def sh(script: str, cwd: Path, timeout: int = 600) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "PATH": f"{programs()}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A directory that looks like a checkout, so that the commands' relative paths land in a temporary place."""
    directory = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.suffix in (".py", ".sh", ".txt") or path.name in ("common", "configs"):
            (directory / path.name).symlink_to(path)
    (directory / ".venv").mkdir()
    for path in (ROOT / ".venv").iterdir():
        (directory / ".venv" / path.name).symlink_to(programs() if path.name == "bin" else path)
    # Short ones, so that an epoch of them is one small pack.
    proteins = [(header, residues[:50]) for header, residues in make_proteins(60, 10, 4, (0.1, 0.4), seed=1)]
    write_fasta(directory / "my_proteins.fasta", proteins)
    shutil.copy(write_text(directory / "text") / "train.jsonl", directory / "my_texts.jsonl")
    return directory


def test_the_commands_in_order(checkout):
    commands = blocks("bash")
    assert len(commands) == 3
    for command in commands:
        for pattern, replacement in SMALLER:
            command = re.sub(pattern, replacement, command, flags=re.MULTILINE)
        done = sh(command, checkout)
        assert done.returncode == 0, done.stderr[-2000:]
    for name in re.findall(r"`([\w.]+(?:\.jsonl|\.png|\.json))`", README):
        assert (checkout / "out" / name).exists() or name == "training_curves.png", name
    (python,) = blocks("python")
    done = sh(
        f"python - <<'E'\n{python}\nprint(sum(p.numel() for p in model.parameters()), len(tokenizer))\nE", checkout
    )
    assert done.stdout.split() == ["7512474", "33"], done.stderr[-2000:]  # 7,512,353 and 121 of the contact head


def test_links_and_files_that_the_readme_names_exist():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).exists(), link


def test_quickstart_from_a_fasta_file_and_again(checkout, tmp_path):
    """Run for real on a few proteins, from elsewhere; the second run finds all done and ends on the same table."""
    (tmp_path / "my.fasta").symlink_to(checkout / "my_proteins.fasta")
    command = f"{checkout}/quickstart.sh --fasta my.fasta --steps 2 --output out"
    first = sh(command, tmp_path)
    assert first.returncode == 0, first.stderr[-2000:]
    for expected in ("before training", "unigram predictor", "after training", "tokens/s", "final_model", "Next:"):
        assert expected in first.stdout, first.stdout[-2000:]
    chosen = (tmp_path / "out" / "run.json").stat()
    again = sh(command, tmp_path)
    assert again.returncode == 0, again.stderr[-2000:]
    table = first.stdout[first.stdout.index("held-out proteins") : first.stdout.index("speed")]
    assert table in again.stdout
    assert "Resuming after step 2" in again.stderr
    assert (tmp_path / "out" / "run.json").stat().st_mtime_ns == chosen.st_mtime_ns, "chosen anew"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--fasta /no/such/file", "no such file"),
        ("--steps many", "a number of steps"),
        ("--steps", "needs a value"),
        ("--frobnicate", "unknown argument"),
    ],
)
def test_quickstart_refuses_bad_arguments_in_one_line(arguments, message):
    done = sh(f"./quickstart.sh {arguments}", ROOT)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
