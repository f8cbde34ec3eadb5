"""What is read from /proc/cpuinfo and the environment."""

from __future__ import annotations

import pytest

from common.models.layers.cpu_features import Cpu

AVX512 = "avx avx2 avx512f avx512bw avx512dq avx512vl"
SKYLAKE = Cpu("GenuineIntel", frozenset(AVX512.split()))
SAPPHIRE = Cpu("GenuineIntel", frozenset(f"{AVX512} avx512_bf16 amx_bf16".split()))
HASWELL = Cpu("GenuineIntel", frozenset(["avx", "avx2"]))
ROME = Cpu("AuthenticAMD", frozenset(["avx", "avx2"]))
GENOA = Cpu("AuthenticAMD", frozenset(f"{AVX512} avx512_bf16".split()))
GRAVITON3 = Cpu("", frozenset(["asimd", "bf16"]))


def test_cpu_parse_reads_first_processor():
    first, second = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2\n", "vendor_id\t: x\nflags\t: y\n"
    assert Cpu.parse(f"processor\t: 0\n{first}\nprocessor\t: 1\n{second}") == Cpu(
        "AuthenticAMD", frozenset(["fpu", "avx2"])
    )
    assert Cpu.parse("processor\t: 0\nFeatures\t: fp asimd bf16\n") == Cpu("", frozenset(["fp", "asimd", "bf16"]))
    assert Cpu.parse("") == Cpu()


@pytest.mark.parametrize(
    ("cpu", "environment", "bf16", "onednn"),
    [
        (SAPPHIRE, {}, True, False),
        (SKYLAKE, {}, False, False),
        (HASWELL, {}, False, False),
        (GENOA, {}, True, True),
        (ROME, {}, False, False),  # AVX2 in both libraries
        (GRAVITON3, {}, True, False),
        (Cpu(), {}, False, False),
        (SAPPHIRE, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, False, False),
        (SAPPHIRE, {"DNNL_MAX_CPU_ISA": "avx512_core_vnni"}, False, False),
        (SAPPHIRE, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "DNNL_MAX_CPU_ISA": "AVX2"}, True, False),
        (SAPPHIRE, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, True, False),
        (SAPPHIRE, {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, True, True),
        (GENOA, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False, False),
    ],
)
def test_cpu_picks_library_by_instructions(cpu, environment, bf16, onednn):
    assert cpu.has_bf16_matmuls(environment) == bf16
    assert cpu.multiplies_fp32_by_onednn(environment) == onednn
