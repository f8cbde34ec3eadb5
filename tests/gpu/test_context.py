"""Context parallelism on GPUs: blocks of keys on one of them, packs that two share. Tolerances follow
from the formats' precision. What needs two GPUs has not run yet (docs/hardware.md)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from common.data.collators import to_device
from common.distributed.process_group import ProcessFlags, distributed_run
from common.models.esm2.alphabet import MASK, PAD
from common.models.esm2.config import HIDDEN_ACT, esm2_config
from common.models.esm2.model import Esm2ForMaskedLM, build_model
from extras.speed import block_attention as attention
from extras.speed.context_parallel import CpSplit
from extras.speed.cp_batches import SlicingCollator
from extras.speed.cp_model import enable_context_parallel
from tests.gpu.test_runs import BACKENDS, TWO_GPUS
from tests.gpu.test_training import relative
from tests.models.context_cases import LENGTHS, make_batch
from tests.training_fixtures import on_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
DUAL, AS_THE_RECIPE, CONTIGUOUS = ("dual_chunk", 4), ("dual_chunk", 16), ("contiguous", 1)
# (--cp_comm_type, layout, multiple)
WAYS = {
    "torch": [(way, *layout) for way in ("p2p", "all_gather") for layout in (DUAL, AS_THE_RECIPE, CONTIGUOUS)],
    "te": [(way, *layout) for way in ("p2p", "all_gather", "a2a") for layout in (DUAL, AS_THE_RECIPE)],
}
ROUNDING = {True: 0.05, False: 1e-4}  # of bf16: 2^-8 a step, and a few steps; of fp32, without TF32


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_cp_attention_by_blocks_equals_full_attention(lengths, bf16):
    """Of four ranks, one after the other on one GPU: with bf16 by flash attention's own kernels, with fp32 by ours."""
    device, cp, heads, dim = "cuda", 4, 4, 64
    slices = CpSplit(np.array(LENGTHS[lengths]), cp, "contiguous")
    parts = attention.Bounds.make(torch.from_numpy(slices.bounds()), device)
    starts = [0, *np.cumsum(LENGTHS[lengths]).tolist()]
    (all_of_it,) = attention.Bounds.make(torch.tensor([starts]), "cpu")
    random = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(starts[-1], heads, dim, generator=random).to(torch.bfloat16) for _ in range(4))
    out, lse = attention.attend_block(*(x.double() for x in (q, k, v)), all_of_it, all_of_it)
    whole = attention.block_gradients(*(x.double() for x in (grad, q, k, v)), out, lse, all_of_it, all_of_it)

    places = [slices.positions(r) + np.array(starts)[slices.sequences(r)] for r in range(cp)]
    q, k, v, grad = (x.to(device, torch.bfloat16 if bf16 else torch.float32) for x in (q, k, v, grad))
    found = {name: torch.zeros(q.shape, device=device) for name in ("out", "dq", "dk", "dv")}
    for rank, mine in enumerate(places):
        if not len(mine):
            continue  # what a rank without a token does, the ranks themselves show
        others = [(rank + turn) % cp for turn in range(cp)]  # its own first, as in the ring
        merged = None
        for other in others:
            part = attention.attend_block(q[mine], k[places[other]], v[places[other]], parts[rank], parts[other])
            merged = part if merged is None else attention.merge_blocks(*merged, *part)
        found["out"][mine] = merged[0]
        for other in others:
            theirs = places[other]
            inputs = grad[mine], q[mine], k[theirs], v[theirs], *merged
            dq, dk, dv = attention.block_gradients(*inputs, parts[rank], parts[other])
            for name, places_of, values in (("dq", mine, dq), ("dk", theirs, dk), ("dv", theirs, dv)):
                found[name][places_of] += values
    for name, expected in zip(found, (out, *whole), strict=True):
        # Over one key alone nothing depends on queries and keys: only rounding is left of their gradients.
        scale = expected.norm() if expected.norm() > 1e-6 else expected.numel() ** 0.5
        assert (found[name].double().cpu() - expected).norm() <= ROUNDING[bf16] * scale, name


@TWO_GPUS
@pytest.mark.parametrize("backend", BACKENDS)
def test_cp_on_two_gpus_equals_one(tmp_path, backend):
    precisions = (True, False) if backend == "torch" else (True,)
    cases = [(*way, lengths, bf16) for way in WAYS[backend] for lengths in ("mixed", "long") for bf16 in precisions]
    codes, said = on_ranks(2, compare, backend, cases, str(tmp_path / "found"))
    assert codes == [0, 0], "\n".join(said)
    found = torch.load(tmp_path / "found")
    assert len(found) == len(cases)
    wrong = []
    for case, differences in found:
        assert len(differences) > 30
        wrong += [(case, name, value) for name, value in differences.items() if not value <= ROUNDING[case[-1]]]
    assert not wrong, "\n".join(map(str, wrong[:20]))


def compare(backend: str, cases: list[tuple], out: str) -> None:
    """On each rank: every case's two packs whole, then shared. Rank 0 writes [case, {loss and gradients: difference}].

    Both in the case's own precision, relative to the whole packs'.
    """
    with distributed_run(ProcessFlags(cp_size=2)) as world:
        device, found = world.device, []
        for case in cases:
            way, layout, multiple, lengths, bf16 = case
            packs = [make_batch(LENGTHS[lengths], "random", seed=n) for n in range(2)]
            expected = loss_and_gradients(model_of(backend, device), packs, bf16, device)
            shared = model_of(backend, device)
            enable_context_parallel(shared, world.cp_group, way)
            mine = [
                SlicingCollator(lambda *_, whole=whole: whole, world.mesh, layout, multiple, PAD, MASK)(None, None)
                for whole in packs
            ]
            ours = loss_and_gradients(shared, mine, bf16, device)
            for value in ours.values():
                dist.all_reduce(value)
            found.append([case, {name: relative(ours[name], expected[name]) for name in expected}])
        if world.is_main:
            torch.save(found, out)
        dist.barrier()


def model_of(backend: str, device: torch.device) -> Esm2ForMaskedLM:
    """The same weights for every backend, large enough for attention to be far from uniform, and no bias zero."""
    model = build_model(esm2_config(3, 320, 20, hidden_act=HIDDEN_ACT["tanh"]), 1, device, backend)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            parameter.add_(noise.to(device) / 32)
    return model


def loss_and_gradients(model, batches: list[dict], bf16: bool, device: torch.device) -> dict[str, torch.Tensor]:
    """Summed over micro-batches."""
    total = torch.zeros((), device=device)
    for batch in batches:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = model(**to_device(batch, device)).loss_sum
        loss.backward()
        total += loss.detach()
    return {"loss": total} | {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
