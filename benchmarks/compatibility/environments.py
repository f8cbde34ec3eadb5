"""Virtual environments with pinned versions over the project's own packages: torch is not installed again."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.measuring import say
from common.cli import UserError

NEWEST = "5.24.0"
TRANSFORMERS = {
    "4.57.6": ("tokenizers==0.22.2", "huggingface_hub==0.36.2"),
    "5.0.0": ("tokenizers==0.22.2", "huggingface_hub==1.33.0"),
    "5.17.0": ("tokenizers==0.23.3", "huggingface_hub==1.33.0"),
    NEWEST: ("tokenizers==0.23.3", "huggingface_hub==1.33.0"),
}
_NEWEST = (f"transformers=={NEWEST}", *TRANSFORMERS[NEWEST])
_OLD = ("tokenizers==0.21.4", "huggingface_hub==0.36.2")
ENVIRONMENTS = {
    **{f"transformers-{number}": (f"transformers=={number}", *pins) for number, pins in TRANSFORMERS.items()},
    "peft": (*_NEWEST, "peft==0.21.2", "accelerate==1.15.0"),
    "sentence-transformers": (*_NEWEST, "sentence-transformers==6.2.0"),
    "fair-esm": ("fair-esm==2.0.0",),
    # faesm cannot be imported beside transformers 4.56.2, and can beside this one.
    "faesm": ("faesm==0.1.1", "einops==0.8.2", "transformers==4.53.3", *_OLD),
    "esm-cpp": ("esm-cpp==0.2.1", "numpy==1.26.4"),
    "onnx": ("onnx==1.23.2", "onnxscript==0.7.2", "onnxruntime==1.32.0", "onnxruntime-node==1.30.0"),
}
FROM_NPM = "onnxruntime-node"
DONE = "pins"  # in a finished environment: a hash of what was asked for


def python_of(name: str, directory: Path) -> Path:
    """The interpreter of an environment, which is made if it is not there. UserError if pip fails.

    A .pth file puts the project's packages after its own.
    """
    place, pins = directory / name, ENVIRONMENTS[name]
    python, done = place / "bin" / "python", place / DONE
    asked = hashlib.sha256(" ".join([*pins, sys.version, sys.prefix]).encode()).hexdigest()
    if done.exists() and done.read_text() == asked:
        return python
    say(f"{place}: {', '.join(pins)}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
    own = sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)})
    Path(own, "zz_project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    from_npm = [pin.replace("==", "@") for pin in pins if pin.startswith(FROM_NPM)]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install(place, [*pip, *(pin for pin in pins if not pin.startswith(FROM_NPM))])
    if from_npm:
        install(place, ["npm", "install", "--silent", "--ignore-scripts", f"--prefix={place}", *from_npm])
    done.write_text(asked)
    return python


def install(place: Path, command: list[str | Path]) -> None:
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(f"{place}: {command[0]}: no such program: install Node.js") from None
    if found.returncode:
        last = (found.stderr or found.stdout).strip().splitlines()[-1:]
        raise UserError(f"{place}: {Path(command[0]).name} failed: {''.join(last)[:160]}")


def check_versions(name: str, found: dict[str, str]) -> None:
    """AssertionError unless what ran is what is pinned."""
    for pin in ENVIRONMENTS[name]:
        package, _, wanted = pin.partition("==")
        assert found[package] == wanted, f"{name}: {package} {found[package]} ran, not {wanted}"
