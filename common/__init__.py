"""The core: what every training run executes. It imports no script and, at module level, no extra.

Import this package before torch, as the scripts do: the settings below have to be made first.
"""

import os
import sys
import time

from common.distributed.stopping import stop_with_launcher

# GNU OpenMP's threads spin while they wait for each other, by default for billions of iterations. With another program
# on one of two cores, steps of the 8M model (4,096 tokens, bf16) then ran at 317 tokens/s in one of three tries, at
# 1,861 and 2,598 in the others; with a million iterations at 1,869 to 2,404, with ten thousand at 1,232 to 1,651.
os.environ.setdefault("GOMP_SPINCOUNT", "1000000")

# After a rank has died, torch's store warns with a C++ stack for every failed message, which buries the one line that
# matters (common/distributed/watchdog.py). Its errors are still printed.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Before torch is imported, which takes seconds: a rank whose launcher died in that time would be orphaned for good.
stop_with_launcher()


def announce_torch_import(script: str) -> None:
    """Importing torch takes seconds, in which an empty terminal looks as if nothing happened."""
    script = os.path.basename(script)
    asks_for_help = not {"-h", "--help", "--help_all"}.isdisjoint(sys.argv)
    if script.startswith("train_") and os.environ.get("RANK", "0") == "0" and not asks_for_help:
        now = time.strftime("%H:%M:%S" if sys.stderr.isatty() else "%m/%d/%Y %H:%M:%S - INFO -")
        sys.stderr.write(f"{now} {script}: loading PyTorch\n")


announce_torch_import(sys.argv[0] if sys.argv else "")


def _short_ctrl_c(kind: type[BaseException], error: BaseException, trace) -> None:
    """One word instead of a traceback on Ctrl-C during imports. The exit status stays Python's."""
    if not issubclass(kind, KeyboardInterrupt) or os.environ.get("TRACEBACK"):
        sys.__excepthook__(kind, error, trace)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write("interrupted\n")


sys.excepthook = _short_ctrl_c
