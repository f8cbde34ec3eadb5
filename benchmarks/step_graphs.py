"""How many graphs torch gives its compiler for a layer, under each strategy's own wrapper, on two ranks (gloo).

    torchrun --nproc_per_node=2 -m benchmarks.step_graphs train_ddp.py --torch_compile False ...      one of them

A layer alone is one graph; what a wrapper cuts (DistributedDataParallel at the borders of its buckets, unless told not
to) shows only there.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch

from benchmarks.dry_run import DDP, FSDP2, KINDS
from benchmarks.gpu_models import row_flags
from benchmarks.gpu_row import TIMED, steps_of
from benchmarks.measuring import ROOT, completed, torchrun, words
from common.cli import run as run_main
from common.compat import CompileContext
from common.distributed.process_group import distributed_run
from common.models.layers.compiling import compile_layers
from common.training.command_line import parse_run
from common.training.resume import ResumePlan
from common.training.set_up import set_up

CP = "train_ddp_cp"
# A layer of the 8M model has 4.9 MB of gradients: borders of the smallest buckets lie within it.
STRATEGIES = {
    "DDP": (DDP, {"ddp_bucket_cap_mb": 1}),
    "DDP x CP": (CP, {"ddp_bucket_cap_mb": 1, "cp_size": 2}),
    "FSDP2, full": (FSDP2, {}),
    "FSDP2, hybrid": (FSDP2, {"sharding_strategy": "hybrid", "hsdp_shard_size": 2}),
    "FSDP2, full, recomputed": (FSDP2, {"activation_checkpointing": "full"}),
}


def graphs_of_run(script: str, argv: list[str]) -> dict[str, int]:
    """On a rank: {"graphs": those that went to the compiler, "traces": of so many tracings} in the run's steps."""
    seen: list[str] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        seen.append(str(CompileContext.current_compile_id()))
        return graph.forward

    module = importlib.import_module(script.removesuffix(".py"))
    args = parse_run("", getattr(module, (KINDS | {CP: "DdpCpFlags"})[module.__name__]), argv)
    with distributed_run(args.process) as world, ExitStack() as stack:
        run = set_up(args, module.build, world, ResumePlan(), None, stack)
        compile_layers(run.built.model, world.device.type, compiler)
        steps_of(run, TIMED, 1)
        del run
    return {"graphs": len(seen), "traces": len(set(seen))}


def graphs_table() -> Iterator[str]:
    yield "| strategy, 2 ranks | graphs of a layer | traced |\n|---|--:|--:|\n"
    for name, (script, flags) in STRATEGIES.items():
        with tempfile.TemporaryDirectory() as place:
            flags = (
                row_flags("8M", "torch", 1024, 3, place, "cpu") | {"config_overrides": "num_hidden_layers=3"} | flags
            )
            command = [*torchrun(2), "-m", "benchmarks.step_graphs", f"{script}.py", *words(flags)]
            done = completed(command, name, os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
        found = json.loads(done.stdout.strip().splitlines()[-1])
        yield f"| {name} | {found['graphs'] / found['traces']:g} | {found['traces']} x |\n"


def main() -> None:
    found = graphs_of_run(sys.argv[1], sys.argv[2:])
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run_main(main)
