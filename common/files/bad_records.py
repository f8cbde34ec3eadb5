"""What becomes of a record that cannot be used: the end of the run, or a line in the count of skipped ones."""

from __future__ import annotations

import logging
from typing import Literal

from common.cli import UserError

logger = logging.getLogger(__name__)
Policy = Literal["error", "skip"]
REMEMBERED = 5


class BadRecords:
    """Call it with the complaint about each bad record: "error" raises the first, "skip" counts them all."""

    def __init__(self, policy: Policy = "error", count: int = 0, first: list[str] | None = None) -> None:
        """count, first: what was skipped before, the `state` that a stopped run left."""
        self.policy = policy
        self.count = count
        self.first = list(first or [])  # complaints about the first few

    def __call__(self, complaint: UserError) -> None:
        if self.policy == "error":
            raise complaint
        self.count += 1
        if len(self.first) < REMEMBERED:
            self.first.append(str(complaint))

    @property
    def state(self) -> dict:
        return {"count": self.count, "first": self.first}

    def report(self) -> None:
        """Say at the end how many there were, and show the first few."""
        if self.count:
            first = f"the first {len(self.first)}" if self.count > len(self.first) else "these"
            logger.warning("%s bad records were skipped, %s:", f"{self.count:,}", first)
            for complaint in self.first:
                logger.warning("  %s", complaint)
