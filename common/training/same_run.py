"""Is this the same run, or the same job? All answers are here.

- Job: a restart of the job that wrote the output directory last resumes from its newest checkpoint, whatever the flags
  say (`is_restart_of`, asked by RunDirectory). The launcher counts a job's starts (`unique_job_id`).
- Run: a checkpoint is resumed only with the model, first weights, optimiser and data of its run (`check_same_...`,
  asked by ResumePlan). Other flags may change, with a warning unless they are in FREE_TO_CHANGE.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from common.cli import LAUNCHER_SPEAKS, UserError
from common.files.safe_files import shorten

# An operator restarts a finished job's pod within seconds; later than this it is a user who starts the job again.
DONE_FOR_S = 3600.0

# Flags that may change on resume without a warning.
FREE_TO_CHANGE = {
    "resume_from_checkpoint",
    "overwrite_output_dir",
    "stop_at_step",
    "stop_after_minutes",
    "disable_tqdm",
    "yes",
}

# Flags by which evaluations are compared (common.training.best): values before a change are of something else.
COMPARED_BY = {
    *("metric_for_best_model", "eval_dataset", "max_eval_samples"),
    *("eval_mlm_probability", "eval_mask_replace_prob"),
}


# ---- job ----


def unique_job_id() -> str | None:
    """The id that no two jobs share: the batch system's, or the UID of the Kubernetes job; None without either."""
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("JOB_UID")


def this_job() -> dict:
    """The identity of this job, to tell its restarts (by torchrun, an operator, the batch system) from new jobs.

    That is its id in the batch system, which no two jobs share. torchrun's --rdzv_id may be shared (the guides'
    variables make it a constant), so it counts with the torchrun process and the command line.
    """
    if slurm := os.environ.get("SLURM_JOB_ID"):
        return {"job": f"slurm {slurm}", "uid": slurm}
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return {"job": None}
    one_node = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    return {
        "job": None if run_id == "none" else f"torchelastic {run_id}",  # "none" is torchrun's default for all jobs
        "torchrun": _launcher(),
        "by_hand": one_node and "KUBERNETES_SERVICE_HOST" not in os.environ,
        "command": sys.argv[1:],
        "uid": os.environ.get("JOB_UID"),  # a Kubernetes job's (extras/launch/restarts.py)
    }


def _launcher() -> str | None:
    """Boot id, pid and start time of torchrun's process, unique over machines; None without /proc."""
    pid = os.environ.get(LAUNCHER_SPEAKS) or os.getppid()  # extras.launch forks ranks off a process of its own
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {pid} {started}"
    except OSError:
        return None


def is_restart_of(text: str) -> bool:
    """Whether this job restarts the one that wrote `text`, its `this_job` as JSON or that of an earlier version."""
    now = this_job()
    before: dict[str, Any]
    try:
        before = json.loads(text)
    except ValueError:
        before = {"job": text}
    if now.get("torchrun") and before.get("torchrun") == now["torchrun"]:
        return True
    if now.get("uid") and before.get("uid"):  # either is missing if the Kubernetes API did not answer
        return (now["job"], now["uid"]) == (before.get("job"), before["uid"])
    if now["job"] is None or now["job"] != before.get("job"):
        return False
    # The same --rdzv_id is still a new job if a user started both by hand (torchrun on one machine, outside of
    # Kubernetes), if the flags differ, or if the earlier one finished long ago.
    both_by_hand = now.get("by_hand") and before.get("by_hand")
    other_flags = before.get("command", now.get("command")) != now.get("command")
    long_done = time.time() - before.get("done", math.inf) > DONE_FOR_S
    return not (both_by_hand or other_flags or long_done)


# ---- run ----


def changed_flags(saved: dict, now: dict) -> dict[str, str]:
    """{flag: what has changed} of the arguments in a checkpoint, but for those in FREE_TO_CHANGE."""
    return {
        name: f"{name} {saved[name]} -> {value}"
        for name, value in now.items()
        if name not in FREE_TO_CHANGE and saved.get(name, value) != value
    }


def check_same_model(path: Path, model: dict, fingerprint: dict) -> None:
    """UserError unless the manifest's `model` equals the fingerprint."""
    model = {"hidden_act": fingerprint.get("hidden_act")} | model  # missing in older checkpoints
    flags = {"hidden_act": "hidden_act (--gelu)", "lora": "--lora"}
    differing = [
        f"{flags.get(k, k)} {shorten(model.get(k))} (now {shorten(v)})"
        for k, v in ({"lora": None} | fingerprint).items()
        if model.get(k) != v
    ]
    if differing:
        raise UserError(
            f"{path}: the checkpoint is of another model: {', '.join(differing)}; choose another --output_dir, "
            "or --overwrite_output_dir"
        )


def check_same_objective(saved: dict, objective: str, output_dir: str) -> None:
    """UserError if the run trains by another --objective. saved: the arguments in the checkpoint."""
    if (before := saved.get("objective", "mlm")) != objective:
        raise UserError(
            f"--objective {objective}: the run in {output_dir} trains by {before}, and its losses would not compare: "
            f"give --objective {before}, or start a new run from its final_model/ with --model_name_or_path"
        )


def check_same_start(saved: dict, weights: str | None, optim: str, output_dir: str) -> None:
    """UserError if --model_name_or_path names other weights than the run started from, which would be ignored, or
    --optim another optimiser, whose state the checkpoint does not have.

    saved: the arguments in the checkpoint; weights: --model_name_or_path; optim: --optim.
    """
    if optim != (before := saved.get("optim", "adamw_torch_fused")):
        raise UserError(
            f"--optim {optim}: the checkpoint has the state of {before}: resume with --optim {before}, or start "
            "a new run from its weights (python -m extras.export CHECKPOINT DIR, then --model_name_or_path DIR)"
        )
    first = saved.get("model_name_or_path", weights)
    if weights and (first is None or os.path.abspath(weights) != os.path.abspath(first)):
        raise UserError(
            f"--output_dir {output_dir}: the run there started from {first or 'random weights'} and resumes with its "
            f"own, not with those of --model_name_or_path {weights}: choose another --output_dir, or start anew there "
            "with --overwrite_output_dir"
        )


def check_same_data(saved: dict, now: dict) -> None:
    """UserError naming what differs, unless a position in one batch plan is valid in the other."""
    if "dataset" in saved and saved["dataset"] != now["dataset"]:
        before, after = short_identity(saved["dataset"]), short_identity(now["dataset"])
        raise UserError(
            f"the data have changed since the checkpoint (their hash was {before}; now {after}): give those it was "
            "trained on, or start a new run from its final_model/ with --model_name_or_path and another --output_dir"
        )
    differing = [f"{k} {saved.get(k)!r} (now {v!r})" for k, v in now.items() if saved.get(k) != v]
    differing += [f"{k} {v!r} (now not used)" for k, v in saved.items() if k not in now]
    if differing:
        raise UserError(
            f"the checkpoint stands in another order of batches: {', '.join(differing)}; give the same flags, or "
            "start a new run from its final_model/ with --model_name_or_path and another --output_dir"
        )


def short_identity(identity: str) -> str:
    """The first digits of a hash, and the number of records if it is followed by one."""
    digest, _, records = str(identity).partition("-")
    return f"{digest[:12]}, {records} records" if records else digest[:12]
