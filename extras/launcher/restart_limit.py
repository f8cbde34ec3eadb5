"""The restart limit: a job that starts three times in a row without a new checkpoint is not started again.

slurm/common.sh, torchrun's restarts and Kubernetes start a failed run again, without this for ever. The count is kept
beside the checkpoints (`.starts`), because each start may be on another machine; a new job counts from zero.
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

VARIABLE = "JOB_UID"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of the pod's service account, if it has one


def set_job_uid(account: Path = ACCOUNT) -> None:
    """Set JOB_UID, for the ranks too, to the owner of this pod as the Kubernetes API has it.

    Unless it is set already (trainjob-template.yaml) or the pod has no account. Without an answer jobs are told apart
    by rendezvous id, flags and time.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if os.environ.get(VARIABLE) or not host or not (account / "token").exists():
        return
    try:
        namespace, token = ((account / name).read_text().strip() for name in ("namespace", "token"))
        host = f"[{host}]" if ":" in host else host
        url = f"https://{host}:{port}/api/v1/namespaces/{namespace}/pods/{socket.gethostname()}"
        context = ssl.create_default_context(cafile=account / "ca.crt")
        # Not through a proxy that the pod's variables name for other hosts.
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
        with opener.open(Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=20) as answer:
            owners = json.load(answer)["metadata"]["ownerReferences"]
        os.environ[VARIABLE] = next(owner["uid"] for owner in owners if owner.get("controller"))
    except (OSError, HTTPException, ValueError, KeyError, TypeError, StopIteration) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        sys.stderr.write(f"warning: the API does not say this pod's job (kubernetes/job-uid.yaml): {reason}\n")


def unique_id() -> str | None:
    """Slurm's job number or a Kubernetes job's UID, unlike the job's name unique; None if there is neither."""
    return os.environ.get("SLURM_JOB_ID") or os.environ.get(VARIABLE)


MAX_STARTS = 3
FILE = ".starts"
PRIVATE = 0o600
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def private(path: str, flags: int) -> int:
    """An `opener` for `open`: only the owner can read or write the file, also one that was open to others before."""
    descriptor = os.open(path, flags, PRIVATE)
    with suppress(OSError):  # another user's file, or a file system without modes
        os.fchmod(descriptor, PRIVATE)
    return descriptor


class RestartCounter:
    """Starts of `job` in a row that made no new checkpoint in `output_dir`; used by the launcher of rank 0.

    If the count cannot be written (no directory, no space) nothing is counted: the run itself reports the reason.
    """

    def __init__(self, output_dir: Path, job: str):
        self.output_dir, self.job = output_dir, job
        self._created = [path for path in (output_dir, *output_dir.parents) if not path.exists()]

    def increment(self) -> None:
        """Count a start. UserError if the limit is reached."""
        if self.exhausted():
            message = self.message()
            self.clear()  # submitted again, even under the same name, the job counts from zero
            raise UserError(message)
        self._write(self._read() + 1)

    def exhausted(self) -> bool:
        return self._read() >= MAX_STARTS

    def decrement(self) -> None:
        """Do not count the last start: a signal stopped it."""
        self._write(max(0, self._read() - 1))

    def clear(self) -> None:
        """The job is over: remove the count, and directories made for it that are empty."""
        with suppress(OSError):
            (self.output_dir / FILE).unlink(missing_ok=True)
            for path in self._created:  # upwards
                path.rmdir()

    def message(self) -> str:
        newest = self._newest_checkpoint()
        stands = "there is none" if newest is None else f"the newest is still checkpoint-{newest}"
        return (
            f"{self.output_dir}: not started again: {MAX_STARTS} starts of this job in a row made no new checkpoint "
            f"({stands}): fix what ended them, or save more often (--save_steps), then submit it anew"
        )

    def _read(self) -> int:
        with suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads((self.output_dir / FILE).read_text())
            if (saved["job"], saved["newest"]) == (self.job, self._newest_checkpoint()):
                return int(saved["starts"])
        return 0

    def _write(self, starts: int) -> None:
        with suppress(OSError):
            self.output_dir.mkdir(parents=True, exist_ok=True)
            content = json.dumps({"job": self.job, "newest": self._newest_checkpoint(), "starts": starts})
            with open(self.output_dir / FILE, "w", opener=private) as file:
                file.write(content)

    def _newest_checkpoint(self) -> int | None:
        """Its step; a checkpoint gets its name when it is complete."""
        try:
            found = [_CHECKPOINT.fullmatch(path.name) for path in self.output_dir.iterdir()]
        except OSError:
            return None
        return max((int(match[1]) for match in found if match), default=None)
