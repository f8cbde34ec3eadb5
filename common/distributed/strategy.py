"""What a strategy does to a model, in one interface: the training loop does not know which one it has.

`Strategy` is one process; `Replicated`, DistributedDataParallel (both by `replicate`); `FullySharded`, FSDP2's
`fully_shard`. That of Megatron-FSDP has a file of its own, which none but its script imports.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from common.cli import UserError
from common.distributed.world import World
from common.flags import Flags, Missing, flag

# How ranks lie on a mesh when weights are dealt out to them.


def replicas_and_shards(world: World, shard_size: int) -> tuple[int, int]:
    """(groups that replicate each other, ranks that share one copy), the latter neighbours in rank. UserError where
    `shard_size` (--hsdp_shard_size) does not divide the ranks."""
    if shard_size < 1 or world.size % shard_size:
        fitting = ", ".join(str(n) for n in range(1, world.size + 1) if world.size % n == 0)
        raise UserError(f"--hsdp_shard_size {shard_size} does not divide {world.size} ranks: choose {fitting}")
    return world.size // shard_size, shard_size


def mesh_of(world: World, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks, in order, in this shape; its groups wait for each other as long as --ddp_timeout says. All ranks
    together."""
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    wait_as_told(world, mesh)
    return mesh


def wait_as_told(world: World, mesh: DeviceMesh) -> None:
    """Torch gives the groups of a mesh a timeout of its own (ten minutes with NCCL, half an hour with gloo) and has no
    argument for another."""
    if not world.rehearsed:
        for group in mesh.get_all_groups():
            _set_pg_timeout(timedelta(seconds=world.timeout_s), group)


class Strategy:
    """`model`: as a training step calls it, wrapped or not; `evaluated`: as an evaluation does.

    sums_gradients: over the ranks, instead of averaging them.
    """

    sums_gradients = False

    def grad_scale(self, ranks: int) -> int:
        """How many times those of the global batch the gradients of a rank are, for their average to be these."""
        return 1 if self.sums_gradients else ranks

    def __init__(self, model: nn.Module, evaluated: nn.Module | None = None):
        self.model, self.evaluated = model, evaluated or model

    def micro_batch(self, last: bool) -> AbstractContextManager:
        """Around forward and backward pass of a micro-batch: gradients are exchanged with a step's last one only."""
        return nullcontext() if last or not hasattr(self.model, "no_sync") else self.model.no_sync()

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Clip the global gradient norm (0: don't); fp32 scalar, the norm before.

        On this rank's own rows, with one exchange at most: the same calls on DTensors take torch many times as long.
        """
        gradients = self.gradients()
        total = torch.zeros((), dtype=torch.float64)
        if gradients:  # a rank may have no rows of anything
            total = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).double().square().sum()
        norm = self.over_shards(total).sqrt().float()
        if max_norm and gradients:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
        return norm

    def gradients(self) -> list[Tensor]:
        """This rank's rows of them, to be written to."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def over_shards(self, total: Tensor) -> Tensor:
        """A sum over what this rank has, as one over all that there is; written to."""
        return total

    def sync_model_weights(self) -> None:
        """Parameters have been set or updated: what the forward pass computes with is to be made of them."""

    def clear_gradients(self) -> None:
        self.model.zero_grad()

    def release(self) -> None:
        """After a forward pass without a backward pass: what was gathered for it is let go."""

    def whole(self, parameter: Tensor) -> Tensor:
        """All of a parameter, gathered from the ranks (all call together) where it is sharded."""
        return whole(parameter)

    def dcp_state(self, state: dict, saving: bool) -> dict:
        """A checkpoint's {"model": {name: shard}, "optimizer": {"state": {name: {moment: shard}}, ...}, ...}, each
        shard with what torch.distributed.checkpoint must know of it. No collective; any thread."""
        return state

    @property
    def last_gradient(self) -> nn.Parameter:
        """The parameter whose gradient is the last one of a backward pass to be there."""
        return next(p for p in self.model.parameters() if p.requires_grad)

    def exchanges(self) -> list[tuple[object, str]]:
        """Methods (object, name) in which this rank waits for the others during a pass, none calling another."""
        return []

    # ---- a dry run: tensors have no values, groups exchange nothing ---------------------------------------------

    warmup_steps_before_timing = 0  # steps before the first that holds what all later ones do

    def rehearse(self) -> None:
        """Before the first step of a dry run: what would await values does not."""

    def computed_with(self) -> Iterable[Tensor]:
        """What it keeps between steps, beside parameters, gradients and moments, to compute and exchange with."""
        return ()

    def hold_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Those of the optimiser have their gradients, as after a step's passes."""
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)


class Replicated(Strategy):
    """Replicas behind DistributedDataParallel."""

    warmup_steps_before_timing = 2  # the second begins with buckets made anew, by the order in which gradients came

    def rehearse(self) -> None:
        # Replicas take their own gradients for the average: a collective without values has no result to await.
        self.model.register_comm_hook(None, _own)


def _own(_, bucket):  # torch looks at annotations, and wants them unquoted
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _in_bf16(_, bucket):
    """The average over the ranks, for half of the bytes. torch's own hook is refused where there is no NCCL."""
    gradients = bucket.buffer()
    rounded = gradients.bfloat16().div_(dist.get_world_size())
    exchange = dist.all_reduce(rounded, async_op=True).get_future()
    return exchange.then(lambda done: gradients.copy_(done.value()[0]))


@dataclass(frozen=True)
class StrategyFlags(Flags):
    """Base of the flags of a parallel strategy. Those that depend on other groups look at the whole run's flags."""

    group = "memory and exchange"

    def missing_in(self, run: Any) -> Iterable[Missing]:
        """As `missing`, given the flags of the run."""
        return ()

    def check_in(self, run: Any) -> None:
        """As `check`, given the flags of the run."""

    @property
    def state_on_host(self) -> bool:
        """Whether weights, gradients and moments are kept in host memory."""
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
    """Of DistributedDataParallel."""

    unlisted = ("ddp_bucket_cap_mb",)

    gradient_checkpointing: bool = flag(
        False, "Store layer inputs only, and recompute the activations in the backward pass."
    )
    ddp_bucket_cap_mb: int = flag(25, "Megabytes of gradients per all-reduce bucket.")
    ddp_bucket_dtype: str = flag("fp32", "All-reduce gradients in fp32, or in bf16: half the bytes, and rounded.")

    @property
    def recomputed(self) -> str:
        """The mode of `save_activations`."""
        return "full" if self.gradient_checkpointing else "none"

    def recompute_modes(self) -> dict[str, dict[str, Any]]:
        return {"none": {"gradient_checkpointing": False}, "full": {"gradient_checkpointing": True}}

    def check(self) -> None:
        self.require_choice("ddp_bucket_dtype", ("fp32", "bf16"))
        self.require_at_least(1, "ddp_bucket_cap_mb")


def replicate(model: nn.Module, world: World, flags: ReplicaFlags, init_sync: bool = True) -> Strategy:
    """One replica a rank, gradients averaged in buckets while the backward pass still runs.

    init_sync: send the weights of rank 0 first.
    """
    if world.size == 1:
        return Strategy(model)
    replica = DistributedDataParallel(
        model,
        device_ids=[world.local_rank] if world.device.type == "cuda" else None,
        init_sync=init_sync and not world.rehearsed,
        bucket_cap_mb=flags.ddp_bucket_cap_mb,
        gradient_as_bucket_view=True,
    )
    if flags.ddp_bucket_dtype == "bf16" and not world.rehearsed:  # a dry run has a hook of its own
        replica.register_comm_hook(None, _in_bf16)
    return Replicated(replica, evaluated=model)


class FullySharded(Strategy):
    """Weights, gradients and optimiser state dealt out by rows.

    sync_each_batch: gradients are exchanged after every micro-batch; else each rank holds whole ones in fp32 until the
    last.
    """

    def __init__(self, model: FSDPModule, sync_each_batch: bool = False):
        super().__init__(model)
        self.sync_each_batch = sync_each_batch
        mesh = next(model.parameters()).device_mesh
        self.device, self.group = mesh.device_type, mesh["shard"].get_group()

    def micro_batch(self, last: bool) -> AbstractContextManager:
        self.model.set_requires_gradient_sync(last or self.sync_each_batch)
        return nullcontext()

    def gradients(self) -> list[Tensor]:
        return [gradient.to_local() for gradient in super().gradients()]

    def over_shards(self, total: Tensor) -> Tensor:
        total = total.to(self.device)  # of the exchange; gradients may be on the host
        dist.all_reduce(total, group=self.group)
        return total

    def release(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a parameter, to be written to, and the number of the first. A plain tensor is all here.

    `fully_shard` deals dimension 0 in chunks of equal size, the last one shorter (torch.chunk); a rank may get none.
    Parameters that are dealt otherwise have a `first_row`.
    """
    if not isinstance(parameter, DTensor):
        return parameter, 0
    if (first := getattr(parameter, "first_row", None)) is not None:
        return parameter.to_local(), first
    rows = parameter.shape[0]
    first = 0
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "only rows are dealt"
            size = parameter.device_mesh.size(dimension)
            first = min(rows, -(-rows // size) * parameter.device_mesh.get_coordinate()[dimension])
    return parameter.to_local(), first


@torch.no_grad()
def copy_rows(parameter: Tensor, whole: Tensor) -> None:
    """Set a parameter to a value, of which this rank takes its own rows."""
    local, first = local_rows(parameter)
    local.copy_(whole[first : first + len(local)])


def whole(parameter: Tensor) -> Tensor:
    """All of a parameter, gathered from the ranks (all call together) where it is sharded."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
