"""Commands of documents, typed as they stand but smaller: fewer steps, smaller models, two ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from extras.prepare.sample import make_proteins
from tests.conftest import ROOT
from tests.data_fixtures import write_fasta
from tests.decoder_fixtures import write_text
from tests.patience import run
from tests.warm_python import programs

TINY = "--config_overrides hidden_size=64,intermediate_size=128,num_attention_heads=4"
TWO_LAYERS = f"{TINY},num_hidden_layers=2"  # where no flag says what layer 6 does
SMALLER = (
    (r"^\./install\.sh && \. \.venv/bin/activate$", ":"),
    (r"--max_steps \d+", "--max_steps 2"),
    (r"--num_train_epochs \d+", "--num_train_epochs 0.01"),
    (r"--nnodes=\S+ --nproc_per_node=8", "--standalone --nproc_per_node=2"),
    (r"--rdzv_\w+=\S+|--max_restarts=\d+", ""),
    (r"--nproc_per_node=8", "--standalone --nproc_per_node=2"),
    (r"--world_size \d+", "--world_size 2"),
    (r"facebook/esm2_t\d+_(35M|150M|650M|3B|15B)_UR50D", f"facebook/esm2_t6_8M_UR50D {TWO_LAYERS}"),
    (r"--device_memory 80", "--device_memory 8"),
    (r"--emulate_precision", f"--emulate_precision {TINY}"),
    (r"--tokens_per_pack \d+ --gradient_accumulation_steps \d+", "--tokens_per_pack 1024"),
    (r"--packs_per_step \d+", "--packs_per_step 2"),
    (r"--quant_stats_freq \d+", "--quant_stats_freq 1"),
    (r"--max_seq_length 8192", "--max_seq_length 256"),
    (r"--intermediate_size \d+", "--intermediate_size 256"),
    (r"--max_context_width 512", "--max_context_width 128"),
)


def blocks(text: str, language: str) -> list[str]:
    """Fenced ones of this language; `bash` is what the tests type, `sh` what needs a network, GPUs or a cluster."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for said, block in fenced if said == language]


def contributing(heading: str) -> list[str]:
    """The Python of a section of CONTRIBUTING.md's "How to add"."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (section,) = re.findall(rf"^### {heading}\n.*?(?=^##|\Z)", page, re.DOTALL | re.MULTILINE)
    return blocks(section, "python")


def join_lines(command: str) -> str:
    return command.replace("\\\n", " ")


def smaller(command: str) -> str:
    command = join_lines(command)
    for pattern, replacement in SMALLER:
        command = re.sub(pattern, replacement, command, flags=re.MULTILINE)
    return command


def sh(script: str, cwd: Path, timeout: int = 600) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "PATH": f"{programs()}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return run(["bash", "-euo", "pipefail", "-c", script], timeout, cwd=cwd, env=environment)


ALARMS = re.compile(
    r"(?i)warn|deprecat|(?<!standard )error|exception|traceback|fatal|fail|^\[?[WEF]\d{4}\b|could not|cannot", re.M
)


def alarming(done: subprocess.CompletedProcess) -> list[str]:
    """Lines that would worry somebody whose run is as it should be."""
    return [line for line in (done.stdout + done.stderr).splitlines() if ALARMS.search(line)]


def checkout_in(directory: Path) -> Path:
    """A directory that looks like a checkout, so that the commands' relative paths land in a temporary place; and the
    files that documents take for the user's own."""
    for path in ROOT.iterdir():
        if path.suffix in (".py", ".sh", ".txt") or path.name in ("common", "extras", "configs", "benchmarks"):
            (directory / path.name).symlink_to(path)
    (directory / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        (directory / ".venv" / path.name).symlink_to(programs() if path.name == "bin" else path)
    # Short ones, so that an epoch of them is one small pack.
    proteins = [(header, residues[:50]) for header, residues in make_proteins(60, 10, 4, (0.1, 0.4), seed=1)]
    write_fasta(directory / "my_proteins.fasta", proteins)
    shutil.copy(write_text(directory / "text") / "train.jsonl", directory / "my_texts.jsonl")
    return directory
