"""Transformer Engine's Python over the stand-in, in this process: `start` first of all that asks for it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import pytest

SITE = Path(os.environ.get("TE_ON_CPU_SITE", Path(sys.prefix) / "te_on_cpu"))  # ./install.sh --dev
MISSING = "Transformer Engine's Python is not beside the environment (./install.sh --dev)"
needs_site = pytest.mark.skipif(not (SITE / "transformer_engine").exists(), reason=MISSING)
# Its own switches: no flash-attn, no compilation.
VARIABLES = {"NVTE_FLASH_ATTN": "0", "NVTE_TORCH_COMPILE": "0", "NVTE_PROJECT_BUILDING": "1"}


class _Elsewhere(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of a GPU's compilers and of ONNX, which it imports and nothing here calls."""

    roots = ("onnxscript", "onnx", "transformer_engine.pytorch.triton", "transformer_engine.common.triton")

    def find_spec(self, name, path=None, target=None):
        if any(name == root or name.startswith(f"{root}.") for root in self.roots):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock()
        module.__path__, module.__name__, module.__spec__ = [], spec.name, spec
        return module

    def exec_module(self, module) -> None:
        pass


def _extension() -> types.ModuleType:
    """`transformer_engine_torch`: the stand-ins as kernels, and an error by name for what has none."""
    from tests.te_on_cpu import attention, casts, kernels, names, operands, placement, scaling

    module = types.ModuleType("transformer_engine_torch")
    for part in (attention, casts, kernels, operands, scaling):
        for name in part.__all__:
            setattr(module, name, placement.kernel(getattr(part, name)))
    for name, value in vars(names).items():
        if getattr(value, "__module__", None) == names.__name__:
            setattr(module, name, value)

    def other(name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value = names.Enumeration(name, (), {})
        else:

            def value(*args, **kwargs):
                raise RuntimeError(f"the stand-in has no {name}: tests/te_on_cpu")

        setattr(module, name, value)
        return value

    module.__getattr__ = other
    return module


def start(capability: tuple[int, int] = (9, 0), attention: bool = False) -> None:
    """capability: of the GPU that the CPU says it is. attention: it has cuDNN's, not only torch's."""
    os.environ |= VARIABLES | {"NVTE_FUSED_ATTN": str(int(attention))}
    sys.path.append(str(SITE))
    sys.meta_path.insert(0, _Elsewhere())
    from tests.te_on_cpu import device

    device.install(capability)
    sys.modules["transformer_engine_torch"] = _extension()
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda name: None
    importlib.import_module("transformer_engine.pytorch")
