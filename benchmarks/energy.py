"""Energy of the CPU packages, by Linux's counters (RAPL, /sys/class/powercap)."""

from __future__ import annotations

from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


class Energy:
    """Joules since it was made. The counters wrap: ask at least once in a few minutes."""

    def __init__(self, powercap: Path = POWERCAP):
        self.packages = [path for path in sorted(powercap.glob("intel-rapl:*")) if path.name.count(":") == 1]
        self.total = 0.0
        self.last = self._read()

    def joules(self) -> float | None:
        """None where there are no counters, or none that this user may read (root's by default)."""
        if self.last is None or (now := self._read()) is None:
            return None
        for package, before, after in zip(self.packages, self.last, now, strict=True):
            wrap = int((package / "max_energy_range_uj").read_text()) if after < before else 0
            self.total += (after - before + wrap) / 1e6
        self.last = now
        return self.total

    def _read(self) -> list[int] | None:
        try:
            return [int((package / "energy_uj").read_text()) for package in self.packages] or None
        except OSError:
            return None
