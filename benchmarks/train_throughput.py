"""Training speed and memory on this machine: our packed model beside transformers' EsmForMaskedLM, in one run.

    python -m benchmarks.train_throughput --dataset_dir quickstart/sample/processed/arrow [--output table.md]

The peer gets the same proteins, crops and masks, as padded batches (to 512, and to the longest of the batch) of as
many positions as our packs have tokens, the same optimiser, dtype and clipping, scaled-dot-product attention, and runs
both as a plain script would and with our process settings (allocator, thread spinning); ratios are against the faster
of the two. Speeds are real residues and <cls>/<eos> a second: padding is not counted. Every measurement is a fresh
process, rounds are interleaved, and the median is reported.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
from dataclasses import dataclass
from itertools import islice

from benchmarks.measuring import (
    WARMUP,
    PreparedFlags,
    in_rounds,
    speed_cells,
    training_speed,
    where_measured,
    worker_or_table,
)
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
    steps: int = flag(8, f"Steps timed, after {WARMUP} that are not.")
    rounds: int = flag(3, "Times that every measurement is repeated.")
    dtypes: str = flag("fp32,bf16", "Which precisions.")
    compiled: bool = flag(False, "Measure --torch_compile too.")
    output: str | None = flag(None, "Also write the table there.")
    worker: str | None = flag(None, "Internal: measure this one in this process and print JSON.")


def measure(args: Arguments) -> dict:
    """One mode in this process: real tokens a second and peak resident memory."""
    import torch

    from common.data.collators import MaskingCollator
    from common.data.loader import PlannedOrder, TrainLoader
    from common.data.packing import BatchPlan
    from common.data.token_store import open_split
    from common.distributed.process_group import keep_freed_memory
    from common.models.esm2.config import load_config
    from common.models.esm2.model import Esm2ForMaskedLM
    from common.models.layers.compiling import compile_layers
    from common.models.layers.initialise import initialise
    from extras.interop.hf_backend import StockEsm

    mode, dtype, tuned = args.worker.split(":")
    if tuned == "tuned":
        keep_freed_memory()
    config = load_config(args.config_name)
    ours = mode.startswith("ours")
    with torch.device("meta"):
        model = Esm2ForMaskedLM(config) if ours else StockEsm(config)
    model.to_empty(device="cpu")
    initialise(model, 0, config.initializer_range)
    if mode == "ours-compiled":
        compile_layers(model, "cpu")
    store = open_split(args.dataset_dir, "train", ESM2_TOKENS)
    size = {"tokens_per_pack": args.tokens}
    if not ours:
        size = {"sequences_per_pack": args.tokens // args.max_seq_length}
    plan = BatchPlan(store.lengths, len(store), 0, args.max_seq_length, **size)
    loader = TrainLoader(PlannedOrder(store, plan, packs_per_step=1), MaskingCollator(ESM2_TOKENS, 0))
    prepared = [share.micro_batches[0] for share in islice(loader, args.steps + WARMUP)]
    if mode == "pad512":  # to this width; else to the longest
        prepared = [batch | {"max_seqlen": args.max_seq_length} for batch in prepared]
    return training_speed(model, prepared, dtype, ours=True)


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
            lines.append(f"| {dtype} | {speed_cells(name, found[job], ours)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    worker_or_table(parse_arguments(__doc__, Arguments), measure, compare)


if __name__ == "__main__":
    run(main)
