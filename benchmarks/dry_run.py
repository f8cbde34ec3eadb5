"""What --dry_run says of a rank's memory, beside what torch's allocator held in real runs of two steps on CPU ranks.

    python -m benchmarks.dry_run [--output table.md]

train_fsdp2.py, fp32, a CPU's ways (--use_cpu); generated proteins, and for the Llama this repository's documents.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.allocator_peak import PLAIN, ROOT
from benchmarks.tables import publish, where_measured
from common.cli import Flags, UserError, flag, parse_arguments, run
from common.tasks.kinds import parse_run
from common.training.held_memory import rehearsed

SCRIPT = "train_fsdp2.py"
ESM2 = {"config_name": "facebook/esm2_t6_8M_UR50D", "dataset": "sample", "tokens_per_pack": 2048}
ESM2 |= {"max_seq_length": 512, "max_steps": 2}
WIDER = "num_hidden_layers=8,hidden_size=480,intermediate_size=1920"
LLAMA = {"model_type": "llama_v2", "hidden_width": 256, "num_layers": 4, "num_heads": 8, "num_key_value_heads": 4}
LLAMA |= {"intermediate_size": 704, "max_context_width": 256, "train_batch_size": 8, "max_steps": 2, "bf16": 0}
LLAMA |= {"vocab_size": 2048, "activation_checkpointing": "none"}
MODELS = {
    "ESM-2 8M": ESM2,
    "ESM-2, 8 layers of 480": ESM2 | {"config_overrides": WIDER},
    "Llama, 4 layers of 256": LLAMA,
}


@dataclass
class Arguments(Flags):
    ranks: str = flag("1,2,4", "Numbers of ranks.")
    output: str | None = flag(None, "Also write the table there.")


def words(flags: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def measured(ranks: int, flags: dict, directory: Path) -> int:
    """Bytes at most of the rank that held most."""
    peak = directory / "peak"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += ["-m", "benchmarks.allocator_peak", str(peak), SCRIPT]
    command += words(flags | PLAIN | {"output_dir": directory / "out", "overwrite_output_dir": True})
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"{ranks} ranks: failed: {done.stderr.strip().splitlines()[-1]}")
    return max(int(Path(f"{peak}.{rank}").read_text()) for rank in range(ranks))


def told(ranks: int, flags: dict) -> int:
    """Bytes at most, by the dry run."""
    from train_fsdp2 import FsdpFlags, build

    args = parse_run("", FsdpFlags, words(flags | {"dry_run": True, "world_size": ranks, "use_cpu": True}))
    with rehearsed(args, build) as rehearsal:
        return rehearsal.step(args.pack_tokens).peak


def main() -> None:
    (args,) = parse_arguments(__doc__, Arguments)
    lines = ["| model | ranks | measured, MB | --dry_run, MB | |", "|---|--:|--:|--:|--:|"]
    with tempfile.TemporaryDirectory() as place:
        text = Path(place) / "text.txt"
        text.write_text("\n\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))))
        for name, flags in MODELS.items():
            flags = {"dataset": text} | flags
            for ranks in map(int, args.ranks.split(",")):
                found, said = measured(ranks, flags, Path(place)), told(ranks, flags)
                lines.append(
                    f"| {name} | {ranks} | {found / 1e6:,.0f} | {said / 1e6:,.0f} | {said / found - 1:+.1%} |"
                )
                print(lines[-1], file=sys.stderr, flush=True)
    publish("\n\n".join([*where_measured("benchmarks.dry_run", "torch"), "\n".join(lines)]) + "\n", args.output)


if __name__ == "__main__":
    run(main)
