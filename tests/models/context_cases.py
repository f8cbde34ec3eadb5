"""One pack on one process and on ranks that share it: logits, loss and every gradient of both. Run by forked ranks."""

from __future__ import annotations

import functools
import itertools
import weakref

import numpy as np
import torch
import torch.distributed as dist

from common.data.collators import IGNORE, FillingCollator, to_device
from common.distributed.world import World
from common.models.esm2.alphabet import MASK, PAD
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.models.layers.attention import rotary_tables
from common.models.layers.initialise import initialise
from common.models.layers.residual import Model
from extras.families.decoders.config import DecoderConfig
from extras.families.decoders.model import DecoderForCausalLM
from extras.speed.context_attention import COMM_TYPES, CpLayout, operator, ring_blocks
from extras.speed.context_parallel import ContextGroup, CpPack, CpSplit, create_cp_groups
from extras.speed.cp_batches import FilledSlices, SlicingCollator
from extras.speed.cp_model import enable_context_parallel

LENGTHS = {  # of the sequences of a pack
    "mixed": [1, 3, 16, 29, 70, 5, 41],
    "alone": [37],
    "shortest": [1],
    "long": [3000, 9],
}
LABELS = ("none", "first rank's", "last token", "all", "random", "a sequence without", "a micro-batch without")
CPU = torch.device("cpu")
PRECISIONS = ((False, False), (False, True), (True, True))  # token dropout, bf16


def make_batch(lengths: list[int], which: str, seed: int) -> dict:
    """A whole pack with labels of a kind; tokens that are asked for are <mask> now and then."""
    generator = np.random.default_rng(seed)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = generator.integers(4, 24, cu_seqlens[-1])
    asked = generator.random(len(ids)) < 0.3
    positions = np.arange(len(ids)) - np.repeat(cu_seqlens[:-1], lengths)
    if which == "none" or (which == "a micro-batch without" and seed % 2):
        asked[:] = False
    elif which == "first rank's":
        asked &= positions == 0
    elif which == "last token":
        asked[:] = False
        asked[-1] = True
    elif which == "all":
        asked[:] = True
    elif which == "a sequence without":
        asked[: cu_seqlens[1 + len(lengths) // 2]] = False
    labels = np.where(asked, ids, IGNORE)
    ids = np.where(asked & (generator.random(len(ids)) < 0.8), MASK, ids)
    return {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "max_seqlen": max(lengths),
        "num_targets": int(asked.sum()),
        "num_tokens": len(ids),
        "sum_squared_lengths": int((np.array(lengths) ** 2).sum()),
        "num_sequences": len(lengths),
        "num_unknown": 0,
    }


SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DECODERS = {  # {kind: what its configuration has beside the sizes}
    "llama": {"rope_scaling": SCALING | {"original_max_position_embeddings": 16}, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "rope_theta": 1e6},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


def model_of(kind: bool | str) -> Model:
    """kind: of DECODERS, or an ESM-2 with or without token dropout."""
    if isinstance(kind, str):
        sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = DecoderConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **DECODERS[kind])
        model: Model = DecoderForCausalLM(config)
        initialise(model, 1, config.initializer_range)
    else:
        model = build_model(esm2_config(layers=2, hidden_size=64, heads=4, token_dropout=kind), seed=1)
    with torch.no_grad():  # biases are zero at first, and weights so small that attention is nearly uniform
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) / 8
            )
    return model


def gradients(model: Model, batches: list[dict], bf16: bool) -> tuple[torch.Tensor, dict]:
    """Summed over micro-batches; a router's loss is in it."""
    model.zero_grad()
    total = torch.zeros(())
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(**to_device(batch, CPU))
        router = getattr(output, "router", None)
        loss = output.loss_sum if router is None else output.loss_sum + 10 * router
        loss.backward()
        total += loss.detach()
    return total, {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def logits_of(model: Model, batch: dict, bf16: bool) -> torch.Tensor:
    inputs = {k: v for k, v in to_device(batch, CPU).items() if k != "labels"}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return model(**inputs).logits


def filled(batch: dict, tokens: int) -> dict:
    """Slices filled up to so many tokens, at least, and 16 sequences."""
    return FilledSlices(FillingCollator(lambda *_: batch, tokens, 16, batch["max_seqlen"], 0, PAD))(None, None)


def hold_bits(model: Model, batches: list[dict], bf16: bool) -> None:
    """Empty sequences, up to the tokens that the model fills up to itself, change no bit."""
    loss, expected = gradients(model, batches, bf16)
    same, found = gradients(model, [filled(batch, tokens=0) for batch in batches], bf16)
    assert torch.equal(same, loss)
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


def hold_operator(context: ContextGroup, batch: dict) -> None:
    """What compiled layers call computes, forward and backward, what others call: of a decoder's heads."""
    shared, generator = to_device(batch, CPU)["cp_pack"], torch.Generator().manual_seed(context.rank)
    qkv, grad = (torch.randn(len(batch["input_ids"]), n, 8, generator=generator) for n in (8, 4))
    tables = rotary_tables(shared.positions, 8)
    layout, results = CpLayout(shared.real, shared.bounds, CPU, context), []
    for attend in (
        lambda x: layout.attention(x, *tables, kv_heads=2),
        lambda x: operator(x, *tables, shared.real, shared.bounds, layout.sets, *layout.names, 2)[0],
    ):
        x = qkv.clone().requires_grad_()
        out = attend(x)
        out.backward(grad.flatten(1))
        results.append((out.detach(), x.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def compare(cp_size: int, cases: list[tuple], out: str) -> None:
    """In every rank: each case (way, layout, multiple, kind, bf16, lengths, labels) against the whole packs here.

    Rank 0 writes what differs and by how much: [case, what, distance, scale, cosine].
    """
    world = World.from_environment(use_cpu=True)
    dist.init_process_group("gloo")
    create_cp_groups(world, cp_size)
    mesh, found = world.mesh, []

    @functools.cache  # ways and layouts are compared to the same
    def reference(kind: bool | str, bf16: bool, lengths: str, labels: str) -> tuple[torch.Tensor, dict, torch.Tensor]:
        whole, packs = model_of(kind), packs_of(lengths, labels)
        return *gradients(whole, packs, bf16), logits_of(whole, packs[0], bf16)

    def packs_of(lengths: str, labels: str) -> list[dict]:
        """Two micro-batches for each data rank; of a long one, one."""
        return [make_batch(LENGTHS[lengths], labels, seed=n) for n in range((lengths != "long") + mesh.dp_size)]

    for number, case in enumerate(cases):
        way, layout, multiple, kind, bf16, lengths, labels = case
        packs = packs_of(lengths, labels)
        shared = model_of(kind)
        enable_context_parallel(shared, world.cp_group, way)
        mine = packs[mesh.dp_rank :: mesh.dp_size]
        slices = [
            SlicingCollator(lambda *_, batch=b: batch, mesh, layout, multiple, PAD, MASK)(None, None) for b in mine
        ]
        if isinstance(kind, str):
            hold_operator(ContextGroup(world.cp_group, way), slices[0])
        elif number % 4 == 1:  # a decoder does not fill up packs itself
            hold_bits(shared, slices, bf16)
        if number % 2 and shared.takes_fillers:  # fillers and empty sequences, in no shared sequence
            slices = [filled(b, tokens=len(b["input_ids"]) + 100) for b in slices]
        own_loss, own = gradients(shared, slices, bf16)
        together = torch.cat([own_loss.view(1), *(value.flatten() for value in own.values())])
        dist.all_reduce(together)
        own_loss, *parts = together.split([1, *(value.numel() for value in own.values())])
        own = {name: part.view_as(own[name]) for name, part in zip(own, parts, strict=True)}
        got = logits_of(shared, slices[0], bf16)
        bounds, real = (slices[0][f"cp_{name}"][mesh.cp_rank] for name in ("bounds", "real"))
        back = torch.zeros(mine[0]["num_tokens"], got.shape[-1])
        for n, start in enumerate(mine[0]["cu_seqlens"][:-1].tolist()):
            of_sequence = slice(int(bounds[n]), int(bounds[n]) + int(real[n]))
            back[start + slices[0]["cp_positions"][of_sequence]] = got[of_sequence]
        dist.all_reduce(back, group=world.cp_group)
        counts = torch.tensor([sum(b[key] for b in slices) for key in ("num_tokens", "num_targets", "num_sequences")])
        dist.all_reduce(counts)
        assert counts.tolist() == [sum(b[k] for b in packs) for k in ("num_tokens", "num_targets", "num_sequences")]
        if world.is_main:
            loss, grads, logits = reference(kind, bf16, lengths, labels)
            found.append([case, "loss", *_distance(own_loss, loss)])
            found += [[case, name, *_distance(own[name], grads[name])] for name in grads]
            found.append([case, "logits", *_distance(back, logits)])
    if world.is_main:
        torch.save(found, out)
    dist.barrier()


def hold_blocks() -> None:
    """On every rank: the ring frees each block of keys once the next one has arrived."""
    world = World.from_environment(use_cpu=True)
    dist.init_process_group("gloo")
    create_cp_groups(world, world.size)
    slices = CpSplit(np.array([64]), world.size, "contiguous")
    arrays = (slices.positions(world.rank), slices.bounds(), slices.real())
    shared = CpPack(*map(torch.from_numpy, arrays), torch.tensor([64]), torch.tensor([0]))
    seen, ranks = [], []
    for rank, block in ring_blocks(
        torch.full((16, 2, 1, 4), float(world.rank)),
        CpLayout(shared.real, shared.bounds, CPU, ContextGroup(world.cp_group)),
    ):
        seen.append(weakref.ref(block))
        ranks.append(rank)
        assert (block == rank).all()
        assert [each() is None for each in seen] == [True] * (len(seen) - 1) + [False], "blocks before it are gone"
    assert sorted(ranks) == list(range(world.size))
    dist.barrier()


def _distance(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float]:
    a, b = a.double().flatten(), b.double().flatten()
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=0).item() if b.norm() > 0 else 1.0
    return (a - b).norm().item(), b.norm().item(), cosine


def all_cases(cp_size: int) -> list[tuple]:
    """Ways and layouts each with all lengths, with all labels and with both precisions; not all of it with all."""
    dual, padded, contiguous = ("dual_chunk", 2 * cp_size), ("dual_chunk", 16), ("contiguous", 1)
    ways = list(itertools.product(COMM_TYPES, (dual, contiguous)))
    cases = [
        (w, *layout, True, False, lengths, "random")
        for w, layout in ways
        for lengths in ("mixed", "alone" if cp_size == 2 else "shortest")
    ]
    cases.append((list(COMM_TYPES)[cp_size == 4], *dual, True, False, "long", "random"))
    cases += [(w, *padded, dropout, bf16, "mixed", "random") for w in COMM_TYPES for dropout, bf16 in PRECISIONS]
    in_turn = ways if cp_size == 2 else ways[::-1]  # other pairs with other ranks
    of_labels = zip(itertools.cycle(in_turn), LABELS, strict=False)
    return cases + [(w, *layout, False, False, "mixed", labels) for (w, layout), labels in of_labels]


def decoder_cases(cp_size: int) -> list[tuple]:
    """As `all_cases`, of decoders: every kind with both ways, all labels, and a longer padding."""
    dual, padded = ("dual_chunk", 2 * cp_size), ("dual_chunk", 16)
    kinds = itertools.cycle(DECODERS)
    cases = [(way, *dual, kind, False, "mixed", "all") for way, kind in itertools.product(COMM_TYPES, DECODERS)]
    of_labels = zip(LABELS, itertools.cycle(COMM_TYPES), kinds, strict=False)
    cases += [(way, *dual, kind, False, "mixed", labels) for labels, way, kind in of_labels]
    cases += [(way, *padded, "llama", True, "mixed", "random") for way in COMM_TYPES]
    return cases + [("p2p", *padded, "mixtral", False, "alone" if cp_size == 2 else "shortest", "all")]
