"""An evaluation metric needs a sum in a model's output and a line in METRICS: here the entropy of predictions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from common.data.training_data import evaluation_masks, held_out_batches, open_data
from common.distributed.world import World
from common.models.family import FAMILIES
from common.training.command_line import parse_run
from common.training.evaluation import METRICS
from common.training.masked_lm import TrainArguments
from tests.data_fixtures import load_script
from tests.models.test_toy_family import REGISTERED, toy  # noqa: F401  (a fixture)
from tests.models.toy_family.family import FAMILY
from tests.training_fixtures import _main, on_ranks, rows

ALONE = World(0, 0, 1, torch.device("cpu"))


def _train_with_entropy(argv: list[str]) -> None:
    FAMILIES.update(REGISTERED)
    METRICS["entropy"] = lambda output, batch: output.entropy
    _main(argv)


def _mean_entropy(args: TrainArguments, weights: dict[str, np.ndarray], split: str) -> float:
    """In nats, over the masked residues of a split, by the toy model's formulas in numpy."""
    embedding, matrix, bias = (
        weights[name] for name in ("embedding.weight", "layers.0.linear.weight", "layers.0.linear.bias")
    )
    store = open_data(args.data, FAMILY.tokens, ALONE, evaluate=True).held_out(split)
    collator = evaluation_masks(args.data, FAMILY.tokens, ALONE.mesh)
    entropies = []
    for batch in held_out_batches(args.data, store, collator, ALONE):
        x = embedding[batch["input_ids"].numpy()].astype(np.float64)
        hidden = torch.from_numpy(x @ matrix.T + bias)
        x = x + torch.nn.functional.gelu(hidden).numpy()
        exponents = np.exp(x @ embedding.T)
        p = exponents / exponents.sum(-1, keepdims=True)
        entropies.append(-(p * np.log(p)).sum(-1)[batch["labels"].numpy() >= 0])
    return float(np.concatenate(entropies).mean())


def test_metric_reaches_rows_and_results_of_a_run_on_2_ranks(toy, tmp_path: Path):  # noqa: F811
    model, data = toy
    out = tmp_path / "out"
    flags = {"config_name": model, "dataset_dir": data, "output_dir": out, "max_steps": 4, "max_seq_length": 32}
    flags |= {"learning_rate": 0.1, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "eval_steps": 2}
    argv = [*(f"--{name}={value}" for name, value in flags.items()), "--do_eval", "--dataloader_num_workers=0"]
    codes, said = on_ranks(2, _train_with_entropy, argv)
    assert codes == [0, 0], said
    results = json.loads((out / "all_results.json").read_text())
    evaluated = [row for row in rows(out) if "eval_entropy" in row]
    assert [row["step"] for row in evaluated] == [2, 4]
    assert evaluated[1]["eval_entropy"] == results["eval_entropy"] != evaluated[0]["eval_entropy"]
    args = parse_run("", load_script("train_ddp.py").DdpFlags, argv)
    weights = load_file(out / "final_model" / "model.safetensors")
    for split, prefix in (("validation", "eval"), ("test", "test")):
        assert abs(results[f"{prefix}_entropy"] - _mean_entropy(args, weights, split)) < 1e-5
