"""ESM-2 as a family (common.models.family): its flags, the choice of backend and GELU, FLOPs, export.

GELU: ESM-2's own is exact (erf); Transformer Engine's fused kernels have the tanh approximation only. A run records
its choice as `hidden_act` in config.json (transformers' names), which stock `EsmForMaskedLM` ignores: its GELU is
always exact. The difference is measured in benchmarks/results/gelu.md. The LM head's GELU is exact everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from common.cli import UserError
from common.data import TokenSet
from common.data.alphabet import recorded_alphabet
from common.distributed.world import World
from common.flags import Missing, flag
from common.hooks import extra
from common.models.esm2.alphabet import ESM2_TOKENS, TOKENS
from common.models.esm2.config import ESM2_SIZES, HIDDEN_ACT, Esm2Config, gelu_of, load_config
from common.models.family import BackendFamily, Family, ModelSpec, encoder_family, encoders, families, family_of
from common.models.layers.backend import HF_BACKENDS, BackendFlags, Heads
from common.models.layers.config_base import CHAINS, override
from common.models.layers.hf_directory import check_no_dropout
from common.models.layers.state_dict_adapter import Pieces, StateDictAdapter

ONLY_GELU = {"te": "tanh", **dict.fromkeys(HF_BACKENDS, "exact")}  # backends with one kind


def choose_gelu(asked: str | None, backend: str, config: Esm2Config) -> tuple[str, str | None]:
    """(the GELU, a remark for the log or None); the GELU is written into the configuration.

    asked: --gelu; None takes the backend's only one, else that of the weights. UserError if the backend has only the
    other.
    """
    own, only = gelu_of(config), ONLY_GELU.get(backend)
    if asked and only and asked != only:
        raise UserError(f"--gelu {asked}: --backend {backend} has the {only} GELU only: drop the flag, or the backend")
    chosen = asked or only or own
    config.hidden_act = HIDDEN_ACT[chosen]
    if chosen == "tanh":
        why = "asked for" if asked else f"--backend {backend} has no other" if only else "as the weights were trained"
        return chosen, (
            f"GELU: the tanh approximation ({why}), recorded as hidden_act {config.hidden_act}; EsmForMaskedLM "
            "computes the exact one"
        )
    if own == "tanh":
        return chosen, "GELU: the exact one (asked for); these weights were trained with the tanh approximation"
    return chosen, None  # ESM-2 as published


def choose_residual(asked: bool | None, can: bool, device: torch.device, previous: Mapping[str, str]) -> bool:
    """Whether the residual stream is bf16: as asked, else as a run that is resumed had it, else on a GPU.

    can: whether the layers compute in bf16 and have the choice; previous: as of `load_model`.
    """
    if asked is not None:
        return asked
    if previous:
        return previous.get("bf16_residual") == "True"
    return can and device.type == "cuda"


NO_KERNEL = "Transformer Engine has no attention kernel for packs here (neither flash-attn nor cuDNN's)"


@dataclass(frozen=True)
class ModelFlags(BackendFlags):
    """Which ESM-2, and how it computes."""

    group = "model"
    required = ("config_name",)
    advanced = ("config_overrides",)
    unlisted = ("model_type", "tokenizer_name", "alphabet", "gelu", "bf16_residual")
    file_only = ("fused_gelu",)

    config_name: str | None = flag(
        None,
        lambda: (
            "The model to train from random weights, of a size for your data (docs/sizes.md): "
            f"{', '.join(line.hub_names for line in families().values() if line.hub_names)} (built in), a directory "
            "with config.json, a Hub name."
        ),
    )
    model_type: str | None = flag(
        None,
        lambda: (
            f"{', '.join(f'{kind} ({line.about})' for kind, line in families().items() if line.about)} or esm. "
            "Default: what config.json or the name says (docs/models.md)."
        ),
    )
    config_overrides: str | None = flag(
        None, "For another size: change the configuration of --config_name: num_hidden_layers=2,hidden_size=64,..."
    )
    tokenizer_name: str | None = flag(None, "ESM-2's vocabulary is built in: a directory with another one is refused.")
    alphabet: str | None = flag(
        None,
        "For --dataset in another alphabet than ESM-2's: saprot, codon, or a YAML file (docs/data.md). Default: that "
        "of --dataset_dir.",
    )
    gelu: str | None = flag(
        None,
        "exact: ESM-2's own; tanh: an approximation, Transformer Engine's only one. Default: the backend's.",
        choices=HIDDEN_ACT,
    )
    fused_gelu: bool = flag(
        False, "With --bf16 on Hopper or Blackwell: exact GELU inside the matmuls of the torch backend, by QuACK."
    )
    bf16_residual: bool | None = flag(
        None,
        "With --bf16: a bf16 residual stream too, as Transformer Engine always has it: less memory traffic, two more "
        "roundings per layer. Default: on a GPU.",
    )

    overrides = {"config_name": ("model_name_or_path",), "model_name_or_path": ("config_name", "config_overrides")}
    last_wins = ("config_name", "model_name_or_path")

    def missing(self) -> Iterator[Missing]:
        if not self.config_name and not self.model_name_or_path:
            yield Missing("--config_name", "the model to train", "facebook/esm2_t6_8M_UR50D")

    def resolve(self) -> ModelFlags:
        if not self.model_type or self.config_name or self.model_name_or_path:
            return self
        published = encoder_named(self.model_type).published
        return replace(self, config_name=published[0]) if published else self

    def check(self) -> None:
        if self.model_type:
            asked, name = encoder_named(self.model_type), str(self.config_name or self.model_name_or_path)
            if encoder_family(name, self.model_type) is not asked:
                raise UserError(f"--model_type {self.model_type}: {name} is of another family: drop one of the two")
        if self.config_name and self.model_name_or_path:
            raise UserError("--config_name (random weights) excludes --model_name_or_path (given weights)")
        if self.config_overrides and not self.config_name:
            raise UserError("--config_overrides changes --config_name; it cannot change --model_name_or_path")

    def torch_only(self) -> list[str]:
        flags = {"--gelu exact": self.gelu == "exact", "--fused_gelu": self.fused_gelu}
        return [*super().torch_only(), *(name for name, is_given in flags.items() if is_given)]


def encoder_named(model_type: str) -> Family:
    """The family of --model_type. UserError unless it is one of masked language modelling."""
    if model_type not in families() or (family := family_of(model_type)).task != "mlm":
        raise UserError(f"--model_type {model_type}: is no encoder here: choose {', '.join(encoders())}")
    return family


def te_attends(config: Esm2Config) -> bool:
    """Whether Transformer Engine (installed) has its own attention kernel for packs."""
    from common.models.esm2.layers_te import has_kernel

    return has_kernel(config.num_attention_heads, config.hidden_size // config.num_attention_heads)


class EncoderFamily(BackendFamily):
    """A family that `ModelFlags` choose from."""

    def check_flags(self, flags: ModelFlags) -> None:
        """UserError for flags of ESM-2 only."""
        of_esm2 = ("gelu", "fused_gelu", "tokenizer_name", "alphabet")
        for name in (name for name in of_esm2 if getattr(flags, name)):
            raise UserError(f"--{name}: is of ESM-2 only, and this is {self.title}: drop the flag")
        if flags.backend in HF_BACKENDS:
            raise UserError(f"--backend {flags.backend}: is of ESM-2 only: choose auto, te, torch")

    def configuration(self, args: Any) -> tuple[Any, str | None]:
        flags = args.model
        self.check_flags(flags)
        name = flags.config_name or flags.model_name_or_path
        config = self.load_config(name)
        if flags.config_overrides:
            config = override(config, flags.config_overrides)
        check_no_dropout(config, str(name))
        if args.data.chains:
            config.others[CHAINS] = args.data.chains
        if args.data.objective != "mdlm" or not config.token_dropout:
            return config, None
        remark = "Token dropout: off, as --objective mdlm masks at all rates"
        if flags.model_name_or_path:
            remark += "; these weights were trained with it: the loss is high at first"
        return replace(config, token_dropout=False), remark

    def heads(self, config: Any) -> Heads:
        heads = config.num_attention_heads
        return Heads(heads, heads, config.hidden_size // heads)

    def check_run(self, args: Any, config: Any, backend: str, world: World) -> None:
        if world.cp_size > 1:  # both backends have torch's attention
            extra().check_context(args.model.cp_comm_type, args.data.cp_layout, world.cp_size, "torch", config)

    def choose_residual(self, flags: ModelFlags, can: bool, device: torch.device, previous: dict) -> bool:
        return choose_residual(flags.bf16_residual, can, device, previous)


class Esm2(EncoderFamily):
    alphabet = " ".join(TOKENS)

    tokens = ESM2_TOKENS
    title, published = "ESM-2", tuple(ESM2_SIZES)
    stock, lora_targets = "Esm", "query,key,value"

    def load_config(self, name: str) -> Esm2Config:
        return load_config(name)

    def tokens_of(self, config: Esm2Config) -> TokenSet:
        if not config.chains:
            return config.tokens
        if config.alphabet is not None:
            raise UserError(f"--chains: models of the alphabet {config.tokens.name} read one chain a record: drop it")
        return super().tokens_of(config)

    def configuration(self, args: Any) -> tuple[Esm2Config, str | None]:
        """A model of random weights takes the alphabet of --alphabet, or of the data."""
        config, remark = super().configuration(args)
        asked = args.model.alphabet
        wanted = extra().alphabet(asked, f"--alphabet {asked}") if asked else None
        if wanted is None and args.model.config_name and args.data.dataset_dir:
            wanted = recorded_alphabet(args.data.dataset_dir)
        if wanted is None or config.tokens == wanted:
            return config, remark
        if config.alphabet is not None or not args.model.config_name:
            name = args.model.config_name or args.model.model_name_or_path
            given = f"--alphabet {asked}" if asked else f"--dataset_dir {args.data.dataset_dir}"
            raise UserError(f"{name}: a model of the alphabet {config.tokens.name}, and {given} is {wanted.name}")
        remarks = (f"Alphabet: {wanted.name}, {wanted.vocab_size} tokens", remark)
        return config.in_alphabet(wanted), ". ".join(filter(None, remarks))

    def check_flags(self, flags: ModelFlags) -> None:
        if flags.tokenizer_name:
            extra().check_tokenizer(flags.tokenizer_name)

    def check_run(self, args: Any, config: Esm2Config, backend: str, world: World) -> None:
        if world.cp_size > 1:
            extra().check_context(args.model.cp_comm_type, args.data.cp_layout, world.cp_size, backend, config)

    def attends_by(self, backend: str, config: Esm2Config) -> tuple[str, str | None]:
        if backend == "te" and not te_attends(config):
            return "torch", f"Attention by torch's kernels: {NO_KERNEL}"
        return backend, None

    def choose(self, args: Any, world: World, torch_only: tuple[str, ...], previous: dict) -> ModelSpec:
        """ESM-2's own choice is the GELU."""
        spec, flags, before = super().choose(args, world, torch_only, previous), args.model, previous.get("gelu")
        gelu, remark = choose_gelu(flags.gelu or (before if before in HIDDEN_ACT else None), spec.backend, spec.config)
        make, lines = spec.make, [remark]
        if spec.backend in HF_BACKENDS or flags.fused_gelu:
            make, remarks = extra().esm2_layers(args, spec.config, spec.backend, gelu, world, make)
            lines += remarks
        return replace(spec, gelu=gelu, remarks=(*spec.remarks, *(line for line in lines if line)), make=make)

    @property
    def adapter(self) -> StateDictAdapter:
        from common.models.esm2.convert import ADAPTER

        return ADAPTER

    def flops(self, config: Esm2Config, tokens: int, squared_lengths: int, targets: int, set_pairs: int = 0) -> float:
        """The LM head runs on the masked positions only."""
        hidden, ffn = config.hidden_size, config.intermediate_size
        per_token = 2 * config.num_hidden_layers * (4 * hidden * hidden + 2 * hidden * ffn)
        attention = 4 * config.num_hidden_layers * hidden * squared_lengths
        head = 2 * targets * (hidden * hidden + hidden * config.num_tokens)
        return 3.0 * (per_token * tokens + attention + head)

    def from_transformers(self, model: Any) -> tuple[Any, Pieces]:
        config = Esm2Config.of(model.config.to_dict())
        return config, self.adapter.from_hf(model.state_dict(), config)[0]


FAMILY = Esm2()
