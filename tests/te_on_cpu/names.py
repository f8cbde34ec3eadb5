"""The constants and types of `transformer_engine_torch`."""

from __future__ import annotations

import enum


class DType(enum.IntEnum):
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class FP8FwdTensors(enum.IntEnum):
    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(enum.IntEnum):
    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class _Member(int):
    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


class Enumeration(type):
    """Has whatever member is asked for: the Python asks for each by name, and only compares them."""

    def __getattr__(cls, name: str) -> _Member:
        if name.startswith("__"):
            raise AttributeError(name)
        member = _Member(len(cls.__dict__))
        member.name = name
        setattr(cls, name, member)
        return member


def get_cudnn_version() -> int:
    return 91400


def get_cublasLt_version() -> int:
    return 130000


def get_num_cublas_streams() -> int:
    return 1


def device_supports_multicast(device_id: int = -1) -> bool:
    return False


def get_fused_attn_backend(fused_attn_params, /):
    """cuDNN's for packs in 16 bits (tests/te_on_cpu/attention.py)."""
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""
