"""torchrun for batch systems: a signal to stop is passed on to the ranks, and their exit status becomes its own.

python -m common.ranks.launch --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d ... train_ddp.py ...  (as for torchrun)

torchrun itself takes SIGTERM as a failure and exits with 1, whatever the ranks say, so that who started it cannot
tell a run that has saved (75: start it again) from one that has crashed. And with cgroups Slurm signals only the
process that it started, which is torchrun.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from common.ranks.stopping import PREEMPTED, SIGNALS

told: list[int] = []  # the signals that have come


def main() -> None:
    for number in SIGNALS:
        signal.signal(number, _pass_on)
    # After the handlers: importing torch takes seconds.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun sets its own handlers for the signals named here: no longer for those of a stop.
    arguments = ["--signals_to_handle=SIGINT,SIGHUP,SIGQUIT", *sys.argv[1:]]
    try:
        run.main(arguments)
    except ChildFailedError as error:  # torchrun has printed which rank it was
        sys.exit(_status(error.get_first_failure()[1].exitcode))


def _pass_on(number: int, frame) -> None:
    told.append(number)
    ranks = _children()
    if not ranks:
        os._exit(PREEMPTED)  # nothing has begun yet, or all is over: the next start knows
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def _status(exitcode: int) -> int:
    """A rank's exit code (negative: the signal it died of) as a shell has it."""
    if -exitcode in told:  # while it imported torch: nothing to save
        return PREEMPTED
    return exitcode if exitcode >= 0 else 128 - exitcode


if __name__ == "__main__":
    main()
