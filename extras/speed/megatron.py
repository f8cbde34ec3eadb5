"""Megatron-FSDP as a strategy: megatron-fsdp's `fully_shard_model`, otherwise its lower-level methods.

Not used are its optimiser wrapper, which takes a step when it is created, its clipping, which hangs if a rank has no
rows of a tensor, and its checkpoint preparation, a collective per tensor. This relies on internals of one version, so
any other is refused.

Weights lie in buckets, one or more per layer, which are split into equal parts between rows. Where a tensor is split,
and whether a rank has any of it, depends on its neighbours in the bucket, not on torch.chunk: `first_row` has it.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

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
from common.distributed.shards import local_shard
from common.distributed.strategy import Strategy
from common.distributed.world import World

if TYPE_CHECKING:
    from megatron_fsdp import MegatronFSDP

    from extras.plan.dry_run.memory_estimate import FakeWorld

# ---- dry run: no-op stand-ins for the CUDA calls of megatron-fsdp 0.6.1 --------------------------------------
#
# Streams, events, scaling inside a reduction (PREMUL_SUM) and coalesced collectives hold no memory, so a rank's memory
# is the same without them, except for blocks that CUDA's allocator holds until another stream is done with them. They
# are replaced on a machine with a GPU too, which is not touched then. Tests that compute on CPU ranks use the same
# streams and events (tests/megatron_on_cpu.py).


class Event:
    """A CUDA event, or the work of a collective, that is complete."""

    def wait(self, stream=None) -> None:
        pass


class Stream:
    """A stream whose work is complete when it is enqueued."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other) -> None:
        pass

    def record_event(self, event=None) -> Event:
        return Event()


CALLS = {  # of torch.cuda
    "Stream": Stream,
    "stream": lambda stream: nullcontext(),
    "current_stream": lambda device=None: Stream(),
    "current_device": lambda: 0,
    "empty_cache": lambda: None,
}


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Replace the CUDA calls within the block."""
    from megatron_fsdp import param_and_grad_buffer as library

    of_library = {
        MEGATRON_COALESCING: lambda group=None, device=None, async_ops=False: nullcontext(Event()),
        "gradient_reduce_preprocessing": lambda gradients, factor, config: dist.ReduceOp.SUM,
        "check_gpu_memory": lambda threshold=0.9: False,  # True empties the allocator's cache
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


# ---- tensors split between any rows: DTensor itself knows torch.chunk's offsets only --------------------------


def gather_rows(rows: Tensor, first: int, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
    """All-gather a tensor of this shape of which each rank of the group has some rows, or none."""
    span = torch.tensor([first, len(rows)], device=rows.device)
    spans = span.new_empty(group.size() * 2)
    dist.all_gather_into_tensor(spans, span, group=group)
    spans = spans.view(-1, 2).tolist()
    most = max(count for _, count in spans)  # pad to one length: gloo gathers no others
    padded = rows.new_zeros(most, *shape[1:])
    padded[: len(rows)] = rows
    gathered = padded.new_empty(len(spans) * most, *shape[1:])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    full = rows.new_empty(shape)
    for part, (begin, count) in zip(gathered.view(len(spans), most, *shape[1:]), spans, strict=True):
        full[begin : begin + count] = part[:count]
    return full


@torch.no_grad()
def add_dcp_hooks(shard: DTensor, first: int) -> None:
    """Give torch.distributed.checkpoint the shard's offset by the methods it looks for; copies lose them."""
    local: Any = shard.to_local()
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
    "no_shard": "nothing sharded",
    "optim": "optimiser state sharded (ZeRO-1)",
    "optim_grads": "gradients too (ZeRO-2)",
    "optim_grads_params": "weights too, gathered layer by layer (ZeRO-3)",
}


def load_library(world: World):
    """Import megatron_fsdp. UserError if it cannot run here or has another version."""
    if world.device.type not in DEVICES and not world.is_dry_run:
        raise UserError(
            "train_mfsdp.py needs an NVIDIA GPU: Megatron-FSDP runs on CUDA alone; train_fsdp2.py shards on any device"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Transformer Engine is missing
            import megatron_fsdp
    except ImportError as error:
        raise UserError(f"megatron-fsdp is not installed: pip install megatron-fsdp=={VERSION}") from error
    if megatron_fsdp.__version__ != VERSION:
        raise UserError(
            f"megatron-fsdp {megatron_fsdp.__version__}: train_mfsdp.py is written for {VERSION}: "
            f"pip install megatron-fsdp=={VERSION}"
        )
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    logging.getLogger(megatron_fsdp.__name__).setLevel(logging.WARNING)  # it logs every bucket
    return megatron_fsdp


class MegatronSharded(Strategy):
    """`shard` wraps the model; its parameters are then what the optimiser updates: fp32 masters, or the weights.

    flags: train_mfsdp.py's.
    """

    def __init__(self, flags: Any, bf16: bool, world: World):
        with world.raise_together():
            self.library = load_library(world)
        if world.is_dry_run:
            cast("FakeWorld", world).lent.enter_context(fake_cuda())
        self.flags, self.bf16, self.world = flags, bf16, world
        self.sums_gradients = flags.calculate_per_token_loss

    def shard(self, model: nn.Module) -> None:
        """Shard a model without storage. The values of its parameters are set later."""
        flags, device = self.flags, self.world.device
        mesh, groups = self._mesh()
        if self.bf16:
            model.to(torch.bfloat16)
        if not flags.on_meta:
            model.to_empty(device=device)
        reduce_dtype = torch.float32 if flags.grad_reduce_in_fp32 else torch.bfloat16
        policy = self.library.MixedPrecisionPolicy(
            # Without masters the optimiser updates the weights themselves.
            main_params_dtype=torch.float32 if self.bf16 and flags.preserve_fp32_weights else None,
            main_grads_dtype=torch.float32 if flags.preserve_fp32_weights or not self.bf16 else torch.bfloat16,
            # With one shard 0.6.1 would add the copy in another precision to the original.
            grad_comm_dtype=None if mesh["shard"].size() == 1 else reduce_dtype,
        )
        with _storage_alone(model):
            wrapped = self.library.fully_shard_model(
                model,
                device_mesh=mesh,
                dp_shard_dim="shard",
                tp_dim="tensor",
                fsdp_unit_modules=[type(model.layers[0])],
                zero_dp_strategy=flags.zero_dp_strategy,
                device=device,
                init_model_with_meta_device=flags.on_meta,
                mixed_precision_policy=policy,
                sync_model_each_microbatch=False,
                preproc_state_dict_for_dcp_ckpt=False,
                calculate_per_token_loss=flags.calculate_per_token_loss,
                **groups,
            )
        super().__init__(wrapped)
        self.wrapped: MegatronFSDP = wrapped
        group = mesh["shard"].get_group()
        if not flags.shards:
            self.replica_group = group
        else:
            self.shard_group = group
            if groups:
                self.replica_group = mesh["replicate"].get_group()
        self.raw = wrapped.raw_param
        for parameter in self.raw.values():
            # The library's own `to` and `cpu`, which check for storage, cannot be traced by torch.compile.
            parameter.__dict__.pop("to", None)
            parameter.__dict__.pop("cpu", None)
        self.first_rows: dict[str, int] = {}
        sharded: dict[str, Any] = dict(model.named_parameters()) if flags.shards else {}
        for name, parameter in sharded.items():
            first, rest = divmod(parameter.megatron_fsdp_slice.start, math.prod(parameter.shape[1:]))
            assert rest == 0, "only rows are sharded"
            self.first_rows[name] = parameter.first_row = first

    def _mesh(self) -> tuple[DeviceMesh, dict]:
        """(the mesh, which needs a tensor-parallel dimension; the arguments for HSDP)."""
        world, size = self.world, self.flags.hsdp_shard_size
        replicas, shards = hsdp_shape(world, size or world.size)
        if replicas == 1:
            return init_mesh(world, (shards, 1), ("shard", "tensor")), {}
        mesh = init_mesh(world, (replicas, shards, 1), ("replicate", "shard", "tensor"))
        everyone = flatten_mesh(mesh["replicate", "shard"], "everyone")
        set_group_timeouts(world, everyone)
        return mesh, {"dp_outer_dim": "replicate", "hybrid_fsdp_group": everyone.get_group()}

    # ---- a step ---------------------------------------------------------------------------------------------

    def micro_batch(self, last: bool) -> AbstractContextManager:
        self.wrapped.model_auto_sync = last or self.flags.sync_model_each_microbatch  # its setter warns at every call
        return nullcontext()

    def gradients(self) -> list[Tensor]:
        # Whichever set of parameters the module holds at the moment.
        updated: list[tuple[str, Any]] = self.wrapped.param_and_grad_buffer.optimizer_named_parameters
        return [p.grad.to_local() for _, p in updated if p.grad is not None]

    def sum_over_shards(self, total: Tensor) -> Tensor:
        total = total.to(self.world.device)
        if self.flags.shards:
            dist.all_reduce(total, group=self.shard_group)
        return total

    def sync_model_weights(self) -> None:
        self.wrapped.install_optimized_model_weights()

    def clear_gradients(self) -> None:
        self.wrapped.zero_grad_buffer()

    def reshard(self) -> None:
        self.wrapped.synchronize_param_gather()

    # ---- full parameters and checkpoints ------------------------------------------------------------------------

    @torch.no_grad()
    def full_tensor(self, parameter: Tensor) -> Tensor:
        rows, first = local_shard(parameter)
        return rows if self.shard_group is None else gather_rows(rows, first, parameter.shape, self.shard_group)

    @torch.no_grad()
    def dcp_state(self, state: dict, saving: bool) -> dict:
        moments = state["optimizer"]["state"]
        for name, first in self.first_rows.items():
            for shard in (state["model"].get(name), *moments.get(name, {}).values()):
                if isinstance(shard, DTensor):
                    add_dcp_hooks(shard, first)
        if saving:
            # A rank without rows of a tensor takes no step for it, so its step count is not the tensor's. The same
            # where another replica saves the moments.
            moments = {name: of for name, of in moments.items() if any(map(_has_rows, of.values()))}
        return state | {"optimizer": state["optimizer"] | {"state": moments}}

    # ---- stragglers -----------------------------------------------------------------------------------------

    @property
    def last_gradient(self) -> nn.Parameter:
        return next(p for p in self.raw.values() if p.requires_grad)

    def blocking_collectives(self) -> list[tuple[object, str]]:
        gathering, reducing = self.wrapped.all_gather_pipeline, self.wrapped.grad_reduce_pipeline
        return [
            (gathering, "wait_bucket_ready"),
            (reducing, "wait_for_previous_grad_reduce"),
            (reducing, MEGATRON_GRAD_REDUCE),
        ]

    # ---- a dry run ------------------------------------------------------------------------------------------

    warmup_steps_before_timing = 1  # weights outside the layers stay gathered after the first step

    def compute_buffers(self) -> Iterator[Tensor]:
        """Weight buffers, and the gathered weights, whose storage is allocated once."""
        for group in self.wrapped.param_and_grad_buffer.parameter_groups:
            if group.model_weight_buffer:
                yield group.model_weight_buffer.data
        yield from self.raw.values()

    def attach_gradients(self, parameters: list[nn.Parameter]) -> None:
        """They are in the library's gradient buffers from the start."""
        self.wrapped.attach_grad_to_optimizer_state()


def _has_rows(shard) -> bool:
    return isinstance(shard, DTensor) and shard.to_local().numel() > 0


@contextmanager
def _storage_alone(model: Any) -> Iterator[None]:
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
