"""Generated proteins as FASTA: complete in a file, or printed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.files.safe_files import replace_flushed
from extras.after.downstream.outputs import locked_file, writing

logger = logging.getLogger(__name__)
LINE = 80
STANDARD = "ACDEFGHIKLMNPQRSTVWY"  # the residues that may be drawn


class Generated(NamedTuple):
    """A protein. log_p: float64 [residues that were drawn], nats; remark: for the end of its header."""

    name: str
    residues: str
    log_p: np.ndarray
    remark: str = ""

    def record(self) -> str:
        mean = f"{self.log_p.mean():.4f}" if len(self.log_p) else "nan"
        words = [f">{self.name}", f"length={len(self.residues)}", f"generated={len(self.log_p)}", f"log_p={mean}"]
        lines = [self.residues[n : n + LINE] for n in range(0, len(self.residues), LINE)]
        return "\n".join([" ".join([*words, *([self.remark] if self.remark else [])]), *lines, ""])


@contextmanager
def locked_output(output: str | None) -> Iterator[None]:
    """Locks the file that is to be written, before the work begins."""
    with ExitStack() as stack:
        if output is not None:
            stack.enter_context(locked_file(Path(output), "--output"))
        yield


def write(proteins: Iterable[Generated], output: str | None) -> None:
    """Write the file once all proteins are there, or print them."""
    made = list(proteins)
    text = "".join(protein.record() for protein in made)
    if output is None:
        sys.stdout.write(text)
    else:
        path = Path(output)
        with writing(path, "--output"), replace_flushed(path) as partial:
            partial.write_text(text)
    drawn = [protein.log_p.mean() for protein in made if len(protein.log_p)]
    logger.info(
        "%s%s proteins, mean log-probability %.3f nats a residue",
        "" if output is None else f"Written: {output}: ",
        f"{len(made):,}",
        np.mean(drawn) if drawn else float("nan"),
    )
