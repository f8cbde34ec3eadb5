"""The end of a run: results, held-out evaluation, the exported model, the picture."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from common.cli import UserError, one_line
from common.distributed.stopping import Preempted
from common.distributed.world import World
from common.files.json_files import read_json_lines, write_json
from common.models.layers.hf_directory import Training
from common.training.arguments import RunArguments
from common.training.progress import Resolved, TrainerState
from common.training.run_logger import METRICS, RunLogger
from common.training.task import Task

logger = logging.getLogger(__name__)


def finish(
    task: Task,
    state: TrainerState,
    resolved: Resolved,
    log: RunLogger,
    args: RunArguments,
    world: World,
    evaluate: Callable[[str, str], dict],
    whole: Callable[[Tensor], Tensor],
) -> None:
    """Report, evaluate, export and draw as the flags say. Raises Preempted if told to stop during an evaluation.

    whole: gathers a parameter from the ranks.
    """
    output_dir = Path(args.checkpoint.output_dir)

    def report(split: str, results: dict) -> None:
        with world.on_main_rank() as is_main:
            if is_main:
                log.results(split, state.step, results, of_training=args.do_train)

    if args.do_train:
        if state.unknown:
            share = state.unknown / max(state.tokens, 1)
            logger.warning("%s characters (%.2g of the tokens) are no residues: <unk>", f"{state.unknown:,}", share)
        report("train", _training_results(state, resolved, task.data.num_examples))
    if args.do_eval:
        logger.info("*** Evaluate ***")
        for split, prefix in (("validation", "eval"), ("test", "test")):
            with world.raise_together():
                absent = task.data.held_out(split) is None
            if absent:
                continue
            found = evaluate(split, prefix)
            if not found:
                raise Preempted
            report(prefix, {"epoch": state.epoch} | found)
    with world.on_main_rank() as is_main:
        if is_main and args.do_train:
            history = read_json_lines(output_dir / METRICS)
            write_json(output_dir / "trainer_state.json", asdict(state) | {"log_history": history})
    finished = args.do_train and task.data.finished(state.step, state.position)
    if finished if args.save_final_model is None else args.save_final_model:
        _export(task, output_dir / "final_model", Training.of_state(asdict(state)), world, whole)
    with world.on_main_rank() as is_main:
        if is_main and args.do_train:
            log.draw_last()


def _training_results(state: TrainerState, resolved: Resolved, num_examples: int | None) -> dict:
    seconds = max(state.seconds, 1e-9)
    return {
        "backend": resolved.backend,
        "epoch": state.epoch,
        **({"gelu": resolved.gelu} if resolved.gelu else {}),
        "total_flos": state.total_flos,
        "train_loss": state.loss_total / max(state.step - state.skipped_steps, 1),
        "train_runtime": state.seconds,
        "train_samples": num_examples or state.sequences,
        "train_samples_per_second": state.sequences / seconds,
        "train_steps_per_second": state.step / seconds,
        "train_tokens_per_second": state.tokens / seconds,
        "train_unknown_characters": state.unknown,
    }


def _export(task: Task, final: Path, training: Training, world: World, whole: Callable[[Tensor], Tensor]) -> None:
    """Write final_model/; all ranks together, which gather one tensor after the other for rank 0 to write."""
    pieces = task.exported(whole)
    failure = None
    try:
        if world.is_main:
            task.export(pieces, final, training)
    except (OSError, SafetensorError) as error:
        reason = one_line(error)[:160]
        failure = UserError(
            f"{final}: not exported: {reason}; the last checkpoint holds everything: make room and run the same "
            "command again"
        )
    for _ in pieces:  # those that rank 0 did not come to, too: the others wait for it
        pass
    world.raise_on_all(failure)
    logger.info("Model for transformers' from_pretrained: %s", final)
