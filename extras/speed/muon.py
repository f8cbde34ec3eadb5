"""--optim muon: Muon for the matrices of the layers, AdamW for embeddings, norms, biases and the output layer.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest orthogonal matrix, found by five Newton-Schulz
steps. Updates are scaled to AdamW's size (Liu et al. 2025, arXiv:2502.16982), so that --learning_rate and
--weight_decay mean the same for both. Query, key and value are matrices of their own, and so are a decoder's gate and
up, and each expert's.

A matrix is orthogonalised whole, by one rank: its owner. With sharded weights, ranks send their rows of the momentum
to the owner and get the rows of the update back. Of replicas, each owns a share of the matrices and sends the results
to the others. So any strategy on any number of ranks computes what one process does. The communication needs only to
know which rows of a matrix each rank holds.

In fp32 runs the Newton-Schulz steps compute in fp32, with --bf16 in bf16. (torch.optim.Muon, which always takes bf16,
turns a rounding difference of the gradient into one of up to 1.8e-2 of the update.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.distributed.shards import local_shard
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.models.layers.residual import Block
from common.training.optim import AdamW, OptimizerFlags, adamw_groups

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz steps, as in torch.optim.Muon
STEPS, EPSILON = 5, 1e-7
UPDATE_RMS = 0.2  # AdamW's, by which updates are scaled
ROWS_AT_A_TIME = 2**28  # elements of a rank's rows that are sent at a time: bounds the memory of a step


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest matrices with orthonormal rows or columns, about: singular values lie between 0.7 and 1.2.

    matrices: [B, m, n], which is overwritten; computes in its dtype.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPSILON))
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def newton_schulz_flops(block: Block, columns: int) -> float:
    """Floating-point operations of orthogonalising a block's matrices."""
    short, long = sorted((block.rows // block.parts, columns))
    return block.parts * STEPS * (4.0 * short**2 * long + 2.0 * short**3)


@dataclass(frozen=True)
class OwnedBlock:
    """A block of a parameter, and who orthogonalises it.

    number: of the parameter; replica, shard: of the owner; rows_of: how many of its rows each shard holds; here: this
    rank's, as a slice of its rows of the parameter.
    """

    number: int
    block: Block
    columns: int
    replica: int
    shard: int
    rows_of: tuple[int, ...]
    here: slice

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of each of the block's matrices, [rows / parts, columns]."""
        return self.block.rows // self.block.parts, self.columns

    @property
    def scale(self) -> float:
        """An orthogonal matrix of this shape times this has the RMS of an update of AdamW."""
        return UPDATE_RMS * math.sqrt(max(self.shape))

    def matrices(self, rows: Tensor) -> Tensor:
        """[rows, columns] -> [parts, rows / parts, columns]."""
        by_group = rows.view(self.block.groups, self.block.parts, -1, self.columns)
        return by_group.transpose(0, 1).reshape(self.block.parts, *self.shape)

    def rows(self, matrices: Tensor) -> Tensor:
        """The inverse of `matrices`."""
        by_part = matrices.reshape(self.block.parts, self.block.groups, -1, self.columns)
        return by_part.transpose(0, 1).reshape(self.block.rows, self.columns)


@dataclass(frozen=True)
class HeldParameter:
    """A parameter: its blocks, its columns, and the (first row, number of rows) that each shard holds."""

    blocks: Sequence[Block]
    columns: int
    held: Sequence[Sequence[int]]


def assign(parameters: Sequence[HeldParameter], replicas: int, shards: int, shard: int) -> list[list[OwnedBlock]]:
    """Give each block an owner, in groups that are sent one after the other. shard: this rank's.

    The owner is the least busy of all ranks, for the costliest block of a group first: all ranks agree, since that
    depends on shapes alone.
    """
    ranks = replicas * shards
    groups: list[list[tuple[int, Block, int]]] = []
    elements = math.inf
    for number, parameter in enumerate(parameters):
        first = 0
        for block in parameter.blocks:
            size = block.rows * parameter.columns
            if elements + size > ROWS_AT_A_TIME * shards:
                groups.append([])
                elements = 0
            groups[-1].append((number, block, first))
            elements += size
            first += block.rows
    busy = [0.0] * ranks
    owned = []
    for group in groups:
        costs = [newton_schulz_flops(block, parameters[number].columns) for number, block, _ in group]
        owners = [0] * len(group)
        for index in sorted(range(len(group)), key=lambda index: -costs[index]):
            owners[index] = busy.index(min(busy))
            busy[owners[index]] += costs[index]
        blocks = []
        for (number, block, first), owner in zip(group, owners, strict=True):
            parameter = parameters[number]
            spans = [(max(first, start), min(first + block.rows, start + rows)) for start, rows in parameter.held]
            rows_of = tuple(max(0, end - begin) for begin, end in spans)
            begin = spans[shard][0] - parameter.held[shard][0]
            here = slice(begin, begin + rows_of[shard]) if rows_of[shard] else slice(0, 0)
            blocks.append(OwnedBlock(number, block, parameter.columns, *divmod(owner, shards), rows_of, here))
        owned.append(blocks)
    return owned


@dataclass(frozen=True)
class StepCost:
    """What a step costs a rank beside AdamW's part.

    flops: of the rank with the most; bytes_sent: by this rank; temporary: bytes at a time, when activations are gone.
    """

    flops: float
    bytes_sent: int
    temporary: int


class Ranks(NamedTuple):
    """This rank in a process group; None: alone."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        return cls(group, dist.get_rank(group), dist.get_world_size(group)) if group else cls()


def step_cost(groups: Sequence[Sequence[OwnedBlock]], replicas: Ranks, shards: Ranks, itemsize: int) -> StepCost:
    """The cost of a step of blocks that `assign` has given owners. itemsize: bytes of an element that is sent."""
    flops, sent, temporary = [0.0] * (replicas.size * shards.size), 0, 0
    for group in groups:
        rows = [0] * replicas.size
        own: dict[tuple[int, int], int] = {}  # elements of the matrices of each shape
        for each in group:
            flops[each.replica * shards.size + each.shard] += newton_schulz_flops(each.block, each.columns)
            here, whole = each.rows_of[shards.rank] * each.columns, each.block.rows * each.columns
            rows[each.replica] += here
            if each.replica == replicas.rank:
                is_owner = each.shard == shards.rank
                sent += whole - here if is_owner else here  # rows of the update, or of the direction
                own[each.shape] = own.get(each.shape, 0) + is_owner * whole
        sent += (replicas.size - 1) * max(rows)
        # Of a Newton-Schulz step: input, two matmuls with it, output, and two square matrices.
        steps = [size * (4 + 2 * min(shape) / max(shape)) for shape, size in own.items()]
        held = sum(rows) + max(steps, default=0)
        if shards.size > 1:  # what is sent, what is received, and whole matrices
            held += sum(rows) + 2 * sum(own.values())
        gathered = sum(rows) + replicas.size * max(rows) + 2 * sum(own.values()) if replicas.size > 1 else 0
        temporary = max(temporary, held, gathered)
    return StepCost(max(flops), sent * itemsize, int(temporary) * itemsize)


class Muon(torch.optim.Optimizer):
    """Muon and AdamW over the parameters of a run. All ranks together.

    weights: what is updated; matrices: `Model.hidden_matrices`; dtype: of the Newton-Schulz steps and of what ranks
    send each other.
    """

    found_inf: Tensor | None = None  # see `update_unless`

    def __init__(
        self,
        weights: nn.Module,
        matrices: Mapping[str, Sequence[Block]],
        flags: OptimizerFlags,
        strategy: Strategy,
        world: World,
        dtype: torch.dtype,
    ):
        named = dict(weights.named_parameters())
        hidden = self._hidden = [named[name] for name in matrices]
        rest = [parameter for name, parameter in named.items() if name not in matrices]
        groups = adamw_groups(rest, flags)
        # Updates the first groups, with their part of this optimiser's state.
        self._adamw = AdamW(groups, lr=flags.learning_rate, fused=True)
        matrix_group = {"params": hidden, "weight_decay": flags.weight_decay, "momentum": MOMENTUM}
        super().__init__([*groups, matrix_group], {"lr": flags.learning_rate})

        self._device, self._dtype = world.device, dtype
        self._shards, self._replicas = Ranks.of(strategy.shard_group), Ranks.of(strategy.replica_group)
        own = [[first, len(rows)] for rows, first in map(local_shard, hidden)]
        held = world.gather(own, strategy.shard_group) if self._shards.size > 1 else [own]
        shards = held[: self._shards.size]
        parameters = [
            HeldParameter(blocks, parameter.shape[1], [shard[number] for shard in shards])
            for number, (blocks, parameter) in enumerate(zip(matrices.values(), hidden, strict=True))
        ]
        self._groups = assign(parameters, self._replicas.size, self._shards.size, self._shards.rank)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override]  # no closure
        """Update all weights."""
        *groups, group = self.param_groups
        self._adamw.state, self._adamw.param_groups = self.state, groups  # loading a state replaces both
        self._adamw.found_inf = self.found_inf
        self._adamw.step()
        # The host waits here, while AdamW's part runs. Chosen on the device, gradients and updates would be read and
        # written once more, to mask a NaN: 12 bytes a weight.
        if self.found_inf is not None and self.found_inf:
            return
        lr, momentum = group["lr"], group["momentum"]
        for parameter in self._hidden:
            self._momentum(parameter).lerp_(self._gradient(parameter), 1 - momentum)
        if lr == 0:
            return
        for blocks in self._groups:
            updates = self._updates(blocks, [self._direction(each, momentum) for each in blocks])
            for each, update in zip(blocks, updates, strict=True):
                weights = local_shard(self._hidden[each.number])[0][each.here]
                weights.mul_(1 - lr * group["weight_decay"])
                weights.add_(update.to(weights.device), alpha=-lr * each.scale)

    def cost(self) -> StepCost:
        return step_cost(self._groups, self._replicas, self._shards, self._dtype.itemsize)

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        """This rank's rows."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return _local(state["momentum_buffer"])

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        """This rank's rows. Megatron-FSDP gives a rank without rows none; it takes part in the all-to-all even so."""
        if parameter.grad is None:
            return torch.zeros_like(_local(parameter))
        return _local(parameter.grad).to(parameter.dtype)

    def _direction(self, each: OwnedBlock, momentum: float) -> Tensor:
        """Nesterov's, of this rank's rows of the block."""
        parameter = self._hidden[each.number]
        rows = self._gradient(parameter)[each.here].lerp(self._momentum(parameter)[each.here], momentum)
        return rows.to(self._device, self._dtype)

    def _updates(self, blocks: list[OwnedBlock], rows: list[Tensor]) -> list[Tensor]:
        """This rank's rows [rows, columns] of each block's update, from those of its direction."""
        own = [number for number, each in enumerate(blocks) if each.replica == self._replicas.rank]
        done = self._by_owners([blocks[number] for number in own], [rows[number] for number in own])
        if self._replicas.size == 1:
            return done
        shapes = [(each.rows_of[self._shards.rank], each.columns) for each in blocks]
        sizes = [
            [math.prod(shape) for shape, each in zip(shapes, blocks, strict=True) if each.replica == replica]
            for replica in range(self._replicas.size)
        ]
        longest = max(map(sum, sizes))
        sent = F.pad(self._flat(done), (0, longest - sum(sizes[self._replicas.rank])))
        gathered = sent.new_empty(self._replicas.size * longest)
        if longest:  # the same for all replicas
            dist.all_gather_into_tensor(gathered, sent, group=self._replicas.group)
        parts = [
            iter(of[: sum(size)].split(size))
            for of, size in zip(gathered.view(len(sizes), longest), sizes, strict=True)
        ]
        return [next(parts[each.replica]).view(shape) for each, shape in zip(blocks, shapes, strict=True)]

    def _by_owners(self, blocks: list[OwnedBlock], rows: list[Tensor]) -> list[Tensor]:
        """This rank's rows of each block's update, from those of its direction, for blocks that this replica owns."""
        if self._shards.size == 1:
            return orthogonal_rows(blocks, rows)
        me, shards = self._shards.rank, range(self._shards.size)
        order = sorted(range(len(blocks)), key=lambda number: blocks[number].shard)
        own = [each for each in blocks if each.shard == me]
        sent = [sum(each.rows_of[me] * each.columns for each in blocks if each.shard == shard) for shard in shards]
        received = [sum(each.rows_of[shard] * each.columns for each in own) for shard in shards]
        to_owners = self._flat([rows[number] for number in order])
        at_owner = to_owners.new_empty(sum(received))
        dist.all_to_all_single(at_owner, to_owners, received, sent, group=self._shards.group)
        pieces = at_owner.split([each.rows_of[shard] * each.columns for shard in shards for each in own])
        whole = [torch.cat(pieces[n :: len(own)]).view(-1, each.columns) for n, each in enumerate(own)]
        done = [update.split(each.rows_of) for each, update in zip(own, orthogonal_rows(own, whole), strict=True)]
        back = self._flat([of_shards[shard] for shard in shards for of_shards in done])
        updates = torch.empty_like(to_owners)
        dist.all_to_all_single(updates, back, sent, received, group=self._shards.group)
        parts = updates.split([rows[number].numel() for number in order])
        by_number = dict(zip(order, parts, strict=True))
        return [by_number[number].view(rows[number].shape) for number in range(len(blocks))]

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """All elements end to end."""
        none = torch.empty(0, dtype=self._dtype, device=self._device)
        return torch.cat([none, *(tensor.flatten() for tensor in tensors)])


def orthogonal_rows(blocks: Sequence[OwnedBlock], wholes: Sequence[Tensor]) -> list[Tensor]:
    """The orthogonalised blocks [rows, columns], matrices of the same shape at once."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for number, each in enumerate(blocks):
        by_shape.setdefault(each.shape, []).append(number)
    done: dict[int, Tensor] = {}
    for numbers in by_shape.values():
        matrices = torch.cat([blocks[number].matrices(wholes[number]) for number in numbers])
        parts = orthogonalise(matrices).split([blocks[number].block.parts for number in numbers])
        done |= {number: blocks[number].rows(part) for number, part in zip(numbers, parts, strict=True)}
    return [done[number] for number in range(len(blocks))]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
