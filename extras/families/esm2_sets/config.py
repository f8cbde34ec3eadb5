"""The configuration of an ESM-2 with attention over sets: ESM-2's, and which layers have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from common.cli import UserError
from common.models.esm2.config import ESM2_SIZES, Esm2Config, esm2_config
from common.models.layers import hf_directory

MODEL_TYPE = "esm_sets"
OF_ESM2 = (None, "esm", "nv_esm")  # model_type of the configurations that are taken for one of ESM-2


@dataclass
class EsmSetsConfig(Esm2Config):
    """The fields of ESM-2's config.json, and:

    set_every: after the last of so many layers comes attention over the set; rope_theta_global: base of the rotation
    there, whose positions run over the set.
    """

    architecture: ClassVar[str] = "EsmSetsForMaskedLM"
    fixed = Esm2Config.fixed | {"model_type": MODEL_TYPE}
    positive = (*Esm2Config.positive, "rope_theta_global")
    fingerprint_fields = (*Esm2Config.fingerprint_fields, "set_every", "rope_theta_global")
    # No parameter depends on them.
    max_num_sequences: ClassVar[int] = 1 << 30
    max_num_positions_within_seq: ClassVar[int] = 1 << 30
    max_num_positions_global: ClassVar[int] = 1 << 30
    is_of_esm2 = False  # no field: whether it was read from a model without attention over sets

    model_type: str = MODEL_TYPE
    set_every: int = 3
    rope_theta_global: float = 500000.0

    @classmethod
    def of(cls, content: dict[str, Any]) -> Self:
        if content.get("model_type") not in OF_ESM2:
            return super().of(content)
        return cls.on(Esm2Config.of(content))

    @classmethod
    def on(cls, config: Esm2Config) -> Self:
        """An ESM-2's, with attention over sets."""
        made = super().of(config.content() | {"model_type": MODEL_TYPE, "architectures": [cls.architecture]})
        made.is_of_esm2, made.set_every = True, min(cls.set_every, config.num_hidden_layers)
        return made

    def esm2(self) -> Esm2Config:
        """Without attention over sets."""
        content = self.content() | {"model_type": "esm", "architectures": [Esm2Config.architecture]}
        return Esm2Config.of({name: content[name] for name in content.keys() - {"set_every", "rope_theta_global"}})

    def is_global(self, n: int) -> bool:
        """Whether attention over the set comes after layer n, from 0."""
        return (n + 1) % self.set_every == 0

    def check(self, where: str) -> None:
        super().check(where)
        if not 1 <= self.set_every <= self.num_hidden_layers:
            raise UserError(
                f"{where}: set_every is {self.set_every}: must be 1 to num_hidden_layers, {self.num_hidden_layers}"
            )

    def to_transformers(self):
        """The same as an object with transformers' `save_pretrained`, which has no class of its own."""
        from transformers import PretrainedConfig

        class EsmSetsConfig(PretrainedConfig):
            model_type = MODEL_TYPE

        return EsmSetsConfig.from_dict(self.content())


def load_config(name: str) -> EsmSetsConfig:
    """The configuration behind an ESM-2's built-in name, a local directory, or a name on the Hub (in this order); one
    of ESM-2 gets attention over sets."""
    if name in ESM2_SIZES:
        return EsmSetsConfig.on(esm2_config(*ESM2_SIZES[name]))
    config = hf_directory.load_config(name, EsmSetsConfig.read, name, ESM2_SIZES, "")
    config.check(name)
    return config
