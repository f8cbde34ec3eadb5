"""A CPU that says it is an NVIDIA GPU: what torch.cuda tells, autocast of both, gloo for NCCL.

`install` patches torch for the rest of the process: call it in a process of its own.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.amp import autocast_mode
from torch.nn.attention import varlen
from torch.nn.parallel import DistributedDataParallel

from extras.speed import megatron as fake_cuda
from tests.te_on_cpu import graphs, placement

_LIBRARY = torch.library.Library("aten", "IMPL")  # what it registers goes with it


class Event(fake_cuda.Event):
    """Everything is done as it is asked for."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 0.0


class Stream(fake_cuda.Stream):
    cuda_stream, device = 0, placement.CUDA

    def query(self) -> bool:
        """Nothing is ever under way."""
        return True

    def wait_event(self, event) -> None:
        pass

    def record_event(self, event=None) -> Event:
        return Event()

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_) -> None:
        pass


def install(capability: tuple[int, int]) -> None:
    """One GPU of this compute capability, for this process and its forks."""
    _tell(capability)
    _cast_for_both()
    _exchange_by_gloo()
    graphs.install()
    varlen.varlen_attn = attention_of_packs
    for name, kernel in (("forward", _attend_blocks), ("backward", _gradients_of_blocks)):
        _LIBRARY.impl(f"_flash_attention_{name}", kernel, "CPU")
    torch.Tensor.record_stream = lambda tensor, stream: None
    make = torch.Tensor._make_wrapper_subclass
    torch.Tensor._make_wrapper_subclass = staticmethod(
        lambda cls, *args, device=None, **kwargs: make(
            cls, *args, device=placement.CPU if placement.as_place(device) else device, **kwargs
        )
    )
    placement.install()


def attention_of_packs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """In the place of torch's varlen_attn, with its arguments: sequence by sequence, in fp32."""
    return _Attention.apply(query, key, value, cu_seq_q, max_q, {"is_causal": is_causal, "enable_gqa": enable_gqa})


class _Attention(torch.autograd.Function):
    """A kernel for each pass."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, cu: Tensor, longest: int, options: dict) -> Tensor:
        ctx.save_for_backward(query, key, value, cu)
        ctx.others = longest, options
        return placement.kernel(_attend)(query, key, value, cu, longest, options)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return *placement.kernel(_attention_gradients)(grad, *ctx.saved_tensors, *ctx.others), None, None, None


def _attend(query: Tensor, key: Tensor, value: Tensor, cu: Tensor, longest: int, options: dict) -> Tensor:
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"varlen_attn takes fp16 and bf16, not {query.dtype}")
    lengths = cu.diff().tolist()
    if max(lengths) > longest:
        raise RuntimeError(f"a sequence of {max(lengths)} tokens, where max_q is {longest}: illegal access")
    with torch.autocast("cuda", enabled=False):
        parts = (x.float().transpose(0, 1).split(lengths, 1) for x in (query, key, value))
        attended = [
            F.scaled_dot_product_attention(*(x[None] for x in part), **options)[0] for part in zip(*parts, strict=True)
        ]
        return torch.cat(attended, 1).transpose(0, 1).to(query.dtype)


def _attention_gradients(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        return torch.autograd.grad(_attend(*leaves, *others), leaves, grad)


def _pairs(q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, causal: bool, scale: float) -> Iterator[tuple]:
    """(rows, columns, keys' heads for each query, scores [H, Tq, Tk]) of each sequence that has both."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"flash attention takes fp16 and bf16, not {q.dtype}")
    bounds = zip(queries.tolist(), queries[1:].tolist(), keys.tolist(), keys[1:].tolist(), strict=False)
    heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    for begin, end, first, last in bounds:
        if end > begin and last > first:
            rows, columns = slice(begin, end), slice(first, last)
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k[columns].float()[:, heads]) * scale
            if causal:  # the last query sees all keys
                hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
                scores = scores.masked_fill(hidden, -torch.inf)
            yield rows, columns, heads, scores


def _attend_blocks(q, k, v, queries, keys, longest, most_keys, dropout, causal, debug, *, scale):
    """In the place of torch's kernel, with its arguments: sequence by sequence, in fp32."""
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), -torch.inf)
    for rows, columns, heads, scores in _pairs(q, k, queries, keys, causal, scale):
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[columns].float()[:, heads]).to(q.dtype)
    return out, lse, *(q.new_empty(0) for _ in range(3))


def _gradients_of_blocks(grad, q, k, v, out, lse, queries, keys, longest, most_keys, dropout, causal, *_, scale):
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    for rows, columns, heads, scores in _pairs(q, k, queries, keys, causal, scale):
        g, o, wide = grad[rows].float(), out[rows].float(), v[columns].float()[:, heads]
        weights = (scores - lse[:, rows, None]).exp()  # of these keys among all of the query's
        of_scores = weights * (torch.einsum("qhd,khd->hqk", g, wide) - (g * o).sum(-1).t()[..., None]) * scale
        dq[rows] = torch.einsum("hqk,khd->qhd", of_scores, k[columns].float()[:, heads])
        for whole, part in (
            (dk, torch.einsum("hqk,qhd->khd", of_scores, q[rows].float())),
            (dv, torch.einsum("hqk,qhd->khd", weights, g)),
        ):
            whole[columns] = whole[columns].index_add(1, heads, part)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _tell(capability: tuple[int, int]) -> None:
    properties = types.SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132, name="a CPU", total_memory=80 << 30
    )
    torch.version.cuda = "13.0"
    torch.cuda.nccl = types.SimpleNamespace(version=lambda: (2, 29, 7))
    locked = {f"cudaHost{what}": lambda *where: 0 for what in ("Register", "Unregister")}
    torch.cuda.cudart = lambda: types.SimpleNamespace(**locked)
    torch.cuda.nvtx = types.SimpleNamespace(range_push=lambda text: None, range_pop=lambda: None)
    stand_ins = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 8,
        "current_device": lambda: placement.CUDA.index,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "get_device_name": lambda *_: "a CPU",
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_, **__: None,
        "manual_seed": torch.default_generator.manual_seed,
        # The CPU's numbers; as a generator that no graph can capture, for that the CPU's cannot.
        "default_generators": (torch.default_generator,) * 8,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
        "stream": lambda stream: nullcontext(),
    }
    torch._C._get_accelerator = lambda *_: torch.device("cuda")  # FSDP2's mesh is of its kind
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)


def _cast_for_both() -> None:
    """Autocast of CUDA casts nothing here, where operators are the CPU's: each comes with the other's."""
    enter, leave = autocast_mode.autocast.__enter__, autocast_mode.autocast.__exit__

    def enter_both(self):
        if self.device in ("cpu", "cuda") and not hasattr(self, "of_other"):
            other = "cpu" if self.device == "cuda" else "cuda"
            twin = autocast_mode.autocast(other, self.fast_dtype, enabled=self._enabled)
            twin.of_other = None
            self.twins = [*getattr(self, "twins", ()), twin]
            enter(twin)
        return enter(self)

    def leave_both(self, *error):
        left = leave(self, *error)
        if not hasattr(self, "of_other") and self.device in ("cpu", "cuda"):
            leave(self.twins.pop(), *error)
        return left

    autocast_mode.autocast.__enter__, autocast_mode.autocast.__exit__ = enter_both, leave_both


def _exchange_by_gloo() -> None:
    init, wrap = dist.init_process_group, DistributedDataParallel.__init__
    dist.init_process_group = lambda backend=None, **kwargs: init("gloo", **kwargs)

    def wrap_without_device(self, module, device_ids=None, *args, **kwargs) -> None:
        wrap(self, module, None, *args, **kwargs)

    DistributedDataParallel.__init__ = wrap_without_device
    dist.batch_isend_irecv = lambda ops: [Once(op.op(op.tensor, op.peer, op.group, op.tag)) for op in ops]


class Once:
    """Of a batch, which NCCL sends as one, a part: whoever waits for it again waits for nothing (gloo: for ever)."""

    def __init__(self, work: dist.Work):
        self.work: dist.Work | None = work

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work = None
