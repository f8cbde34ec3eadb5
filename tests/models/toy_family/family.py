"""The toy family: nucleotides, embedded, passed through one layer, predicted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from common.data import TokenSet
from common.distributed.world import World
from common.models.family import Family, ModelSpec
from common.models.layers.linear import Linear
from common.models.layers.residual import Layers
from common.models.layers.state_dict_adapter import Pieces, StateDictAdapter

TOKENS = ("<cls>", "<pad>", "<eos>", "A", "C", "G", "T", "<mask>")


@dataclass
class ToyConfig:
    set_by: ClassVar[str] = "config.json"
    architecture: ClassVar[str] = "ToyModel"

    model_type: str = "toy"
    vocab_size: int = len(TOKENS)
    hidden_size: int = 16
    num_hidden_layers: int = 1
    initializer_range: float = 0.02

    def content(self) -> dict[str, Any]:
        return asdict(self)

    def fingerprint(self) -> dict[str, Any]:
        return asdict(self) | {"alphabet": " ".join(TOKENS)}


class ToyLayer(nn.Module):
    def __init__(self, config: ToyConfig):
        super().__init__()
        self.linear = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


class ToyOutput(NamedTuple):
    loss_sum: Tensor
    correct: Tensor
    entropy: Tensor  # of the predictions, summed over the targets: a metric that ESM-2 lacks
    token_losses: Tensor  # [T]
    token_correct: Tensor  # [T]


class ToyModel(nn.Module):
    zero_rows = {"embedding.weight": (TOKENS.index("<pad>"),)}

    def __init__(self, config: ToyConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = Layers([ToyLayer(config)])

    def forward(self, input_ids: Tensor, *, labels: Tensor, **_: Any) -> ToyOutput:
        x = self.embedding(input_ids)
        for layer in self.layers.in_turn():
            x = layer(x)
        logits = x @ self.embedding.weight.t()
        correct = logits.argmax(-1) == labels
        losses = F.cross_entropy(logits, labels, reduction="none")
        entropy = torch.distributions.Categorical(logits=logits.float()).entropy()[labels >= 0].sum()
        return ToyOutput(losses.sum(), correct.sum(), entropy, losses, correct)


class ToyAdapter(StateDictAdapter):
    model = ToyModel

    def parts(self, config: ToyConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
        with torch.device("meta"):
            names = list(ToyModel(config).state_dict())
        return ((name, (name,)) for name in names)

    def write_tokenizer(self, directory: Path, tokenizer: Any = None) -> None:
        """transformers has none."""

    def save(self, pieces: Pieces, config: ToyConfig, directory: Path, *_: Any) -> None:
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(asdict(config)))
        save_file(dict(pieces), directory / "model.safetensors")


class Toy(Family):
    alphabet = " ".join(TOKENS)
    tokens = TokenSet(len(TOKENS), pad=1, mask=7, unknown=0, residues=(3, 6), replacements=(3, 4, 5, 6))
    adapter = ToyAdapter()

    def load_config(self, name: str) -> ToyConfig:
        return ToyConfig(**json.loads((Path(name) / "config.json").read_text()))

    def choose(self, args: Any, world: World, torch_only: tuple[str, ...], previous: dict) -> ModelSpec:
        config = self.load_config(args.model.config_name or args.model.model_name_or_path)
        read = None
        if given := args.model.model_name_or_path:
            read = partial(self.adapter.read, given, config)
        return ModelSpec(config, "torch", "the only one", "", (), partial(self.make, config), read)

    def flops(self, config: ToyConfig, tokens: int, squared_lengths: int, targets: int, set_pairs: int = 0) -> float:
        return 3.0 * 2 * tokens * config.hidden_size * (config.hidden_size + config.vocab_size)


FAMILY = Toy()
