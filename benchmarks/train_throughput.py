"""Training speed and memory on this machine: our packed model beside transformers' EsmForMaskedLM, in one run.

    python -m benchmarks.train_throughput --dataset_dir quickstart/sample/processed/arrow [--output table.md]

The peer gets the same proteins, crops and masks, as padded batches (to 512, and to the longest of the batch) of as
many positions as our packs have tokens, the same optimiser, dtype and clipping, scaled-dot-product attention, and runs
both as a plain script would and with our process settings (allocator, thread spinning); ratios are against the faster
of the two. Speeds are real residues and <cls>/<eos> a second: padding is not counted. Every measurement is a fresh
process, rounds are interleaved, and the median is reported.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
import json
import time
from dataclasses import dataclass
from itertools import islice

from benchmarks.prepared import PreparedFlags
from benchmarks.rounds import cells, in_rounds
from benchmarks.tables import publish, where_measured
from common.cli import run
from common.flags import flag, parse_arguments
from common.models.esm2.alphabet import ESM2_TOKENS

MODES = {
    "ours": "ours, packed",
    "ours-compiled": "ours, packed, --torch_compile",
    "longest": "EsmForMaskedLM, padded to the longest",
    "pad512": "EsmForMaskedLM, padded to 512",
}


@dataclass
class Arguments(PreparedFlags):
    config_name: str = flag("facebook/esm2_t6_8M_UR50D", "The model.")
    tokens: int = flag(8192, "Tokens in a pack; positions in a padded batch.")
    max_seq_length: int = flag(512, "Crop, for all.")
    steps: int = flag(8, "Steps timed, after two that are not.")
    rounds: int = flag(3, "Times that every measurement is repeated.")
    dtypes: str = flag("fp32,bf16", "Which precisions.")
    compiled: bool = flag(False, "Measure --torch_compile too.")
    output: str | None = flag(None, "Also write the table there.")
    worker: str | None = flag(None, "Internal: measure this one in this process and print JSON.")


def measure(args: Arguments) -> dict:
    """One mode in this process: real tokens a second and peak resident memory."""
    import torch

    from benchmarks.peer import padded
    from common.data.collators import MaskingCollator, to_device
    from common.data.loader import PlannedOrder, TrainLoader
    from common.data.packing import BatchPlan
    from common.data.token_store import open_split
    from common.distributed.run import keep_freed_memory
    from common.models.esm2.config import load_config
    from common.models.esm2.model import build_model
    from common.models.layers.compiling import compile_layers
    from common.training.run_logger import peak_memory_gb

    mode, dtype, tuned = args.worker.split(":")
    if tuned == "tuned":
        keep_freed_memory()
    config = load_config(args.config_name)
    ours = mode.startswith("ours")
    if ours:
        model = build_model(config, seed=0)
        if mode == "ours-compiled":
            compile_layers(model, "cpu")
    else:
        from transformers import EsmForMaskedLM

        from common.compat import use_sdpa

        stock = config.to_transformers()
        use_sdpa(stock)
        model = EsmForMaskedLM(stock)
    store = open_split(args.dataset_dir, "train", ESM2_TOKENS)
    size = {"tokens_per_pack": args.tokens}
    if not ours:
        size = {"sequences_per_pack": args.tokens // args.max_seq_length}
    plan = BatchPlan(store.lengths, len(store), 0, args.max_seq_length, **size)
    loader = TrainLoader(PlannedOrder(store, plan, packs_per_step=1), MaskingCollator(ESM2_TOKENS, 0))
    prepared = [share.micro_batches[0] for share in islice(loader, args.steps + 2)]
    if not ours:
        width = args.max_seq_length if mode == "pad512" else 0
        prepared = [batch | padded(batch, width) for batch in prepared]

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    model.train()
    tokens = 0
    for number, batch in enumerate(prepared):
        if number == 2:
            started, tokens = time.perf_counter(), 0
        inputs = to_device(batch, torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            output = model(**inputs)
            loss = output.loss_sum / batch["num_targets"] if ours else output.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += batch["num_tokens"]
    speed = tokens / (time.perf_counter() - started)
    return {"tokens_per_second": speed, "peak_gb": peak_memory_gb(torch.device("cpu")), "loss": loss.item()}


def compare(args: Arguments) -> str:
    import torch  # noqa: F401  (its version)
    import transformers  # noqa: F401

    jobs = []
    for dtype in args.dtypes.split(","):
        jobs += [f"ours:{dtype}:tuned"] + ([f"ours-compiled:{dtype}:tuned"] if args.compiled else [])
        jobs += [f"{mode}:{dtype}:{tuned}" for mode in ("longest", "pad512") for tuned in ("plain", "tuned")]
    names = ("dataset_dir", "config_name", "tokens", "max_seq_length", "steps")
    flags = {name: getattr(args, name) for name in names}
    found = in_rounds("benchmarks.train_throughput", jobs, args.rounds, flags)
    hardware, command = where_measured("benchmarks.train_throughput", "torch", "transformers")
    lines = [
        f"{args.config_name}, {args.tokens} tokens a step, crops of {args.max_seq_length}, {hardware}",
        "",
        f"{command}, median of {args.rounds}",
        "",
        "| precision | model | tokens/s | spread | ours is faster by | peak memory, GB |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for dtype in args.dtypes.split(","):
        for job in (j for j in jobs if f":{dtype}:" in j):
            mode, _, tuned = job.split(":")
            name = MODES[mode] + (", our process settings" if tuned == "tuned" and not mode.startswith("ours") else "")
            ours = None if mode.startswith("ours") else found[f"ours:{dtype}:tuned"]
            lines.append(f"| {dtype} | {cells(name, found[job], ours)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    if args.worker:
        print(json.dumps(measure(args)))
        return
    table = compare(args)
    publish(table, args.output)


if __name__ == "__main__":
    run(main)
