"""One row of the GPU benchmarks: some steps of a train script's own run, timed or profiled.

    python -m benchmarks.gpu_row timed 3 train_ddp.py --dataset sample --max_steps 11 --output_dir out ...
    torchrun --nproc_per_node=2 -m benchmarks.gpu_row profiled 3 train_fsdp2.py ...

The flags are the script's, and so are model, strategy, optimiser, data and step: the script's `build` and the loop's
`set_up` make them. What is left out is logging, evaluation and checkpoints. The first steps (3 above) are not timed.
Prints a line of JSON, on rank 0.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.dry_run import KINDS
from benchmarks.gpu_clocks import finish, matmul_tflops, watched
from benchmarks.measuring import ROOT, torchrun, words
from common.cli import run as run_main
from common.distributed.process_group import distributed_run
from common.distributed.world import World
from common.training.arguments import RunArguments
from common.training.command_line import parse_run
from common.training.log_row import peak_memory_gb
from common.training.resume import ResumePlan
from common.training.run_logger import peak_flops
from common.training.set_up import Run, set_up
from common.training.step import StepPrefetcher, scheduled_gc
from common.training.task import Build

TIMED, PROFILED = "timed", "profiled"
PATIENCE_S = 10  # after SIGTERM


def measured(way: str, warmup: int, script: str, argv: list[str]) -> dict[str, Any]:
    """The row of a script's run, in this process, which is a rank of it. way: TIMED or PROFILED."""
    module = importlib.import_module(script.removesuffix(".py"))
    args = parse_run("", getattr(module, KINDS[module.__name__]), argv)
    with distributed_run(args.process) as world:
        return _of_run(args, module.build, world, way, warmup)


def _of_run(args: RunArguments, build: Build, world: World, way: str, warmup: int) -> dict[str, Any]:
    """A function of its own: the model is freed before the process groups are."""
    row: dict[str, Any] = {"matmul_tflops": matmul_tflops(world.device)}
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with ExitStack() as stack:
        run = set_up(args, build, world, ResumePlan(), None, stack)
        return row | steps_of(run, way, warmup)


def steps_of(run: Run, way: str, warmup: int) -> dict[str, Any]:
    """--max_steps steps, of which the first `warmup` count for nothing: real tokens a second of all ranks, ms a step,
    the last loss, peak memory, attention kernels that ran, MFU, clocks; profiled: {kernel: [ms, launches]} of a step.
    """
    args, world, task, plan = run.args, run.world, run.task, run.plan
    steps = args.data.max_steps
    learning_rate = replace(args.optimizer, warmup_steps=plan.warmup_steps).schedule(plan.total_steps)
    run.strategy.model.train()
    if run.built.compiled:
        world.watch.compilation_counts_as_progress()
    loader = task.steps(plan.packs_per_step, 0, run.state.position, steps, plan.total_steps)
    tokens, flops, loss = 0, 0.0, 0.0
    kernels = run.monitor.kernels  # of a GPU's first step; None on a CPU
    with closing(iter(loader)) as batches, scheduled_gc():
        prefetcher = StepPrefetcher(batches, task, world)
        profiler = _profiler(world.device) if way == PROFILED else nullcontext()
        with ExitStack() as watch:
            for step in range(steps):
                if step == warmup:
                    finish(world.device)
                    clocks = watch.enter_context(watched(world.device))
                    seen = watch.enter_context(profiler)
                    started = time.perf_counter()
                data, counts = prefetcher.pop(step + 1)
                assert data is not None, "stopped by a signal"
                ahead = None if step + 1 == steps else prefetcher
                if kernels:
                    kernels.begin()
                loss = run.stepper.step(step, learning_rate(step), data.micro_batches, counts, ahead).loss
                if kernels:
                    kernels.end()
                if step >= warmup:
                    tokens += counts.num_tokens
                    flops += task.flops(counts)
            finish(world.device)
            seconds = time.perf_counter() - started
    world.watch.rest()
    row = {"tokens_per_second": tokens / seconds, "step_ms": 1e3 * seconds / (steps - warmup), "loss": loss}
    row |= {
        "peak_gb": peak_memory_gb(world.device),
        "attention": kernels.found if kernels else "",
    } | clocks
    if peak := peak_flops(world.device, args.precision.bf16, args.log.peak_tflops_per_gpu):
        row["mfu"] = flops / seconds / world.size / peak
    if way == PROFILED:
        row["kernels"] = _kernels(seen, world.device, steps - warmup)
    return row


def _profiler(device: torch.device) -> profile:
    return profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"))


def _kernels(seen: profile, device: torch.device, steps: int) -> dict[str, list[float]]:
    on_gpu, spent, started = device.type == "cuda", Counter(), Counter()
    for event in seen.key_averages():
        if event.key.startswith("Optimizer."):
            continue  # the profiler's own mark around the optimiser's kernels
        if event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU):
            spent[event.key] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3 / steps
            started[event.key] += event.count / steps
    return {kernel: [milliseconds, started[kernel]] for kernel, milliseconds in spent.most_common()}


# ---- in a process of its own -----------------------------------------------------------------------------------


def end_rows_with_me() -> None:
    """Before `row_of`: SIGTERM, as of `timeout`, ends the row too, which is in a session of its own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def row_of(script: str, flags: Mapping[str, object], gpus: int, seconds: float, warmup: int, way: str = TIMED) -> dict:
    """The row of a run in processes of its own, with its `command`; `error` says why there is none.

    A row that fails, hangs or leaves its GPU unusable costs itself only.
    """
    command, typed = ([f"{script}.py", *words(those)] for those in (flags, {**flags, "output_dir": "out"}))
    launcher = torchrun(gpus) if gpus > 1 else [sys.executable]
    row: dict[str, Any] = {
        "command": " ".join([f"torchrun --nproc_per_node={gpus}" if gpus > 1 else "python", *typed])
    }
    with subprocess.Popen(
        [*launcher, "-m", "benchmarks.gpu_row", way, str(warmup), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,  # so that its loader workers end with it
    ) as process:
        try:
            out, said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return row | {"error": f"given up after {seconds:.0f} s"}
        finally:
            _end(process)
    if process.returncode == 0:
        return row | json.loads(out.strip().splitlines()[-1])
    lines = said.strip().splitlines() or [""]
    line = next((line for line in lines if line.startswith("error: ")), lines[-1]).removeprefix("error: ")
    return row | {"error": f"exit status {process.returncode}: {' '.join(line.split())[:100]}".replace("|", "/")}


def _end(process: subprocess.Popen) -> None:
    """torchrun's ranks are in sessions of their own: it ends them if it is asked to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)


def main() -> None:
    way, warmup, script, *argv = sys.argv[1:]
    row = measured(way, int(warmup), script, argv)
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run_main(main)
