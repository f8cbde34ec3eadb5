"""Python's garbage collector at the same steps on every rank, and at no other time.

By itself it runs when enough objects were made, on each rank in another step: for tens of milliseconds that rank
launches nothing, and all others wait for it in the next exchange.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COLLECT_EVERY = 50  # steps


@contextmanager
def collected_by_step(every: int = COLLECT_EVERY) -> Iterator[Callable[[int], None]]:
    """Gives what is to be called after each step, with its number; every so many it collects.

    What is there at the beginning (modules, the model) is not looked at again until the end.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lambda step: gc.collect() if step % every == 0 else None
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
