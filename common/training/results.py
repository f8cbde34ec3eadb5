"""What a run logs before its first step, and what it writes at its end: results and the exported model."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from common.cli import UserError, one_line
from common.console import is_terminal
from common.data.training_data import PlannedData, TrainingData
from common.distributed.world import World
from common.files.runs import resolve_directory
from common.flags import flat
from common.hooks import extra
from common.models.layers.initialise import count_parameters
from common.models.layers.model_card import Training
from common.software import software
from common.training.arguments import RunArguments
from common.training.evaluation import Evaluator
from common.training.run_logger import RunLogger
from common.training.same_run import short_identity
from common.training.task import BuiltModel, Task
from common.training.trainer_state import RunPlan, TrainerState

logger = logging.getLogger(__name__)

STRATEGY = ("sharding_strategy", "activation_checkpointing", "cpu_offload")  # flags that say more of it
WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin", "*.distcp")  # of transformers, and of a checkpoint


def announce(
    args: RunArguments, built: BuiltModel, data: TrainingData, plan: RunPlan, state: TrainerState, world: World
) -> None:
    """Log what the run is about to do."""
    per_rank, unit = args.batch
    logger.info("***** Running training *****" if args.do_train else "***** No training *****")
    for name, value in resolved(args, built, data, plan, world).items():
        logger.info("  %s: %s", name, value)
    counts = (
        ("Num examples", data.num_examples or "unknown (streamed)"),
        ("Num Epochs", _epochs(args.data.num_train_epochs, data)),
        (f"Instantaneous batch size per device ({unit})", per_rank),
        (
            f"Total train batch size (w. parallel, distributed & accumulation; {unit})",
            plan.packs_per_step.map(lambda packs: packs * per_rank),
        ),
        ("Gradient Accumulation steps", plan.accumulation),
        ("Total optimization steps", plan.total_steps),
        ("Number of trainable parameters", count_parameters(built.model)),
    )
    for name, value in () if is_terminal() else counts:  # as in the guides' logs
        logger.info("  %s = %s", name, f"{value:,}" if isinstance(value, int) else value)
    logger.info("  Weights: %s", describe_weights(args.model.model_name_or_path, args.data.seed, state.step))
    if not state.step and (warning := warn_of_unused_weights(args.model.model_name_or_path, args.model_named)):
        logger.warning("%s", warning)
    for line in built.remarks:
        logger.info("  %s", line)
    precision = "bfloat16, fp32 master weights" if args.precision.bf16 else "fp32"
    logger.info("  Device = %s x %d, computing in %s", world.device.type, world.size, precision)
    if world.cp_size > 1:
        logger.info(
            "  Each pack is shared by %d ranks (%s, %s)", world.cp_size, args.model.cp_comm_type, args.data.cp_layout
        )
    if state.step:
        logger.info("Resuming after step %d (epoch %.2f)", state.step, state.epoch)
    if len(plan.packs_per_step.stages) > 1:
        logger.info("Packs in a step: %s", plan.packs_per_step)
    elif plan.accumulation.plain != args.data.gradient_accumulation_steps:
        logger.info("Accumulation is %s, to keep %s packs a step", plan.accumulation, plan.packs_per_step)


def resolved(args: RunArguments, built: BuiltModel, data: TrainingData, plan: RunPlan, world: World) -> dict[str, str]:
    """{part of the run: what flags and defaults have made of it}."""
    info, (per_rank, unit) = run_info(args, built, (), world), args.batch
    identity = short_identity(data.identity.get("dataset", ""))
    packs = plan.packs_per_step
    tokens = packs.map(lambda number: number * args.pack_tokens)
    parts = {
        "Model": info["model"],
        "Data": f"{info['data']}, content {identity}",
        "Step": f"{packs} x {per_rank:,} {unit}: at most {tokens} tokens",
        "Schedule": f"{args.optimizer.lr_scheduler_type}, peak {args.optimizer.learning_rate:g}, warm-up "
        f"{plan.warmup_steps:,g} of {plan.total_steps:,} steps; {args.optimizer.optim}",
    }
    script = Path(sys.argv[0]).stem
    strategy = [f"{name} {value}" for name in STRATEGY if (value := flat(args).get(name)) not in (None, False)]
    return parts | {"Strategy": ", ".join([script, *strategy])}


def _epochs(requested: float, data: TrainingData) -> int | str:
    if not isinstance(data, PlannedData) or data.end is None:
        return "n/a (limited by --max_steps)"
    epochs = data.plan.epochs_before(data.end)
    return int(requested) if requested == epochs else f"{requested:g}: to the nearest pack, {epochs:.6g}"


def describe_weights(weights: str | None, seed: int, step: int) -> str:
    """Which weights the run starts from, for the log. weights: --model_name_or_path; step: of the checkpoint it
    resumes from, 0 for none."""
    if step:
        return f"from checkpoint-{step}"
    if not weights:
        return f"random, seed {seed}"
    files = weight_files(directory := str(resolve_directory(weights)))
    return f"from {directory}" + (f" ({files})" if files else "")


def warn_of_unused_weights(weights: str | None, named: str | None) -> str | None:
    """A warning if --config_name or --model, `named`, is a directory with weights: only its configuration is used."""
    if weights or not named or not (files := weight_files(named)):
        return None
    return (
        f"{named} has weights ({files}), which are not loaded: training starts from random ones; to start "
        f"from them give --model_name_or_path {named}"
    )


def weight_files(directory: str) -> str:
    """The first weight file of a local directory and how many more there are; "" if there are none."""
    matches = (sorted(Path(directory).glob(pattern)) for pattern in WEIGHT_FILES)
    names = next((files for files in matches if files), [])
    if not names:
        return ""
    return names[0].name + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def run_info(args: RunArguments, built: BuiltModel, labels: tuple[str, ...], world: World) -> dict:
    """The heading of the run's curves, and with what it was made."""
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
    flags = flat(args)
    return {
        "model": f"{args.model_named or built.config.model_type} ({count_parameters(built.model):,} parameters)",
        "data": str(flags["dataset_dir"] or flags["dataset"] or " ".join(flags.get("dataset_mix") or ())),
        "device": f"{device} x {world.size}, {'bf16' if args.precision.bf16 else 'fp32'}",
        "words": list(labels),
        "software": software(),
    }


def training_results(
    state: TrainerState, implementation: dict[str, Any], num_examples: int | None, attention_kernels: str = ""
) -> dict:
    """The content of train_results.json. Warns of characters that are no residues.

    implementation: `BuiltModel.implementation`; attention_kernels: that ran, as the profiler names them.
    """
    if state.unknown:
        share = state.unknown / max(state.tokens, 1)
        logger.warning("%s characters (%.2g of the tokens) are no residues: <unk>", f"{state.unknown:,}", share)
    seconds = max(state.seconds, 1e-9)
    with_loss = state.step - state.skipped_steps - state.steps_without_target
    return {
        **({"attention": implementation["attention"]} if "attention" in implementation else {}),
        **({"attention_kernels": attention_kernels} if attention_kernels else {}),
        "backend": implementation["backend"],
        "epoch": state.epoch,
        **({"gelu": gelu} if (gelu := implementation["gelu"]) else {}),
        "total_flos": state.total_flos,
        **({"train_loss": state.loss_total / with_loss} if with_loss else {}),
        "train_runtime": state.seconds,
        "train_samples": num_examples or state.sequences,
        "train_samples_per_second": state.sequences / seconds,
        "train_steps_per_second": state.step / seconds,
        "train_tokens_per_second": state.tokens / seconds,
        "train_unknown_characters": state.unknown,
    }


def write_evaluations(
    evaluator: Evaluator, log: RunLogger, state: TrainerState, of_best: bool, of_training: bool
) -> bool:
    """Evaluate on all held-out sets and the test split, and write the results; all ranks together.

    state: of the model; of_best: that is the best one; of_training: as `RunLogger.results`. False if the run was
    stopped meanwhile.
    """
    about = {"epoch": state.epoch}
    if of_best:
        about |= {"best_global_step": state.step}
    if all(map(evaluator.has, evaluator.task.held_out)):
        if not (results := evaluator.evaluate(state.step, downstream=True)):
            return False
        log.results("eval", state.step, about | results, of_training=of_training)
    if evaluator.has("test"):
        if not (results := evaluator.evaluate_split(state.step, "test", "test").results):
            return False
        log.results("test", state.step, about | results, of_training=of_training)
    log.losses(evaluator.losses(), state.step)
    return True


def export_model(
    task: Task,
    state: TrainerState,
    world: World,
    gather: Callable[[Tensor], Tensor],
    directory: Path,
    hub_model_id: str | None = None,
    fitted: tuple[dict[str, Tensor], tuple[str, ...]] = ({}, ()),
    results: Mapping[str, Any] | None = None,
) -> None:
    """Write the model to `directory`; all ranks together. Tensors are gathered one at a time and written by rank 0.

    hub_model_id: upload it there, too; fitted, results: of the Evaluator, for the model and its card.
    """
    heads, chains = fitted
    pieces, training = task.exported(gather, heads), Training.of_state(asdict(state))
    training = replace(training, contacts=chains, results=results or {})
    failure = None
    try:
        if world.is_main:
            task.export(pieces, directory, training)
    except (OSError, SafetensorError) as error:
        failure = UserError(
            f"{directory}: not exported: {one_line(error)[:160]}; the last checkpoint has everything: free some space "
            "and run the same command again"
        )
    for _ in pieces:  # the other ranks wait for rank 0 to take part in every gather, also after a failure
        pass
    world.raise_on_all(failure)
    logger.info("Model %s: %s", task.family.form, directory)
    if hub_model_id:
        with world.on_main_rank() as is_main:
            if is_main:
                extra().push(directory, hub_model_id)
