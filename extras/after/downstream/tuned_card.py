"""The model card of what finetune.py trains."""

from __future__ import annotations

import json
from typing import Any

from common.models.family import Family
from common.models.layers.model_card import rows as table_rows
from common.software import software
from extras.after.downstream.labels import TaskSpec
from extras.after.downstream.metrics import about_intervals, shown


def card_of(family: Family, task: TaskSpec, results: dict[str, Any], lora_r: int | None) -> str:
    """The model card. It has no paths, and no names of the user's but those of the classes.

    lora_r: None if all weights were trained.
    """
    head = "ForTokenClassification" if task.of_residues else "ForSequenceClassification"
    what = "all weights trained" if lora_r is None else f"LoRA of rank {lora_r}"
    library = "transformers" if lora_r is None else "peft"
    lines = ["---", f"library_name: {library}", "license: unknown", "tags:", "- protein", "- esm", "---", ""]
    lines += [f"# {family.title}, fine-tuned: {task.name.replace('_', ' ')}, {what}", ""]
    lines += ["```python", *(_opened(family.stock + head) if lora_r is None else _opened_adapter(head))]
    lines += ['tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")', "```", ""]
    if task.classes:
        names = json.dumps(dict(enumerate(task.classes)), indent=2, ensure_ascii=False)
        lines += ["Classes (`id2label` of `config.json`):", "", "```json", names, "```", ""]
    counts = {f"{name} proteins": f"{count:,}" for name, count in results["counts"].items()}
    lines += [*table_rows(counts | {"best epoch": f"{results['best_epoch']}", "software": software()}, ("", "")), ""]
    metrics = {name: shown(value) for name, value in results["test"].items() if isinstance(value, list)}
    over = about_intervals(results["intervals"]["over"], {"held-out": results["intervals"]["test"]})
    lines += ["## Results", "", *table_rows(metrics, (f"test split; {over}", "")), ""]
    lines += ["## Licence", "", "To be filled in: the `license` above, and what the training data allow."]
    return "\n".join(lines) + "\n"


def _opened(kind: str) -> list[str]:
    return [
        f"from transformers import AutoTokenizer, {kind}",
        "",
        f'model = {kind}.from_pretrained("DIRECTORY")  # of this file',
    ]


def _opened_adapter(head: str) -> list[str]:
    """AutoPeftModel reads the base model's config.json, which has other labels."""
    return [
        f"from peft import AutoPeftModel{head}",
        "from transformers import AutoConfig, AutoTokenizer",
        "",
        'labels = AutoConfig.from_pretrained("DIRECTORY")  # of this file',
        f"model = AutoPeftModel{head}.from_pretrained(",
        '    "DIRECTORY", id2label=labels.id2label, label2id=labels.label2id',
        ")",
    ]
