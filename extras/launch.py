"""torchrun for batch systems: it passes on what its ranks say, and knows when to start them again.

python -m extras.launch --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d ... train_ddp.py ...  (as for torchrun)

- A signal to stop reaches the ranks, and their exit status becomes its own. torchrun itself takes SIGTERM as a failure
  and ends with 1, whatever the ranks say, so that who started it cannot tell a run that has saved (75: start it again)
  from one that has crashed. And with cgroups Slurm signals only the process that it started, which is torchrun.
- Bad input (2) ends the job: --max_restarts are for ends that are not the user's fault.
- What ranks have to say of it is one line, printed here, after all else and without torchrun's report around it.
- So does the third start in a row without a new checkpoint (extras.launcher.restart_limit), with the reason and
status 2.
- In a pod every other end is told as TRY_AGAIN: the training operator's restartPolicy ExitCode tries again above 127.
- A run on one node listens on loopback only, whatever --rdzv_endpoint says. Of several nodes the agents exchange JSON
  (extras.launcher.rendezvous), so that torchrun itself cannot be one of them.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from common.cli import BAD_INPUT, LAUNCHER_SPEAKS, one_line, user_errors
from common.distributed.stopping import PREEMPTED, SIGNALS

TRY_AGAIN = 128 + signal.SIGTERM

told: list[int] = []  # the signals that have come


def main() -> None:
    for number in SIGNALS:
        signal.signal(number, _pass_on)
    try:
        with user_errors():
            status = _torchrun(sys.argv[1:])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    sys.exit(_for_the_starter(status))


def _torchrun(arguments: list[str]) -> int:
    # After the handlers: importing torch takes seconds.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousStateError
    from torch.distributed.launcher import api

    from extras.launcher import rendezvous
    from extras.launcher.agent import Agent, Stopped
    from extras.launcher.restart_limit import set_job_uid

    set_job_uid()
    Agent.told, Agent.output_dir = told, _output_dir(arguments)
    os.environ[LAUNCHER_SPEAKS] = "1"
    # Ranks that end because they were told to are no failure: what they said of it is the last word.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(lambda _: not told)
    api.LocalElasticAgent = Agent
    try:
        # torchrun sets its own handlers for the signals named here: no longer for those of a stop.
        parsed = run.parse_args(["--signals_to_handle=SIGHUP,SIGQUIT", *arguments])
        rendezvous.choose(parsed, run.parse_min_max_nnodes(parsed.nnodes)[1])
        if run.determine_local_world_size(parsed.nproc_per_node) > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun does, with five lines of warning
        run.run(parsed)
    except ChildFailedError as error:  # torchrun or the agent has printed which rank it was
        return _status(error.get_first_failure()[1].exitcode)
    except Stopped as stop:
        return _status(stop.failure.exitcode)
    except RendezvousStateError as error:
        sys.stderr.write(f"error: {one_line(error)}\n")
        return 1
    except RendezvousError as error:
        sys.stderr.write(f"error: the other nodes are gone, or the job is over: {one_line(error)}\n")
        return 1
    return 0


def _output_dir(arguments: list[str]) -> Path | None:
    """What a train script will take for its --output_dir; None for what makes no checkpoints to count starts by."""
    if not {"-m", "--module"}.isdisjoint(arguments) or "embed.py" in (Path(word).name for word in arguments):
        return None
    given = None
    for word, after in zip(arguments, [*arguments[1:], None], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("-", "_") in ("__output_dir", "__checkpoint_dir"):
            given = value if equals else after
    return Path(given) if given else None


def _pass_on(number: int, frame) -> None:
    told.append(number)
    ranks = _children()
    if not ranks:
        # Nothing has begun yet, or all is over: the next start knows.
        os._exit(128 + number if number == signal.SIGINT else _for_the_starter(PREEMPTED))
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


def _for_the_starter(status: int) -> int:
    return TRY_AGAIN if "KUBERNETES_SERVICE_HOST" in os.environ and status not in (0, BAD_INPUT) else status


if __name__ == "__main__":
    main()
