"""The stand-in takes what the binary takes. Runs where the binary loads: it needs its CUDA torch, and no GPU."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from tests.te_on_cpu.signatures import differences, parameters, stand_ins


def binary():
    """`transformer_engine_torch`, or a skip that says what is missing."""
    if torch.version.cuda is None:
        pytest.skip("this torch is one for CPUs")
    try:
        importlib.import_module("transformer_engine.common")  # loads the library behind it
        return importlib.import_module("transformer_engine_torch")
    except Exception as error:  # libraries that do not fit each other fail in many ways
        pytest.skip(f"no binary of Transformer Engine: {error}")


def test_signatures_match_the_binary():
    assert not differences(binary())


def test_signatures_are_parsed():
    """And what differs is seen: of a binary that has one function, none of the others, and another count."""
    dequantize = "dequantize(input: list[int, str], otype: DType | None = None, *, more: object) -> object\n\nText"
    assert parameters(dequantize.splitlines()[0]) == {"input": False, "otype": True, "more": False}
    theirs = SimpleNamespace(dequantize=SimpleNamespace(__doc__=dequantize))
    found = differences(theirs)
    assert len(found) == len(stand_ins())
    assert "dequantize: takes ['t', 'otype'], the binary ['input', 'otype', 'more']" in found
