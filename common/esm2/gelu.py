"""Which GELU the layers have: ESM-2's own (exact, by erf) or the tanh approximation.

Transformer Engine's fused kernels have the second only. A run records its choice as `hidden_act` in config.json
(transformers' names), which stock `EsmForMaskedLM` does not read: its GELU is always the exact one. What that changes
is measured in benchmarks/results/gelu.md. The LM head's GELU is exact everywhere.
"""

from __future__ import annotations

from common.cli import UserError
from common.esm2.config import Esm2Config

HIDDEN_ACT = {"exact": "gelu", "tanh": "gelu_pytorch_tanh"}
ONLY_GELU = {"te": "tanh"}  # a backend with one kind


def gelu_of(config: Esm2Config) -> str:
    """`exact` or `tanh`, as config.json says. Any other `hidden_act` counts for nothing, as in transformers."""
    return "tanh" if getattr(config, "hidden_act", None) == HIDDEN_ACT["tanh"] else "exact"


def choose_gelu(asked: str | None, backend: str, config: Esm2Config) -> tuple[str, str | None]:
    """Settle on --gelu, write it into the configuration, and return it with what is to be said about it.

    asked: None leaves it to the backend, and then to the weights' own configuration. UserError where the backend has
    only another.
    """
    own, only = gelu_of(config), ONLY_GELU.get(backend)
    if asked and only and asked != only:
        raise UserError(f"--gelu {asked}: --backend {backend} has the {only} GELU only: drop the flag, or the backend")
    chosen = asked or only or own
    config.hidden_act = HIDDEN_ACT[chosen]
    if chosen == "tanh":
        why = "asked for" if asked else f"--backend {backend} has no other" if only else "as the weights were trained"
        return chosen, (
            f"GELU: the tanh approximation ({why}), recorded as hidden_act {config.hidden_act}; EsmForMaskedLM "
            "computes the exact one"
        )
    if own == "tanh":
        return chosen, "GELU: the exact one (asked for); these weights were trained with the tanh approximation"
    return chosen, None  # ESM-2 as published goes without saying
