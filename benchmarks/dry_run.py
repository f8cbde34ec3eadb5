"""What --dry_run says of a rank's memory, beside what torch's allocator held in real runs of two steps on CPU ranks.

    python -m benchmarks.dry_run [--output table.md]

fp32, a CPU's ways (--use_cpu); generated proteins, and for the Llama this repository's documents. train_mfsdp.py runs
behind the tests' stand-ins for CUDA and NCCL.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import importlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.allocator_peak import PLAIN
from benchmarks.measuring import ROOT, completed, publish, say, torchrun, where_measured, words
from common.cli import run
from common.flags import Flags, flag, parse_arguments
from common.training.arguments import RunArguments
from common.training.command_line import parse_run
from extras.plan.dry_run.memory_estimate import fake_run

FSDP2, MFSDP = "train_fsdp2", "train_mfsdp"
DDP = "train_ddp"
KINDS = {DDP: "DdpFlags", FSDP2: "FsdpFlags", MFSDP: "MegatronFlags"}
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
# Of train_mfsdp.py, on the first model, 4 ranks
LAYOUTS = [{"zero_dp_strategy": name} for name in ("no_shard", "optim", "optim_grads")] + [{"hsdp_shard_size": 2}]


@dataclass
class Arguments(Flags):
    ranks: str = flag("1,2,4", "Numbers of ranks.")
    scripts: str = flag("train_fsdp2,train_mfsdp", "Those, comma-separated.")
    output: str | None = flag(None, "Also write the table there.")


def measured(script: str, ranks: int, flags: dict, directory: Path) -> int:
    """Bytes at most of the rank that held most."""
    peak = directory / "peak"
    command = [*torchrun(ranks), "-m", "benchmarks.allocator_peak", str(peak), f"{script}.py"]
    command += words(flags | PLAIN | {"output_dir": directory / "out", "overwrite_output_dir": True})
    completed(command, f"{script}.py, {ranks} ranks", os.environ | {"OMP_NUM_THREADS": "1"})
    return max(int(Path(f"{peak}.{rank}").read_text()) for rank in range(ranks))


def parsed(script: str, ranks: int, flags: list[str]) -> RunArguments:
    """A dry run's arguments."""
    kind = getattr(importlib.import_module(script), KINDS[script])
    return parse_run("", kind, [*flags, "--dry_run", f"--world_size={ranks}"])


def predicted(script: str, ranks: int, flags: list[str]) -> int:
    """Peak bytes, by the dry run of these flags."""
    args = parsed(script, ranks, flags)
    with fake_run(args, importlib.import_module(script).build) as fake:
        return fake.step(args.pack_tokens).peak


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    scripts, numbers = args.scripts.split(","), [int(number) for number in args.ranks.split(",")]
    cases = [(script, name, ranks, {}) for script in scripts for name in MODELS for ranks in numbers]
    cases += [(MFSDP, next(iter(MODELS)), 4, layout) for layout in LAYOUTS if MFSDP in scripts]
    lines = ["| script | model | ranks | measured, MB | --dry_run, MB | |", "|---|---|--:|--:|--:|--:|"]
    with tempfile.TemporaryDirectory() as place:
        text = Path(place) / "text.txt"
        text.write_text("\n\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))))
        for script, name, ranks, layout in cases:
            flags = {"dataset": text} | MODELS[name] | layout
            found = measured(script, ranks, flags, Path(place))
            estimate = predicted(script, ranks, [*words(flags), "--use_cpu"])
            of_script = f"{script}.py " + " ".join(f"{flag} {value}" for flag, value in layout.items())
            lines.append(
                f"| {of_script.strip()} | {name} | {ranks} | {found / 1e6:,.0f} | {estimate / 1e6:,.0f} "
                f"| {estimate / found - 1:+.1%} |"
            )
            say(lines[-1])
    publish("\n\n".join([*where_measured("benchmarks.dry_run", "torch"), "\n".join(lines)]) + "\n", args.output)


if __name__ == "__main__":
    run(main)
