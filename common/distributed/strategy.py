"""What a parallelism strategy does to a model, behind one interface: the training loop does not know which it has.

`Strategy` is one process. `replicate` makes it DistributedDataParallel; common.distributed.fsdp has FSDP2's
`fully_shard`, extras.speed.megatron Megatron-FSDP.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from common.cli import UserError
from common.compat import foreach_mul_, foreach_norm
from common.distributed.world import World
from common.flags import Flags, Missing, flag


class Strategy:
    """`model` is what a training step calls, wrapped or not; `evaluated` what an evaluation calls.

    sums_gradients: gradients are summed over the ranks, not averaged; shard_group: the ranks that share the rows of
    one copy of the weights; replica_group: those that hold the same rows; None: this rank alone.
    """

    sums_gradients = False
    shard_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    keeps_gradients = False

    def __init__(self, model: nn.Module, evaluated: nn.Module | None = None):
        self.model, self.evaluated = model, evaluated or model

    def grad_scale(self, ranks: int) -> int:
        """Loss scale per rank that makes the averaged gradient the global batch's: 1 where gradients are summed."""
        return 1 if self.sums_gradients else ranks

    def micro_batch(self, last: bool) -> AbstractContextManager:
        """Context of a micro-batch's forward and backward: gradients are all-reduced with a step's last one only."""
        return nullcontext()

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Clip the global gradient norm (0: don't); returns the norm before, an fp32 scalar.

        Computed on local shards with at most one all-reduce: the same calls on DTensors take many times as long.
        """
        gradients = self.gradients()
        total = torch.zeros((), dtype=torch.float64)
        if gradients:  # a rank may have no rows of any parameter
            total = torch.stack(foreach_norm(gradients, dtype=torch.float32)).double().square().sum()
        norm = self.sum_over_shards(total).sqrt().float()
        if max_norm and gradients:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            foreach_mul_(gradients, factor.to(gradients[0].device))
        return norm

    def gradients(self) -> list[Tensor]:
        """This rank's shards of the gradients; clipping writes to them."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def sum_over_shards(self, total: Tensor) -> Tensor:
        """All-reduce a sum over this rank's shards, in place."""
        return total

    def sync_model_weights(self) -> None:
        """After parameters are set or updated: derive the weights that the forward pass computes with."""

    def clear_gradients(self) -> None:
        self.model.zero_grad(set_to_none=not self.keeps_gradients)

    def keep_gradients(self) -> None:
        """Keep the gradients' memory from step to step, for backward passes to add to.

        Else autograd takes the first micro-batch's gradients as they are, and a CUDA graph's next replay overwrites
        them (pytorch/pytorch#169545).
        """
        self.keeps_gradients = True
        self.attach_gradients([p for p in self.model.parameters() if p.requires_grad])

    def reshard(self) -> None:
        """After a forward pass without a backward pass: free the gathered weights."""

    def full_tensor(self, parameter: Tensor) -> Tensor:
        """The full parameter, all-gathered if it is sharded (a collective)."""
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def dcp_state(self, state: dict, saving: bool) -> dict:
        """A checkpoint's {"model": {name: shard}, "optimizer": {"state": {name: {moment: shard}}, ...}, ...}, with
        what torch.distributed.checkpoint has to know of each shard. No collective; called from any thread."""
        return state

    # ---- common.training.step_monitor ----------------------------------------------------------------------------

    @property
    def last_gradient(self) -> nn.Parameter:
        """The parameter whose gradient a backward pass computes last."""
        return next(p for p in self.model.parameters() if p.requires_grad)

    def blocking_collectives(self) -> list[tuple[object, str]]:
        """Methods (object, name) that wait for other ranks during a pass; none calls another of them."""
        return []

    # ---- extras.plan.dry_run: tensors have no values, collectives do nothing ----------------------------------------

    warmup_steps_before_timing = 0  # steps before memory is the same in every step

    def prepare_dry_run(self) -> None:
        """Before the first step of a dry run: disable what would wait for values."""

    def compute_buffers(self) -> Iterable[Tensor]:
        """Buffers kept between steps besides parameters, gradients and moments."""
        return ()

    def attach_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Give the optimiser's parameters gradients, as a step's backward passes do."""
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)


class Replicated(Strategy):
    """DistributedDataParallel."""

    warmup_steps_before_timing = 2  # the second rebuilds the buckets in the order in which gradients arrived

    def __init__(self, replica: DistributedDataParallel, model: nn.Module):
        super().__init__(replica, evaluated=model)
        self.replica, self.replica_group = replica, dist.group.WORLD

    def micro_batch(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self.replica.no_sync()

    def prepare_dry_run(self) -> None:
        # Use local gradients as the average: a collective without values never completes.
        self.replica.register_comm_hook(None, _local_gradients)


def _local_gradients(_, bucket):  # torch inspects the annotations of a hook, and refuses quoted ones
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _all_reduce_in_bf16(_, bucket):
    """Average in bf16, which halves the traffic. torch's own hook is refused where there is no NCCL."""
    gradients = bucket.buffer()
    rounded = gradients.bfloat16().div_(dist.get_world_size())
    future = dist.all_reduce(rounded, async_op=True).get_future()
    return future.then(lambda done: gradients.copy_(done.value()[0]))


@dataclass(frozen=True)
class StrategyFlags(Flags):
    """Base of the flags of a parallel strategy. Those that depend on other groups look at the whole run's flags."""

    group = "memory and communication"
    needs_layers = False  # works only for a model that calls its own layers

    def missing_in(self, run: Any) -> Iterable[Missing]:
        """Flags of the strategy that the run needs and lacks."""
        return ()

    def check_in(self, run: Any) -> None:
        """UserError for values of the strategy's flags that contradict the run's other flags."""

    @property
    def state_on_host(self) -> bool:
        """Whether weights, gradients and moments are kept in host memory."""
        return False

    @property
    def replays_layers(self) -> bool:
        """Whether layers are recorded as CUDA graphs."""
        return False

    @property
    def only_by_torch(self) -> tuple[str, ...]:
        """Flags that are given and only the torch backend supports."""
        return ()

    def recompute_modes(self) -> dict[str, dict[str, Any]]:
        """{name: {flag: value}}: ways to treat activations, for a dry run to compare."""
        return {}


@dataclass(frozen=True)
class ReplicaFlags(StrategyFlags):
    """Flags of DistributedDataParallel."""

    unlisted = ("ddp_bucket_cap_mb",)
    file_only = ("ddp_bucket_dtype", "cuda_graphs")

    gradient_checkpointing: bool = flag(
        False, "If memory runs out: store layer inputs only, and recompute activations in the backward pass."
    )
    ddp_bucket_cap_mb: int | None = flag(
        None, "Megabytes of gradients per all-reduce bucket. Default: 25 on up to 8 ranks, up to 100 on more."
    )
    ddp_bucket_dtype: str = flag(
        "fp32", "Dtype of the gradients' all-reduce; bf16: half the bytes, and rounded.", choices=("fp32", "bf16")
    )
    cuda_graphs: bool = flag(
        False,
        "Record each compiled layer, or Transformer Engine's, as a CUDA graph and replay it. No GPU has measured it "
        "(docs/hardware.md).",
    )

    @property
    def recomputed(self) -> str:
        """The mode of `save_activations`."""
        return "full" if self.gradient_checkpointing else "none"

    @property
    def replays_layers(self) -> bool:
        return self.cuda_graphs

    def recompute_modes(self) -> dict[str, dict[str, Any]]:
        return {"none": {"gradient_checkpointing": False}, "full": {"gradient_checkpointing": True}}

    def check(self) -> None:
        if self.cuda_graphs and self.gradient_checkpointing:
            raise UserError(
                "--cuda_graphs: a recomputed layer runs within the backward pass, where none is recorded: drop it, or "
                "--gradient_checkpointing"
            )
        self.require_at_least(1, "ddp_bucket_cap_mb")


def default_bucket_mb(ranks: int) -> int:
    """Megabytes of a bucket: an all-reduce of more ranks has more hops, which larger buckets take less often.

    It rests on a model of the network (extras/plan/step_model/communication.py): no GPU has measured it.
    """
    return min(100, max(25, 25 * ranks // 8))


def replicate(model: nn.Module, world: World, flags: ReplicaFlags, init_sync: bool = True) -> Strategy:
    """DistributedDataParallel: gradients are averaged in buckets during the backward pass.

    init_sync: broadcast rank 0's weights first.
    """
    strategy = Strategy(model) if world.size == 1 else _replicated(model, world, flags, init_sync)
    if flags.cuda_graphs:
        strategy.keep_gradients()
    return strategy


def _replicated(model: nn.Module, world: World, flags: ReplicaFlags, init_sync: bool) -> Strategy:
    replica = DistributedDataParallel(
        model,
        device_ids=[world.local_rank] if world.device.type == "cuda" else None,
        init_sync=init_sync and not world.is_dry_run,
        bucket_cap_mb=flags.ddp_bucket_cap_mb or default_bucket_mb(world.size),
        gradient_as_bucket_view=True,
    )
    if flags.ddp_bucket_dtype == "bf16" and not world.is_dry_run:  # a dry run has its own hook
        replica.register_comm_hook(None, _all_reduce_in_bf16)
    return Replicated(replica, model)
