"""What the tests of downloads share: a file to fetch, and a short retry policy."""

import gzip
import hashlib

from extras.prepare.download import Expected, RetryPolicy

QUICK = RetryPolicy(timeout_s=5.0, attempts=3, first_wait_s=0.01, longest_wait_s=0.05)
CONTENT = gzip.compress("".join(f">P{i} x\nMKVLAGTYRR\n" for i in range(50_000)).encode(), mtime=0)
THIRD = len(CONTENT) * 3 // 10


def sums(content: bytes, **extra) -> Expected:
    return Expected({name: hashlib.new(name, content).hexdigest() for name in ("md5", "sha256")}, **extra)
