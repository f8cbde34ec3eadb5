"""torchrun for batch systems: reports the ranks' exit status and error line, and limits restarts.

python -m extras.launch --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d ... train_ddp.py ...  (flags as torchrun's)

- A stop signal is forwarded to the ranks, and their exit status becomes the launcher's. torchrun itself treats SIGTERM
  as a failure and exits with 1, so that a run that has saved (75: requeue it) looks like a crash. With cgroups Slurm
  signals only the process that it started, which is torchrun.
- Bad input (2) ends the job: --max_restarts is for failures that are not the user's.
- So does the third start in a row without a new checkpoint (extras.launch.restarts), with the reason and
  status 2.
- The ranks' error line is printed last, without torchrun's report around it.
- A node that is started again can join the others (torch 2.13: unless their agents share the ranks' store).
- In a pod every other failure becomes TRY_AGAIN: the training operator's restartPolicy ExitCode retries above 127.
- Ranks are forked off a process with their imports done (extras.launch.forked_ranks), and keep their last states in
  memory of the launcher (extras.launch.memory): a restart takes neither the imports nor the steps since a checkpoint.
- A run on one node listens on loopback only, whatever --rdzv_endpoint is. The agents of several nodes share JSON
  (extras.launch.rendezvous), so torchrun itself cannot be one of them.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from common import announce_torch_import
from common.cli import BAD_INPUT, LAUNCHER_SPEAKS, UserError, one_line, user_errors
from common.compat import run_exit_functions
from common.distributed.stopping import PREEMPTED, SIGNALS

TRY_AGAIN = 128 + signal.SIGTERM

begun = time.time()
received: list[int] = []  # stop signals
agents: list[type] = []  # torchrun's, once it may start ranks
helpers: list[int] = []  # children that are no ranks: the process that ranks are forked off, and Python's own


def main() -> None:
    for number in SIGNALS:
        signal.signal(number, _forward_signal)
    try:
        with user_errors():
            status = _torchrun(sys.argv[1:])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    sys.exit(_final_status(status))


def _torchrun(arguments: list[str]) -> int:
    # After the signal handlers: importing torch takes seconds, here and where ranks are forked off.
    from extras.launch import forked_ranks

    early, prepared = forked_ranks.can_be_prepared(arguments), None
    if early:
        announce_torch_import(early)
        prepared = prepare_ranks(early, is_module=False)
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousStateError
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.launcher import api

    from extras.launch import rendezvous
    from extras.launch.memory import LauncherMemory
    from extras.launch.restarts import Agent, Stopped, output_dir_of, set_job_uid

    set_job_uid()
    Agent.signals, Agent.output_dir, Agent.begun = received, output_dir_of(arguments), begun
    os.environ[LAUNCHER_SPEAKS] = str(os.getpid())
    # Ranks that exit on a signal have not failed: drop torchrun's report of it.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(lambda _: not received)
    api.LocalElasticAgent = Agent
    try:
        # torchrun installs handlers for the signals named here: leave the stop signals to ours.
        parsed = run.parse_args(["--signals_to_handle=SIGHUP,SIGQUIT", "--start-method=forkserver", *arguments])
        try:
            least_nodes, most_nodes = run.parse_min_max_nnodes(parsed.nnodes)
            ranks = run.determine_local_world_size(parsed.nproc_per_node)
            rendezvous.use_json_backend(parsed, most_nodes)
            parse_rendezvous_endpoint(parsed.rdzv_endpoint, default_port=0)
            assert 0 < least_nodes <= most_nodes
            assert ranks > 0
        except (ValueError, AssertionError) as error:
            reason = one_line(error) if str(error) else "a number of nodes or ranks is not possible"
            raise UserError(f"a flag before the script's name: {reason}: see torchrun --help") from error
        if not (parsed.module or parsed.no_python or Path(parsed.training_script).exists()):
            raise UserError(f"{parsed.training_script}: no such script here ({os.getcwd()})")
        if most_nodes > 1:
            # torch 2.13: an agent that shares the ranks' store does not announce its address to one that joins later.
            os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        if ranks > 1:
            forked_ranks.limit_threads()
        if Path(parsed.training_script).name.startswith("train_") and hasattr(os, "memfd_create"):  # Linux
            Agent.memory = LauncherMemory(ranks)
        if parsed.start_method == "forkserver" and not parsed.no_python:
            if prepared is None:
                prepared = prepare_ranks(parsed.training_script, parsed.module)
            if prepared:
                forked_ranks.use()
        agents.append(Agent)
        run.run(parsed)
    except ChildFailedError as error:  # torchrun or the agent has printed which rank failed
        return _shell_status(error.get_first_failure()[1].exitcode)
    except Stopped as stop:
        return _shell_status(stop.failure.exitcode)
    except RendezvousStateError as error:
        sys.stderr.write(f"error: {one_line(error)}\n")
        return 1
    except (RendezvousError, DistError) as error:  # DistError: an agent that is waited for has died meanwhile
        sys.stderr.write(f"error: the other nodes are gone, or the job is over: {one_line(error)}\n")
        return 1
    return 0


def prepare_ranks(script: str, is_module: bool) -> bool:
    from extras.launch import forked_ranks

    prepared = forked_ranks.prepare(script, is_module)
    helpers.extend(_children())
    return prepared


def _forward_signal(number: int, frame) -> None:
    received.append(number)
    children = _children() if agents else []  # none is a rank before
    ranks = [rank for child in children for rank in (_children(child) if child in helpers else [child])]
    if not ranks:
        # Before the first rank starts or after the last one ends: the next start resumes.
        with suppress(Exception):
            run_exit_functions()  # multiprocessing's directory
        os._exit(128 + number if number == signal.SIGINT else _final_status(PREEMPTED))
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _children(process: int | str = "self") -> list[int]:
    children: list[int] = []
    with suppress(OSError):  # a process or thread that has ended since: a signal handler must not raise
        for task in Path(f"/proc/{process}/task").iterdir():
            with suppress(OSError):
                children += map(int, (task / "children").read_text().split())
    return children


def _shell_status(exitcode: int) -> int:
    """A rank's exit code (negative: the signal that killed it) as a shell reports it."""
    if -exitcode in received:  # stopped while it imported torch: nothing to save
        return PREEMPTED
    return exitcode if exitcode >= 0 else 128 - exitcode


def _final_status(status: int) -> int:
    return TRY_AGAIN if "KUBERNETES_SERVICE_HOST" in os.environ and status not in (0, BAD_INPUT) else status


if __name__ == "__main__":
    main()
