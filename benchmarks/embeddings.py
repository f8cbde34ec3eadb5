"""embed.py's way with proteins beside transformers' own, padded batches: residues a second, on one CPU or GPU.

python -m benchmarks.embeddings --fasta my.fasta [--config_name facebook/esm2_t6_8M_UR50D] [--output table.md]
python -m benchmarks.embeddings --fasta my.fasta --scores [--output table.md]    # score.py's masked marginals

Weights are random: speed does not depend on them. The stock model gets the proteins as a user would give them, in the
order of the file, so many at a time, cut at the same length and padded to the longest of each batch; and, for a
stricter look, sorted by length. All take turns in one process, round after round; numbers are medians. With
OMP_NUM_THREADS=1 on a CPU the thread's CPU seconds count, for a machine that is not quiet.

--scores: a few mutations of each protein, each a forward pass with its residue masked; and the time of all single
mutants of one protein.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import EsmForMaskedLM, EsmModel, PreTrainedModel

from benchmarks.measuring import publish, say, spread, where_measured
from common.models.esm2.alphabet import BYTE_TO_ID, MASK, PAD, encode
from common.models.esm2.config import load_config
from common.models.esm2.convert import ADAPTER
from common.models.esm2.model import build_model
from extras.after.inference.encoder import Encoder, EncoderFlags, embed
from extras.after.inference.mutation_scores import RESIDUES, Mutation, Variant, score, single_mutants
from extras.prepare.sources.fasta import read_fasta

Ways = dict[str, Callable[[], Sequence]]  # the first is ours
RESIDUE_IDS = [int(BYTE_TO_ID[ord(letter)]) for letter in RESIDUES]


def padded(model: PreTrainedModel, rows: list[Tensor], batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids [length] and the stock model's first output [length, ...] of each row; padded, a batch at a time."""
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        ids = torch.nn.utils.rnn.pad_sequence(part, True, PAD).to(model.device)
        outputs = model(input_ids=ids, attention_mask=(ids != PAD).long())[0]
        yield from ((row, output[: len(row)]) for row, output in zip(part, outputs, strict=True))


def tokens_of(text: bytes) -> Tensor:
    return torch.from_numpy(encode(text)).long()


@torch.inference_mode()
def stock_means(model: PreTrainedModel, texts: list[bytes], batch: int) -> list[Tensor]:
    """Means over residues, of padded batches."""
    return [hidden[1:-1].mean(0) for _, hidden in padded(model, [tokens_of(text) for text in texts], batch)]


@torch.inference_mode()
def stock_scores(model: PreTrainedModel, variants: list[Variant], batch: int) -> Tensor:
    """Masked marginals of variants with one mutation each, float64 [variants]; of padded batches."""
    rows, mutations = [tokens_of(variant.protein) for variant in variants], [one for _, (one,) in variants]
    for row, mutation in zip(rows, mutations, strict=True):
        row[1 + mutation.position] = MASK
    logits = torch.cat([output[row == MASK] for row, output in padded(model, rows, batch)])
    log_p, each = logits.double().log_softmax(-1), range(len(rows))
    return log_p[each, [one.mutant for one in mutations]] - log_p[each, [one.wild for one in mutations]]


def variants_of(texts: list[bytes], positions: int) -> list[Variant]:
    """So many mutations of each protein, evenly along it, of its standard residues to alanine or glycine."""
    found = []
    for text in texts:
        ids = BYTE_TO_ID[np.frombuffer(text, np.uint8)]
        (standard,) = np.isin(ids, RESIDUE_IDS).nonzero()
        for n in standard[np.linspace(0, len(standard) - 1, positions + 2).round().astype(int)[1:-1]].tolist():
            mutant = next(int(BYTE_TO_ID[letter]) for letter in b"AG" if BYTE_TO_ID[letter] != ids[n])
            found.append(Variant(text, (Mutation(int(ids[n]), n, mutant),)))
    return found


def largest_difference(ours: Sequence, theirs: Sequence) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((torch.as_tensor(a) - torch.as_tensor(b).cpu()).abs().max()) for a, b in pairs)


def clock() -> float:
    """Seconds. Of one thread on a CPU those that it ran, so that other programs on the machine do not count."""
    is_one_thread = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.process_time() if is_one_thread else time.perf_counter()


def timed(name: str, way: Callable[[], object]) -> float:
    started = clock()
    way()
    seconds = clock() - started
    say(f"{name}: {seconds:.2f} s")
    return seconds


def in_turns(ways: Ways, rounds: int) -> tuple[dict[str, list[float]], float]:
    """({way: seconds of each round}, the largest difference between the results of the first two)."""
    ours, theirs, *_ = [way() for way in ways.values()]  # warm, and the same numbers
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            seconds[name].append(timed(f"round {number + 1}/{rounds}  {name}", way))
    return seconds, largest_difference(ours, theirs)


def table(script: str, seconds: dict[str, list[float]], units: int, unit: str) -> list[str]:
    """Lines of Markdown: the speed of each way in units a second."""
    lines = [f"| | {unit}/s | spread | `{script}` is faster by |", "|---|--:|--:|--:|"]
    ours = statistics.median(next(iter(seconds.values())))
    for number, (name, values) in enumerate(seconds.items()):
        middle = statistics.median(values)
        ratio = f"{middle / ours:.2f} x" if number else ""
        speed = f"{units / middle:,.1f}" if units / middle < 100 else f"{units / middle:,.0f}"
        lines.append(f"| {name} | {speed} | {spread(values):.0%} | {ratio} |")
    return lines


def embeddings(args: argparse.Namespace, encoder: Encoder, directory: str, texts: list[bytes], how: str) -> list[str]:
    theirs = EsmModel.from_pretrained(directory, add_pooling_layer=False).eval().to(encoder.device)
    by_length, batches = sorted(texts, key=len), f"transformers, batches of {args.batch}"
    ways: Ways = {
        "`embed.py`: packed": lambda: [each.mean(0) for each in embed(encoder, [("", text) for text in texts])],
        f"{batches}, padded": lambda: stock_means(theirs, texts, args.batch),
        f"{batches}, sorted by length": lambda: stock_means(theirs, by_length, args.batch),
        "transformers, one at a time": lambda: stock_means(theirs, texts, 1),
    }
    seconds, worst = in_turns(ways, args.rounds)
    residues = sum(map(len, texts))
    return [
        f"{len(texts)} proteins of {residues:,} residues, {how}. "
        f"The largest difference of a mean between the first two rows: {worst:.1e}.",
        "",
        *table("embed.py", seconds, residues, "residues"),
    ]


def scores(args: argparse.Namespace, encoder: Encoder, directory: str, texts: list[bytes], how: str) -> list[str]:
    theirs = EsmForMaskedLM.from_pretrained(directory).eval().to(encoder.device)
    variants = variants_of(texts, args.positions)
    protein = bytes(letter for text in texts for letter in text if chr(letter) in RESIDUES)[: args.residues]
    by_length, batches = sorted(variants, key=lambda v: len(v.protein)), f"transformers, batches of {args.batch}"
    ways: Ways = {
        "`score.py`: packed": lambda: score(encoder, variants, True),
        f"{batches}, padded": lambda: stock_scores(theirs, variants, args.batch),
        f"{batches}, sorted by length": lambda: stock_scores(theirs, by_length, args.batch),
        "transformers, one at a time": lambda: stock_scores(theirs, variants, 1),
    }
    seconds, worst = in_turns(ways, args.rounds)
    of_one = [
        timed("all single mutants", lambda: single_mutants(encoder, [protein], True)) for _ in range(args.rounds)
    ]
    return [
        f"{len(variants)} mutations, {args.positions} of each of {len(texts)} proteins of {sum(map(len, texts)):,} "
        f"residues: a pass each, with the residue masked; {how}. "
        f"The largest difference of a score between the first two rows: {worst:.1e} nats.",
        "",
        *table("score.py", seconds, len(variants), "scores"),
        "",
        f"All {len(protein) * len(RESIDUES):,} single mutants of a protein of {len(protein)} residues, {len(protein)} "
        f"passes: {statistics.median(of_one):.1f} s, spread {spread(of_one):.0%}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fasta", required=True)
    parser.add_argument("--config_name", default="facebook/esm2_t6_8M_UR50D")
    parser.add_argument("--scores", action="store_true")
    parser.add_argument("--proteins", type=int, help="of the file's first; default: 200, with --scores 40")
    parser.add_argument("--positions", type=int, default=2, help="with --scores: mutations of each protein")
    parser.add_argument("--residues", type=int, default=300, help="with --scores: of the protein mutated everywhere")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, help="default: 5, with --scores 3")
    parser.add_argument("--output")
    args = parser.parse_args()
    args.proteins = args.proteins or (40 if args.scores else 200)
    args.rounds = args.rounds or (3 if args.scores else 5)
    with tempfile.TemporaryDirectory() as directory:
        config = load_config(args.config_name)
        held = dict(build_model(config, seed=1).named_parameters())
        ADAPTER.save(ADAPTER.to_hf(lambda name: held[name].detach(), config, {}), config, Path(directory, "model"))
        held.clear()
        encoder = Encoder(EncoderFlags(model_name_or_path=f"{directory}/model"))
        longest = encoder.flags.max_seq_length - 2  # no windows: both compute the same residues
        texts = [text[:longest] for _, text in islice(read_fasta(args.fasta), args.proteins)]
        count = torch.get_num_threads()
        threads = f"{count} threads" if count > 1 else "one thread (its CPU seconds)"
        where = threads if encoder.device.type == "cpu" else "one GPU"
        how = f"{args.config_name}, fp32, {where}, {args.rounds} rounds in turns"
        lines = (scores if args.scores else embeddings)(args, encoder, f"{directory}/model", texts, how)
    measured, command = where_measured("benchmarks.embeddings", "torch", "transformers")
    title = "# Scores of mutations beside transformers" if args.scores else "# Embeddings beside transformers"
    publish("\n".join([title, "", measured, "", command, "", *lines]), args.output)


if __name__ == "__main__":
    main()
