"""Preflight's findings, merged over the ranks: a table, the same as JSON, and one line for each problem."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import itemgetter
from subprocess import SubprocessError

from common.cli import UserError, one_line

OK, WARN, ERROR = LEVELS = ("ok", "warn", "error")
SHOWN = 8  # ranks that a line lists
ALIKE = 4  # rows of a check without problems in the table; JSON has all


@dataclass(frozen=True)
class Finding:
    """A result of one rank. `todo`: what to do about a warning or error."""

    check: str
    level: str  # of LEVELS
    found: str
    todo: str = ""


@dataclass
class RankReport:
    """One rank's findings. `facts` must be the same on every node: {"torch": "2.13.0", ...}."""

    rank: int
    host: str
    node: str  # unique in the run: two nodes may have the same host name
    leads: bool  # the first rank of its node, which checks what its ranks share
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: dict) -> RankReport:
        return cls(**value | {"findings": [Finding(**finding) for finding in value["findings"]]})


class LocalChecks:
    """Checks that run concurrently, each in a thread; one that hangs is abandoned and reported."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._pool = ThreadPoolExecutor(16)
        self._running: list[tuple[str, Future]] = []

    def start(self, check: str, function: Callable, *arguments) -> None:
        """The function returns a Finding, a dict of facts, a sequence of these, or None."""
        self._running.append((check, self._pool.submit(function, *arguments)))

    def finish(self, report: RankReport) -> None:
        """Add the results to the report."""
        deadline = time.monotonic() + self.seconds
        for check, running in self._running:
            try:
                result = running.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                what = f"no answer within {self.seconds:g} s"
                result = Finding(check, ERROR, what, "see whether the filesystem or network behind it is alive")
            except (UserError, OSError, RuntimeError, SubprocessError) as error:
                result = Finding(check, ERROR, one_line(error))
            for item in result if isinstance(result, list | tuple) else [result]:
                if isinstance(item, Finding):
                    report.findings.append(item)
                elif item:
                    report.facts |= item


def merge(reports: list[RankReport], whole_run: Iterable[Finding], seconds: float) -> dict:
    """The report of the run: one row for equal findings, with the ranks that made them; rows of a check adjacent.

    reports: by rank; whole_run: findings of no single rank.
    """
    places: dict[Finding, list[str]] = {}
    for report in reports:
        for finding in report.findings:
            places.setdefault(finding, []).append(f"rank {report.rank} ({report.host})")
    places |= {finding: [] for finding in whole_run}
    leaders = [f"rank {r.rank} ({r.host})" for r in reports if r.leads]
    rows = [asdict(finding) | {"where": where, "at": _at(where, leaders)} for finding, where in places.items()]
    checks = list(dict.fromkeys(row["check"] for row in rows))
    rows.sort(key=lambda row: checks.index(row["check"]))
    worst = max((LEVELS.index(row["level"]) for row in rows), default=0)
    return {
        "level": LEVELS[worst],
        "seconds": round(seconds, 2),
        "ranks": len(reports),
        "nodes": len(leaders),
        "checks": rows,
    }


def _at(where: list[str], leaders: list[str]) -> str:
    """The ranks, abbreviated."""
    if not where:
        return "the run"
    if len(where) > 1 and where == leaders:
        return f"all {len(where)} nodes"
    more = f" and {len(where) - SHOWN} more" if len(where) > SHOWN else ""
    return ", ".join(where[:SHOWN]) + more


def differences(reports: list[RankReport]) -> list[Finding]:
    """Compare the nodes' facts: one row with those that are equal, an error for each that differs."""
    leaders = [report for report in reports if report.leads]
    findings, same = [], []
    for name in dict.fromkeys(name for report in leaders for name in report.facts):
        hosts: dict[str, list[str]] = {}
        for report in leaders:
            hosts.setdefault(report.facts.get(name, "none"), []).append(report.host)
        if len(hosts) == 1:
            same.append(f"{name} {next(iter(hosts))}")
            continue
        values = "; ".join(f"{value} on {_at(names, [])}" for value, names in hosts.items())
        todo = "give every node the same image, environment and data: ranks that differ hang or compute other numbers"
        findings.append(Finding("versions", ERROR, f"{name} differs between nodes: {values}", todo))
    return [Finding("versions", OK, ", ".join(same)), *findings]


def table(report: dict) -> str:
    """The report as text, one line per row; rows of a check beyond ALIKE without problems are only counted."""
    width = max((len(row["check"]) for row in report["checks"]), default=0)
    lines = []
    for check, rows in groupby(report["checks"], key=itemgetter("check")):
        fine = 0
        for row in rows:
            fine += row["level"] == OK
            if row["level"] != OK or fine <= ALIKE:
                lines.append(f"{check:{width}}  {row['level']:5}  {row['found']}  [{row['at']}]")
        if fine > ALIKE:
            lines.append(f"{check:{width}}  {OK:5}  and {fine - ALIKE} more  [see --json]")
    whole = f"{report['ranks']} ranks on {report['nodes']} nodes, {report['seconds']:.1f} s"
    lines.append(f"preflight of {whole}: {report['level']}")
    return "\n".join(lines)


def problems(report: dict) -> list[str]:
    """One line per problem, errors first: `error: check: ranks: finding: what to do`."""
    lines = []
    for level, word in ((ERROR, "error"), (WARN, "warning")):
        for row in report["checks"]:
            if row["level"] == level:
                todo = f": {row['todo']}" if row["todo"] else ""
                lines.append(f"{word}: {row['check']}: {row['at']}: {row['found']}{todo}")
    return lines
