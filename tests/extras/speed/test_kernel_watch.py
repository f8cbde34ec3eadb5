"""Which attention kernels ran, by their names in a profile of the first step."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity

from common.training.results import training_results
from common.training.trainer_state import TrainerState
from extras.speed.attention_kernels import KernelWatch, kernels_of
from tests.training_fixtures import ROOT

# flash2's are of an H100 (benchmarks/results/gpu_profile.md); no GPU has run the others here: their names are from
# profiles that others have published.
RAN = {
    "flash2": ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<6",),
    "flash3": ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Collect",),
    "flash4": ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__tensor",),
    "cudnn": ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1",),
    "sdpa": ("fmha_cutlassB_bf16_aligned_64x64_k64_seqaligned_sm80(PyTorchMemEffAttention::AttentionBack",),
    "": ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT", "triton_poi_fused_gelu_gelu_backward_4"),
    "cudnn, flash2": (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1",
    ),
}


@pytest.mark.parametrize("kernels", RAN)
def test_kernels_are_known_by_name(kernels):
    assert kernels_of([*RAN[kernels], *RAN[""]]) == kernels


def test_kernels_of_the_measured_profile_are_known():
    profile = (ROOT / "benchmarks" / "results" / "gpu_profile.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| ([\w ,]+) \|", profile, re.MULTILINE)
    assert len(rows) > 30
    assert {kernels_of([name]) for name, group in rows if group == "attention"} == {"flash2"}
    assert {kernels_of([name]) for name, group in rows if group != "attention"} == {""}


def test_kernels_of_the_first_step_are_watched(caplog):
    """On a CPU, whose attention is none of these."""
    watch, q = KernelWatch(ProfilerActivity.CPU), torch.ones(1, 2, 8, 16)
    caplog.set_level("INFO")
    for _ in range(3):
        watch.begin()
        F.scaled_dot_product_attention(q, q, q)
        watch.end()
    (line,) = caplog.messages
    assert re.fullmatch(r"Attention kernels that ran in the first step: none known by name among \d+", line)
    results = training_results(TrainerState(), {"backend": "torch", "gelu": "exact"}, 1, watch.found)
    assert results["attention_kernels"] == watch.found


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])  # the second: builds without CUPTI
def test_a_failing_profiler_fails_no_step(monkeypatch, caplog, kind):
    def refuse(self):
        raise kind("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(torch.profiler.profile, "start", refuse)
    watch = KernelWatch(ProfilerActivity.CPU)
    watch.begin()
    watch.end()
    assert watch.found == ""
    assert caplog.messages == [
        "The attention kernels that ran are not known: the profiler failed (CUPTI_ERROR_INSUFFICIENT_PRIVILEGES)"
    ]
