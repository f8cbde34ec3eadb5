"""What the data-preparation tests share: the scripts as modules, command lines, FASTA files, the real sample."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import datasets
import numpy as np
import pytest

from tests.forked import run_script

ROOT = Path(__file__).resolve().parent.parent
REAL_SAMPLE = ROOT.parent / "shared/data/uniref90_sample_8k.fasta.gz"
needs_real_sample = pytest.mark.skipif(not REAL_SAMPLE.exists(), reason=f"no {REAL_SAMPLE}")
LOG_LINE = re.compile(r"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d - (INFO|WARNING) - .*")


def load_script(name: str):
    """Import `0.download_data.py` and the like, whose names are no module names."""
    spec = importlib.util.spec_from_file_location(name.replace(".", "_"), ROOT / name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


DOWNLOAD, TOKENIZE = load_script("0.download_data.py"), load_script("1.tokenize_uniref_csv.py")


def call(script, *argv) -> None:
    """Run a script's main in this process; UserErrors come through."""
    before, sys.argv = sys.argv, [script.__name__, *map(str, argv), *_quick(script.__name__, argv)]
    try:
        script.main()
    finally:
        sys.argv = before


def command(name: str, *argv) -> list[str]:
    return [sys.executable, str(ROOT / name), *map(str, argv), *_quick(name, argv)]


def _quick(script: str, argv: tuple) -> tuple[str, ...]:
    """Without the search of relatives, two seconds of MMseqs2, but in the tests of that."""
    searches = any(name in script for name in ("uniref", "probe", "finetune"))
    return ("--count_relatives", "False") if searches and "--count_relatives" not in argv else ()


def environment() -> dict:
    return os.environ | {"HF_HUB_OFFLINE": "1"}


def expect_error(name: str, *argv) -> str:
    """Run a script as a user does, forked; returns its one line of error. Whatever else it says are log lines."""
    done = run_script(name, *argv, env=environment())
    lines = [
        line for line in done.stderr.replace("\r", "\n").splitlines() if line.strip() and " records/s" not in line
    ]
    assert done.returncode == 2, done.stderr
    assert lines[-1].startswith("error: ")
    assert all(LOG_LINE.fullmatch(line) for line in lines[:-1]), done.stderr
    return lines[-1]


def write_fasta(path: Path, records: Iterable[tuple[str, str]]) -> Path:
    path.write_text("".join(f">{name} description of {name}\n{sequence}\n" for name, sequence in records))
    return path


def numbered(count: int) -> list[tuple[str, str]]:
    """Records of rising length, as in a sorted input: P0, P1, ... of 1, 2, ... residues at most 500 long."""
    return [(f"P{i}", "ACDEFGHIKLMNPQRSTVWY"[i % 20] * (1 + i * 500 // count)) for i in range(count)]


def edit_unnoticed(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes of a file by as many others; size and time of change stay."""
    times, data = path.stat(), path.read_bytes()
    assert old in data
    assert len(old) == len(new)
    path.write_bytes(data.replace(old, new))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def everything_in(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def write_csv(directory: Path, rows: Iterable[tuple[str, str]], name: str = "x000.csv") -> Path:
    directory.mkdir(exist_ok=True)
    with open(directory / name, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "text"])
        writer.writerows(rows)
    return directory


def proteins(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Random ones of 6 to 79 residues, all different."""
    generator = np.random.default_rng(seed)
    letters = np.frombuffer(b"LAGVSERTIDPKQNFYMHWCX", np.uint8)
    return [
        (f"P{i}", letters[generator.integers(21, size=generator.integers(6, 80))].tobytes().decode())
        for i in range(count)
    ]


def different(number: int) -> str:
    """Four residues, others for each number below 160,000."""
    return "".join("ACDEFGHIKLMNPQRSTVWY"[number // 20**place % 20] for place in range(4))


def load(out) -> dict[str, list[tuple[str, list[int]]]]:
    """{split: [(id, input_ids), ...]} through `datasets`."""
    loaded = datasets.load_from_disk(str(out / "arrow"))
    return {split: list(zip(rows["id"], rows["input_ids"], strict=True)) for split, rows in loaded.items()}
