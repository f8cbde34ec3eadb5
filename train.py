#!/usr/bin/env python3
"""The guides' train.py: names the script to use. Here a script is one parallelism strategy."""

from __future__ import annotations

import sys

from common.cli import UserError, run

INSTEAD = (
    "train.py: here a script is one strategy: use train_ddp.py, or train_fsdp2.py to shard (FSDP); "
    "python -m extras.migrate 'COMMAND' translates a command"
)


def main() -> None:
    if {"-h", "--help"}.isdisjoint(sys.argv):
        raise UserError(INSTEAD)
    print(INSTEAD)


if __name__ == "__main__":
    run(main)
