"""The end of a run: results, held-out evaluation, the exported model, the picture."""

from __future__ import annotations

import logging
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from common.cli import UserError
from common.files.json_files import read_json_lines, write_json
from common.model import convert
from common.model.pretrained import save_pretrained
from common.ranks.sharding import whole
from common.ranks.stopping import Preempted
from common.training.evaluate import evaluate, unigram
from common.training.metrics import format_block, write_results

if TYPE_CHECKING:
    from common.training.trainer import Run

logger = logging.getLogger(__name__)


def finish(run: Run) -> None:
    """Report, evaluate, export and draw as the flags say. Raises Preempted if told to stop during an evaluation."""
    args, state, world = run.args, run.state, run.world
    if args.do_train:
        _report(run, "train", _training_results(run))
    if args.do_eval:
        logger.info("*** Evaluate ***")
        for split, prefix in (("validation", "eval"), ("test", "test")):
            if (store := run.data.held_out(split)) is None:
                continue
            found = run.evaluate() if prefix == "eval" else evaluate(run.core, store, args, world, prefix, state.step)
            if not found:
                raise Preempted
            found |= unigram(run.data.sample(), store, args, world, prefix)
            _report(run, prefix, {"epoch": state.epoch} | found)
    with world.main_does() as mine:
        if mine and args.do_train:
            history = read_json_lines(run.output_dir / "metrics.jsonl")
            write_json(run.output_dir / "trainer_state.json", asdict(state) | {"log_history": history})
    finished = args.do_train and state.step >= run.total_steps
    if finished if args.save_final_model is None else args.save_final_model:
        _export(run)
    with world.main_does() as mine:
        if mine and args.do_train:
            from common.training.report import draw_curves

            draw_curves(run.output_dir)


def _training_results(run: Run) -> dict:
    state, seconds = run.state, max(run.state.seconds, 1e-9)
    return {
        "backend": run.args.backend,
        "epoch": state.epoch,
        "gelu": run.args.gelu,
        "total_flos": state.total_flos,
        "train_loss": state.loss_total / max(state.step - state.skipped_steps, 1),
        "train_runtime": state.seconds,
        "train_samples": run.data.num_examples or state.sequences,
        "train_samples_per_second": state.sequences / seconds,
        "train_steps_per_second": state.step / seconds,
        "train_tokens_per_second": state.tokens / seconds,
    }


def _report(run: Run, split: str, results: dict) -> None:
    with run.world.main_does() as mine:
        if mine:
            write_results(run.output_dir, split, results)
            run.tracker.write({"step": run.state.step, **results})
            print(format_block(split, results), flush=True)


def _export(run: Run) -> None:
    """Write final_model/; all ranks together, which gather one tensor after the other for rank 0 to write."""
    final = run.output_dir / "final_model"
    parameters = dict(run.weights.named_parameters())
    pieces = convert.pieces_to_hf(lambda name: whole(parameters[name].detach()), run.config, run.core.extras)
    failure = None
    try:
        if run.world.is_main:
            save_pretrained(pieces, run.config, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(final.with_name("final_model.partial"), ignore_errors=True)
        reason = " ".join(str(error).split())[:160]
        failure = UserError(
            f"{final}: not exported: {reason}; the last checkpoint holds everything: make room and run the same "
            "command again"
        )
    for _ in pieces:  # those that rank 0 did not come to, too: the others wait for it
        pass
    run.world.end_together(failure)
    logger.info("Model for transformers' from_pretrained: %s", final)
