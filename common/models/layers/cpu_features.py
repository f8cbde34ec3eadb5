"""Which instructions this CPU has, and which of them oneDNN and MKL may use by the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# ONEDNN_MAX_CPU_ISA (documented by oneDNN) keeps that library below what the CPU has.
_ONEDNN_WITHOUT_AVX512 = ("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2")
_ONEDNN_WITHOUT_BF16 = (*_ONEDNN_WITHOUT_AVX512, "avx512_core", "avx512_core_vnni")
# MKL_ENABLE_INSTRUCTIONS (documented by MKL) does the same there.
_MKL_WITHOUT_AVX512 = ("sse4_2", "avx", "avx2", "avx2_e1")
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@dataclass(frozen=True)
class Cpu:
    """Vendor and instruction flags from /proc/cpuinfo; both empty where there is no such file."""

    vendor: str = ""  # "GenuineIntel", "AuthenticAMD"; empty on ARM
    flags: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, cpuinfo: str) -> Cpu:
        """From the file's text: x86's `vendor_id` and `flags`, ARM's `Features`."""
        fields = {}
        for line in reversed(cpuinfo.splitlines()):  # the first processor's come last, and stay
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
        return cls(fields.get("vendor_id", ""), frozenset(fields.get("flags", fields.get("Features", "")).split()))

    def has_bf16_matmuls(self, environment: Mapping[str, str]) -> bool:
        """Whether the CPU has bf16 matmul instructions and oneDNN may use them.

        False if unknown: without the instructions oneDNN's bf16 matmul takes 4 (AVX-512) to 15 times (AVX2) as long as
        fp32, while fp32 takes 4 times as long as the instructions.
        """
        if "bf16" in self.flags:  # ARM
            return True
        has_instructions = bool({"avx512_bf16", "amx_bf16"} & self.flags)
        return has_instructions and onednn_level(environment) not in _ONEDNN_WITHOUT_BF16

    def multiplies_fp32_by_onednn(self, environment: Mapping[str, str]) -> bool:
        """Whether oneDNN has wider vectors here than MKL, which takes its AVX2 path on processors not of Intel's.

        With vectors of one width MKL is the faster of the two, and torch's own choice.
        """
        if not self.flags >= _AVX512 or onednn_level(environment) in _ONEDNN_WITHOUT_AVX512:
            return False
        mkl_is_limited = environment.get("MKL_ENABLE_INSTRUCTIONS", "").lower() in _MKL_WITHOUT_AVX512
        return self.vendor != "GenuineIntel" or mkl_is_limited


def onednn_level(environment: Mapping[str, str]) -> str:
    return environment.get("ONEDNN_MAX_CPU_ISA", environment.get("DNNL_MAX_CPU_ISA", "all")).lower()


def this_cpu() -> Cpu:
    path = Path("/proc/cpuinfo")
    return Cpu.parse(path.read_text()) if path.exists() else Cpu()
