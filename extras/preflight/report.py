"""What preflight found, merged over the ranks: a table and JSON for the same facts, and one line for each problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

OK, WARN, ERROR = LEVELS = ("ok", "warn", "error")
SHOWN = 8  # places a line names one by one
ALIKE = 4  # rows of a check without a problem that the table shows; JSON has all


@dataclass(frozen=True)
class Finding:
    """One fact of one rank. `todo`: what the user can do about it, for warnings and errors."""

    check: str
    level: str  # of LEVELS
    found: str
    todo: str = ""


@dataclass
class RankReport:
    """What one rank found. `facts` must be the same on every node: {"torch": "2.13.0", ...}."""

    rank: int
    host: str
    node: str  # which node, unique in the run: two may have the same host name
    leads: bool  # the first rank of its node, which looks at what the node's ranks share
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict) -> RankReport:
        return cls(**value | {"findings": [Finding(**finding) for finding in value["findings"]]})


def merge(reports: list[RankReport], whole_run: Iterable[Finding], seconds: float) -> dict:
    """The report of the run: equal findings in one row, with the places they were made at.

    whole_run: findings that are no single rank's. Rows of a check stand together.
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
    """The places in a few words."""
    if not where:
        return "the run"
    if len(where) > 1 and where == leaders:
        return f"all {len(where)} nodes"
    more = f" and {len(where) - SHOWN} more" if len(where) > SHOWN else ""
    return ", ".join(where[:SHOWN]) + more


def differences(reports: list[RankReport]) -> list[Finding]:
    """Findings on the facts that all nodes must share: one row of what is the same, an error for each that isn't."""
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
    """The report as text, one line a row; of many nodes that differ in harmless numbers, some."""
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
    """One line a problem: `error: what: where: what was found: what to do`, errors first."""
    lines = []
    for level, word in ((ERROR, "error"), (WARN, "warning")):
        for row in report["checks"]:
            if row["level"] == level:
                todo = f": {row['todo']}" if row["todo"] else ""
                lines.append(f"{word}: {row['check']}: {row['at']}: {row['found']}{todo}")
    return lines
