"""Attention of sets on ranks that share a pack, beside that of the whole pack on one. Run by forked ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from common.distributed.world import World
from extras.families.sets.cp import CpSetLayout
from extras.speed.context_attention import COMM_TYPES, CpLayout, operator
from extras.speed.context_parallel import ContextGroup, CpSplit, create_cp_groups
from tests.extras.families.sets.cases import DIM, HEADS, PACKS, attended, inputs_of, layout_of

FILLERS = 3  # of a rank, behind its tokens


def compare() -> None:
    """In every rank: outputs and gradients of its tokens, eager and of the operator, are those of the whole pack."""
    world = World.from_environment(use_cpu=True)
    dist.init_process_group("gloo")
    create_cp_groups(world, world.size)
    packs = ("ragged", "empty sequences", "32 a set")
    for pack, layout, comm_type in itertools.product(packs, ("dual_chunk", "contiguous"), COMM_TYPES):
        hold_case(pack, layout, ContextGroup(world.cp_group, comm_type))
    dist.barrier()


def hold_case(pack: str, layout: str, context: ContextGroup) -> None:
    rank, case = context.rank, (pack, layout, context.comm_type)
    whole = layout_of(PACKS[pack])
    bounds = whole.table[0, :-1]
    qkv, grad, cos, sin = inputs_of(int(bounds[-1]), torch.float64)
    expected = attended(lambda x: whole.attention(x, cos, sin), qkv, grad)

    lengths = bounds.diff().numpy()
    split = CpSplit(lengths, context.size, layout, 1 if layout == "contiguous" else 2 * context.size)
    positions = F.pad(torch.from_numpy(split.positions(rank)), (0, FILLERS))
    arrays = (torch.from_numpy(x) for x in (split.real(), split.bounds()))
    sets = whole.table.int()  # a batch's, which has a sequence of fillers more
    shared = CpSetLayout(CpLayout(*arrays, positions.device, context), positions, sets if rank else sets[:, :-1])
    own = shared.own  # of this rank's tokens, those that are real
    sequences = torch.from_numpy(np.append(split.sequences(rank), [0] * FILLERS))[own]
    places = bounds[sequences] + positions[own]
    assert torch.equal(shared.numbers[own], whole.numbers[places]), case
    assert torch.equal(shared.positions[own], whole.positions[places]), case

    def slices(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(positions), *x.shape[1:], dtype=x.dtype).index_copy(0, own, x[places])

    tables, names = (slices(cos), slices(sin)), shared.names
    tensors = shared.real, shared.bounds, shared.sets
    eager: list[Callable] = [lambda x: shared.attention(x, *tables)]
    eager.append(lambda x: operator(x, *tables, *tensors, *names, 0)[0])
    compiled = [torch.compile(eager[0], backend="aot_eager", fullgraph=True)] if case[0] == "ragged" else []
    for attend in eager + compiled:
        out, gradient = attended(attend, slices(qkv), slices(grad))
        assert out.shape == (len(positions), HEADS * DIM)
        for found, exact in zip((out, gradient), expected, strict=True):
            torch.testing.assert_close(found[own], exact[places], rtol=0, atol=1e-12, msg=lambda m: f"{case}: {m}")
            assert not found.index_fill(0, own, 0).any(), "padding gets no attention and no gradient"
