"""What benchmarks share: commands and fresh processes, rounds in turns, the peer's batches, tables.

It imports no torch: the peak memory of a child process counts from its parent's.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING

from common.cli import UserError
from common.flags import Flags, Missing, flag

if TYPE_CHECKING:
    from torch import nn


ROOT = Path(__file__).resolve().parents[1]
# Keys of a file of flags that are no flags of a command line, of any train script.
FILE_ONLY = {
    *("cp_comm_type", "cp_layout", "cuda_graphs", "dataset_mix_stages", "dataset_mix_exponent"),
    *("ddp_bucket_dtype", "device_reserve", "diffusion_schedule", "eval_mask_replace_prob", "eval_mlm_probability"),
    *("eval_nelbo",),
    *("fp8_scaled_mm", "fused_gelu", "mask_replace_prob", "packs_per_step_schedule"),
    *("random_replace_prob", "sample_clusters_exponent", "set_size", "straggler_every", "triton_adamw"),
}
WARMUP = 2  # steps of `training_speed` that are not timed


@dataclass
class PreparedFlags(Flags):
    """The flag of the benchmarks that read proteins as step 1 leaves them."""

    dataset_dir: str | None = flag(None, "processed/arrow, as 1.tokenize_uniref_csv.py writes it.")

    def missing(self) -> Iterator[Missing]:
        if not self.dataset_dir:
            yield Missing("--dataset_dir", "what 1.tokenize_uniref_csv.py wrote", "processed/arrow")


# ---- commands and processes ---------------------------------------------------------------------------------


def torchrun(ranks: int) -> list[str]:
    """What to start a script's ranks with."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]


def words(flags: Mapping[str, object]) -> list[str]:
    """As on a command line; a flag whose value is True stands alone."""
    first, rest = file_first(flags)
    return [*first, *(f"--{name}" if value is True else f"--{name}={value}" for name, value in rest.items())]


def file_first(flags: Mapping[str, object]) -> tuple[list[str], dict[str, object]]:
    """(a file of those of these flags that are keys of one alone, which its name says; or nothing, the others)."""
    keys = {name: value for name, value in flags.items() if name in FILE_ONLY and value is not None}
    rest = {name: value for name, value in flags.items() if name not in FILE_ONLY}
    if not keys:
        return [], rest
    directory = Path(tempfile.gettempdir()) / f"flags-of-{os.getuid()}"  # not another user's
    directory.mkdir(mode=0o700, exist_ok=True)
    file = directory / f"{'-'.join(f'{name}={value}' for name, value in keys.items())}.json"
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(keys))
    partial.replace(file)
    return [str(file)], rest


def completed(
    command: Sequence[str | Path],
    what: str,
    environment: Mapping[str, str] = os.environ,
    seconds: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """The process, after its end. UserError, naming `what`, with the error line if it fails or takes longer."""
    with subprocess.Popen(command, env=environment, stdout=PIPE, stderr=PIPE, text=True, cwd=ROOT) as process:
        try:
            out, said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks, after 30 s by force
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=40)
            raise UserError(f"{what}: given up after {seconds:.0f} s") from None
        finally:
            process.kill()
    if process.returncode:
        lines = said.strip().splitlines() or [f"exit status {process.returncode}"]
        line = next((line for line in lines if line.startswith("error: ")), lines[-1])  # torchrun adds its own
        raise UserError(f"{what}: {line.removeprefix('error: ')}")
    return subprocess.CompletedProcess(command, 0, out, said)


def measured_afresh(
    module: str,
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    what: str,
    seconds: float | None = None,
) -> dict:
    """The JSON that `python -m module --flag=value ...` prints last; seconds: as `completed`.

    In a process of its own, in which nothing is warm, cached or set by another measurement.
    """
    done = completed([sys.executable, "-m", module, *words(flags)], what, environment, seconds)
    return json.loads(done.stdout.strip().splitlines()[-1])


def in_rounds(module: str, jobs: list[str], rounds: int, flags: Mapping[str, object]) -> dict[str, list[dict]]:
    """{job: what `python -m module --worker JOB` with these flags prints in each round}.

    Every job is a fresh process; the jobs of a round take turns. The last part of a job's name, after a colon, says
    how its process is set up: `tuned` as our scripts set theirs up, `plain` as a script that sets nothing.
    """
    results: dict[str, list[dict]] = {job: [] for job in jobs}
    width = max(map(len, jobs))
    for number in range(rounds):
        for job in jobs:
            environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
            if job.endswith(":plain"):
                environment["GOMP_SPINCOUNT"] = "30000000000"  # what GNU OpenMP does by default
            results[job].append(measured_afresh(module, {"worker": job} | flags, environment, job))
            speed = results[job][-1]["tokens_per_second"]
            say(f"round {number + 1}/{rounds}  {job:<{width}} {speed:9,.0f} tokens/s")
    return results


def worker_or_table(args, measure: Callable[..., dict], compare: Callable[..., str]) -> None:
    """With --worker: measure in this process and print JSON; else compare, and publish the table."""
    if args.worker:
        print(json.dumps(measure(args)))
    else:
        publish(compare(args), args.output)


# ---- beside transformers ------------------------------------------------------------------------------------


def training_speed(model: nn.Module, batches: list[dict], dtype: str, ours: bool) -> dict:
    """Train on a CPU: real tokens a second after WARMUP steps, peak resident memory, the last loss."""
    import torch

    from common.data.collators import to_device
    from common.training.log_row import peak_memory_gb

    cpu = torch.device("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    model.train()
    started, tokens, loss = 0.0, 0, torch.zeros(())
    for number, batch in enumerate(batches):
        if number == WARMUP:
            started, tokens = time.perf_counter(), 0
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            output = model(**to_device(batch, cpu))
            loss = output.loss_sum / batch["num_targets"] if ours else output.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += batch["num_tokens"]
    speed = tokens / (time.perf_counter() - started)
    return {"tokens_per_second": speed, "peak_gb": peak_memory_gb(cpu), "loss": loss.item()}


# ---- tables -------------------------------------------------------------------------------------------------


def median_speed(runs: list[dict]) -> float:
    return statistics.median(run["tokens_per_second"] for run in runs)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error (NaN of one value)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def spread(values: Sequence[float]) -> float:
    """Largest less smallest, as a part of the median."""
    return (max(values) - min(values)) / statistics.median(values)


def speed_cells(what: str, runs: list[dict], ours: list[dict] | None) -> str:
    """Of a row: what it is, tokens/s, spread, by how much `ours` is faster (None: this is ours), peak memory in GB."""
    speed, memory = median_speed(runs), max(run["peak_gb"] for run in runs)
    ratio = f"{median_speed(ours) / speed:.2f} x" if ours else ""
    apart = spread([run["tokens_per_second"] for run in runs])
    return f"{what} | {speed:,.0f} | {apart:.0%} | {ratio} | {memory:.2f} |"


def where_measured(module: str, *libraries: str) -> list[str]:
    """Two lines of Markdown: hardware, versions and commit; and the command that made the table."""
    versions = ", ".join(f"{name} {version(name)}" for name in libraries)
    python = f"Python {platform.python_version()}"
    hardware = f"{os.cpu_count()} CPU cores, {processor()}"
    command = " ".join([f"python -m {module}", *sys.argv[1:]])
    return [", ".join([hardware, python, versions, f"commit {commit()}"]), f"`{command}`"]


def publish(text: str, output: str | None) -> None:
    """Print it, and write it to `output` if there is one."""
    print(text)
    if output:
        Path(output).write_text(text.rstrip() + "\n", encoding="utf-8")


def say(line: str) -> None:
    """How far the measurement is."""
    print(line, file=sys.stderr, flush=True)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    if not shutil.which("git"):
        return "unknown"
    done = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
