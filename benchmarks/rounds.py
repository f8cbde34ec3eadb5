"""Training speeds side by side: every job in a fresh process, round after round, the jobs of a round in turns.

A job is a name whose last part, after a colon, says how its process is set up: `tuned` as our scripts set theirs up,
`plain` as a script that sets nothing.
"""

from __future__ import annotations

import os
import statistics
import sys

from benchmarks.fresh import measured_afresh


def in_rounds(module: str, jobs: list[str], rounds: int, flags: dict[str, object]) -> dict[str, list[dict]]:
    """{job: what `python -m module --worker JOB` with these flags says of itself in each round}."""
    found: dict[str, list[dict]] = {job: [] for job in jobs}
    width = max(map(len, jobs))
    for number in range(rounds):
        for job in jobs:
            found[job].append(_afresh(module, job, flags))
            speed = found[job][-1]["tokens_per_second"]
            print(f"round {number + 1}/{rounds}  {job:<{width}} {speed:9,.0f} tokens/s", file=sys.stderr, flush=True)
    return found


def median_speed(runs: list[dict]) -> float:
    return statistics.median(run["tokens_per_second"] for run in runs)


def cells(what: str, runs: list[dict], ours: list[dict] | None) -> str:
    """Of a row: what it is, tokens/s, spread, by how much `ours` is faster (None: this is ours), peak memory in GB."""
    speeds = [run["tokens_per_second"] for run in runs]
    speed, memory = median_speed(runs), max(run["peak_gb"] for run in runs)
    ratio = f"{median_speed(ours) / speed:.2f} x" if ours else ""
    return f"{what} | {speed:,.0f} | {(max(speeds) - min(speeds)) / speed:.0%} | {ratio} | {memory:.2f} |"


def _afresh(module: str, job: str, flags: dict[str, object]) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    if job.endswith(":plain"):
        environment["GOMP_SPINCOUNT"] = "30000000000"  # what GNU OpenMP does by default
    return measured_afresh(module, {"worker": job} | flags, environment, job)
