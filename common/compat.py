"""Private API of other packages: every use in this repository goes through a name of this module.

`NAMES` lists private classes, functions and submodules, resolved when first imported from here, so that importing
this module imports nothing. Below it are functions for private attributes of other packages' objects. The comment
over each group has the versions in which it was seen; tests/test_compat.py checks each against those installed and
names what an upgrade removed.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

_DYNAMIC = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
NAMES: dict[str, tuple[str, str]] = {
    # torch 2.11 to 2.15. torch.compiler.disable, resolved at the first call: importing the compiler takes as long as
    # a fifth of `--help`.
    "disable_dynamo": ("torch._compile", "_disable_dynamo"),
    "dynamo_config": ("torch._dynamo", "config"),
    "mark_static_address": ("torch._dynamo", "mark_static_address"),
    "compile_callbacks": ("torch._dynamo.callback", "callback_handler"),
    "CompileContext": ("torch._guards", "CompileContext"),
    "inductor_cache_dir": ("torch._inductor.runtime.cache_dir_utils", "cache_dir"),
    # torch 2.11 to 2.15. Fake tensors and dispatch modes have no public counterpart.
    "FakeTensor": ("torch._subclasses.fake_tensor", "FakeTensor"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    "TorchDispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
    "tree_iter": ("torch.utils._pytree", "tree_iter"),
    # torch 2.11 to 2.15. Fused operations over lists of tensors, as torch's optimisers use them.
    "foreach_norm": ("torch", "_foreach_norm"),
    "foreach_add_": ("torch", "_foreach_add_"),
    "foreach_mul_": ("torch", "_foreach_mul_"),
    "foreach_copy_": ("torch", "_foreach_copy_"),
    "scaled_mm": ("torch", "_scaled_mm"),
    # torch 2.11 to 2.15. The kernels behind scaled_dot_product_attention and varlen_attn, which return the logsumexp.
    "cpu_flash_forward": ("torch.ops.aten", "_scaled_dot_product_flash_attention_for_cpu"),
    "cpu_flash_backward": ("torch.ops.aten", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    "cuda_flash_forward": ("torch.ops.aten", "_flash_attention_forward"),
    "cuda_flash_backward": ("torch.ops.aten", "_flash_attention_backward"),
    "onednn_int8_weight": ("torch.ops.onednn", "qlinear_prepack"),  # x86, as the next
    "onednn_int8_linear": ("torch.ops.onednn", "qlinear_pointwise"),
    "aten_to_copy": ("torch.ops.aten", "_to_copy"),  # what autocast calls
    # torch 2.13 to 2.15. Its public activate_flash_attention_impl takes the module of the kernels as it is.
    "register_flash_attention_fa4": ("torch.nn.attention._fa4", "register_flash_attention_fa4"),
    # torch 2.11 to 2.15. Process groups: by name in a compiled graph, one without other ranks.
    "resolve_process_group": ("torch.distributed.distributed_c10d", "_resolve_process_group"),
    "FakeStore": ("torch.testing._internal.distributed.fake_pg", "FakeStore"),  # registers the backend "fake"
    # torch 2.11 to 2.15. The state of torchrun's rendezvous, which torch pickles.
    "NodeDesc": (_DYNAMIC, "_NodeDesc"),
    "RendezvousState": (_DYNAMIC, "_RendezvousState"),
    # torch 2.11 to 2.15. For benchmarks.
    "ProfilerEventType": ("torch._C._profiler", "_EventType"),
    "aot_function": ("torch._functorch.aot_autograd", "aot_function"),
    "make_boxed_func": ("torch._functorch.aot_autograd", "make_boxed_func"),
    "fx_graph_cse": ("torch._functorch.compile_utils", "fx_graph_cse"),
    "min_cut_rematerialization_partition": ("torch._functorch.partitioners", "min_cut_rematerialization_partition"),
    "select_decomp_table": ("torch._inductor.decomposition", "select_decomp_table"),
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, private = NAMES[name]
    value = globals()[name] = getattr(_namespace(path), private)
    return value


def _namespace(path: str) -> Any:
    """A module, or an attribute of one: torch.ops.aten is no module that could be imported."""
    try:
        return import_module(path)
    except ModuleNotFoundError:
        parent, _, last = path.rpartition(".")
        if not parent:
            raise
        return getattr(_namespace(parent), last)


# ---- torch: tensors, modules, optimisers --------------------------------------------------------------------


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors share when they share a storage. `_cdata`: torch 2.11 to 2.15.

    `data_ptr` is no such number: it is 0 for all fake tensors.
    """
    return untyped_storage_key(tensor.untyped_storage())


def untyped_storage_key(storage: torch.UntypedStorage) -> int:
    return storage._cdata


def onednn_linear(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """a [m, k] @ b [n, k].T + bias by oneDNN. `mkldnn._linear_pointwise`: torch 2.11 to 2.15, x86."""
    import torch

    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


def assume_constant_result(function: Callable) -> Callable:
    """torch.compiler.assume_constant_result, without importing the compiler.

    `_dynamo_marked_constant`: torch 2.11 to 2.15.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


@assume_constant_result
def varlen_takes_cudnn() -> bool:
    """Whether varlen_attn takes the kernels that `sdpa_kernel` allows, cuDNN's first: torch 2.15. Those of 2.11 and
    2.13 have flash alone."""
    return hasattr(import_module("torch.nn.attention.varlen"), "_select_backend")


def operator_schema(operator: Any) -> Any:
    """The schema of an operator of torch.ops; None of another function. `_schema`: torch 2.11 to 2.15."""
    return getattr(operator, "_schema", None)


def stop_loader_workers(iterator: Any) -> None:
    """Stop the workers of a DataLoader's iterator; kill any that does not stop within a few seconds.

    `_shutdown_workers` and `_workers`: torch 2.11 to 2.15.
    """
    iterator._shutdown_workers()
    for worker in iterator._workers:
        if worker.is_alive():  # stuck in a read; this process could not exit before it
            worker.kill()
            worker.join()


# ---- torch: process groups and torchrun ---------------------------------------------------------------------


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """A mesh takes no timeout for its groups. `_set_pg_timeout`: torch 2.11 to 2.13; 2.15 has a public name."""
    from torch.distributed import distributed_c10d as c10d

    (c10d.set_timeout if hasattr(c10d, "set_timeout") else c10d._set_pg_timeout)(timeout, group)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All dimensions of a mesh as one. `_flatten`: torch 2.11 to 2.15."""
    return mesh._flatten(name)


def dump_flight_recorder() -> bytes:
    """This rank's latest collectives, for torch's fr_trace. `_dump_nccl_trace`, `_dump_fr_trace`: torch 2.11 to 2.15.

    Builds with CUDA record NCCL's collectives apart from gloo's.
    """
    from torch._C import _distributed_c10d as c10d

    name = "_dump_nccl_trace" if hasattr(c10d, "_dump_nccl_trace") else "_dump_fr_trace"
    return getattr(c10d, name)()


def set_tcp_store_factory(handler: Any, serve: Callable) -> None:
    """How a rendezvous handler makes the ranks' store. `_create_tcp_store_server`: torch 2.11 to 2.15."""
    assert hasattr(handler, "_create_tcp_store_server")
    handler._create_tcp_store_server = serve


def set_rank_starter(start: Callable) -> None:
    """Have torch's launcher start ranks by `start(args, environment, [file of stdout, of stderr])`, which returns what
    has the methods of a Popen, or None for torch's own way. `SubprocessHandler._popen`: torch 2.11 to 2.15."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    own = SubprocessHandler._popen

    def popen(self: Any, args: tuple, env: dict[str, str]) -> Any:
        outputs = [file and file.name for file in (self._stdout, self._stderr)]
        return start(args, env, outputs) or own(self, args, env)

    SubprocessHandler._popen = popen


def rendezvous_has_time_zones() -> bool:
    """Whether torch compares the rendezvous' times with UTC's zone (2.13) or without (`datetime.utcnow`, 2.11)."""
    return hasattr(import_module(_DYNAMIC), "timezone")


# ---- Python -------------------------------------------------------------------------------------------------


def run_exit_functions() -> None:
    """What atexit holds: Python 3.11 leaves that out at the end of multiprocessing's processes."""
    atexit._run_exitfuncs()


def frame_of_thread(ident: int | None) -> Any:
    """The frame that a thread is in; None if it has ended. `sys._current_frames`: CPython 3.11 to 3.14."""
    import sys

    return None if ident is None else sys._current_frames().get(ident)


# ---- Megatron-FSDP 0.6.1, the one version that extras/speed/megatron.py takes --------------------------------------

MEGATRON_COALESCING = "_coalescing_manager"  # in megatron_fsdp.param_and_grad_buffer
MEGATRON_GRAD_REDUCE = "_bucket_group_gradient_reduce"  # of the gradient reduction pipeline


# ---- Transformer Engine 2.20 --------------------------------------------------------------------------------


def te_field(tensor: Any, name: str) -> Any:
    """What a quantised tensor stores: data, scale_inv, fp8_dtype, is_2D_scaled; rowwise_data, amax_columnwise, ..."""
    return getattr(tensor, f"_{name}")


# ---- flash-attn-4 4.0.0b18 to b36 ---------------------------------------------------------------------------


def flash_attention_4() -> tuple[Callable, Callable]:
    """Forward and backward pass, as torch 2.13 and 2.15 call them (`torch.nn.attention._fa4`)."""
    interface = import_module("flash_attn.cute.interface")
    return interface._flash_attn_fwd, interface._flash_attn_bwd


# ---- transformers 5.17 to 5.24 ------------------------------------------------------------------------------


def use_attention(config: Any, kind: str = "sdpa") -> None:
    """Have a stock model compute attention so: sdpa, or flash_attention_2."""
    config._attn_implementation = kind
