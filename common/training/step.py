"""One optimiser step, the same on every rank and for every strategy; and what is done about one that goes wrong.

A step whose loss or gradient norm is infinite or no number, if only on one rank, is skipped by all of them: no
optimiser step, weights and optimiser state as they were; the data and the schedule move on.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.utils import clip_grad_norm_

from common.batches import batches
from common.batches.loader import TrainStep
from common.cli import UserError
from common.ranks.sharding import gradient_sync, whole
from common.training.progress import flops_of

if TYPE_CHECKING:
    from common.training.trainer import Run

logger = logging.getLogger(__name__)


@dataclass
class StepResult:
    """Of one step: the global batch's loss in nats a masked residue, the gradient norm before clipping, seconds.

    The seconds are the host's, and exact on a CPU. On a GPU the loss is read before the optimiser is started, so the
    first are those of forward, backward and exchange; the optimiser's are what starting it took, and its kernels
    count with the next step's forward pass.
    """

    loss: float
    grad_norm: float
    skipped: bool
    forward_backward: float
    optimizer: float


def take_step(run: Run, share: TrainStep, counts: list[int]) -> StepResult:
    """Take one step, or skip it, and count it in the run's state. UserError after too many skipped in a row."""
    args, world, state = run.args, run.world, run.state
    masked, tokens, _, sequences = counts
    world.watch.mark("forward/backward", state.step + 1)
    started = time.perf_counter()
    run.stragglers.begin()
    lr = run.lr(state.step)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    loss = torch.zeros((), device=world.device)
    if run.core.quant_stats:
        run.core.quant_stats.begin_step(state.step + 1)
    for number, batch in enumerate(share.micro_batches):
        last = number == len(share.micro_batches) - 1
        if run.core.emulation:
            run.core.emulation.begin(state.step, number * world.size + world.rank)
        with gradient_sync(run.model, last):
            with torch.autocast(world.device.type, torch.bfloat16, enabled=args.bf16):
                output = run.model(**batches.to_device(batch, world.device))
            # Gradients are averaged over the ranks, so the sum over the global batch is scaled up by their number.
            (output.loss_sum * (world.size / max(masked, 1))).backward()
        loss += output.loss_sum.detach()
    world.watch.mark("loss and gradient norm", state.step + 1)
    norm = whole(clip_grad_norm_(run.model.parameters(), args.max_grad_norm or math.inf)).to(world.device)
    # The norm minus itself is 0, or no number where the norm is none: that of one rank (a replica that went wrong by
    # itself) reaches all with the loss, in no exchange of its own. Nor is there a wait for the device of its own: loss
    # and norm are read once a step, to be logged; here, and not after the optimiser has been started.
    loss, stray = world.sum(torch.stack([loss, norm - norm]))
    loss, norm, stray = torch.stack([loss / max(masked, 1), norm, stray]).tolist()
    norm = norm + stray if math.isfinite(norm) else norm
    computed = time.perf_counter()
    run.stragglers.end()

    world.watch.mark("optimiser", state.step + 1)
    skipped = not (math.isfinite(loss) and math.isfinite(norm))
    if not skipped:
        run.optimizer.step()
    run.model.zero_grad()
    if run.core.emulation:
        run.core.emulation.end_step(world, skipped)
    if skipped and run.core.encoder.quantised:
        run.core.encoder.quantised.forget_overflows()
    if run.core.quant_stats:  # of a skipped step too: they may tell why
        run.record_quant_stats(run.core.quant_stats.end_step())
    result = StepResult(loss, norm, skipped, computed - started, time.perf_counter() - computed)

    state.step += 1
    state.position, state.epoch = run.data.position_after(share), share.epoch
    state.tokens += tokens  # read and computed, learned from or not
    state.sequences += sequences
    state.total_flos += flops_of(run.config, counts)
    if skipped:
        _count_skipped(run, loss, norm)
    else:
        state.loss_total += loss
        state.skipped_lately = []
    return result


def _count_skipped(run: Run, loss: float, norm: float) -> None:
    state, most = run.state, run.args.max_skipped_steps
    state.skipped_steps += 1
    state.skipped_lately = [*state.skipped_lately, f"step {state.step}: loss {loss:.4g}, gradient norm {norm:.4g}"]
    logger.warning("Skipped %s", state.skipped_lately[-1])
    if len(state.skipped_lately) >= most:
        seen = "; ".join(state.skipped_lately[-10:])
        diverged = UserError(
            f"the run has diverged: --max_skipped_steps {most} skipped in a row ({seen}); nothing is saved of them: "
            "go on from an earlier checkpoint with a lower --learning_rate or --max_grad_norm"
        )
        run.world.end_together(diverged)
