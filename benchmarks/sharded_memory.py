"""Host memory of every rank of train_fsdp2.py on 1, 2 and 4 ranks, from start to export: is the model whole anywhere?

    python -m benchmarks.sharded_memory --dataset_dir processed/arrow [--output table.md]

On CPU, where weights, gradients and moments are in host memory. A rank's resident memory is read from /proc every few
milliseconds and put down to what the run is at, by what stands in its output directory. What a rank of a model of a
few thousand parameters takes (Python, torch, data) is subtracted. Freed memory is given back at once
(MALLOC_MMAP_THRESHOLD_), which train scripts avoid for speed: what glibc keeps is not the model's.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import ROOT, PreparedFlags, publish, say, torchrun, where_measured, words
from common.cli import UserError, run
from common.flags import flag, parse_arguments

PHASES = ("start", "training", "saving", "export")
TINY = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32"
EVERY_S = 0.005


@dataclass
class Arguments(PreparedFlags):
    config_name: str = flag("facebook/esm2_t30_150M_UR50D", "The model.")
    ranks: str = flag("1,2,4", "Numbers of ranks.")
    work_dir: str | None = flag(None, "Where checkpoints are written.")
    output: str | None = flag(None, "Also write the table there.")


def peaks(args: Arguments, ranks: int, accumulation: int, *extra: str) -> dict[str, float]:
    """MB of the largest rank in each phase of a run of three steps with two checkpoints."""
    with tempfile.TemporaryDirectory(dir=args.work_dir) as out:
        flags = {
            "dataset_dir": args.dataset_dir,
            "config_name": args.config_name,
            "output_dir": out,
            "tokens_per_pack": 64,
            "max_seq_length": 64,
            "gradient_accumulation_steps": accumulation,
            "max_steps": 3,
            "save_steps": 2,
        }
        command = [*torchrun(ranks), "train_fsdp2.py", *words(flags)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        process = subprocess.Popen(
            [*command, *extra], cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        found = dict.fromkeys(PHASES, 0)
        while process.poll() is None:
            phase = _phase(Path(out))
            found[phase] = max([found[phase], *map(_resident, _children(process.pid))])
            time.sleep(EVERY_S)
        if process.returncode:
            raise UserError(f"{ranks} ranks: failed: {process.stderr.read().strip().splitlines()[-1]}")
    return {phase: pages * os.sysconf("SC_PAGE_SIZE") / 1e6 for phase, pages in found.items()}


def _phase(out: Path) -> str:
    names = os.listdir(out)
    if any(name.startswith("final_model") for name in names):
        return "export"
    if any(name.startswith("tmp-checkpoint") for name in names):
        return "saving"
    return "training" if "metrics.jsonl" in names else "start"


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _resident(pid: int) -> int:
    """Pages."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def table(args: Arguments) -> list[str]:
    import torch

    from common.models.esm2.config import load_config
    from common.models.esm2.model import Esm2ForMaskedLM
    from common.models.layers.initialise import count_parameters

    with torch.device("meta"):
        parameters = count_parameters(Esm2ForMaskedLM(load_config(args.config_name)))
    lines = [
        f"{args.config_name}: {parameters:,} parameters, {4 * parameters / 1e6:,.0f} MB in fp32; with gradients and "
        f"moments {16 * parameters / 1e6:,.0f} MB. Peak of the largest rank, MB, less that of a tiny model:",
        "",
        "| ranks | accumulation | " + " | ".join(PHASES) + " | weights, gradients and moments / ranks |",
        "|--:|---|" + "--:|" * (len(PHASES) + 1),
    ]
    counts = [int(ranks) for ranks in args.ranks.split(",")]
    cases = [(ranks, "1", 1, ()) for ranks in counts]
    cases += [(counts[-1], "2", 2, ()), (counts[-1], "2, --sync_each_batch", 2, ("--sync_each_batch",))]
    for ranks, name, accumulation, extra in cases:
        nothing = peaks(args, ranks, accumulation, *extra, "--config_overrides", TINY)
        found = peaks(args, ranks, accumulation, *extra)
        cells = [f"{found[phase] - nothing[phase]:,.0f}" for phase in PHASES]
        lines.append(f"| {ranks} | {name} | {' | '.join(cells)} | {16 * parameters / ranks / 1e6:,.0f} |")
        say(lines[-1])
    return lines


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    lines = table(args)
    text = "\n\n".join([*where_measured("benchmarks.sharded_memory", "torch"), "\n".join(lines)]) + "\n"
    publish(text, args.output)


if __name__ == "__main__":
    run(main)
