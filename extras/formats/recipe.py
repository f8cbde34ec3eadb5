"""A number format below bf16 is a subclass of `Recipe`, in a file that ends with `FORMAT = <Subclass>`.

Its fields are what --fp8_recipe_kwargs may set, with the names and defaults of Transformer Engine's recipe
(`transformer_engine.common.recipe`). extras/catalogue.py has a line for each: its name and its module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.cli import UserError
from common.hooks import extra
from extras.formats.casts import E4M3, E5M2, GRADIENT, Element, Quantized

ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)
NAMES = {ADA: "Ada", HOPPER: "Hopper", BLACKWELL: "Blackwell"}


@dataclass(frozen=True)
class Recipe(ABC):
    """How a layer's matmuls are quantised. Abstract is what a format must say: it is not rounded in silence."""

    title: ClassVar[str] = ""
    flag: ClassVar[str] = "--fp8"
    default_format: ClassVar[str] = "hybrid"

    # What it asks of device and shapes.
    capability: ClassVar[tuple[int, int]] = HOPPER
    multiple: ClassVar[int] = 16  # of tokens and of every dimension of a matmul

    # How it scales.
    whole_tensor: ClassVar[bool] = False  # one scale a tensor: quantised, it is the same along both dimensions
    keeps_scales: ClassVar[bool] = False  # from step to step: see `new_scales`

    # Who computes in it, and what it takes there. te_class: "" where Transformer Engine has no such recipe.
    scaled_mm: ClassVar[bool] = False  # --fp8_scaled_mm
    te_class: ClassVar[str] = ""
    te_variables: ClassVar[dict[str, str]] = {}  # Transformer Engine's own that would change it: what to say instead
    fp8_params: ClassVar[bool] = True  # weights can be kept in it
    shard_rows: ClassVar[int | None] = None  # a scale's rows of a weight, where not all of it
    hides_nan: ClassVar[bool] = False  # Transformer Engine's cast turns a NaN into a number

    # --quant_stats: a statistic's name begins so where it is of this recipe (""; of the layer's own alone), and the
    # feature of Transformer Engine's debug configuration.
    stat_name: ClassVar[str] = ""
    stat_feature: ClassVar[str] = "LogFp8TensorStats"

    fp8_format: str = "hybrid"  # hybrid: E4M3 forward, E5M2 for gradients; e4m3: everywhere

    @property
    @abstractmethod
    def exact_in_bf16(self) -> bool:
        """Whether bf16 holds every quantised value, its block's scale included: then emulation multiplies in bf16."""

    @abstractmethod
    def quantize(
        self, x: Tensor, role: int, along: int, key: int = 0, group: dist.ProcessGroup | None = None
    ) -> Quantized:
        """x [R, C] for a matmul that sums over its columns or its rows.

        key: of random bits; group: the ranks that share a pack, and with it the scale of a tensor.
        """

    def stored(self, tensor: Any, along: int) -> Quantized | None:
        """The same of a tensor of Transformer Engine, [R, C]; None where it has no copy for such matmuls.

        UserError for a format whose tensors there are not read.
        """
        raise UserError(f"--quant_stats: {self.title}: only of emulated layers: add --emulate_precision, or drop it")

    def new_scales(self, matmuls: int, device: torch.device | str) -> Any:
        """Scales of the operands of all matmuls of a model; None where the format keeps none from step to step."""
        return None

    def element(self, role: int) -> Element:
        return E5M2 if self.fp8_format == "hybrid" and role == GRADIENT else E4M3

    def transform(self, x: Tensor, role: int, along: int) -> Tensor:
        """What is cast in place of x."""
        return x

    @property
    def draws(self) -> bool:
        """Whether gradients are rounded with random bits."""
        return False

    @property
    def te_power_of_2(self) -> bool | None:
        """Whether Transformer Engine's scales are powers of two; None: as its recipe has it."""
        return None

    @property
    def full_title(self) -> str:
        return f"{self.title}, {self.fp8_format}"

    @classmethod
    def check_kwargs(cls, given: dict[str, Any]) -> str:
        """What is wrong with values of the fields, whose types are right; "" if nothing."""
        return ""


Plan = tuple[Recipe | None, ...]  # one entry a layer; None: BF16, or what the run computes in


def format_of(module: str) -> type[Recipe]:
    return import_module(module).FORMAT


def fp8_formats() -> dict[str, type[Recipe]]:
    """{value of --fp8_recipe: its class}"""
    return {name: format_of(module) for name, module in extra().fp8_formats().items()}
