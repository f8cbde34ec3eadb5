"""What a mask rate does to a model's calibration at other rates.

python -m benchmarks.mask_rates 0.15=out15/final_model 0.40=out40/final_model --dataset_dir processed/arrow
    [--output table.md]

Names before = are free. Each model is asked for hidden residues at several rates: its loss, how often its likeliest
residue is right, how much more it believes (mean probability of the likeliest), the expected calibration error, and
what one temperature, fitted on half of the proteins, takes off the loss of the other half.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor

from benchmarks.measuring import publish, say, where_measured
from benchmarks.token_dropout import log_p, protein_ids, questions
from common.cli import run
from common.training.protein_losses import mean_and_error
from extras.after.inference.encoder import Encoder, EncoderFlags

RATES = {"one residue": None, "15 %": 0.15, "30 %": 0.3, "50 %": 0.5, "80 %": 0.8}
BINS = 15  # of as many residues each (Nguyen and O'Connor 2015)


def calibration_error(belief: Tensor, right: Tensor) -> float:
    """Expected calibration error: |accuracy - mean belief| over bins of equal size, weighted. Both [n]."""
    order = belief.argsort()
    parts = zip(belief[order].tensor_split(BINS), right[order].double().tensor_split(BINS), strict=True)
    return sum(len(b) * abs(b.mean().item() - r.mean().item()) for b, r in parts) / len(belief)


def temperature(logs: Tensor, true: Tensor) -> float:
    """That minimises the loss of log p [n, tokens] at the residues [n]."""

    def loss(log_t: float) -> float:
        return F.cross_entropy(logs / float(np.exp(log_t)), true).item()

    return float(np.exp(minimize_scalar(loss, bounds=(-1.5, 1.5), method="bounded").x))


def row(encoder: Encoder, proteins: list[np.ndarray], rate: float | None) -> list[str]:
    """Cells; errors are over proteins."""
    asked = questions(proteins, rate, encoder.alphabet.mask)
    logs = log_p(encoder, asked).double()
    true = torch.from_numpy(np.concatenate([proteins[n][at] for _, at, n in asked]).astype(np.int64))
    of = torch.tensor(np.concatenate([np.full(len(at), n) for _, at, n in asked]))
    belief, best = logs.exp().max(1)
    right = best == true
    losses = F.nll_loss(logs, true, reduction="none")
    excess = over_proteins(belief - right.double(), of)
    fitted = of % 2 == 0
    scale = temperature(logs[fitted], true[fitted])
    gained = losses - F.cross_entropy(logs / scale, true, reduction="none")
    return [
        "{:.4f} ± {:.4f}".format(*over_proteins(losses, of)),
        f"{right.double().mean():.2%}",
        "{:+.2%} ± {:.2%}".format(*excess),
        f"{calibration_error(belief, right):.2%}",
        f"{scale:.3f}",
        "{:.4f} ± {:.4f}".format(*over_proteins(gained[~fitted], of[~fitted])),
    ]


def over_proteins(values: Tensor, of: Tensor) -> tuple[float, float]:
    """Mean over residues and its standard error over the proteins `of`; both [n]."""
    return mean_and_error(np.bincount(of, values), np.bincount(of))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=DIRECTORY")
    parser.add_argument("--dataset_dir", required=True, help="whose validation split they were not trained on")
    parser.add_argument("--proteins", type=int, default=400, help="the first ones of it")
    parser.add_argument("--output")
    args = parser.parse_args()
    proteins = protein_ids(args.dataset_dir, args.proteins)
    lines = [
        "| model | hidden | loss | right | believed less right | calibration error | temperature | it takes off |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for each in args.models:
        name, _, directory = each.rpartition("=")
        encoder = Encoder(EncoderFlags(directory), torch.device("cpu"))
        for hidden, rate in RATES.items():
            lines.append(f"| {name} | {hidden} | {' | '.join(row(encoder, proteins, rate))} |")
            say(lines[-1])
    about = f"{len(proteins)} held-out proteins, of each at most 256 tokens; nats; ±: standard errors over proteins."
    where = where_measured("benchmarks.mask_rates", "torch")
    publish("\n".join(["# Calibration by mask rate", "", *where, "", about, "", *lines]), args.output)


if __name__ == "__main__":
    run(main)
