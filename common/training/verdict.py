"""What a run's held-out results say, in a line, and under which keys they are."""

from __future__ import annotations

import math
from collections.abc import Iterable

from common.files.runs import BASELINES


def verdict(results: dict, prefix: str = "eval") -> str:
    """Whether the model predicts the hidden residues of a held-out split better than the baselines, in a line; "" if
    unknown. Better: by more than two standard errors of the difference."""
    compared = []
    for key, name in BASELINES:
        if (below := results.get(f"{prefix}_below_{key}_masked")) is None:
            continue
        error = results.get(f"{prefix}_below_{key}_masked_stderr")
        by = f"{abs(below):.4f}" if error is None else f"{abs(below):.4f} ± {error:.4f}"
        noise = math.inf if error is None else 2 * error
        how = "better than" if below > noise else "worse than" if below < -noise else "no better than"
        compared.append((how, f"{how} {name} do, by {by} nats"))
    if not compared:
        return ""
    units = f"{results[f'{prefix}_clusters']:,} clusters" if f"{prefix}_clusters" in results else "proteins"
    has_error = results.get(f"{prefix}_below_unigram_masked_stderr") is not None
    over = f"± over {units}" if has_error else "of a single protein or cluster: without an error"
    texts = ", and ".join(text for _, text in compared)
    of_set = "" if prefix == "eval" else f" on {prefix.removeprefix('eval_')}"
    line = f"Verdict{of_set}: the model predicts hidden residues {texts} ({over})"
    if all(how == "better than" for how, _ in compared):
        return line
    learnt = " has learnt composition, not context:" if compared[0][0] == "better than" else ""
    return f"{line}:{learnt} train longer, look for a rate with --find_learning_rate, or look at the data"


def verdicts(results: dict) -> list[str]:
    """The verdicts, a line each, on all held-out sets but the test split."""
    return [line for prefix in held_out_prefixes([results]) if (line := verdict(results, prefix))]


def held_out_prefixes(rows: Iterable[dict]) -> list[str]:
    """The prefixes of the held-out sets that a run was evaluated on: "eval" (validation split), then "eval_NAME"."""
    keys = {key for row in rows for key in row if key.startswith("eval") and key.endswith("_samples")}
    return sorted(key.removesuffix("_samples") for key in keys)


def held_out_key(rows: Iterable[dict], prefix: str = "eval") -> str:
    """The key of a run's held-out loss in its rows: of hidden residues, or of all targets (decoders; before 0.5)."""
    key = f"{prefix}_loss_masked"
    return key if any(key in row for row in rows) else f"{prefix}_loss"
