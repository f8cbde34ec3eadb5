"""What the README's commands for a laptop take, typed one after the other in a fresh clone: time, memory, disk, loss.

python -m benchmarks.first_hour --fasta my_proteins.fasta.gz [--output table.md]

The commands are read from README.md and docs/after.md, and run as they stand there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.measuring import ROOT, publish, where_measured

PROTEINS = "my_proteins.fasta"  # the name that the README gives them


class Taken(NamedTuple):
    """seconds; megabytes of the largest process, and of what it left on disk."""

    seconds: float
    memory: float
    disk: float


def commands() -> list[str]:
    """The README's for a laptop, and docs/after.md's for embeddings, each on one line."""
    blocks = [
        re.search(r"## On a laptop.*?```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1],
        re.search(r"## Embeddings.*?```bash\n(.*?)```", (ROOT / "docs" / "after.md").read_text(), re.S)[1],
    ]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return ["./quickstart.sh", *(re.sub(r"\s+", " ", re.sub(r"\s+# .*", "", line)).strip() for line in lines)]


def take(command: str, directory: Path) -> Taken:
    """Run it there, in a shell in which the environment is active. RuntimeError with what it said, where it fails."""
    before, started = size_of(directory), time.monotonic()
    # The shell is its commands' parent: what it waited for counts.
    script = f"[ ! -f .venv/bin/activate ] || . .venv/bin/activate; {command}\ntrue"
    with open(directory / "said", "wb") as said:
        process = subprocess.Popen(["bash", "-euc", script], cwd=directory, stdout=said, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command}\n{(directory / 'said').read_text()[-2000:]}")
    return Taken(time.monotonic() - started, used.ru_maxrss / 1024, size_of(directory) - before)


def size_of(directory: Path) -> float:
    """Megabytes of the files below."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*") if not path.is_dir()) / 1e6


def losses(output: Path) -> str:
    """Of a run: its held-out loss, beside the unigram predictor's."""
    results = json.loads((output / "eval_results.json").read_text())
    return f"{results['eval_loss_masked']:.2f} (unigram {results['eval_unigram_loss_masked']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fasta", type=Path, required=True)
    parser.add_argument("--output")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        clone = Path(work) / "esm"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        unpacked = gzip.open if args.fasta.suffix == ".gz" else open
        with unpacked(args.fasta, "rb") as packed, open(clone / PROTEINS, "wb") as plain:
            shutil.copyfileobj(packed, plain)
        count = (clone / PROTEINS).read_bytes().count(b">")
        for command in commands():
            taken = take(command, clone)
            if command == "./quickstart.sh":
                loss = losses(clone / "quickstart" / "sample" / "model")
            else:
                loss = losses(clone / "out") if command.startswith("python train_ddp.py") else ""
            used = f"{taken.seconds:,.0f} s | {taken.memory:,.0f} MB | {round(taken.disk):,} MB"
            rows.append(f"| `{command}` | {used} | {loss} |")
            print(rows[-1], flush=True)
    text = [
        "# What the README's commands take",
        "",
        *"\n\n".join(where_measured("benchmarks.first_hour", "torch")).splitlines(),
        "",
    ]
    text += [
        f"A fresh clone, {count:,} proteins in `{PROTEINS}`; packages come from a mirror nearby. Memory is that of"
    ]
    text += ["the largest process; loss in nats, of the hidden residues of held-out proteins.", ""]
    text += ["| command | time | memory | disk | held-out loss at the end |", "|---|--:|--:|--:|---|", *rows]
    publish("\n".join(text), args.output)


if __name__ == "__main__":
    main()
