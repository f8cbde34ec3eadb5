"""How often a job has started and got nowhere: three times in a row, and it is over.

A run that ends by no fault of its user's is started again, by slurm/common.sh, by torchrun's own restarts or by
Kubernetes: for ever, if nothing counted. What a start has achieved is a newer checkpoint than it found. The count lies
with the checkpoints (`.starts`), for a job may start on other machines each time; a new job counts anew.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import sys
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from common.cli import UserError, one_line

# What tells a job from every other one, of its own name too: Slurm's number, or the UID of a Kubernetes job.

VARIABLE = "JOB_UID"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where every pod finds its account's, if it has one


def set_job_uid(account: Path = ACCOUNT) -> None:
    """Put a Kubernetes job's UID into the environment of the ranks, unless it is there (trainjob-template.yaml) or the
    pod may not ask.

    The API tells of the pod who owns it. Without an answer jobs are told apart by their rendezvous id, flags and time.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if os.environ.get(VARIABLE) or not host or not (account / "token").exists():
        return
    try:
        namespace, token = ((account / name).read_text().strip() for name in ("namespace", "token"))
        host = f"[{host}]" if ":" in host else host
        url = f"https://{host}:{port}/api/v1/namespaces/{namespace}/pods/{socket.gethostname()}"
        context = ssl.create_default_context(cafile=account / "ca.crt")
        # Never through a proxy, which the variables of a pod may name for the rest of the world.
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
        with opener.open(Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=20) as answer:
            owners = json.load(answer)["metadata"]["ownerReferences"]
        os.environ[VARIABLE] = next(owner["uid"] for owner in owners if owner.get("controller"))
    except (OSError, HTTPException, ValueError, KeyError, TypeError, StopIteration) as error:
        told = f"{type(error).__name__}: {one_line(error)}"
        sys.stderr.write(f"warning: the API does not tell this pod's job (kubernetes/job-uid.yaml): {told}\n")


def unique_id() -> str | None:
    """What no two jobs share: Slurm's number, or the UID of a Kubernetes job; None where there is neither."""
    return os.environ.get("SLURM_JOB_ID") or os.environ.get(VARIABLE)


MAX_STARTS = 3
FILE = ".starts"
PRIVATE = 0o600
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def private(path: str, flags: int) -> int:
    """An `opener` for `open`: nobody else reads or writes the file, one that others could until now included."""
    descriptor = os.open(path, flags, PRIVATE)
    with suppress(OSError):  # another user's, or a file system without modes
        os.fchmod(descriptor, PRIVATE)
    return descriptor


class RestartCounter:
    """The starts of `job` (its name in the batch system) that write to `output_dir`. For the launcher of rank 0 alone.

    Where the count cannot be kept (no such directory, no space) nothing is counted: the run itself will say why.
    """

    def __init__(self, output_dir: Path, job: str):
        self.output_dir, self.job = output_dir, job
        self._made = [path for path in (output_dir, *output_dir.parents) if not path.exists()]

    def begin(self) -> None:
        """Count a start. UserError where too many in a row have got nowhere."""
        if self.spent():
            verdict = self.verdict()
            self.end()  # who submits it anew, even under the same name, has been told
            raise UserError(verdict)
        self._write(self._in_a_row() + 1)

    def spent(self) -> bool:
        """Whether another start is one too many."""
        return self._in_a_row() >= MAX_STARTS

    def forget(self) -> None:
        """The last start does not count: it ended because it was told to."""
        self._write(max(0, self._in_a_row() - 1))

    def end(self) -> None:
        """The job is over, one way or the other: nothing is left of the count, nor of a directory made for it."""
        with suppress(OSError):
            (self.output_dir / FILE).unlink(missing_ok=True)
            for path in self._made:  # upwards, as far as they are empty
                path.rmdir()

    def verdict(self) -> str:
        newest = self._newest()
        stands = "there is none" if newest is None else f"the newest is still checkpoint-{newest}"
        return (
            f"{self.output_dir}: not started again: {MAX_STARTS} starts of this job in a row made no new checkpoint "
            f"({stands}): mend what ended them, or save more often (--save_steps), then submit it anew"
        )

    def _in_a_row(self) -> int:
        with suppress(OSError, ValueError, KeyError, TypeError):
            told = json.loads((self.output_dir / FILE).read_text())
            if (told["job"], told["newest"]) == (self.job, self._newest()):
                return int(told["starts"])
        return 0

    def _write(self, starts: int) -> None:
        with suppress(OSError):
            self.output_dir.mkdir(parents=True, exist_ok=True)
            content = json.dumps({"job": self.job, "newest": self._newest(), "starts": starts})
            with open(self.output_dir / FILE, "w", opener=private) as file:
                file.write(content)

    def _newest(self) -> int | None:
        """The step of the newest checkpoint; a checkpoint gets its name when it is complete."""
        try:
            found = [_CHECKPOINT.fullmatch(path.name) for path in self.output_dir.iterdir()]
        except OSError:
            return None
        return max((int(match[1]) for match in found if match), default=None)
