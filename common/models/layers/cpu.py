"""Which products this CPU has instructions for, and which library multiplies fp32 matrices with the wider of them.

An answer is a function of what the CPU is and of the environment, never of a timing: a run that is started again takes
the same path, and so ends with the same bits. Measured: benchmarks/results/cpu_products.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# ONEDNN_MAX_CPU_ISA (documented by oneDNN) keeps that library below what the CPU has.
_ONEDNN_WITHOUT_AVX512 = ("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2")
_ONEDNN_WITHOUT_BF16 = (*_ONEDNN_WITHOUT_AVX512, "avx512_core", "avx512_core_vnni")
# MKL_ENABLE_INSTRUCTIONS (documented by MKL) does the same there.
_MKL_WITHOUT_AVX512 = ("sse4_2", "avx", "avx2", "avx2_e1")
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@dataclass(frozen=True)
class Cpu:
    """What /proc/cpuinfo says of a CPU: nothing where there is no such file."""

    vendor: str = ""  # "GenuineIntel", "AuthenticAMD"; empty on ARM
    flags: frozenset[str] = frozenset()

    @classmethod
    def of(cls, cpuinfo: str) -> Cpu:
        """From the file's text: x86's `vendor_id` and `flags`, ARM's `Features`."""
        fields = dict(_field(line) for line in reversed(cpuinfo.splitlines()))  # of the first processor
        return cls(fields.get("vendor_id", ""), frozenset(fields.get("flags", fields.get("Features", "")).split()))

    def has_bf16_products(self, environment: Mapping[str, str]) -> bool:
        """Whether bf16 products are instructions here, and oneDNN, which multiplies bf16 matrices, may use them.

        False where nothing is known: oneDNN without instructions takes four (AVX-512) to fifteen times (AVX2) as long
        as fp32 products do; these take four times as long as the instructions.
        """
        if "bf16" in self.flags:  # ARM
            return True
        return (
            bool({"avx512_bf16", "amx_bf16"} & self.flags) and _onednn_level(environment) not in _ONEDNN_WITHOUT_BF16
        )

    def multiplies_fp32_by_onednn(self, environment: Mapping[str, str]) -> bool:
        """Whether oneDNN has wider vectors here than MKL, which takes its AVX2 path on processors not of Intel's.

        With vectors of one width MKL is the faster of the two, and the library's own choice.
        """
        onednn = self.flags >= _AVX512 and _onednn_level(environment) not in _ONEDNN_WITHOUT_AVX512
        mkl = (
            self.flags >= _AVX512
            and self.vendor == "GenuineIntel"
            and environment.get("MKL_ENABLE_INSTRUCTIONS", "").lower() not in _MKL_WITHOUT_AVX512
        )
        return onednn and not mkl


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _onednn_level(environment: Mapping[str, str]) -> str:
    return environment.get("ONEDNN_MAX_CPU_ISA", environment.get("DNNL_MAX_CPU_ISA", "all")).lower()


def this_cpu() -> Cpu:
    path = Path("/proc/cpuinfo")
    return Cpu.of(path.read_text()) if path.exists() else Cpu()


# Asked once: the libraries read the environment once, too, and a graph that is compiled holds these as constants.
_ONEDNN = torch.backends.mkldnn.is_available()
BF16_PRODUCTS = _ONEDNN and this_cpu().has_bf16_products(os.environ)
FP32_BY_ONEDNN = _ONEDNN and torch.backends.mkl.is_available() and this_cpu().multiplies_fp32_by_onednn(os.environ)


_as_on_a_gpu = False  # a plain name: torch.compile looks into what reads it


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Have the model go a GPU's ways, with tensors that have no values: what such a run would hold can be counted."""
    global _as_on_a_gpu
    before, _as_on_a_gpu = _as_on_a_gpu, True
    try:
        yield
    finally:
        _as_on_a_gpu = before


def device_type(x: Tensor) -> str:
    """Of the device whose ways a model is to go with x: `cpu`, `cuda`."""
    return "cuda" if _as_on_a_gpu else x.device.type


def is_as_on_a_gpu() -> bool:
    """Whether a model is to go a GPU's ways without one."""
    return _as_on_a_gpu
