"""Embeddings with --int8 beside fp32, --bf16 and esm-cpp's INT8: tokens a CPU second, and what int8 changes.

python -m benchmarks.int8_inference --fasta my.fasta [--config_name facebook/esm2_t30_150M_UR50D] [--output table.md]
    [--esm_cpp peer/bin/python]                  # an interpreter with esm-cpp 0.2.1, which needs NumPy 1
    [--model_name_or_path out/final_model]       # weights to compare the numbers of; random ones for the speed
    [--mutations mavenn/examples/datasets]       # amyloid-beta, TDP-43 and GB1, of mavenn 1.1.4

One thread; the seconds are those that it ran. All take turns, round after round, with the same token ids, packed; the
peer quantises as its README says, smoothed for the first four proteins. Give one core to this alone (`taskset -c 0`).
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import argparse
import statistics
import subprocess
import tempfile
import time
from itertools import islice
from pathlib import Path
from subprocess import PIPE

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr

from benchmarks.measuring import publish, say, spread, where_measured
from benchmarks.real_downstream import TABLES, mutations_of, read_measured
from common.models.esm2.alphabet import ESM2_TOKENS, MASK
from common.models.esm2.config import load_config
from common.models.esm2.convert import ADAPTER
from common.models.esm2.model import build_model
from extras.after.inference.encoder import Encoder, EncoderFlags, embed
from extras.after.inference.mutation_scores import compare, score
from extras.prepare.sources.fasta import read_fasta

PEER = """
import sys, time
import numpy as np
import esm_cpp
model = esm_cpp.Model.load_from_safetensors(sys.argv[1])
found = np.load(sys.argv[2])
sequences = [found[name] for name in found.files]
observer = esm_cpp.ActivationObserver()
for ids in sequences[:4]:
    model.forward_with_observer(ids, np.ones_like(ids), observer)
model.apply_smoothquant(observer.percentile(99.9), 0.5)
model.quantize_weights()
for _ in sys.stdin:
    started = time.process_time()
    model.forward_scheduled(sequences)
    print(time.process_time() - started, flush=True)
"""


class Peer:
    """esm-cpp in a process of its own. seconds: of one forward pass over all sequences."""

    def __init__(self, python: str, model: Path, sequences: list[np.ndarray]):
        ids = model.parent / "ids.npz"
        np.savez(ids, *(sequence.astype(np.int32) for sequence in sequences))
        weights = str(model / "model.safetensors")
        command = ["env", "ESM_NUM_THREADS=1", python, "-c", PEER, weights, str(ids)]
        self.process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)

    def seconds(self) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def speeds(args: argparse.Namespace, texts: list[bytes], directory: Path) -> list[str]:
    config = load_config(args.config_name)
    held = dict(build_model(config, seed=1).named_parameters())
    model = directory / "model"
    ADAPTER.save(ADAPTER.to_hf(lambda name: held[name].detach(), config, {}), config, model)
    held.clear()
    sequences = [ESM2_TOKENS.encode(text) for text in texts]
    ways = {}
    for name, flags in {"fp32": {}, "--bf16": {"bf16": True}, "--int8": {"int8": True}}.items():
        encoder = Encoder(EncoderFlags(str(model), use_cpu=True, tokens_per_pack=args.tokens_per_pack, **flags))
        encoder.fit_int8(texts)
        ways[f"`embed.py`, {name}"] = lambda encoder=encoder: embed_seconds(encoder, texts)
    if args.esm_cpp:
        ways["esm-cpp, INT8"] = Peer(args.esm_cpp, model, sequences).seconds
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):  # the first warms up, and fits
        for name, way in ways.items():
            taken = way()
            say(f"round {number}/{args.rounds}  {name}: {taken:.2f} s")
            if number:
                seconds[name].append(taken)
    tokens = sum(map(len, sequences))
    ours = statistics.median(seconds["`embed.py`, --int8"])
    lines = [f"{len(texts)} proteins of {tokens:,} tokens, {args.config_name}, one thread, {args.rounds} rounds.", ""]
    lines += ["| | tokens a CPU second | spread | `--int8` is faster by |", "|---|--:|--:|--:|"]
    for name, values in seconds.items():
        middle = statistics.median(values)
        ratio = "" if middle == ours else f"{middle / ours:.2f} x"
        lines.append(f"| {name} | {tokens / middle:,.0f} | {spread(values):.0%} | {ratio} |")
    return lines


def embed_seconds(encoder: Encoder, texts: list[bytes]) -> float:
    started = time.process_time()
    embed(encoder, [("", text) for text in texts], pooling="mean")
    return time.process_time() - started


@torch.inference_mode()
def masked_nats(encoder: Encoder, texts: list[bytes]) -> float:
    """Mean nats a residue, every 15th of each protein masked: of the same residues by any encoder."""
    sequences = [ESM2_TOKENS.encode(text) for text in texts]
    places = [np.arange(1 + n % 15, len(ids) - 1, 15) for n, ids in enumerate(sequences)]
    masked = [ids.copy() for ids in sequences]
    for ids, at in zip(masked, places, strict=True):
        ids[at] = MASK
    logits = encoder.logits(masked, at=places)
    targets = np.concatenate([ids[at] for ids, at in zip(sequences, places, strict=True)])
    return float(F.cross_entropy(torch.cat(logits).double(), torch.from_numpy(targets).long()))


def changes(args: argparse.Namespace, texts: list[bytes]) -> list[str]:
    """What int8 changes of a model's numbers."""
    exact, coarse = (Encoder(EncoderFlags(args.model_name_or_path, use_cpu=True, int8=int8)) for int8 in (False, True))
    coarse.fit_int8(texts)
    pairs = list(zip(*(embed(each, [("", text) for text in texts]) for each in (exact, coarse)), strict=True))
    residues = torch.cat([F.cosine_similarity(a, b, dim=1) for a, b in pairs])
    means = torch.stack([F.cosine_similarity(a.mean(0), b.mean(0), dim=0) for a, b in pairs])
    nats = [masked_nats(each, texts) for each in (exact, coarse)]
    perplexity = np.exp(nats)
    lines = ["", f"The numbers of {args.trained}, {len(texts)} proteins:", ""]
    lines += ["| | fp32 | `--int8` | |", "|---|--:|--:|--:|"]
    lines.append(f"| cosine of a protein's mean with fp32's | | | least {means.min():.5f}, mean {means.mean():.5f} |")
    lines.append(f"| of a residue's | | | least {residues.min():.5f}, mean {residues.mean():.5f} |")
    change = f"{perplexity[1] / perplexity[0] - 1:+.3%}"
    lines.append(f"| perplexity of masked residues | {perplexity[0]:.4f} | {perplexity[1]:.4f} | {change} |")
    for protein, file in TABLES.items() if args.mutations else ():
        table = read_measured(Path(args.mutations, file))
        for count in np.unique(table.mutations).tolist():
            rows = mutations_of(table, count, 2000)
            variants = [compare(table.sequences[row], table.wild_type.encode(), file) for row in rows]
            found = [spearmanr(score(each, variants, True), table.measured[rows])[0] for each in (exact, coarse)]
            name = f"Spearman, {protein}, {count} changed, {len(rows):,} variants"
            lines.append(f"| {name} | {found[0]:.4f} | {found[1]:.4f} | {found[1] - found[0]:+.4f} |")
            say(lines[-1])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fasta", required=True)
    parser.add_argument("--config_name", default="facebook/esm2_t30_150M_UR50D")
    parser.add_argument("--proteins", type=int, default=20, help="of the file's first")
    parser.add_argument("--rounds", type=int, default=3, help="0: only what int8 changes")
    parser.add_argument("--tokens_per_pack", type=int)
    parser.add_argument("--esm_cpp")
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--trained", default="the model", help="what the table calls it")
    parser.add_argument("--mutations")
    parser.add_argument("--output")
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts = [text[:1022] for _, text in islice(read_fasta(args.fasta), args.proteins)]
    lines: list[str] = []
    if args.rounds:
        with tempfile.TemporaryDirectory() as directory:
            lines += speeds(args, texts, Path(directory))
    if args.model_name_or_path:
        lines += changes(args, texts)
    measured, command = where_measured("benchmarks.int8_inference", "torch")
    publish("\n".join(["# 8-bit integers on a CPU", "", measured, "", command, "", *lines]), args.output)


if __name__ == "__main__":
    main()
