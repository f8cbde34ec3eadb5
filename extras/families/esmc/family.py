"""ESM C as a family (common.models.family): the choice of backend, FLOPs, weights from and to transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from common.cli import UserError
from common.distributed.world import World
from common.hooks import extra
from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.esm2.config import override
from common.models.esm2.family import choose_residual
from common.models.family import Family, ModelSpec
from common.models.layers.backend import STOCK, Heads, check_device, choose_backend
from common.models.layers.hf_directory import check_no_dropout
from common.models.layers.state_dict_adapter import Pieces, StateDictAdapter
from extras.families.esmc.config import ALPHABET, ESMC_SIZES, EsmcConfig, check_supported, load_config
from extras.families.esmc.convert import ADAPTER


def swiglu_flops(config: Any, ffn: int, head: int, tokens: int, squared_lengths: int, targets: int) -> float:
    """As Family.flops, of layers with SwiGLU. ffn: its width; head: weights of the LM head."""
    hidden = config.hidden_size
    per_token = 2 * config.num_hidden_layers * (4 * hidden * hidden + 3 * hidden * ffn)
    attention = 4 * config.num_hidden_layers * hidden * squared_lengths
    return 3.0 * (per_token * tokens + attention + 2 * targets * head)


class Esmc(Family):
    alphabet = ALPHABET
    tokens = ESM2_TOKENS  # the ids that reading and masking need are ESM-2's
    title, published = "ESM C", tuple(ESMC_SIZES)
    stock, lora_targets = "Esmc", "q_proj,k_proj,v_proj"
    adapter: StateDictAdapter = ADAPTER
    check = staticmethod(check_supported)  # of a configuration

    def load_config(self, name: str) -> EsmcConfig:
        return load_config(name)

    def choose(self, args: Any, world: World, torch_only: tuple[str, ...], previous: dict) -> ModelSpec:
        flags, bf16 = args.model, args.precision.bf16
        of_esm2 = {"gelu": flags.gelu, "fused_gelu": flags.fused_gelu, "tokenizer_name": flags.tokenizer_name}
        for name in (name for name, given in of_esm2.items() if given):
            raise UserError(f"--{name}: is of ESM-2 only, and this is {self.title}: drop the flag")
        if flags.backend in STOCK:
            raise UserError(f"--backend {flags.backend}: is of ESM-2 only: choose auto, te, torch")
        config = self.load_config(flags.config_name or flags.model_name_or_path)
        if flags.config_overrides:
            config = override(config, flags.config_overrides, self.check)
        check_no_dropout(config, str(flags.config_name or flags.model_name_or_path))
        torch_only += args.precision.torch_only()
        backend, why = choose_backend(flags, world.device, bf16, torch_only, previous.get("backend"))
        heads = config.num_attention_heads
        head_dim = config.hidden_size // heads
        check_device(world.device, bf16, head_dim, "torch")  # both backends have torch's attention
        if world.cp_size > 1:
            extra().check_context(flags.cp_comm_type, args.data.cp_layout, world.cp_size, "torch", config)
        attention, kernels = flags.choose_attention(Heads(heads, heads, head_dim), bf16, world)
        remarks = (f"Backend: {backend} ({why})", *([kernels] if kernels else []))
        bf16_residual = choose_residual(flags.bf16_residual, bf16 and backend == "torch", world.device, previous)
        residual = torch.bfloat16 if bf16_residual else torch.float32
        make = partial(self.adapter.model, config, backend, residual)
        read = partial(self.adapter.read, flags.model_name_or_path, config) if flags.model_name_or_path else None
        return ModelSpec(config, backend, why, "", remarks, make, read, attention, bf16_residual)

    def flops(self, config: EsmcConfig, tokens: int, squared_lengths: int, targets: int) -> float:
        """The LM head runs on the masked positions only."""
        hidden, ffn = config.hidden_size, config.intermediate_size
        head = hidden * hidden + hidden * config.vocab_size
        return swiglu_flops(config, ffn, head, tokens, squared_lengths, targets)

    def of_stock(self, model: Any) -> tuple[Any, Pieces]:
        config = EsmcConfig.of(model.config.to_dict())
        return config, self.adapter.from_hf(model.state_dict(), config)[0]


FAMILY = Esmc()
