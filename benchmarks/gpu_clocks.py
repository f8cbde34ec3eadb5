"""What a GPU's clocks, power and temperature were while something ran, and how fast one fixed matmul is on it.

Two measurements of a step compare only where these do: a GPU that is hot, or held to less power, computes more slowly.
Both do nothing on a CPU but time the matmul.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")  # nvidia-smi's names
REASONS_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # newer drivers', older ones'
# Their bits (nvml.h, nvmlClocksEventReasons). That a GPU idles between two steps is none that slows one down.
REASONS = {
    0x2: "set clocks",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature (driver)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
EVERY_MS = 200
MATMUL = {"cuda": (8192, 30), "cpu": (512, 3)}  # rows, columns and depth; how many are timed


@dataclass(frozen=True)
class Sample:
    """MHz, MHz, W, degrees C; None where the GPU does not say. reasons: of REASONS."""

    sm: float | None
    memory: float | None
    power: float | None
    temperature: float | None
    reasons: int

    @classmethod
    def parse(cls, line: str) -> Sample:
        """A line of nvidia-smi's CSV without header and units. ValueError for anything else."""
        *numbers, reasons = (cell.strip() for cell in line.split(","))
        if len(numbers) != len(FIELDS):
            raise ValueError(f"{line!r}: not {', '.join(FIELDS)} and reasons")
        bits = 0 if reasons.startswith("[") else int(reasons, 16)
        return cls(*(None if number.startswith("[") else float(number) for number in numbers), bits)  # [N/A]


def summary(samples: Iterable[Sample]) -> dict[str, Any]:
    """Medians of the clocks, the lowest of the SMs', the most of power and temperature, all reasons; {} of nothing."""
    samples = list(samples)
    if not samples:
        return {}
    seen = {
        name: [value for sample in samples if (value := getattr(sample, name)) is not None]
        for name in ("sm", "memory", "power", "temperature")
    }
    found = {
        "sm_mhz": [statistics.median(seen["sm"]), min(seen["sm"])] if seen["sm"] else [],
        "memory_mhz": statistics.median(seen["memory"]) if seen["memory"] else None,
        "watts": max(seen["power"], default=None),
        "celsius": max(seen["temperature"], default=None),
    }
    bits = 0
    for sample in samples:
        bits |= sample.reasons
    return found | {"throttled": [words for bit, words in REASONS.items() if bits & bit]}


@contextmanager
def watched(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields a dict that is the `summary` of the device, once the block has ended; {} without nvidia-smi."""
    found: dict[str, Any] = {}
    if device.type != "cuda" or not shutil.which("nvidia-smi"):
        yield found
        return
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # CUDA_VISIBLE_DEVICES numbers them anew
    known = subprocess.run(["nvidia-smi", "--help-query-gpu"], capture_output=True, text=True, check=False).stdout
    reasons = next((name for name in REASONS_FIELDS if name in known), REASONS_FIELDS[-1])
    fields = ",".join([*FIELDS, reasons])
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    with subprocess.Popen(
        [*command, f"--loop-ms={EVERY_MS}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield found
        finally:
            process.terminate()
            lines = process.communicate()[0].splitlines()
    try:
        found |= summary(map(Sample.parse, lines))
    except ValueError as error:
        found["said"] = str(error)[:200]


def cells(row: dict[str, Any]) -> str:
    """Of a table: the matmul, and the clocks; empty where they are not known."""
    sm, watts, celsius = row.get("sm_mhz"), row.get("watts"), row.get("celsius")
    parts = [
        f"{row['matmul_tflops']:.3g}",
        f"{sm[0]:.0f} ({sm[1]:.0f})" if sm else "",
        f"{row['memory_mhz']:.0f}" if row.get("memory_mhz") else "",
        f"{watts:.0f}" if watts else "",
        f"{celsius:.0f}" if celsius else "",
        ", ".join(row.get("throttled", [])) or row.get("said", "").replace("|", "/"),
    ]
    return " | ".join(parts)


HEADS = ("matmul, TFLOPS", "SM clock, MHz (lowest)", "memory", "W", "°C", "slowed by")


def matmul_tflops(device: torch.device) -> float:
    """Of square matmuls in bf16: the same on every day, so that a row of a table says what the GPU was like before."""
    size, times = MATMUL[device.type]
    left, right = (torch.ones(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    for number in range(times + 3):
        if number == 3:
            finish(device)
            started = time.perf_counter()
        left @ right
    finish(device)
    return 2 * size**3 * times / (time.perf_counter() - started) / 1e12


def finish(device: torch.device) -> None:
    """Wait for all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
