"""What the GPU benchmarks compare: the models, by kind and size, and the same generated proteins for each."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import torch
from torch import Tensor, nn

from common.cli import UserError
from common.data.collators import Batch, MaskingCollator, to_device
from common.data.packing import Pack
from common.flags import Flags
from common.models.esm2.alphabet import CLS, EOS, ESM2_TOKENS
from common.models.esm2.config import ESM2_SIZES, HIDDEN_ACT, Esm2Config, esm2_config
from common.models.esm2.model import Esm2ForMaskedLM
from common.models.layers.backend import te_missing
from common.models.layers.compiling import compile_layers
from common.precision.build import Precision
from common.precision.emulation import Emulation
from common.precision.plan import FP8_RECIPES
from extras.hf_backend import StockEsm

# layers, hidden size, heads; of 15B also as many layers as fit beside their optimiser
SIZES = {name.split("_")[2]: shape for name, shape in ESM2_SIZES.items()}
SIZES |= {"15B/8": (6, *SIZES["15B"][1:]), "tiny": (2, 64, 4)}
KINDS = {
    "te": "TE",
    "te-fp8": "TE, FP8",
    "te-fp8-params": "TE, FP8, weights in FP8",
    "torch-compiled": "torch, compiled",
    "torch": "torch",
    "emulated": "torch, FP8 emulated",
    "peer": "EsmForMaskedLM, padded, sdpa",
}
MAX_LENGTH = 1024
LOG_MEDIAN, LOG_SPREAD = 5.6, 0.75  # of the lengths


def check_choices(flags: Flags, device: str, **known: Collection[str]) -> None:
    """UserError for a value of a flag that is none of those known, or a device that is not here."""
    for name, values in known.items():
        for value in getattr(flags, name).split(","):
            if value not in values:
                raise UserError(f"--{name} {value}: choose {', '.join(values)}")
    if device == "cuda" and not torch.cuda.is_available():
        size = next(iter(known))
        raise UserError(f"--device cuda: no GPU here; --device cpu --{size} tiny tries the script itself")


def gpu_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "no GPU"


def failure(error: Exception) -> str:
    """In a cell of a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:80]}".replace("|", "/")


def proteins(tokens: int, rng: np.random.Generator) -> tuple[Pack, np.ndarray]:
    """A pack of `tokens` tokens, or two less: (pack, ids uint8 [tokens])."""
    lengths = []
    while (left := tokens - sum(lengths)) > 0:
        length = int(np.clip(np.exp(rng.normal(LOG_MEDIAN, LOG_SPREAD)), 30, MAX_LENGTH - 2)) + 2
        lengths.append(left if left - length < 3 else length)
    lengths = np.minimum(np.array(lengths), MAX_LENGTH)
    ids = rng.integers(4, 24, lengths.sum()).astype(np.uint8)
    ends = lengths.cumsum()
    ids[ends - lengths], ids[ends - 1] = CLS, EOS
    number = np.arange(len(lengths))
    return Pack(records=number, starts=np.zeros_like(number), lengths=lengths, epoch=0), ids


def batches_for(kind: str, tokens: int, count: int) -> list[Batch]:
    """Packs of `tokens` tokens; for the peer, of each as many sequences as have no more positions when padded."""
    rng = np.random.default_rng(0)
    batches = []
    for pack, ids in (proteins(tokens, rng) for _ in range(count)):
        rows = len(pack.lengths)
        if kind == "peer":
            rows = next(n for n in range(rows, 0, -1) if n * pack.lengths[:n].max() <= tokens or n == 1)
        part = Pack(pack.records[:rows], pack.starts[:rows], pack.lengths[:rows], 0)
        batches.append(MaskingCollator(ESM2_TOKENS, 0)(part, ids[: part.lengths.sum()]))
    return batches


def build(kind: str, config: Esm2Config, device: str, fp8_recipe: str) -> tuple[nn.Module, Precision]:
    """A model in fp32 with random weights, the same ones whatever the kind. UserError without what it needs.

    Drawn on the device: common.models.layers.initialise, on the CPU, takes half a minute for 3B.
    """
    backend = "te" if kind.startswith("te") else "torch"
    if backend == "te" and (missing := te_missing(torch.device(device))):
        raise UserError(missing)
    with torch.device("meta"):
        model = StockEsm(config) if kind == "peer" else Esm2ForMaskedLM(config, backend)
    precision = Precision()
    plan = (FP8_RECIPES[fp8_recipe](FP8_RECIPES[fp8_recipe].default_format),) * config.num_hidden_layers
    if kind.startswith("te-fp8"):
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        from common.precision.te import Quantised

        FP8GlobalStateManager.reset()  # it would keep the scales of earlier models
        precision = Precision(plan, quantiser=Quantised(model, plan, fp8_params=kind == "te-fp8-params"))
    model.to_empty(device=device)
    fill(model)
    if kind == "te-fp8-params":
        precision = precision.quantise_weights()
    if kind == "emulated":
        precision = Precision(plan, quantiser=Emulation(model, plan, seed=0, device=device))
    if kind == "torch-compiled":
        torch.compiler.reset()
        compile_layers(model, device)
    return model, precision


def config_of(kind: str, size: str) -> Esm2Config:
    config = esm2_config(*SIZES[size])
    if kind.startswith("te"):
        config.hidden_act = HIDDEN_ACT["tanh"]
    return config


def steps_of(kind: str, config: Esm2Config, device: str, fp8_recipe: str) -> Callable[[Batch], Tensor]:
    """A function that does one training step with a batch of that kind and returns its loss, on the device."""
    model, precision = build(kind, config, device, fp8_recipe)
    model.train()
    masters = precision.masters
    weights = (masters.weights if masters else model).parameters()
    optimizer = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.01, fused=True)
    if masters:
        masters.attach(optimizer)

    def step(batch: Batch) -> Tensor:
        inputs = to_device(batch, torch.device(device))
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = model(**inputs).loss_sum / batch["num_targets"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        return loss.detach()

    return step


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Random numbers everywhere, in biases and norms too, so that a swapped tensor shows."""
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        generator = torch.Generator(parameter.device).manual_seed(number)
        centre = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
        parameter.normal_(centre, 0.02, generator=generator)
