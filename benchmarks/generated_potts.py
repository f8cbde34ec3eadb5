r"""Samples of a masked diffusion model beside the Potts family that it was trained on.

python -m benchmarks.generated_potts --members members.fasta
python train_ddp.py --objective mdlm --dataset members.fasta --output_dir out ...
python -m benchmarks.generated_potts --model out/final_model [--output FILE]

The first command writes members of one family of extras/prepare/synthetic_structures.py. The third lets a model that
was trained on these generate, and its table compares: the held-out bound with the family's entropy, which is the
least possible; site and pair frequencies with the family's exact ones, as chi-square per degree of freedom, 1 for the
family itself; the couplings' energy; and the identity to the nearest training member.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.measuring import mean_and_error, publish, say, where_measured
from common.cli import run
from common.flags import Flags, Missing, flag, parse_arguments
from common.models.esm2.alphabet import ESM2_TOKENS, MASK
from extras.after.generation.draws import Sampling
from extras.after.generation.encoders import generated
from extras.after.generation.novelty import nearest_identities
from extras.after.generation.templates import Template
from extras.after.generation.unmask import Schedule
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.prepare.synthetic_structures import COUPLED, RESIDUES, PottsFamily, letters, row_states

TRAINING, HELD_OUT = 20_000, 200
SCHEDULES = {
    "one at a time": Schedule(),
    "ancestral, 20 steps": Schedule(steps=20),
    "ancestral, 20 steps, remask 0.5": Schedule(steps=20, remask=0.5),
    "confidence, 20 steps": Schedule(True, steps=20),
}


@dataclass
class Arguments(Flags):
    model: str | None = flag(None, "The trained model.")
    members: str | None = flag(None, "Instead: a FASTA file to write, of the members to train on.")
    samples: int = flag(1000, "Of each sampler.")
    seed: int = flag(1, "For another family.")
    output: str | None = flag(None, "A file for the table.")

    def missing(self) -> Iterator[Missing]:
        if not self.model and not self.members:
            yield Missing("--model", "trained on the --members of this script", "out/final_model")


def tokens_of(members: np.ndarray) -> torch.Tensor:
    """int64 [n, L + 2] of residue indices [n, L]."""
    to_token = ESM2_TOKENS.byte_to_id[np.frombuffer(RESIDUES.encode(), np.uint8)].astype(np.int64)
    ends = np.full((len(members), 1), ESM2_TOKENS.begin), np.full((len(members), 1), ESM2_TOKENS.end)
    return torch.from_numpy(np.concatenate((ends[0], to_token[members], ends[1]), 1))


def bound(model: Any, ids: torch.Tensor, rates: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Of each protein [n] the negative log-likelihood's bound at its mask rate, nats a residue."""
    is_residue = F.pad(torch.ones_like(ids[:, 2:], dtype=torch.bool), (1, 1))
    is_masked = is_residue & (torch.rand(ids.shape, generator=generator) < rates[:, None])
    ends = torch.arange(0, ids.numel() + 1, ids.shape[1], dtype=torch.int32)
    shown = torch.where(is_masked, MASK, ids).flatten()
    logits = model(shown, cu_seqlens=ends, max_seqlen=ids.shape[1]).logits
    losses = F.cross_entropy(logits, ids.flatten(), reduction="none").view(ids.shape)
    return (losses * is_masked).sum(1) / rates / is_residue.sum(1)


def held_out_bound(encoder: Encoder, members: np.ndarray) -> tuple[float, float]:
    """(nats a residue, its standard error), eight mask rates a protein."""
    generator, ids = torch.Generator().manual_seed(3), tokens_of(members)
    values = []
    with torch.inference_mode():
        for batch in ids.split(50):
            offset = torch.rand(len(batch), generator=generator)
            rates = [((k + offset) / 8).clamp(min=1e-3) for k in range(8)]
            values += torch.stack([bound(encoder.model, batch, rate, generator) for rate in rates]).mean(0).tolist()
    return mean_and_error(values)


def entropy() -> float:
    """Of a family, nats a residue: rows are independent."""
    states, p = row_states()
    return float(-(p * np.log(p)).sum() / states.shape[1])


def spins(family: PottsFamily, members: np.ndarray) -> np.ndarray:
    """+1 and -1 by which of its two residues each site has, 0 for another one: [n, L]."""
    return (family.sites[:, 1] == members).astype(int) - (family.sites[:, 0] == members).astype(int)


def compared(family: PottsFamily, members: np.ndarray) -> list[str]:
    """Cells: residues that the family never has there, chi-square per degree of freedom of site means and of the
    coupled pairs' correlations, energy a row."""
    states, p = row_states()
    of_state = 2 * states - 1
    found = spins(family, members)
    correlation = {(a, b): float((p * of_state[:, a] * of_state[:, b]).sum()) for a, b in COUPLED}
    pairs = [(row[a], row[b], value) for row in family.rows for (a, b), value in correlation.items()]
    site_z = found.mean(0) * np.sqrt(len(members))  # each site's two residues are as likely: mean 0, variance 1
    product = np.array([found[:, a] * found[:, b] for a, b, _ in pairs])
    exact = np.array([value for *_, value in pairs])
    pair_z = (product.mean(1) - exact) / np.sqrt((1 - exact**2) / len(members))
    energy = sum(
        coupling * found[:, row[a]] * found[:, row[b]] for row in family.rows for (a, b), coupling in COUPLED.items()
    ) / len(family.rows)
    mean, error = mean_and_error(energy.tolist())
    return [
        f"{100 * (found == 0).mean():.3f} %",
        f"{(site_z**2).mean():.2f}",
        f"{(pair_z**2).mean():.2f}",
        f"{abs(product.mean(1) - exact).mean():.4f}",
        f"{mean:.3f} ± {error:.3f}",
    ]


def nearest(members: np.ndarray, training: np.ndarray) -> str:
    texts = [letters(each) for each in members[:200]]
    with TemporaryDirectory() as scratch:
        found = nearest_identities(texts, [letters(each) for each in training], Path(scratch))
    return "not known" if found is None else f"{100 * found.mean():.1f} %, most {100 * found.max():.1f} %"


def sampled(encoder: Encoder, schedule: Schedule, args: Arguments, length: int) -> np.ndarray:
    begun = [Template(str(n), (0, n), b"X" * length, np.ones(length, bool)) for n in range(args.samples)]
    made = generated(encoder, begun, schedule, Sampling(), args.seed)
    return np.array([[RESIDUES.index(letter) for letter in protein.residues] for protein in made])


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    generator = np.random.default_rng(args.seed)
    family = PottsFamily.make(generator)
    training, held_out = family.members(TRAINING, generator), family.members(args.samples, generator)
    if args.members:
        records = (f">M{number}\n{letters(member)}\n" for number, member in enumerate(training))
        Path(args.members).write_text("".join(records))
        return
    encoder = Encoder(EncoderFlags(model_name_or_path=str(args.model), use_cpu=True))
    value, error = held_out_bound(encoder, held_out[:HELD_OUT])
    length = held_out.shape[1]
    shuffled = np.stack([generator.permutation(column) for column in held_out.T], 1)
    rows = {"the family's held-out members": held_out, "the same, sites independent": shuffled}
    lines = [
        f"A family of {length} residues, {TRAINING:,} training members, {args.samples:,} of each row. Held-out bound "
        f"{value:.4f} ± {error:.4f} nats a residue; the least possible, the family's entropy: {entropy():.4f}.",
        "",
        "| | impossible residues | sites, chi-square / df | coupled pairs, chi-square / df | their mean error "
        "| energy a row | nearest training member |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    rows |= {name: sampled(encoder, schedule, args, length) for name, schedule in SCHEDULES.items()}
    for name, members in rows.items():
        lines.append(f"| {name} | {' | '.join(compared(family, members))} | {nearest(members, training)} |")
        say(lines[-1])
    publish("\n".join([*lines, "", *where_measured("benchmarks.generated_potts", "torch")]), args.output)


if __name__ == "__main__":
    run(main)
