"""What a run counts and writes: metrics.jsonl, the guides' *_results.json, the step line, peaks of devices."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import torch

from common.files.json_files import write_json

# Dense bf16 peak in FLOP/s, from the vendors' data sheets (without sparsity), by words of the device's name. The key
# with most words wins.
PEAK_FLOPS = {
    "A10": 125e12,
    "A10G": 70e12,
    "A100": 312e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
}


def peak_flops(device: torch.device, bf16: bool) -> float | None:
    """The device's dense bf16 peak, or None where it is not known (CPUs, slices of a GPU, other precisions): then no
    MFU is claimed."""
    if device.type != "cuda" or not bf16:
        return None
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    matches = [key for key in PEAK_FLOPS if words.issuperset(key.split())]
    return PEAK_FLOPS[max(matches, key=len)] if matches and "MIG" not in words else None


def peak_memory_gb(device: torch.device) -> float:
    """Most memory in use so far, in GB: of the allocator on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    for line in Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else ():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024 / 1e9
    return 0.0


def results_file(output_dir: Path, split: str) -> Path:
    return output_dir / f"{split}_results.json"


def write_results(output_dir: Path, split: str, results: dict) -> None:
    """`<split>_results.json`, and the same keys merged into all_results.json, as transformers' Trainer does."""
    write_json(results_file(output_dir, split), results)
    merged = output_dir / "all_results.json"
    known = json.loads(merged.read_text()) if merged.exists() else {}
    write_json(merged, known | results)


def format_block(split: str, results: dict) -> str:
    """The guides' `***** train metrics *****` block."""
    shown = {k: _shown(k, v) for k, v in sorted(results.items())}
    width, right = max(map(len, shown), default=0), max(map(len, shown.values()), default=0)
    return "\n".join([f"***** {split} metrics *****", *(f"  {k:<{width}} = {v:>{right}}" for k, v in shown.items())])


def _shown(key: str, value) -> str:
    if key.endswith("_runtime"):
        hours, rest = divmod(value, 3600)
        return f"{int(hours)}:{int(rest // 60):02d}:{rest % 60:05.2f}"
    if key == "total_flos":
        return f"{value / 1e9:,.0f}GF"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


IN_GUIDE_LINE = ("loss", "step_loss", "learning_rate")


def guide_line(row: dict, samples: int) -> str:
    """The same in the FSDP guides' shape, which their users' scripts read; further fields follow. samples: of a step,
    on all ranks; the seconds of a step hold its wait for data."""
    loss = row.get("step_loss", float("nan"))  # the last step was skipped: the guides would show no number, too
    speed = samples / max(row["step_seconds"], 1e-9)
    begins = (
        f"Batch {row['step'] - 1} Loss: {loss:.5f}, Speed: {speed:.2f} samples/sec, lr: {row['learning_rate']:.6f}"
    )
    return f"{begins}, {step_line({k: v for k, v in row.items() if k not in IN_GUIDE_LINE})}"


def step_line(row: dict) -> str:
    """One line a logged step, in torchtitan's spirit. What the row does not have is left out."""
    parts = [f"step: {row['step']}/{row['total_steps']}"]
    parts += [
        f"{name}: {row[key]:{form}}{unit}"
        for name, key, form, unit in (
            ("epoch", "epoch", ".2f", ""),
            ("loss", "loss", ".4f", ""),
            ("step_loss", "step_loss", ".4f", ""),
            ("ppl", "train_perplexity", ".3f", ""),
            ("grad_norm", "grad_norm", ".3f", ""),
            ("lr", "learning_rate", ".2e", ""),
            ("memory", "peak_memory_gb", ".2f", "GB"),
            ("tps", "tokens_per_second", ",.0f", ""),
            ("tps/gpu", "unpadded_tokens_per_second_per_gpu", ",.0f", ""),
            ("tflops", "tflops_per_device", ".2f", ""),
            ("mfu", "mfu", ".1%", ""),
        )
        if key in row
    ]
    parts.append(f"data wait: {row['data_wait_seconds'] / max(row['step_seconds'], 1e-9):.0%}")
    if row["step"] < row["total_steps"]:
        parts.append(f"eta: {timedelta(seconds=round((row['total_steps'] - row['step']) * row['step_seconds']))}")
    if row.get("checkpoint_seconds", 0) >= 0.05:
        parts.append(f"checkpoint: {row['checkpoint_seconds']:.1f}s")
    if row.get("skipped_steps"):
        parts.append(f"skipped: {row['skipped_steps']}")
    return "  ".join(parts)
