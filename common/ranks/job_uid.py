"""What tells a job from every other one, of its own name too: Slurm's number, or the UID of a Kubernetes job."""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
from http.client import HTTPException
from pathlib import Path
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from common.cli import one_line

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
