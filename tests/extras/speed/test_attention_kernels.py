"""--attention: when which kernels, what the log says, wrong ones found, and what torch's own hook makes of FA4's.

The kernels are stand-ins, an installed `flash-attn-4` of plain PyTorch with the interface of the real one: what a CPU
cannot show is the kernels themselves, and the dispatch to CUDA (tests/gpu/test_attention_kernels.py).
"""

from __future__ import annotations

import gc
import sys
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as switch
from torch.nn.attention import _fa4 as hook

from common import compat
from common.cli import UserError
from common.compat import register_flash_attention_fa4
from common.distributed.world import World
from common.flags import checked
from common.models.layers import attention
from common.models.layers.backend import BackendFlags, Heads
from common.training.results import training_results
from common.training.trainer_state import TrainerState
from extras.speed import block_attention
from extras.speed.attention_kernels import (
    FA4_REQUIREMENT,
    choose_kernels,
    lacking,
)
from tests.training_fixtures import ROOT

CPU, HOPPER, HEADS = torch.device("cpu"), (9, 0), Heads(4, 2, 16, causal=True)
LATER_HOOK = pytest.mark.skipif(len(signature(hook._fa4_run_forward).parameters) < 12, reason="torch 2.11 has another")
INTERFACE = '''
"""softmax(q k^T scale) v, sequence by sequence, in float64: [T, H, D] and K heads of keys and values.

Gradients by hand: inside a kernel autograd is off.
"""
import torch

VALUES, CALLS = 5, []


def _each(q, k, v, causal, scale, cu_q, cu_k):
    bounds = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:])
    for a, b, c, d in bounds:
        share = q.shape[1] // k.shape[1]
        rows = q[a:b].double(), *(x[c:d].double().repeat_interleave(share, dim=1) for x in (k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        scores = torch.einsum("ihd,jhd->hij", *rows[:2]) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(b - a, d - c).triu(1).bool(), -torch.inf)
        yield slice(a, b), rows, scores, scale


def _flash_attn_fwd(q, k, v, *, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k, return_lse, out=None, **others):
    CALLS.append(others)
    each = list(_each(q, k, v, causal, softmax_scale, cu_seqlens_q, cu_seqlens_k))
    out = [torch.einsum("hij,jhd->ihd", scores.softmax(-1), rows[2]) for _, rows, scores, _ in each]
    lse = [scores.logsumexp(-1) for _, _, scores, _ in each]
    assert return_lse
    return torch.cat(out).to(q.dtype), torch.cat(lse, 1).float(), *[None] * (VALUES - 2)


def _flash_attn_bwd(q, k, v, out, dout, lse, *, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k, **others):
    CALLS.append(others)
    gradients = []
    for at, (q_, k_, v_), scores, scale in _each(q, k, v, causal, softmax_scale, cu_seqlens_q, cu_seqlens_k):
        grad, weights = dout[at].double(), scores.softmax(-1)
        grad_weights = torch.einsum("ihd,jhd->hij", grad, v_)
        grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True)) * scale
        dq = torch.einsum("hij,jhd->ihd", grad_scores, k_)
        dk, dv = torch.einsum("hij,ihd->jhd", grad_scores, q_), torch.einsum("hij,ihd->jhd", weights, grad)
        gradients.append((dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))))
    return tuple(torch.cat(parts).to(q.dtype) for parts in zip(*gradients))
'''


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that installs a flash-attn-4, beside flash-attn 2 in the same folder: (version, interface)."""
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    hook._fa4_import_module.cache_clear()
    # torch 2.15 asks it of these CPU tensors' device, too.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)

    def install(version: str = "4.0.0b36", interface: str = INTERFACE) -> None:
        package, about = tmp_path / "flash_attn" / "cute", tmp_path / f"flash_attn_4-{version}.dist-info"
        package.mkdir(parents=True)
        about.mkdir()
        (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '2.8.3'\n")
        (package / "__init__.py").touch()
        (package / "interface.py").write_text(interface)
        (about / "METADATA").write_text(f"Metadata-Version: 2.4\nName: flash-attn-4\nVersion: {version}\n")
        (about / "RECORD").write_text(f"flash_attn/cute/interface.py,sha256=0,{len(interface)}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    if switch.current_flash_attention_impl():
        switch.restore_flash_attention_impl()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)


def of_cuda() -> bool:
    """Whether a kernel for CUDA is registered; torch for CPUs has none of its own."""
    gc.collect()
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CUDA")


def exact(q, k, v, grad, lengths, causal):
    """Output and gradients in float64 by scaled_dot_product_attention."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in leaves), strict=True)
    outs = [F.scaled_dot_product_attention(*part, is_causal=causal, enable_gqa=True) for part in parts]
    out = torch.cat(outs, dim=1).transpose(0, 1)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


@LATER_HOOK
@pytest.mark.parametrize("values", [2, 4, 5], ids=["4.0.0b18", "4.0.0b20", "4.0.0b36"])
@pytest.mark.parametrize("causal", [True, False])
def test_fa4_by_torchs_hook_is_attention_whatever_a_version_returns(install, values, causal):
    install(interface=INTERFACE.replace("VALUES, CALLS = 5", f"VALUES, CALLS = {values}"))
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(20, heads, 24) for heads in (4, 2, 2, 4))
    cu_seqlens, scale = torch.tensor([0, 1, 8, 20], dtype=torch.int32), 24**-0.5
    window = (-1, 0) if causal else (-1, -1)  # as varlen_attn passes it
    sequences = cu_seqlens, cu_seqlens
    if values > 2 and not compat.varlen_takes_cudnn():  # torch 2.15 takes any number
        handle = register_flash_attention_fa4("flash_attn.cute.interface")
        with pytest.raises(ValueError, match="too many values"):
            hook._fa4_run_forward(q, k, v, *sequences, 12, 12, scale, causal, *window, None)
        handle.remove()
    handle = register_flash_attention_fa4("extras.speed.attention_kernels")
    out, lse = hook._fa4_run_forward(q, k, v, *sequences, 12, 12, scale, causal, *window, None)
    found = hook._fa4_run_backward(grad, q, k, v, out, lse, *sequences, scale, causal, *window, deterministic=True)
    handle.remove()
    for ours, theirs in zip((out, *found), exact(q, k, v, grad, [1, 7, 12], causal), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    assert lse.shape == (4, 20)
    *_, forward, backward = sys.modules["flash_attn.cute.interface"].CALLS
    assert (forward["max_seqlen_q"], forward["window_size_left"]) == (12, None)
    assert backward["deterministic"], "which torch passes on under use_deterministic_algorithms"


@pytest.fixture
def fa4_for_cpu(install, monkeypatch):
    """torch's hook for CPU tensors, too: the dispatcher's way from the layers to the kernels."""
    install()
    handle = register_flash_attention_fa4("extras.speed.attention_kernels")
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", hook._fa4_flash_attention_forward_impl)
    library.impl("_flash_attention_backward", hook._fa4_flash_attention_backward_impl)
    monkeypatch.setattr(hook, "_fa4_forward_support_error", lambda *_: None)  # "inputs must be CUDA tensors"
    monkeypatch.setattr(hook, "_fa4_backward_support_error", lambda *_: None)
    for module in (attention, block_attention):
        monkeypatch.setattr(module, "has_varlen_kernel", lambda q: True)
    yield
    library._destroy()
    handle.remove()


@LATER_HOOK
@pytest.mark.parametrize("causal", [True, False])
def test_fa4_gets_what_packs_pass(fa4_for_cpu, causal):
    torch.manual_seed(1)
    leaves = [torch.randn(20, heads, 24).requires_grad_() for heads in (4, 2, 2)]
    grad, cu_seqlens = torch.randn(20, 4, 24), torch.tensor([0, 1, 8, 20], dtype=torch.int32)
    out = attention.rotated_attention(*leaves, cu_seqlens, 12, causal)
    found = out.view(20, 4, 24), *torch.autograd.grad(out, leaves, grad.flatten(1))
    for ours, theirs in zip(found, exact(*leaves, grad, [1, 7, 12], causal), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    assert len(sys.modules["flash_attn.cute.interface"].CALLS) == 2


@LATER_HOOK
def test_fa4_gets_what_blocks_of_shared_packs_pass(fa4_for_cpu, monkeypatch):
    """With a sequence without queries, and one without keys, whose rows are masked."""
    torch.manual_seed(1)
    q, k, v, grad = (torch.randn(20, 2, 24) for _ in range(4))
    queries, keys = block_attention.Bounds.make(torch.tensor([[0, 5, 5, 12, 20], [0, 4, 10, 10, 20]]), CPU)

    def results():
        out, lse = block_attention.attend_block(q, k, v, queries, keys)
        found = block_attention.block_gradients(grad, q, k, v, out, lse.nan_to_num(neginf=0.0), queries, keys)
        return out, lse, *found

    ours = results()
    assert len(sys.modules["flash_attn.cute.interface"].CALLS) == 2
    monkeypatch.setattr(block_attention, "has_varlen_kernel", lambda q: False)
    for found, expected in zip(ours, results(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_fa4_is_chosen_registered_and_recorded(install, hopper):
    install()
    before = of_cuda()  # torch's own, of a build with CUDA
    recorded, line = choose_kernels("auto", HEADS, CPU, shared=False)
    assert (recorded, switch.current_flash_attention_impl(), of_cuda()) == ("flash4 4.0.0b36", "FA4", True)
    assert line.startswith("Attention: flash4 4.0.0b36; its results on a small pack are")
    implementation = {"backend": "torch", "gelu": "exact", "attention": recorded}
    assert training_results(TrainerState(), implementation, 1)["attention"] == recorded
    assert choose_kernels("flash2", HEADS, CPU, shared=False)[0] == "flash2"
    assert (switch.current_flash_attention_impl(), of_cuda()) == (None, before)


def test_fa4_falls_back_in_words(install, hopper, monkeypatch):
    """Where it does not load, fails, or is wrong; asked for by name it is an error."""
    before = of_cuda()
    install(interface="raise ImportError('libcute.so:\\n no such file')")
    recorded, line = choose_kernels("auto", HEADS, CPU, shared=False)
    assert recorded == "flash2"
    assert "(not flash4: it fails (ImportError: libcute.so: no such file); not flash3: flash_attn_interface" in line
    with pytest.raises(UserError, match=r"^--attention flash4: it fails .*: choose auto, flash2, .*sdpa$"):
        choose_kernels("flash4", HEADS, CPU, shared=False)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", sys.modules[__name__])
    monkeypatch.setattr(sys.modules[__name__], "_flash_attn_fwd", None, raising=False)
    monkeypatch.setattr(sys.modules[__name__], "_flash_attn_bwd", None, raising=False)
    # On this CPU flash2 and flash4 are the same function, which is wrong when it computes for flash4.
    right = F.scaled_dot_product_attention

    def without_scale(q, k, v, **options):
        wrong = q.dtype == torch.bfloat16 and switch.current_flash_attention_impl() == "FA4"
        return right(q, k, v, scale=1.0 if wrong else None, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", without_scale)
    recorded, line = choose_kernels("auto", HEADS, CPU, shared=False)
    assert (recorded, switch.current_flash_attention_impl(), of_cuda()) == ("flash2", None, before)
    assert "not flash4: its results on a small pack differ from those of fp32 attention by " in line

    def broken(*_, **__):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(F, "scaled_dot_product_attention", broken)
    with pytest.raises(UserError, match=r"flash4 fails on this GPU .*: run again with --attention flash2"):
        choose_kernels("auto", HEADS, CPU, shared=False)


def test_fa4_requirement_is_the_pinned_one():
    if not (ROOT / "requirements-gpu.txt").exists():
        pytest.skip("images have no requirements files")
    assert FA4_REQUIREMENT in (ROOT / "requirements-gpu.txt").read_text().splitlines()


def test_fa4_says_what_it_lacks(install, hopper, monkeypatch, tmp_path):
    assert f'(pip install "{FA4_REQUIREMENT}")' in (lacking("flash4", 64, CPU) or "")
    install("4.0.0b20")
    assert lacking("flash4", 64, CPU) is None
    assert lacking("flash4", 24, CPU) == "heads of 24 need flash-attn-4 4.0.0b30 or later, not 4.0.0b20"
    interface = tmp_path / "flash_attn" / "cute" / "interface.py"
    interface.write_text("# flash-attn 2's, installed later\n")
    assert "flash-attn has replaced its files (pip install --no-deps" in (lacking("flash4", 64, CPU) or "")
    interface.unlink()  # with flash-attn 2
    assert "has replaced its files" in (lacking("flash4", 64, CPU) or "")
    for capability, said in (((8, 0), "8.0"), ((12, 0), "12.0")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, it=capability: it)
        assert lacking("flash4", 64, CPU) == f"it needs compute capability 9.x or 10.x, and this device has {said}"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 3))
    assert lacking("flash3", 64, CPU) == "it needs compute capability 9.x, and this device has 10.3"
    monkeypatch.delattr(switch, "restore_flash_attention_impl")
    assert lacking("flash4", 64, CPU) == f"torch {torch.__version__} has no switch to it"


def test_attention_is_refused_where_it_cannot_be_had(monkeypatch):
    """Before anything is made, in one line."""
    world = World(0, 0, 1, CPU)
    shared = World(0, 0, 2, CPU, cp_size=2)

    def refusal(asked, world=world, by="torch", **flags) -> str:
        with pytest.raises(UserError) as error:
            BackendFlags(attention=asked, **flags).choose_attention(HEADS, True, world, by)
        return str(error.value)

    assert refusal("flash4") == "--attention flash4: it is of runs on a GPU with --bf16: here there are auto and sdpa"
    assert refusal("sdpa", by="te") == "--attention sdpa: --backend te has its own: drop the flag"
    assert (
        refusal("sdpa", shared) == "--attention sdpa: ranks of --cp_size attend by flash kernels: drop one of the two"
    )
    assert refusal("sdpa", torch_compile=True).endswith("which is not compiled: drop --torch_compile")
    assert BackendFlags().choose_attention(HEADS, True, world) == ("", "")
    with pytest.raises(UserError, match="--attention flash: choose auto, flash2, flash3, flash4, cudnn, sdpa"):
        checked(BackendFlags(attention="flash"))


def test_cudnn_says_what_it_lacks(hopper, monkeypatch):
    """In order: a torch that can, the GPU, cuDNN, the heads."""
    monkeypatch.setattr(compat, "varlen_takes_cudnn", lambda: False)
    assert lacking("cudnn", 64, CPU) == f"torch {torch.__version__} has none for packs (2.15 has)"
    with pytest.raises(UserError, match=r"^--attention cudnn: torch .*: choose auto, flash2, sdpa$"):
        choose_kernels("cudnn", HEADS, CPU, shared=False)
    monkeypatch.setattr(compat, "varlen_takes_cudnn", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert lacking("cudnn", 64, CPU) == "it needs cuDNN 9.24 or later, not 9.19.0"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92600)
    assert lacking("cudnn", 64, CPU) is None
    assert lacking("cudnn", 256, CPU) == "it has heads of up to 128, not 256"
    assert choose_kernels("cudnn", HEADS, CPU, shared=False)[0] == "cudnn 9.26.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert lacking("cudnn", 64, CPU) == "it needs compute capability 9.x or 10.x, and this device has 8.0"
