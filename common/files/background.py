"""Work ahead in a thread: while one item is used, the next ones are made (unpacking, sorting, disk reads)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


def ahead(items: Iterable[Item], depth: int = 2) -> Iterator[Item]:
    """The same items, up to `depth` of them made before they are asked for; errors come where they came from.

    Pays where the work leaves Python's lock: decompression, numpy and Arrow on large arrays, files.
    """
    items = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        coming = deque(pool.submit(next, items, _END) for _ in range(depth))
        try:
            while (item := coming.popleft().result()) is not _END:
                coming.append(pool.submit(next, items, _END))
                yield item
        finally:
            pool.shutdown(cancel_futures=True)
            if hasattr(items, "close"):
                items.close()
