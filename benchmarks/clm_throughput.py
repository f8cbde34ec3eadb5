"""Training speed of Llamas on this machine: our packed decoder beside transformers' own loop, in one run.

    python -m benchmarks.clm_throughput [--documents texts.jsonl] [--output table.md]

The peer is LlamaForCausalLM, scaled-dot-product attention, trained as a plain script does: the same documents either
laid end to end and cut into contexts, as run_clm.py does (packed, documents see each other), or one a row, cut at the
context and padded to the longest of the batch. Same optimiser, dtype and clipping, as many positions a step; ratios
are against the faster of the peer as it is and with our process settings. Speeds are real tokens a second: padding
is not counted. Without --documents the documents are docstrings of the installed torch and transformers. Every
measurement is a fresh process, rounds are interleaved, and the median is reported.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import ast
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks.measuring import WARMUP, in_rounds, speed_cells, training_speed, where_measured, worker_or_table
from common.cli import UserError, run
from common.flags import Flags, flag, parse_arguments

# Hidden size, layers, heads, key/value heads, feed-forward width, vocabulary.
MODELS = {"tiny": (256, 6, 8, 4, 688, 2048), "110M": (768, 12, 12, 12, 2048, 32000)}
MODES = {
    "ours": "ours, packed",
    "ours-masks": "ours, packed, --document_masks",
    "ours-compiled": "ours, packed, --torch_compile",
    "packed": "LlamaForCausalLM, packed",
    "padded": "LlamaForCausalLM, a document a row, padded to the longest",
}


@dataclass
class Arguments(Flags):
    documents: str | None = flag(None, "JSON lines with a field `text`. Default: docstrings of what is installed.")
    models: str = flag("tiny,110M", f"Which Llamas: {', '.join(MODELS)}.")
    context: int = flag(512, "Tokens in a context.")
    contexts: int = flag(8, "Contexts in a batch.")
    steps: int = flag(6, f"Steps timed, after {WARMUP} that are not.")
    rounds: int = flag(3, "Times that every measurement is repeated.")
    dtypes: str = flag("fp32,bf16", "Which precisions.")
    compiled: bool = flag(False, "Measure --torch_compile too.")
    output: str | None = flag(None, "Also write the table there.")
    worker: str | None = flag(None, "Internal: measure this one in this process and print JSON.")

    def check(self) -> None:
        if unknown := set(self.models.split(",")) - MODELS.keys():
            raise UserError(f"--models {', '.join(sorted(unknown))}: choose {', '.join(MODELS)}")
        self.require_at_least(2, "context")
        self.require_at_least(1, "contexts", "steps", "rounds")


def documents(file: str | None) -> Iterator[str]:
    """Texts in a fixed order, round and round."""
    if file:
        texts = [json.loads(line)["text"] for line in Path(file).read_text(encoding="utf-8").splitlines()]
    else:
        texts = list(_docstrings("transformers")) + list(_docstrings("torch"))
    while texts:
        yield from texts
    raise UserError(f"--documents {file}: no line in it")


def _docstrings(package: str) -> Iterator[str]:
    (root,) = importlib.util.find_spec(package).submodule_search_locations
    for path in sorted(Path(root).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield text


def measure(args: Arguments) -> dict:
    """One mode in this process: real tokens a second and peak resident memory."""
    import numpy as np
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from common.compat import use_attention
    from common.data.crops import Pack
    from common.distributed.process_group import keep_freed_memory
    from common.models.layers.compiling import compile_layers
    from common.models.layers.initialise import initialise
    from extras.families.decoders.config import DecoderConfig
    from extras.families.decoders.model import DecoderForCausalLM
    from extras.families.text.contexts import CausalCollator
    from extras.families.text.tokenizers import BYTES, load_tokenizer

    name, mode, dtype, tuned = args.worker.split(":")
    if tuned == "tuned":
        keep_freed_memory()
    hidden, layers, heads, kv_heads, width, vocabulary = MODELS[name]
    config = DecoderConfig(
        vocab_size=vocabulary,
        max_position_embeddings=args.context,
        num_key_value_heads=kv_heads,
        intermediate_size=width,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    ours = mode.startswith("ours")
    torch.manual_seed(0)
    if ours:
        model = DecoderForCausalLM(config)
        initialise(model, 0, config.initializer_range)
        if mode == "ours-compiled":
            compile_layers(model, "cpu")
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        stock = LlamaConfig(**config.content())
        use_attention(stock)
        model = LlamaForCausalLM(stock)

    tokenizer, _ = load_tokenizer(BYTES)
    texts = documents(args.documents)

    def tokenised() -> Iterator[np.ndarray]:
        for text in texts:
            yield np.append(tokenizer.encode([text])[0], tokenizer.eos_id)

    def padded() -> dict:
        rows = [torch.from_numpy(ids[: args.context].astype(np.int64)) for ids in islice(source, args.contexts)]
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = pad_sequence(rows, batch_first=True)
        labels = ids.masked_fill(~mask, -100)
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels, "num_tokens": int(mask.sum())}

    left = np.zeros(0, np.int64)  # of a document that was cut

    def contexts() -> tuple[np.ndarray, list[int]]:
        """Tokens of a batch [B x L], and the lengths of the documents' pieces in them."""
        nonlocal left
        missing, taken = args.contexts * args.context, []
        while missing:
            take = min(missing, args.context - (args.contexts * args.context - missing) % args.context)
            piece = left if len(left) else next(source)
            taken.append(piece[:take])
            left, missing = piece[take:], missing - len(taken[-1])
        return np.concatenate(taken), [len(piece) for piece in taken]

    source = tokenised()
    prepared = []
    for _ in range(args.steps + WARMUP):
        if mode == "padded":
            prepared.append(padded())
            continue
        ids, lengths = contexts()
        if ours:
            lengths = np.array(lengths)
            pack = Pack(np.zeros_like(lengths), np.zeros_like(lengths), lengths, epoch=0)
            prepared.append(CausalCollator(args.context, mode == "ours-masks")(pack, ids))
        else:
            rows = torch.from_numpy(ids.astype(np.int64)).view(args.contexts, args.context)
            mask = torch.ones_like(rows)
            prepared.append({"input_ids": rows, "attention_mask": mask, "labels": rows, "num_tokens": rows.numel()})
    return training_speed(model, prepared, dtype, ours) | {"parameters": sum(p.numel() for p in model.parameters())}


def compare(args: Arguments) -> str:
    import torch  # noqa: F401  (its version)
    import transformers  # noqa: F401

    modes = ["ours", "ours-masks"] + ["ours-compiled"] * args.compiled
    kinds = [f"{mode}:{{}}:tuned" for mode in modes]
    kinds += [f"{mode}:{{}}:{tuned}" for mode in ("packed", "padded") for tuned in ("plain", "tuned")]
    jobs = [
        f"{name}:{kind.format(dtype)}"
        for name in args.models.split(",")
        for dtype in args.dtypes.split(",")
        for kind in kinds
    ]
    names = ("documents", "context", "contexts", "steps")
    flags = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    found = in_rounds("benchmarks.clm_throughput", jobs, args.rounds, flags)
    hardware, command = where_measured("benchmarks.clm_throughput", "torch", "transformers")
    lines = [
        f"{args.contexts} contexts of {args.context} tokens (bytes of text) a step, {hardware}",
        "",
        f"{command}, median of {args.rounds}",
        "",
        "| Llama | precision | model | tokens/s | spread | ours is faster by | peak memory, GB |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for job in jobs:
        name, mode, dtype, tuned = job.split(":")
        ours = None if mode.startswith("ours") else found[f"{name}:ours:{dtype}:tuned"]
        what = MODES[mode] + (", our process settings" if tuned == "tuned" and ours else "")
        size = f"{name}, {found[job][0]['parameters'] / 1e6:.1f} M"
        lines.append(f"| {size} | {dtype} | {speed_cells(what, found[job], ours)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    worker_or_table(parse_arguments(__doc__, Arguments), measure, compare)


if __name__ == "__main__":
    run(main)
