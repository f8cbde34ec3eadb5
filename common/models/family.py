"""The families of models: ESM-2, Llama, ... A family is a folder with a `family.py`, and a line in `families`.

A family's `family.py` defines FAMILY, a `Family`. It is imported when its family is asked for: an ESM-2 run imports no
decoder. CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.cli import UserError
from common.data import TokenSet
from common.distributed.world import World
from common.files.runs import resolve_directory
from common.hooks import FamilyLine, extra
from common.models.layers.backend import Heads, check_device, choose_backend
from common.models.layers.hf_directory import read_config
from common.models.layers.residual import Model
from common.models.layers.state_dict_adapter import Pieces, StateDictAdapter

# Of the core; `families` has the extras', too.
FAMILIES = {"esm": FamilyLine("common.models.esm2.family", "facebook/esm2_*")}
NO_STOCK = "transformers has no class for models of this family: it cannot be fine-tuned"


@dataclass(frozen=True)
class ModelSpec:
    """The model that the flags ask for, before it is built.

    backend, why: `te`, `torch` or `hf`, and the reason; gelu: `exact` or `tanh` ("" without a choice); remarks: for
    the log; make: builds the model, under torch.device("meta"); read: given weights as ((our name, tensor) pairs,
    extras), None for random ones; attention: the flash-attention kernels ("" without); bf16_residual: whether the
    residual stream is bf16, where that is a choice.
    """

    config: Any
    backend: str
    why: str
    gelu: str
    remarks: tuple[str, ...]
    make: Callable[[], Model]
    read: Callable[[], tuple[Pieces, dict[str, Tensor]]] | None
    attention: str = ""
    bf16_residual: bool | None = None


class Family(ABC):
    """What the rest of the program asks of a family. Methods import what they need: torch alone is there already.

    A model has `config`, `layers` (wrapped, compiled and recomputed one by one), and for `initialise` and
    `count_parameters` (common.models.layers.initialise) may have `padded_vocab` and `zero_rows`.
    """

    task = "mlm"  # or "clm": what trains it
    continues = ""  # model_type of a family whose models --model_type makes its own, with more parameters
    alphabet = ""  # the tokens in order, separated by blanks, as checkpoints record them (mlm)

    tokens: TokenSet  # ids for reading and masking; an Alphabet also for proteins as text: files, embed.py, ... (mlm)
    # Of an encoder: its name, and built-in names of its sizes (--model_type's default first). For finetune.py: how the
    # names of transformers' classes begin, and which matrices there get LoRA's.
    title = ""
    published: tuple[str, ...] = ()
    stock = ""
    lora_targets = ""
    reads_sets = False  # whether a model's `forward` takes the `sets` of a batch (mlm)
    form = "for transformers' from_pretrained"  # of an export, for the log

    @abstractmethod
    def load_config(self, name: str) -> Any:
        """The configuration of a built-in name, a directory or a Hub name. UserError if there is none."""

    @abstractmethod
    def choose(self, args: Any, world: World, torch_only: tuple[str, ...], previous: dict) -> ModelSpec:
        """The model that the flags ask for. UserError if it cannot run here. No collective.

        torch_only: given flags that only the torch backend can honour; previous: the backend (and GELU) of a run that
        is resumed.
        """

    @property
    @abstractmethod
    def adapter(self) -> StateDictAdapter:
        """Reads and writes weights in their published names."""

    def tokens_of(self, config: Any) -> TokenSet:
        """The alphabet of a model (mlm), with what its config.json puts between chains."""
        chains = getattr(config, "chains", "")
        return extra().chains().chain_tokens(self, chains) if chains else self.tokens

    def make(self, config: Any) -> Model:
        """The model with torch layers, under torch.device("meta")."""
        return self.adapter.model(config)

    @abstractmethod
    def flops(self, config: Any, tokens: int, squared_lengths: int, targets: int, set_pairs: int = 0) -> float:
        """Floating-point operations of a training step: matmuls only, the backward pass twice the forward pass.

        Linears cost 2 per weight and token; attention 4 x hidden per pair of tokens of the same sequence: hence the
        sum of squared lengths. set_pairs: pairs of query and key where sequences attend to earlier ones of their set;
        0: every sequence is a set of its own.
        """

    def from_transformers(self, model: Any) -> tuple[Any, Pieces]:
        """(our configuration, our parameters) of transformers' model (mlm). UserError if it has no class for them."""
        raise UserError(NO_STOCK)


class BackendFamily(Family):
    """A family whose layers have a choice of backend: `choose` is the same for all, and asks the methods below it."""

    def choose(self, args: Any, world: World, torch_only: tuple[str, ...], previous: dict) -> ModelSpec:
        flags, bf16 = args.model, args.precision.bf16
        config, remark = self.configuration(args)
        torch_only += args.precision.torch_only()
        backend, why = choose_backend(flags, world.device, bf16, torch_only, previous.get("backend"))
        heads, (attends, no_kernel) = self.heads(config), self.attends_by(backend, config)
        check_device(world.device, bf16, heads.dim, attends)
        self.check_run(args, config, backend, world)
        attention, kernels = flags.choose_attention(heads, bf16, world, attends)
        remarks = tuple(line for line in (remark, f"Backend: {backend} ({why})", no_kernel, kernels) if line)
        bf16_residual = self.choose_residual(flags, bf16 and backend == "torch", world.device, previous)
        residual = () if bf16_residual is None else (torch.bfloat16 if bf16_residual else torch.float32,)
        make = partial(self.adapter.model, config, backend, *residual)
        read = partial(self.adapter.read, flags.model_name_or_path, config) if flags.model_name_or_path else None
        return ModelSpec(config, backend, why, "", remarks, make, read, attention, bf16_residual)

    @abstractmethod
    def configuration(self, args: Any) -> tuple[Any, str | None]:
        """(the configuration that the flags ask for, a remark for the log). UserError for flags of other families."""

    @abstractmethod
    def heads(self, config: Any) -> Heads:
        """Its attention."""

    @abstractmethod
    def check_run(self, args: Any, config: Any, backend: str, world: World) -> None:
        """UserError for what this family cannot have: of context parallelism, of number formats."""

    def attends_by(self, backend: str, config: Any) -> tuple[str, str | None]:
        """(the backend that computes attention, a remark where that is not `backend` but could be)."""
        return "torch", None

    def choose_residual(self, flags: Any, can: bool, device: torch.device, previous: dict) -> bool | None:
        """Whether the residual stream is bf16; None where that is no choice. can: the layers have it."""
        return None


def families() -> dict[str, FamilyLine]:
    """config.json's model_type, in lower case: its family."""
    return FAMILIES | extra().families()


def family_of(model_type: str) -> Family:
    """The family of a config.json's model_type. KeyError if there is none."""
    return import_module(families()[str(model_type).lower()].module).FAMILY


def encoders() -> list[str]:
    """The model_type of each family of masked language modelling."""
    return [model_type for model_type in families() if family_of(model_type).task == "mlm"]


def encoder_family(name: str, model_type: str | None = None) -> Family:
    """The masked-language-modelling family: of a directory by its config.json, of a name by how it begins, else that
    of model_type; ESM-2 without one. The model_type's where that continues the family found.

    ESM-2's loader reports what is wrong with a directory that no family can read.
    """
    family = _family_by_name(name, model_type)
    asked = family_of(model_type) if model_type in families() else family
    return asked if asked.continues and family_of(asked.continues) is family else family


def _family_by_name(name: str, model_type: str | None) -> Family:
    if not Path(name).is_dir():
        listed = ((kind, line.hub_names.partition("*")[0]) for kind, line in families().items())
        known = (kind for kind, beginning in listed if beginning and name.startswith(beginning))
        return family_of(next(known, model_type or "esm"))
    try:
        family = family_of(read_config(resolve_directory(name) / "config.json")["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return family_of(model_type or "esm")
    if family.task != "mlm":
        raise UserError(f"{name}: a decoder, where an encoder is read: score.py and generate.py take decoders")
    return family
