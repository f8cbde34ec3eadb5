"""The flag of the benchmarks that read proteins as step 1 leaves them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.flags import Flags, Missing, flag


@dataclass
class PreparedFlags(Flags):
    dataset_dir: str | None = flag(None, "processed/arrow, as 1.tokenize_uniref_csv.py writes it.")

    def missing(self) -> Iterator[Missing]:
        if not self.dataset_dir:
            yield Missing("--dataset_dir", "what 1.tokenize_uniref_csv.py wrote", "processed/arrow")
