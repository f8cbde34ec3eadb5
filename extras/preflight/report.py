"""Preflight's findings, merged over the ranks: a table, the same as JSON, and one line for each problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

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

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict) -> RankReport:
        return cls(**value | {"findings": [Finding(**finding) for finding in value["findings"]]})


def merge(reports: list[RankReport], whole_run: Iterable[Finding], seconds: float) -> dict:
    """The report of the run: one row for equal findings, with the ranks that made them; rows of a check adjacent.

    whole_run: findings of no single rank.
    """
    places: dict[Finding, list[str]] = {}
    for report in sorted(reports, key=lambda each: each.rank):
        for finding in report.findings:
            places.setdefault(finding, []).append(f"rank {report.rank} ({report.host})")
    places |= {finding: [] for finding in whole_run}
    leaders = [f"rank {r.rank} ({r.host})" for r in sorted(reports, key=lambda r: r.rank) if r.leads]
    rows = [asdict(finding) | {"where": where, "at": _at(where, leaders)} for finding, where in places.items()]
    first = {row["check"]: number for number, row in reversed(list(enumerate(rows)))}
    rows.sort(key=lambda row: first[row["check"]])
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
    leaders = sorted((report for report in reports if report.leads), key=lambda report: report.rank)
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
    lines, fine = [], Counter(row["check"] for row in report["checks"] if row["level"] == OK)
    shown = Counter()
    for row in report["checks"]:
        check, is_fine = row["check"], row["level"] == OK
        shown[check] += is_fine
        if not is_fine or shown[check] <= ALIKE:
            lines.append(f"{check:{width}}  {row['level']:5}  {row['found']}  [{row['at']}]")
        elif shown[check] == fine[check]:
            lines.append(f"{check:{width}}  {OK:5}  and {fine[check] - ALIKE} more  [see --json]")
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
