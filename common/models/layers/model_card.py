"""README.md of an exported model, in the Hub's format: what it is, how it was trained, and what it reached.

It repeats no text of the user's: no paths, names or hosts, only numbers, hashes, and names that this program knows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from torch import Tensor

from common.files.runs import BASELINES
from common.software import software

# Flags of a run whose values, numbers or a choice of these, a card shows.
FLAGS = (
    *("max_steps", "optim", "learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "max_seq_length"),
    *("tokens_per_pack", "tokens_per_step", "gradient_accumulation_steps", "mlm_probability", "mlm_probability_end"),
    *("objective", "seed", "bf16", "fp8", "fp4"),
)
WORDS = {"optim": ("adamw_torch_fused", "muon"), "objective": ("mdlm",)}
SPLITS = {"eval": "validation", "test": "test"}
LICENSE = "unknown"  # an identifier of the Hub's
HASH = re.compile(r"[0-9a-f]{16,64}(-\d+)?")  # and a number of records


@dataclass(frozen=True)
class Training:
    """How the weights were trained, for the model card; None: unknown.

    steps, tokens: trained, 0 for weights exported as they were given; data: the training data's identity; start:
    --model_name_or_path, "" for random weights; contacts: hashes of the chains that a contact head was fitted on;
    flags, results: of the run, values of any type.
    """

    steps: int | None = None
    tokens: int | None = None
    data: str | None = None
    start: str | None = None
    contacts: tuple[str, ...] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_state(cls, state: Any) -> Training:
        """From a run's trainer_state.json; a value of the wrong type is unknown."""
        state = _object(state)
        steps, tokens = (n if type(n := state.get(name)) is int and n >= 0 else None for name in ("step", "tokens"))
        data = _object(state.get("data")).get("dataset")
        start = _object(state.get("arguments")).get("model_name_or_path", ...)
        return cls(
            steps,
            tokens,
            data if steps and isinstance(data, str) and HASH.fullmatch(data) else None,
            start if isinstance(start, str) else "" if start is None else None,
            flags=_object(state.get("arguments")) if steps else {},
        )


UNKNOWN = Training()


def _object(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Export:
    """What is written into a model's directory.

    config: of ours, with `architecture` and `to_transformers`; tags: the Hub's, its pipeline's first;
    expected: every tensor, on the meta device, in the order in which they come; parameters: their number as the card
    has it; finish: writes the tokenizer's files into the directory, and returns {heading: text} for the end of the
    card, if any; published: names of weights that the card may mention as the starting point; opened_by: what reads
    the directory, where transformers has no such class ("": transformers).
    """

    config: Any
    tags: tuple[str, ...]
    expected: Mapping[str, Tensor]
    parameters: int
    finish: Callable[[Path], Mapping[str, str] | None]
    training: Training = UNKNOWN
    published: Collection[str] = ()
    opened_by: str = ""


def card(export: Export, notes: Mapping[str, str]) -> str:
    """notes: {heading: text} for the end."""
    config, architecture, training = export.config, export.config.architecture, export.training
    start = training.start if training.start in export.published else None
    counts = {
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "attention heads": config.num_attention_heads,
        "parameters": export.parameters,
        "training steps": training.steps,
        "training tokens": training.tokens,
    }
    table = {name: f"{count:,}" for name, count in counts.items() if count is not None}
    if training.start is not None:
        table["started from"] = start or ("other weights" if training.start else "random weights")
    if training.data:
        table["training data (hash)"] = f"`{training.data}`"
    if training.steps:
        table |= {"software": software()}
    lines = ["---", *front_matter(export, start), "---", "", f"# {architecture}", "", *rows(table, ("", ""))]
    if export.opened_by:
        lines += ["", f"transformers has no class of it. What opens this directory: {export.opened_by}."]
    else:
        lines += ["", "```python", f"from transformers import AutoTokenizer, {architecture}", ""]
        lines += [f'model = {architecture}.from_pretrained("DIRECTORY")  # of this file']
        lines += ['tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")', "```"]
    if results := dict(shown_results(training.results)):
        lines += ["", "## Results", "", *rows(results, ("held out", ""))]
    if flags := dict(shown_flags(training.flags)):
        lines += ["", "## Training", "", *rows(flags, ("flag", ""))]
    for heading, text in notes.items():
        lines += ["", f"## {heading}", "", text]
    lines += ["", "## Licence", "", "To be filled in: the `license` above, and what the training data allow."]
    return "\n".join(lines) + "\n"


def rows(table: Mapping[str, str], head: tuple[str, str]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---|---|", *(f"| {name} | {value} |" for name, value in table.items())]


def front_matter(export: Export, start: str | None) -> list[str]:
    pipeline, *tags = export.tags
    of = _hidden(export.training.results, "test")
    measured = {
        name: value
        for name in ("loss", "perplexity")
        if (value := number(export.training.results, f"test_{name}{of}")) is not None
    }
    data = ModelCardData(
        license=LICENSE,
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=tags,
        base_model=start,
        model_name=export.config.architecture if measured else None,
        eval_results=[
            EvalResult(
                task_type=pipeline,
                dataset_type="proteins" if pipeline == "fill-mask" else "text",
                dataset_name="held-out test split" + (", hidden residues" if of else ""),
                metric_type=name,
                metric_value=round(value, 6),
            )
            for name, value in measured.items()
        ]
        or None,
    )
    return data.to_yaml().splitlines()


def number(results: Mapping[str, Any], name: str) -> float | None:
    """A result, if it is a finite number."""
    value = results.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def shown_results(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for prefix, split in SPLITS.items():
        of = _hidden(results, prefix)
        which = f"{split}, hidden residues:" if of else split
        for name, unit in (("loss", " nats"), ("accuracy", "")):
            if (value := number(results, f"{prefix}_{name}{of}")) is not None:
                unigram = number(results, f"{prefix}_unigram_{name}{of}")
                beside = f" (residue frequencies alone: {unigram:.4f})" if unigram is not None else ""
                yield f"{which} {name}", f"{value:.4f}{unit}{beside}"
        for key, baseline in BASELINES:
            if (below := number(results, f"{prefix}_below_{key}_masked")) is not None:
                error = number(results, f"{prefix}_below_{key}_masked_stderr")
                yield (
                    f"{which} loss below that of {baseline.replace('their', 'residue')}",
                    f"{below:.4f}" + (f" ± {error:.4f}" if error is not None else "") + " nats",
                )
        if of and (loss := number(results, f"{prefix}_loss")) is not None:
            yield f"{split}, all selected residues, as published losses count them: loss", f"{loss:.4f} nats"
    for name in sorted(results):
        kind = re.fullmatch(r"eval_(contacts|mutations|probe)_([A-Za-z0-9_.-]{1,120})", name)
        if kind and (value := number(results, name)) is not None:
            yield f"{kind[1]}: {kind[2]}", f"{value:.4f}"


def _hidden(results: Mapping[str, Any], prefix: str) -> str:
    """The ending of the names of results that are of hidden residues, "" where a run has none (decoders)."""
    return "_masked" if f"{prefix}_loss_masked" in results else ""


def shown_flags(flags: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in (*FLAGS, *(("lora", "lora_r", "lora_alpha") if flags.get("lora") is True else ())):
        value = flags.get(name)
        if type(value) in (bool, int, float) or value in WORDS.get(name, ()):
            yield f"`--{name}`", f"{value}"
