"""Progress of work that has phases: one bar after the other, none of them left open when an error is printed."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


class Bars:
    """A bar on a terminal; in a log file, a line now and then. Log lines go above the bar."""

    def __enter__(self) -> Bars:
        self._bar = None
        self._redirect = logging_redirect_tqdm()
        self._redirect.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._end()
        self._redirect.__exit__(*error)

    def bytes(self, what: str, total: int) -> None:
        """Begin a phase that is measured in bytes; `read` tells how far it is."""
        self._begin(what, total=total, unit="B", unit_scale=True, postfix="0 records/s")

    def read(self, position: int, records: int) -> None:
        """So many bytes of the total, and the records in them."""
        rate = records / (time.monotonic() - self._began)
        self._bar.set_postfix_str(f"{records:,} records, {rate:,.0f} records/s", refresh=False)
        self._bar.update(position - self._bar.n)

    def records(self, what: str, total: int, done: int = 0) -> None:
        """Begin a phase that is measured in records; `done` is where it begins."""
        self._begin(what, total=total, initial=done, unit=" records")

    def add(self, records: int) -> None:
        """So many more records."""
        self._bar.update(records)

    def _begin(self, what: str, **options) -> None:
        self._end()
        self._began = time.monotonic()
        self._bar = tqdm(desc=what, mininterval=0.5 if sys.stderr.isatty() else 10.0, **options)

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
