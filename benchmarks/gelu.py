"""What the tanh approximation of GELU changes: logits of equal weights, and the loss of two equal training runs.

    python -m benchmarks.gelu --dataset_dir quickstart/sample/processed/arrow [--output table.md]

Transformer Engine's layers have the approximation only (docs/precision.md). Here both are computed by the torch
backend in fp32, so that nothing else differs. As a yardstick the runs are made once more with other initial weights.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import copy
from dataclasses import dataclass

import torch

from benchmarks.measuring import PreparedFlags, publish, say, where_measured
from common.cli import run
from common.data.collators import MaskingCollator, to_device
from common.data.loader import PlannedOrder, TrainLoader
from common.data.packing import BatchPlan
from common.data.token_store import open_split
from common.flags import flag, parse_arguments
from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.esm2.config import HIDDEN_ACT, load_config
from common.models.esm2.model import Esm2ForMaskedLM, build_model
from common.training.optim import OptimizerFlags, build_adamw


@dataclass
class Arguments(PreparedFlags):
    config_name: str = flag("facebook/esm2_t6_8M_UR50D", "The model.")
    tokens: int = flag(2048, "Tokens a step.")
    max_seq_length: int = flag(256, "Crop.")
    steps: int = flag(150, "Steps of each run.")
    learning_rate: float = flag(2e-3, "Peak learning rate.")
    last: int = flag(25, "The final losses are means over this many last steps.")
    output: str | None = flag(None, "Also write the table there.")


def with_gelu(args: Arguments, gelu: str, seed: int) -> Esm2ForMaskedLM:
    config = load_config(args.config_name)
    config.hidden_act = HIDDEN_ACT[gelu]
    return build_model(config, seed)


def batches_of(args: Arguments) -> list[dict]:
    store = open_split(args.dataset_dir, "train", ESM2_TOKENS)
    plan = BatchPlan(store.lengths, len(store), 0, args.max_seq_length, tokens_per_pack=args.tokens)
    loader = TrainLoader(PlannedOrder(store, plan, packs_per_step=1), MaskingCollator(ESM2_TOKENS, 0))
    return [share.micro_batches[0] for share, _ in zip(loader, range(args.steps), strict=False)]


def train(args: Arguments, model: Esm2ForMaskedLM, batches: list[dict], name: str) -> list[float]:
    """The loss of every step, in nats."""
    flags = OptimizerFlags(learning_rate=args.learning_rate)
    optimizer, rate = build_adamw(model.parameters(), flags), flags.schedule(len(batches))
    losses = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        loss = model(**to_device(batch, torch.device("cpu"))).loss_sum / batch["num_targets"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        say(f"{name}  step {step + 1}/{len(batches)}  loss {losses[-1]:.5f}")
    return losses


@torch.no_grad()
def logit_differences(model: Esm2ForMaskedLM, batch: dict) -> tuple[float, float, float]:
    """(largest difference, its share of the logits' range, root mean square difference), the same weights in both."""
    other = copy.deepcopy(model)
    for layer in other.layers:
        layer.layernorm_mlp.approximate = {"none": "tanh", "tanh": "none"}[layer.layernorm_mlp.approximate]
    inputs = {k: batch[k] for k in ("input_ids", "cu_seqlens", "max_seqlen")}
    ours, theirs = (m(**inputs).logits for m in (model, other))
    difference = (ours - theirs).abs()
    return tuple(
        x.item()
        for x in (difference.max(), difference.max() / (ours.max() - ours.min()), difference.square().mean().sqrt())
    )


def compare(args: Arguments) -> str:
    batches = batches_of(args)
    models = {("exact", 0): None, ("tanh", 0): None, ("exact", 1): None}
    fresh = logit_differences(with_gelu(args, "exact", 0), batches[0])
    losses = {}
    for gelu, seed in models:
        models[gelu, seed] = with_gelu(args, gelu, seed)
        losses[gelu, seed] = train(args, models[gelu, seed], batches, f"{gelu}, seed {seed}")
    trained = logit_differences(models["exact", 0], batches[0])
    exact = losses["exact", 0]
    hardware, command = where_measured("benchmarks.gelu", "torch")
    lines = [
        f"{args.config_name}, fp32, {len(batches)} steps of {args.tokens} tokens; {hardware}",
        "",
        command,
        "",
        "The same weights, exact GELU against tanh:",
        "",
        "| weights | largest difference of a logit | of the logits' range | root mean square |",
        "|---|--:|--:|--:|",
    ]
    for name, (largest, share, rms) in (("initial", fresh), ("after the run with exact GELU", trained)):
        lines.append(f"| {name} | {largest:.1e} | {share:.1e} | {rms:.1e} |")
    lines += [
        "",
        "Training runs on the same batches:",
        "",
        f"| run | loss, mean of the last {args.last} steps | difference | largest difference in a step |",
        "|---|--:|--:|--:|",
    ]
    for (gelu, seed), values in losses.items():
        name = f"{gelu} GELU" + (", other initial weights" if seed else "")
        mean, base = (sum(v[-args.last :]) / args.last for v in (values, exact))
        apart = max(abs(a - b) for a, b in zip(values, exact, strict=True))
        lines.append(f"| {name} | {mean:.5f} | {mean - base:+.5f} | {apart:.5f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    table = compare(args)
    publish(table, args.output)


if __name__ == "__main__":
    run(main)
