"""What sharing packs costs and saves: a forward and backward pass on ranks that share a sequence, and on one alone.

    python -m benchmarks.context_parallel [--output benchmarks/results/context_parallel_cpu.md]

One thread a rank, one sequence a pack, fp32, DistributedDataParallel's gradient all-reduce left out: what remains is
the layers and context parallelism. Activations are the bytes of all tensors that autograd keeps for the backward pass.
Bytes moved are those a rank hands to torch.distributed in one forward and backward pass, counted at its calls; in
theory, with b = cp - 1 blocks of keys and values for each layer: p2p b forward, b backward and b + 1 of their
gradients; all_gather b forward, b backward and b of gradients. Gradients travel in fp32.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import json
import os
import statistics
import time
from dataclasses import dataclass

from benchmarks.measuring import completed, publish, say, torchrun, where_measured, words
from common.cli import UserError, run
from common.flags import flag, parse_arguments
from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.layers.residual import Model

WAYS = {"p2p": "dual_chunk", "all_gather": "dual_chunk", "p2p, contiguous": "contiguous"}
HEADS = {"esm2": (20, 20), "llama": (20, 5)}  # of queries, and of keys and values, of 16 numbers each


@dataclass
class Arguments:
    lengths: str = flag("2048,8192,32768", "Tokens of the sequence.")
    model: str = flag("esm2", "esm2, or llama: causal, with four heads of queries to one of keys.")
    layers: int = flag(2, "Layers, of the 8M model's width.")
    cp_size: int = flag(2, "Ranks that share it.")
    rounds: int = flag(3, "Times that every measurement is repeated; sequences above 10,000 tokens once.")
    output: str | None = flag(None, "Also write the table there.")
    worker: str | None = flag(None, "Internal: measure this way in the ranks of a torchrun, and print JSON.")


def measure(args: Arguments) -> dict | None:
    """Seconds, activations and bytes of one pass on this rank, of the largest rank; on rank 0."""
    import torch
    import torch.distributed as dist

    from common.data.collators import MaskingCollator, to_device
    from common.data.crops import Pack
    from common.distributed.process_group import keep_freed_memory
    from common.distributed.world import World
    from extras.families.text.contexts import CausalCollator
    from extras.speed.context_parallel import create_cp_groups
    from extras.speed.cp_batches import SlicingCollator
    from extras.speed.cp_model import enable_context_parallel

    keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = World.from_environment(use_cpu=True)
    length = int(args.lengths)
    ids = torch.randint(4, 24, (length,), generator=torch.Generator().manual_seed(0)).to(torch.uint8).numpy()
    pack = Pack(*(torch.tensor([n]).numpy() for n in (0, 0, length)), epoch=0)
    collator = MaskingCollator(ESM2_TOKENS, seed=0) if args.model == "esm2" else CausalCollator(length)
    model = model_of(args)
    if world.size > 1:
        create_cp_groups(world, world.size)
        layout = WAYS[args.worker]
        multiple = 1 if layout == "contiguous" else 2 * world.size
        tokens = ESM2_TOKENS.pad, ESM2_TOKENS.mask
        collator = SlicingCollator(collator, world.mesh, layout, multiple, *tokens)
        enable_context_parallel(model, world.cp_group, args.worker.partition(",")[0])
    batch = to_device(collator(pack, ids), world.device)
    moved = _count_bytes(world.size)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    seconds = []
    for number in range(2 if length <= 10_000 else 1):
        moved.clear()
        dist.barrier()
        started = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(**batch).loss_sum
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        if number == 0:
            activations = sum(size for place, size in kept.items() if place not in weights)
        loss.backward()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    found = world.gather((seconds[-1], activations, sum(moved)))
    dist.destroy_process_group()
    of_largest = (max(values) for values in zip(*found, strict=True))
    return dict(zip(("seconds", "activations", "bytes"), of_largest, strict=True))


def model_of(args: Arguments) -> Model:
    """Random weights, on the CPU."""
    from common.models.esm2.config import esm2_config
    from common.models.esm2.model import build_model
    from common.models.layers.initialise import initialise
    from extras.families.decoders.config import DecoderConfig
    from extras.families.decoders.model import DecoderForCausalLM

    heads, kv_heads = HEADS[args.model]
    if args.model == "esm2":
        return build_model(esm2_config(layers=args.layers, hidden_size=320, heads=heads), seed=0)
    sizes = {"vocab_size": 272, "hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": args.layers}
    config = DecoderConfig(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads)
    model = DecoderForCausalLM(config)
    initialise(model, 0, config.initializer_range)
    return model


def _count_bytes(size: int) -> list[int]:
    """Of what this rank sends from now on, appended with every call."""
    import torch.distributed as dist

    from extras.speed import context_attention

    sent: list[int] = []
    send_recv, gather, scatter = dist.batch_isend_irecv, context_attention.all_gather, context_attention.reduce_scatter

    def batch_isend_irecv(ways):
        sent.extend(way.tensor.nbytes for way in ways if way.op is dist.isend)
        return send_recv(ways)

    def all_gather(out, own, **how):
        sent.append(own.nbytes * (size - 1))
        return gather(out, own, **how)

    def reduce_scatter(own, everyone, **how):
        sent.append(own.nbytes * (size - 1))
        return scatter(own, everyone, **how)

    dist.batch_isend_irecv = batch_isend_irecv
    context_attention.all_gather, context_attention.reduce_scatter = all_gather, reduce_scatter
    return sent


def in_theory(args: Arguments, way: str, length: int) -> float:
    """Bytes that a rank sends in a forward and a backward pass."""
    block = 2 * 4 * 16 * HEADS[args.model][1] * length / args.cp_size  # keys and values, fp32
    others = args.cp_size - 1
    return args.layers * block * (2 * others + (others + 1 if way.startswith("p2p") else others))


def compare(args: Arguments) -> str:
    hardware, command = where_measured("benchmarks.context_parallel", "torch")
    heads = [str(number) for number in dict.fromkeys(HEADS[args.model])]
    lines = [
        f"# Context parallelism on {args.cp_size} ranks",
        "",
        f"{args.model}: {args.layers} layers of 320 and {' and '.join(heads)} heads, "
        f"fp32, one thread a rank. {hardware}",
        "",
        command,
        "",
        "| tokens | way | pass, s | of one rank's / cp | activations, MB | of one's / cp | sent, MB | in theory |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    ways = [way for way, layout in WAYS.items() if args.model == "esm2" or layout == "dual_chunk"]
    cases = {"one rank": 1} | dict.fromkeys(ways, args.cp_size)
    for length in map(int, args.lengths.split(",")):
        found: dict[str, list[dict]] = {way: [] for way in cases}
        for _ in range(args.rounds if length <= 10_000 else 1):
            for way, ranks in cases.items():
                found[way].append(_in_ranks(args, way, ranks, length))
                say(f"{length} {way}: {found[way][-1]}")
        seconds = {way: statistics.median(each["seconds"] for each in runs) for way, runs in found.items()}
        kept = {way: runs[0]["activations"] for way, runs in found.items()}
        for way, ranks in cases.items():
            cells = [f"{length:,}", way, f"{seconds[way]:.2f}"]
            cells.append(f"{seconds[way] * ranks / seconds['one rank']:.2f}")
            cells += [f"{kept[way] / 1e6:,.1f}", f"{kept[way] * ranks / kept['one rank']:.3f}"]
            sent = found[way][0]["bytes"] / 1e6
            cells += [f"{sent:,.1f}", f"{in_theory(args, way, length) / 1e6:,.1f}" if ranks > 1 else "0.0"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _in_ranks(args: Arguments, way: str, ranks: int, length: int) -> dict:
    flags = {"worker": way, "model": args.model, "layers": args.layers, "cp_size": args.cp_size, "lengths": length}
    command = [*torchrun(ranks), "-m", "benchmarks.context_parallel", *words(flags)]
    done = completed(command, f"{length} tokens, {way}", os.environ | {"OMP_NUM_THREADS": "1"})
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    if args.worker:
        found = measure(args)
        if os.environ["RANK"] == "0":
            print(json.dumps(found))
        return
    if args.model not in HEADS:
        raise UserError(f"--model {args.model}: choose {' or '.join(HEADS)}")
    publish(compare(args), args.output)


if __name__ == "__main__":
    run(main)
