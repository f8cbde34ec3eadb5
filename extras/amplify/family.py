"""AMPLIFY as a family (common.models.registry): FLOPs, weights from and to its authors' names.

The choice of backend is ESM C's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from common.models.layers.hf_directory import Training
from extras.amplify.alphabet import ALPHABET
from extras.amplify.config import AMPLIFY_SIZES, AmplifyConfig, check_supported, load_config
from extras.amplify.convert import pieces_to_ours, pieces_to_theirs, read_pretrained, save_pretrained, write_tokenizer
from extras.amplify.model import AmplifyForMaskedLM
from extras.esmc.family import Esmc, swiglu_flops


class Amplify(Esmc):
    alphabet, tokens = str(ALPHABET), ALPHABET
    title, published = "AMPLIFY", tuple(AMPLIFY_SIZES)
    stock = lora_targets = ""
    form = "in its authors' names, for --model_name_or_path; transformers has no class of it"
    model = AmplifyForMaskedLM
    check = staticmethod(check_supported)

    def load_config(self, name: str) -> AmplifyConfig:
        return load_config(name)

    def read(self, name: str, config: AmplifyConfig) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Tensor]]:
        return read_pretrained(name, config)

    def flops(self, config: AmplifyConfig, tokens: int, squared_lengths: int, targets: int) -> float:
        """The decoder runs on the masked positions only."""
        head = config.hidden_size * ALPHABET.vocab_size
        return swiglu_flops(config, config.ffn_size, head, tokens, squared_lengths, targets)

    def to_hf(
        self, get: Callable[[str], Tensor], config: AmplifyConfig, extras: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        return pieces_to_theirs(get, config)

    def of_stock(self, model: Any) -> tuple[AmplifyConfig, Iterator[tuple[str, Tensor]]]:
        return model.config, pieces_to_ours(model.tensors, model.config)

    def write_tokenizer(self, directory: Path) -> None:
        write_tokenizer(directory)

    def save(
        self,
        tensors: Iterator[tuple[str, Tensor]],
        config: AmplifyConfig,
        directory: Path,
        training: Training,
        tokenizer: Any = None,
    ) -> None:
        save_pretrained(tensors, config, directory, training)


FAMILY = Amplify()
