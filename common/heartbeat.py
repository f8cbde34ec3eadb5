"""A sign of life, for what takes long and cannot say how far it is: a compiler, another program."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def log_every(what: str, every: float = 20.0) -> Iterator[None]:
    """Log "`what`: 20 s so far", every so many seconds until the block ends, however it ends."""
    over, started = threading.Event(), time.monotonic()

    def say() -> None:
        while not over.wait(every):
            logger.info("%s: %.0f s so far", what, time.monotonic() - started)

    thread = threading.Thread(target=say, name="log_every", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
