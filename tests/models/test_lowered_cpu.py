"""A CPU without bf16 instructions, in a new process whose libraries are told so, beside what this one has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.marks import cases
from tests.models.reference import packed, random_batch
from tests.models.small_run import loss_and_gradients

LEVELS = {
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "AVX-512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}


@pytest.mark.parametrize("level", cases(LEVELS, slow={"AVX2"}))
def test_cpu_without_bf16_instructions_computes_the_same(level, tmp_path):
    pack = packed(random_batch([100, 28, 1, 300]))
    torch.save(pack, tmp_path / "pack")
    command = [sys.executable, "-m", "tests.models.small_run", tmp_path / "pack", tmp_path / "found"]
    env = {k: v for k, v in os.environ.items() if k not in LEVELS["AVX2"]} | LEVELS[level]
    subprocess.run(command, env=env, check=True, cwd=Path(__file__).parent.parent.parent)
    fp32, bf16 = torch.load(tmp_path / "found")
    native = loss_and_gradients(pack, torch.bfloat16)
    for name, exact in loss_and_gradients(pack, torch.float32).items():
        if name.endswith("layernorm_qkv.bias"):
            continue  # a key's is zero but for rounding; the weight beside it is compared
        assert bf16[name].dtype == native[name].dtype == torch.float32
        assert (fp32[name] - exact).norm() < 1e-5 * exact.norm(), name
        # bf16's rounding is that of the whole way, some 20 roundings of 2^-9 each: no path may add to it.
        rounding = (native[name] - exact).norm()
        assert (bf16[name] - exact).norm() < 1.5 * rounding + 2**-9 * exact.norm(), name
        assert (bf16[name] - native[name]).norm() < 1e-2 * exact.norm(), name
