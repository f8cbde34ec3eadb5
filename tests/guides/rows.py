"""Every command and every promise of the five guides, a row each, and what holds it here.

A row: what the guide's user types or expects; the check (tests/guides/checks.py); `command`, as it is typed;
`blocks`, the numbers of the guide's code blocks that it is about (none: its prose). typed: such commands of a guide
are typed one after the other into one shell; `before` is typed first, and is ours.

The guides: ESM-2 on EKS and on Slurm (awsome-distributed-training), NVIDIA's recipe esm2_native_te, and PyTorch FSDP
on EKS and on Slurm (awsome-distributed-training).
"""

from __future__ import annotations

from tests.guides.eks import EKS
from tests.guides.eks_training import EKS_TRAINING
from tests.guides.fsdp import FSDP_EKS, FSDP_SLURM
from tests.guides.recipe import RECIPE
from tests.guides.slurm import SLURM

GUIDES = {  # prefix of a row's name: the end of the guide's file
    "eks": "esm2_on_eks",
    "slurm": "esm2_on_slurm",
    "recipe": "esm2_native_te_recipe",
    "fsdp-eks": "fsdp_on_eks",
    "fsdp-slurm": "fsdp_on_slurm",
}

ROWS = {
    f"{guide}-{number}": row
    for guide, rows in (
        ("eks", EKS | EKS_TRAINING),
        ("slurm", SLURM),
        ("recipe", RECIPE),
        ("fsdp-eks", FSDP_EKS),
        ("fsdp-slurm", FSDP_SLURM),
    )
    for number, row in rows.items()
}
