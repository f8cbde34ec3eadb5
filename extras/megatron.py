"""Megatron-FSDP as a strategy: `fully_shard_model` of megatron-fsdp, the rest by its lower methods.

Its own optimiser wrapper, clipping and checkpoint preparation are not used: the first takes a step when it is made,
the second hangs where a rank has no rows of a tensor, the third is a collective for every tensor. What is relied on
here, parts that are private too, is that of one version, so another one is refused.

Weights lie in buckets, one or more a layer, which are cut in equal parts, always between rows: where a tensor is cut,
and whether a rank has any of it, follows from its neighbours, not from torch.chunk. `first_row` says it.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from common.cli import UserError
from common.compat import MEGATRON_COALESCING, MEGATRON_GRAD_REDUCE, flatten_mesh
from common.distributed.fsdp import hsdp_shape, init_mesh, set_group_timeouts
from common.distributed.strategy import Strategy
from common.distributed.world import World

# What megatron-fsdp 0.6.1 calls of CUDA, where nothing is computed: no-op stand-ins, lent while a rehearsal lasts.
#
# None of what they stand for holds memory or computes: streams and events order work, the device's number names it, a
# product that NCCL takes as it adds (PREMUL_SUM) and a group of exchanges that it sends as one are in its kernels. So
# a rank holds the same without them, but for what CUDA's allocator keeps until another stream is done with it. They
# are lent on a machine that has a GPU too, which is then not touched.
#
# On ranks of a CPU that do compute, tests build on the same streams and events (tests/megatron_on_cpu.py).


class Event:
    """Of CUDA, or work of a group: it is done."""

    def wait(self, stream=None) -> None:
        pass


class Stream:
    """Work is done as it is given."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other) -> None:
        pass

    def record_event(self, event=None) -> Event:
        return Event()


# Of torch.cuda.
CALLS = {
    "Stream": Stream,
    "stream": lambda stream: nullcontext(),
    "current_stream": lambda device=None: Stream(),
    "current_device": lambda: 0,
    "empty_cache": lambda: None,
}


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Everything as it was afterwards."""
    from megatron_fsdp import param_and_grad_buffer as library

    of_library = {
        MEGATRON_COALESCING: lambda group=None, device=None, async_ops=False: nullcontext(Event()),
        "gradient_reduce_preprocessing": lambda gradients, factor, config: dist.ReduceOp.SUM,
        "check_gpu_memory": lambda threshold=0.9: False,  # whether to empty the allocator's cache
    }
    logger = logging.getLogger("megatron_fsdp")
    level = logger.level
    with ExitStack() as way_out:
        way_out.callback(logger.setLevel, level)
        logger.setLevel(logging.ERROR)  # it warns that the device is not CUDA's
        for owner, stand_ins in ((torch.cuda, CALLS), (library, of_library)):
            for name, stand_in in stand_ins.items():
                way_out.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, stand_in)
        yield


# Tensors that are cut between rows, anywhere: gathered from the ranks, and told to torch.distributed.checkpoint.
#
# DTensor knows where rows begin by torch.chunk's rule alone. What is cut otherwise says it itself: rows `first` and
# on.


def gather_rows(rows: Tensor, first: int, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
    """All rows of a tensor of this shape, each rank having some, or none; the ranks of the group call together."""
    # Shares of one length: gloo gathers no others.
    mine = torch.tensor([first, len(rows)], device=rows.device)
    shares = mine.new_empty(group.size() * 2)
    dist.all_gather_into_tensor(shares, mine, group=group)
    shares = shares.view(-1, 2).tolist()
    most = max(count for _, count in shares)
    padded = rows.new_zeros(most, *shape[1:])
    padded[: len(rows)] = rows
    gathered = padded.new_empty(len(shares) * most, *shape[1:])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    found = rows.new_empty(shape)
    for part, (begin, count) in zip(gathered.view(len(shares), most, *shape[1:]), shares, strict=True):
        found[begin : begin + count] = part[:count]
    return found


@torch.no_grad()
def describe(shard: DTensor, first: int) -> None:
    """Tell torch.distributed.checkpoint which rows these are, by the names that it looks for; a copy forgets it."""
    local = shard.to_local()
    offsets = torch.Size((first, *(0 for _ in local.shape[1:])))
    chunk = ChunkStorageMetadata(offsets, local.shape)

    def items(name: str, tensor: DTensor) -> list[WriteItem]:
        if not local.numel():
            return []
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(local), tensor.size())
        return [WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)]

    local.__create_chunk_list__ = lambda: [chunk]
    local.__create_write_items__ = items


VERSION = "0.6.1"
DEVICES = ("cuda",)  # its streams, events and reductions are CUDA's and NCCL's
STRATEGIES = {
    "no_shard": "nothing dealt out",
    "optim": "optimiser state dealt out (ZeRO-1)",
    "optim_grads": "gradients too (ZeRO-2)",
    "optim_grads_params": "weights too, gathered layer by layer (ZeRO-3)",
}


@dataclass(frozen=True)
class Layout:
    """How `fully_shard_model` is called.

    shard_size: ranks that share one copy, None for all; bf16: weights are gathered and computed with in it; masters:
    fp32 ones of those; reduce_dtype: in which gradients travel; meta_device: each rank makes storage for one bucket
    at a time; sums_gradients: over the ranks, instead of averaging them; sync_each_batch: wait for every micro-batch's
    exchange.
    """

    zero_dp_strategy: str = "optim_grads_params"
    shard_size: int | None = None
    bf16: bool = False
    masters: bool = True
    reduce_dtype: torch.dtype = torch.float32
    meta_device: bool = True
    sums_gradients: bool = False
    sync_each_batch: bool = False

    @property
    def shards(self) -> bool:
        return self.zero_dp_strategy != "no_shard"


def load_library(world: World):
    """The module. UserError where it cannot work, or is not the one that this is written for."""
    if world.device.type not in DEVICES and not world.is_dry_run:
        raise UserError(
            "train_mfsdp.py needs an NVIDIA GPU: Megatron-FSDP runs on CUDA alone; train_fsdp2.py shards on any device"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it does without Transformer Engine
            import megatron_fsdp
    except ImportError as error:
        raise UserError(f"megatron-fsdp is not installed: pip install megatron-fsdp=={VERSION}") from error
    if megatron_fsdp.__version__ != VERSION:
        raise UserError(
            f"megatron-fsdp {megatron_fsdp.__version__}: train_mfsdp.py is written for {VERSION}: "
            f"pip install megatron-fsdp=={VERSION}"
        )
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    logging.getLogger(megatron_fsdp.__name__).setLevel(logging.WARNING)  # it prints every bucket
    return megatron_fsdp


class MegatronSharded(Strategy):
    """`shard` wraps the model. Its parameters are then what the optimiser updates: fp32 masters, or the weights."""

    def __init__(self, layout: Layout, world: World):
        with world.raise_together():
            self.library = load_library(world)
        if world.is_dry_run:
            world.lent.enter_context(fake_cuda())
        self.layout, self.world = layout, world
        self.sums_gradients = layout.sums_gradients

    def shard(self, model: nn.Module) -> None:
        """Deal out a model that has no storage yet. The values of its parameters are still to be set."""
        layout, device = self.layout, self.world.device
        mesh, groups = self._mesh()
        if layout.bf16:
            model.to(torch.bfloat16)
        if not layout.meta_device:
            model.to_empty(device=device)
        alone = mesh["shard"].size() == 1
        policy = self.library.MixedPrecisionPolicy(
            # Without masters the optimiser updates the weights themselves.
            main_params_dtype=torch.float32 if layout.bf16 and layout.masters else None,
            main_grads_dtype=torch.float32 if layout.masters or not layout.bf16 else torch.bfloat16,
            # Where nothing travels, a copy in another precision is added to what it was made of (0.6.1).
            grad_comm_dtype=None if alone else layout.reduce_dtype,
        )
        with _storage_alone(model):
            wrapped = self.library.fully_shard_model(
                model,
                device_mesh=mesh,
                dp_shard_dim="shard",
                tp_dim="tensor",
                fsdp_unit_modules=[type(model.layers[0])],
                zero_dp_strategy=layout.zero_dp_strategy,
                device=device,
                init_model_with_meta_device=layout.meta_device,
                mixed_precision_policy=policy,
                sync_model_each_microbatch=False,
                preproc_state_dict_for_dcp_ckpt=False,
                calculate_per_token_loss=layout.sums_gradients,
                **groups,
            )
        super().__init__(wrapped)
        self.group = mesh["shard"].get_group()
        self.raw = wrapped.raw_param
        for parameter in self.raw.values():
            # They were given a `to` and a `cpu` that look whether there is storage: no compiled graph holds that.
            parameter.__dict__.pop("to", None)
            parameter.__dict__.pop("cpu", None)
        self.first_rows = {}
        for name, parameter in model.named_parameters():
            if layout.shards:
                first, rest = divmod(parameter.megatron_fsdp_slice.start, math.prod(parameter.shape[1:]))
                assert rest == 0, "only rows are dealt"
                self.first_rows[name] = parameter.first_row = first

    def _mesh(self) -> tuple[DeviceMesh, dict]:
        """(its mesh, which wants a dimension for tensor parallelism; what tells it of groups that replicate)."""
        world, size = self.world, self.layout.shard_size
        replicas, shards = hsdp_shape(world, size or world.size)
        if replicas == 1:
            return init_mesh(world, (shards, 1), ("shard", "tensor")), {}
        mesh = init_mesh(world, (replicas, shards, 1), ("replicate", "shard", "tensor"))
        everyone = flatten_mesh(mesh["replicate", "shard"], "everyone")
        set_group_timeouts(world, everyone)
        return mesh, {"dp_outer_dim": "replicate", "hybrid_fsdp_group": everyone.get_group()}

    # ---- a step ---------------------------------------------------------------------------------------------

    def micro_batch(self, last: bool) -> AbstractContextManager:
        self.model.model_auto_sync = last or self.layout.sync_each_batch  # its setter warns at every call
        return nullcontext()

    def gradients(self) -> list[Tensor]:
        return [p.grad.to_local() for p in self._parameters() if p.grad is not None]

    def sum_over_shards(self, total: Tensor) -> Tensor:
        total = total.to(self.world.device)
        if self.layout.shards:
            dist.all_reduce(total, group=self.group)
        return total

    def sync_model_weights(self) -> None:
        self.model.install_optimized_model_weights()

    def clear_gradients(self) -> None:
        self.model.zero_grad_buffer()

    def reshard(self) -> None:
        self.model.synchronize_param_gather()

    # ---- parameters as a whole ------------------------------------------------------------------------------

    @torch.no_grad()
    def full_tensor(self, parameter: Tensor) -> Tensor:
        rows = parameter.to_local()
        if not self.layout.shards:
            return rows
        return gather_rows(rows, parameter.first_row, parameter.shape, self.group)

    @torch.no_grad()
    def dcp_state(self, state: dict, saving: bool) -> dict:
        moments = state["optimizer"]["state"]
        for name, first in self.first_rows.items():
            for shard in (state["model"].get(name), *moments.get(name, {}).values()):
                if isinstance(shard, DTensor):
                    describe(shard, first)
        if saving:
            # A rank without rows of a tensor takes no step for it: its count of steps is not the tensor's.
            # Nor is it where its moments are another replica's to save.
            moments = {name: of for name, of in moments.items() if any(map(_has_rows, of.values()))}
        return state | {"optimizer": state["optimizer"] | {"state": moments}}

    # ---- stragglers -----------------------------------------------------------------------------------------

    @property
    def last_gradient(self) -> nn.Parameter:
        return next(p for p in self.raw.values() if p.requires_grad)

    def blocking_collectives(self) -> list[tuple[object, str]]:
        gathering, reducing = self.model.all_gather_pipeline, self.model.grad_reduce_pipeline
        return [
            (gathering, "wait_bucket_ready"),
            (reducing, "wait_for_previous_grad_reduce"),
            (reducing, MEGATRON_GRAD_REDUCE),
        ]

    # ---- a dry run ------------------------------------------------------------------------------------------

    warmup_steps_before_timing = 1  # weights outside of layers, once they have been gathered, stay

    def compute_buffers(self) -> Iterator[Tensor]:
        """Its buffers of weights, and what of them is gathered, which has had its storage since it was made."""
        for group in self.model.param_and_grad_buffer.parameter_groups:
            if group.model_weight_buffer:
                yield group.model_weight_buffer.data
        yield from self.raw.values()

    def attach_gradients(self, parameters: list[nn.Parameter]) -> None:
        """They have been in its buffers since those were made."""
        self.model.attach_grad_to_optimizer_state()

    def _parameters(self) -> Iterator[nn.Parameter]:
        """What the optimiser updates, whichever the module holds at the moment."""
        return (parameter for _, parameter in self.model.param_and_grad_buffer.optimizer_named_parameters)


def _has_rows(shard) -> bool:
    return isinstance(shard, DTensor) and shard.to_local().numel() > 0


@contextmanager
def _storage_alone(model: nn.Module) -> Iterator[None]:
    """The library has every module set its parameters as soon as they have storage; here values come later.

    Modules that have no method for it get one for the while, which does nothing. Nor is a model moved that has
    storage: it is on its device, and a dry run's tensors cannot be.
    """
    without = [module for module in model.modules() if not hasattr(module, "reset_parameters")]
    for module in without:
        module.reset_parameters = lambda: None
    model.to = lambda device: model
    try:
        yield
    finally:
        del model.to
        for module in without:
            del module.reset_parameters
