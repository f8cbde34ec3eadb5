"""What the Hub's answers mean, and how long to ask again: for data sets (`hf://` files) and for tokenizers."""

from __future__ import annotations

import logging
import os
import re
import time

from common.cli import UserError, one_line

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
REMOTE = "hf://"
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
ATTEMPTS = 6  # failures in a row, without progress in between, that end the run
FIRST_WAIT_S = 1.0


def offline() -> bool:
    """Whether the Hub is switched off, and a name stands for what is in the local cache."""
    return any(os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE") for variable in OFFLINE_VARIABLES)


def download_command(name: str, kind: str) -> tuple[str, str]:
    """What fetches a repository of some kind (`dataset`, `tokenizer`) by hand, and the flag that then takes it."""
    of_kind = "--repo-type dataset " if kind == "dataset" else ""
    return f"hf download {name} {of_kind}--local-dir DIR", f"--{kind} DIR"


def hub_advice(name: str, error: Exception, kind: str = "dataset") -> str:
    """What the Hub's refusal means and what to do, for the end of an error line. kind: as `download_command`."""
    status = _status(error)
    command, then = download_command(name, kind)
    if status == 429:
        return (
            "the Hub answers 429 (too many requests, usually from many nodes at once): set HF_TOKEN, or better "
            f"{command} once, then {then}"
        )
    if refused(error):
        return f"the Hub refuses access ({status}): accept the {kind}'s terms on its page and set HF_TOKEN"
    return f"the Hub failed ({brief(error)}): try again later, or hf download the {kind} and pass its directory"


def unreachable_advice(name: str, error: Exception, kind: str = "dataset") -> str:
    """The same where nobody answers."""
    command, then = download_command(name, kind)
    return (
        f"the Hub cannot be reached ({brief(error)}): check the network, or download the {kind} elsewhere: "
        f"{command}, then {then}"
    )


def uncached_advice(name: str, kind: str = "dataset") -> str:
    """The same where the Hub is not to be asked."""
    command, then = download_command(name, kind)
    return f"not in the local cache, and the Hub is switched off or cannot be reached: {command}, then {then}"


def refused(error: Exception) -> bool:
    """Whether asking again is useless."""
    return _status(error) in (401, 403, 404)


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def brief(error: BaseException) -> str:
    return one_line(error)[:160]


class Patience:
    """Growing waits between attempts, and their end.

    what: is asked for, the beginning of lines; name, kind: of the repository, as in `hub_advice`.
    """

    def __init__(self, what: str, name: str, kind: str = "dataset", first_wait_s: float = FIRST_WAIT_S):
        self.what, self.name, self.kind, self.first_wait_s, self.failures = what, name, kind, first_wait_s, 0

    def wait_after(self, error: Exception) -> None:
        """Wait before the next attempt; UserError after the last one."""
        self.failures += 1
        if self.failures >= ATTEMPTS or refused(error):
            raise UserError(
                f"{self.what}: {hub_advice(self.name, error, self.kind)} (attempts: {self.failures})"
            ) from None
        wait_s = self.first_wait_s * 2 ** (self.failures - 1)
        logger.warning("%s: %s; trying again in %.0f s", self.what, brief(error), wait_s)
        time.sleep(wait_s)
