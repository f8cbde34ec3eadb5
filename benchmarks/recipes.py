"""What benchmarks.time_to_loss compares: recipes of a training run, and the models and batches to compare them on."""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from common.models.layers.cpu import BF16_MATMULS


@dataclass(frozen=True)
class Recipe:
    """Flags of train_ddp.py, and the learning rates and warm-ups that are tried. change: of benchmarks.candidates."""

    flags: Mapping[str, object]
    rates: Sequence[float]
    warmups: Sequence[float] = (0.15,)
    change: str | None = None


def recipes(
    adamw: Sequence[float], muon: Sequence[float], warmups: Sequence[float] = (0.05, 0.15)
) -> dict[str, Recipe]:
    """All recipes, AdamW's first, for the learning rates that are tried of AdamW and of Muon. warmups: of AdamW alone.

    maskN: N % of the residues are selected, of which 80 % become `<mask>`, 10 % another residue, and 10 % stay.
    hiddenN: all of them become `<mask>`.
    """
    by_muon, decay = {"optim": "muon"}, {"weight_decay": 0.1}
    hidden = {"mask_replace_prob": 1.0, "random_replace_prob": 0.0}
    plain, best = Recipe({}, adamw[1:]), Recipe(by_muon, muon)
    found = {"adamw": Recipe({}, adamw, warmups), "muon": best}
    for percent in (15, 25, 40):
        masks = {"mlm_probability": percent / 100}
        for name, recipe, flags in (("adamw", plain, {}), ("muon", best, by_muon)):
            if percent != 15:
                found[f"{name}-mask{percent}"] = replace(recipe, flags=flags | masks)
            found[f"{name}-hidden{percent}"] = replace(recipe, flags=flags | masks | hidden)
    return found | {
        "muon-mask30to15": replace(best, flags=by_muon | {"mlm_probability": 0.3, "mlm_probability_end": 0.15}),
        "muon-wsd": replace(best, flags=by_muon | {"lr_scheduler_type": "wsd"}),
        "normuon": replace(best, change="normuon"),
        "muon-decay": replace(best, flags=by_muon | decay),
        "muon-cautious-decay": replace(best, flags=by_muon | decay, change="cautious_decay"),
        "muon-ema": replace(best, change="ema"),
        "muon-z-loss": replace(best, change="z_loss"),
        "muon-zero-init": replace(best, change="zero_init"),
        "muon-head-by-adamw": replace(best, change="head_by_adamw"),
    }


@dataclass(frozen=True)
class Plan:
    """What the recipes are compared on. flags: of train_ddp.py, for model and batch; losses: targets in nats.

    goal: tokens that the best recipe may need to AdamW's last loss, as a part of AdamW's.
    """

    title: str
    flags: Mapping[str, object]
    tokens_per_step: int
    tokens: float
    recipes: Mapping[str, Recipe]
    losses: Sequence[float]
    goal: float
    seeds: Sequence[int] = (42, 43, 44)
    evaluations: int = 20

    @property
    def steps(self) -> int:
        """As many as come nearest to the tokens, and are a multiple of the evaluations."""
        return self.evaluations * max(1, round(self.tokens / self.tokens_per_step / self.evaluations))


MODEL_8M, MODEL_35M = "facebook/esm2_t6_8M_UR50D", "facebook/esm2_t12_35M_UR50D"
SMALL = "num_hidden_layers=4,hidden_size=128,num_attention_heads=8,intermediate_size=512"
# Where a CPU has no bf16 instructions, fp32 is faster, and as good for comparing recipes.
ON_CPU = {"bf16": BF16_MATMULS or torch.cuda.is_available(), "dataloader_num_workers": 0}
SMALL_PLAN = Plan(
    "4 layers x 128, 0.8M parameters, crops of 256",
    ON_CPU | {"config_name": MODEL_8M, "config_overrides": SMALL, "tokens_per_pack": 2048, "max_seq_length": 256},
    tokens_per_step=2048,
    tokens=0.49e6,
    recipes=recipes((2.5e-4, 5e-4, 1e-3, 2e-3), (1e-3, 2e-3, 4e-3)),
    losses=(2.87, 2.86),
    goal=0.65,
    evaluations=12,
)
CPU_PLANS = {
    "1M": SMALL_PLAN,
    "1M-long": replace(
        SMALL_PLAN, title=f"{SMALL_PLAN.title}, four times as long", tokens=2.05e6, losses=(2.85, 2.83)
    ),
    "8M": Plan(
        "ESM-2 8M, crops of 512, 200 held-out proteins",
        ON_CPU | {"config_name": MODEL_8M, "tokens_per_pack": 4096, "max_seq_length": 512, "max_eval_samples": 200},
        tokens_per_step=4096,
        tokens=0.49e6,
        recipes=recipes((1.25e-4, 2.5e-4, 5e-4, 1e-3), (5e-4, 1e-3, 2e-3), warmups=(0.15,)),
        losses=(2.87, 2.86),
        goal=0.65,
        evaluations=6,
    ),
}
# nanoprot's settings: 12 tokens a parameter, crops of 512, 524,288 tokens a step, masks of 15 %, 80/10/10.
NANOPROT = {"bf16": True, "tokens_per_pack": 32768, "max_seq_length": 512, "tokens_per_step": 2**19}
NANOPROT |= {"max_eval_samples": 20_000}
DECISIVE_RECIPES = {
    "adamw": Recipe({}, (1e-3, 2e-3, 4e-3)),
    "muon": Recipe({"optim": "muon"}, (1e-3, 2e-3, 4e-3)),
}
ON_8M = Plan(
    "ESM-2 8M, crops of 512, steps of 524,288 tokens (nanoprot: 2.598 nats at the end)",
    NANOPROT | {"config_name": MODEL_8M},
    tokens_per_step=2**19,
    tokens=0.09e9,
    recipes=DECISIVE_RECIPES,
    losses=(2.598, 2.58),
    goal=0.55,
    seeds=(42, 43),
    evaluations=43,
)
DECISIVE_PLANS = {
    "8M-UniRef50": ON_8M,
    "35M-UniRef50": replace(
        ON_8M,
        title="ESM-2 35M, crops of 512, steps of 524,288 tokens (nanoprot: 2.519 nats at the end)",
        flags=NANOPROT | {"config_name": MODEL_35M},
        tokens=0.40e9,
        losses=(2.519, 2.49),
        evaluations=109,
    ),
}
