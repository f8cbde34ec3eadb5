"""What the scripts share. Scripts import from here; nothing here knows a script.

Importing this package comes before importing torch (the train scripts see to it), because of the settings below.
"""

import os
import sys
import time

from common.distributed.stopping import stop_with_launcher

# GNU OpenMP's threads wait for each other by spinning, by default for billions of turns. When another program takes
# one of two cores, steps of the 8M model (4,096 tokens, bf16) ran at 317 tokens/s in one of three tries so, at 1,861
# and 2,598 in the others; with a million turns at 1,869 to 2,404, with ten thousand at 1,232 to 1,651.
os.environ.setdefault("GOMP_SPINCOUNT", "1000000")

# Where a rank has died, torch's store prints C++ stacks for every message to it that fails: warnings that bury the one
# line that matters (extras/monitor/watchdog.py). Its errors are still printed.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Here, for the seconds of importing torch would be a time in which a rank is left behind for good.
stop_with_launcher()


def _say_what_takes_seconds() -> None:
    """Of a train script, before torch is imported: a terminal that stays empty looks as if nothing happened."""
    script = os.path.basename(sys.argv[0]) if sys.argv else ""
    asks_for_help = not {"-h", "--help", "--help_all"}.isdisjoint(sys.argv)
    if script.startswith("train_") and os.environ.get("RANK", "0") == "0" and not asks_for_help:
        sys.stderr.write(f"{time.strftime('%m/%d/%Y %H:%M:%S')} - INFO - {script}: loading PyTorch\n")


_say_what_takes_seconds()


def _one_word_for_ctrl_c(kind: type[BaseException], error: BaseException, trace) -> None:
    """In place of the traceback of whatever was being imported just then. The exit status stays Python's own."""
    if not issubclass(kind, KeyboardInterrupt) or os.environ.get("TRACEBACK"):
        sys.__excepthook__(kind, error, trace)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write("interrupted\n")


sys.excepthook = _one_word_for_ctrl_c
