"""Where the ranks of a preflight meet before they trust any collective: torchrun's key-value store.

A collective that one rank does not reach hangs and names nobody. Here every rank posts what it has, rank 0 waits for
a given time, and knows by number who is missing.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta

import torch.distributed as dist

from common.cli import UserError
from common.ranks.world import World

GRACE_S = 5  # that the others wait longer than rank 0, which has to tell them


class Meeting:
    """Messages between the ranks of one attempt, each value anything that JSON holds; `seconds` bound every wait."""

    def __init__(self, world: World, seconds: float):
        self.world, self.seconds = world, seconds
        self._store = self.connect("meeting")

    def connect(self, purpose: str) -> dist.Store:
        """A connection of its own to the store: one that waits blocks all that share it. UserError if none answers."""
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serves = self.world.is_main and not served_by_torchrun and purpose == "meeting"
        timeout = timedelta(seconds=self.seconds)
        try:
            store = dist.TCPStore(host, int(port), is_master=serves, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:
            where = "torchrun on the first node" if served_by_torchrun else "rank 0"
            raise UserError(
                f"rank {self.world.rank}: {where} does not answer at {host}:{port} within {self.seconds:g} s: see "
                "whether it runs, and whether the nodes may reach that port"
            ) from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"common.preflight/{purpose}/{attempt}", store)

    def post(self, name: str, value) -> None:
        """This rank's message under a name."""
        self._store.set(f"{name}/{self.world.rank}", json.dumps(value))

    def collect(self, name: str, ranks: list[int]) -> tuple[dict[int, object], list[int]]:
        """On rank 0: what the ranks posted under the name, and those that did not in time."""
        deadline = time.monotonic() + self.seconds
        found, missing = {}, []
        for rank in ranks:
            value = self._get(f"{name}/{rank}", deadline - time.monotonic())
            if value is None:
                missing.append(rank)
            else:
                found[rank] = json.loads(value)
        return found, missing

    def tell(self, name: str, value) -> None:
        """Rank 0's message to all."""
        self._store.set(name, json.dumps(value))

    def hear(self, name: str, patience: float = 1):
        """What rank 0 tells under the name, waited for `patience` times as long as a collect may take; UserError."""
        seconds = patience * self.seconds + GRACE_S
        value = self._get(name, seconds)
        if value is None:
            raise UserError(
                f"rank {self.world.rank}: rank 0 has not been heard of for {seconds:g} s: see what it said"
            )
        return json.loads(value)

    def _get(self, key: str, seconds: float) -> bytes | None:
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.001)))
            return self._store.get(key)
        except RuntimeError:  # not there in time, or the store is gone
            return None
