"""Console commands of the installed package: each runs the script of its name.

`esm2-train-ddp --bf16 ...` is `python train_ddp.py --bf16 ...`, from any folder; with several processes
`torchrun --nproc_per_node=8 --no-python esm2-train-ddp --bf16 ...`. pyproject.toml lists the commands.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

INSTALLED = Path(__file__).parent / "scripts"  # of a wheel (setup.py); in a checkout they lie in its root
SCRIPTS = INSTALLED if INSTALLED.is_dir() else Path(__file__).parents[1]


def command_of(script: str) -> str:
    """`0.download_data.py` -> `esm2-download-data`."""
    return "esm2-" + re.sub(r"^\d\.|\.py$", "", script).replace("_", "-")


def main() -> None:
    command = Path(sys.argv[0]).name
    (script,) = (path for path in SCRIPTS.glob("*.py") if command_of(path.name) == command)
    runpy.run_path(str(script), run_name="__main__")
