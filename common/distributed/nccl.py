"""NCCL and CUDA as a run meets them: what they are told before the group exists, and their failures in a line.

Messages are those of torch 2.11 to 2.13 (ProcessGroupNCCL, AcceleratorError). No GPU has raised them here yet:
docs/hardware.md.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from common.cli import one_line

GRACE_S = 120  # beyond --ddp_timeout, in which a rank says whom it has waited for
# What a collective of NCCL fails with when a process at another end is gone or silent.
_GONE = (
    "ncclRemoteError",
    "remote process",
    "Watchdog caught collective operation timeout",
    "onnection",
    "socketPoll",
)
_ADVICE = {
    "ncclInvalidUsage": "two ranks on one GPU, or ranks that call other collectives",
    "ncclUnhandledCudaError": "the driver and this CUDA may not fit: python -m extras.preflight compares them",
    "ncclSystemError": "shared memory (/dev/shm), memlock or the network: NCCL_DEBUG=INFO says which",
    "ncclInternalError": "NCCL_DEBUG=INFO says more",
}


def set_nccl_defaults(timeout_s: int) -> None:
    """Set what the user has not set: NCCL's own guards come after ours, and loaders' workers may fork beside EFA."""
    for name, value in {
        # Its guard of a thread that does not answer ends the process without naming anybody: after the watch has.
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": timeout_s + GRACE_S,
        # libfabric's and the RDMA libraries' memory is then not torn away under a process that forks.
        "FI_EFA_FORK_SAFE": 1,
        "RDMAV_FORK_SAFE": 1,
    }.items():
        os.environ.setdefault(name, str(value))


def is_nccl_peer_error(text: str) -> bool:
    return any(word in text for word in _GONE)


def out_of_memory(error: BaseException) -> bool:
    """Of a device: torch's own exception, or CUDA's or NCCL's error that says so."""
    text = str(error)
    of_device = isinstance(error, torch.AcceleratorError | dist.DistBackendError) or "CUDA error" in text
    of_device = of_device and any(word in text for word in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "calloc"))
    return isinstance(error, torch.OutOfMemoryError) or of_device


def device_failure(error: RuntimeError, device: torch.device, host: str) -> str | None:
    """What CUDA or NCCL failed with and what to do, for one line; None where it is another error."""
    text = str(error)
    if isinstance(error, dist.DistBackendError):
        advice = next((told for name, told in _ADVICE.items() if name in text), "NCCL_DEBUG=INFO says more")
        return f"NCCL failed on {device} of {host}: {one_line(error)[:200]}: {advice}"
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in text or "cuDNN error" in text:
        said = text.partition("\n")[0].removeprefix("CUDA error: ")
        return (
            f"CUDA failed on {device} of {host}: {said[:160]}: if it comes back on this host alone, have its GPU "
            "looked at (nvidia-smi -q, dmesg); else CUDA_LAUNCH_BLOCKING=1 and TRACEBACK=1 show where"
        )
    return None
