"""Progress lines for work that takes long without reporting its own: a compiler, another program."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def log_every(what: str, every: float = 20.0) -> Iterator[None]:
    """Log "`what`: 20 s so far" every `every` seconds until the block ends."""
    done, started = threading.Event(), time.monotonic()

    def log() -> None:
        while not done.wait(every):
            logger.info("%s: %.0f s so far", what, time.monotonic() - started)

    thread = threading.Thread(target=log, name="log_every", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
