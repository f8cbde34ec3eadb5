"""Which flash-attention kernels a run on a GPU computes with: FA2 (torch's own), FA3 or FA4.

torch.nn.attention.activate_flash_attention_impl replaces what aten::_flash_attention_forward and _backward run.
varlen_attn and the blocks of context parallelism call these, so no layer knows of the choice; under `--deterministic`
both get torch's own flag. Chosen kernels first attend to a small pack, forward and backward: where that fails, or is
not what fp32 attention on the host gives, the run keeps FA2 and says why.

Versions of flash-attn-4 return two, four or five values where torch 2.13 unpacks two, so torch is given this module as
the kernels': `_flash_attn_fwd` and `_flash_attn_bwd` below.
"""

from __future__ import annotations

import warnings
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn import attention as switch

from common import compat
from common.cli import UserError, log_every, one_line
from common.compat import flash_attention_4
from common.models.layers.attention import rotated_attention
from common.models.layers.backend import Heads
from extras.speed.block_attention import Bounds, attend_block, block_gradients

FA4_PACKAGE = "flash-attn-4"
FA4_REQUIREMENT = "flash-attn-4[cu13]==4.0.0b36"  # as in requirements-gpu.txt
FA4_ANY_HEADS = Version("4.0.0b30")  # before, heads of a multiple of 32 only
# Compute capabilities (major) that torch's switch takes, and what is tried, the fastest first.
MAJORS = {"FA4": (9, 10), "FA3": (9,)}
# Of the norm: a few times what bf16 probabilities and results cost.
TOLERANCE = 0.03


def choose_kernels(asked: str, heads: Heads, device: torch.device, shared: bool) -> tuple[str, str]:
    """(what results record, a line for the log); the kernels are active from here on.

    asked: --flash_attention, UserError if it names what cannot be had; shared: whether ranks share packs.
    """
    _restore()
    wanted = MAJORS if asked == "auto" else [asked.upper()] if asked != "fa2" else []
    reasons = []
    for name in wanted:
        reason = lacking(name, heads.dim, device) or failure(name, heads, device, shared)
        if reason is None:
            recorded = f"{name} {metadata.version(FA4_PACKAGE)}" if name == "FA4" else name
            return recorded, f"Attention: {recorded}; its results on a small pack are those of fp32 attention"
        if asked != "auto":
            raise UserError(f"--flash_attention {asked}: {reason}; auto falls back to FA2")
        reasons.append(f"not {name}: {reason}")
    return "FA2", f"Attention: FA2, torch's own ({'; '.join(reasons) or '--flash_attention fa2'})"


def lacking(name: str, head_dim: int, device: torch.device) -> str | None:
    """What FA3 or FA4 lacks here, or None."""
    major, minor = torch.cuda.get_device_capability(device)
    if major not in MAJORS[name]:
        needed = " or ".join(f"{number}.x" for number in MAJORS[name])
        return f"it needs compute capability {needed}, and this device has {major}.{minor}"
    if not hasattr(switch, "restore_flash_attention_impl") or name not in switch.list_flash_attention_impls():
        return f"torch {torch.__version__} has no switch to it"
    if name == "FA3":
        installed = find_spec("flash_attn_interface")
        return None if installed else "flash_attn_interface is not installed (from flash-attention's hopper/)"
    return _fa4_lacks(head_dim)


def _fa4_lacks(head_dim: int) -> str | None:
    try:
        package = metadata.distribution(FA4_PACKAGE)
    except metadata.PackageNotFoundError:
        return f'{FA4_PACKAGE} is not installed (pip install "{FA4_REQUIREMENT}")'
    if head_dim % 32 and Version(package.version) < FA4_ANY_HEADS:
        return f"heads of {head_dim} need {FA4_PACKAGE} {FA4_ANY_HEADS} or later, not {package.version}"
    # flash-attn 2 has older files of these names: the one installed last has written them.
    for file in package.files or ():
        path = Path(str(package.locate_file(file)))
        if file.match("flash_attn/cute/interface.py") and not (path.exists() and path.stat().st_size == file.size):
            return f'flash-attn has replaced its files (pip install --no-deps --force-reinstall "{FA4_REQUIREMENT}")'
    return None


def failure(name: str, heads: Heads, device: torch.device, shared: bool) -> str | None:
    """Activate FA3 or FA4 and try it. None, or why not: then FA2 is active again."""
    try:
        if name == "FA4":
            flash_attention_4()  # fails here if it does not load
            switch.register_flash_attention_impl(
                name, register_fn=lambda: compat.register_flash_attention_fa4(__name__)
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # that kernels are replaced
            switch.activate_flash_attention_impl(name)
        with log_every(f"Compiling {name}'s kernels"):
            difference = worst_difference(heads, device, shared)
    except torch.AcceleratorError as error:  # the device may be unusable for this process
        raise UserError(
            f"{name} fails on this GPU ({one_line(error)[:160]}): run again with --flash_attention fa2"
        ) from error
    except Exception as error:  # of compilers, mismatched libraries, unsupported shapes
        _restore()
        return f"it fails ({type(error).__name__}: {one_line(error)[:160]})"
    if difference <= TOLERANCE:
        return None
    _restore()
    return f"its results on a small pack differ from those of fp32 attention by {difference:.1%}"


def _restore() -> None:
    """Back to FA2. Of a torch without the switch nothing else is ever active."""
    if getattr(switch, "current_flash_attention_impl", lambda: None)() is not None:
        switch.restore_flash_attention_impl()


def worst_difference(heads: Heads, device: torch.device, shared: bool) -> float:
    """Between bf16 attention on the device and fp32 attention on the host, of outputs and gradients, by their norms.

    shared: also of a block of a pack that ranks share, where a sequence may have no queries or no keys in it.
    """
    generator = torch.Generator().manual_seed(0)
    counts = heads.queries, heads.keys, heads.keys, heads.queries
    q, k, v, grad = (torch.randn(270, n, heads.dim, generator=generator).bfloat16() for n in counts)
    attends = [_packed, _block] if shared else [_packed]
    differences = []
    for attend in attends:
        ours = attend(*(x.to(device) for x in (q, k, v, grad)), causal=heads.causal)
        exact = attend(*(x.float() for x in (q, k, v, grad)), causal=heads.causal)
        differences += [(x.float().cpu() - y).norm() / y.norm() for x, y in zip(ours, exact, strict=True)]
    return torch.stack(differences).max().item()  # NaN if there is one


def _packed(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Output and gradients of a pack of four sequences."""
    cu_seqlens = torch.tensor([0, 5, 69, 70, 270], dtype=torch.int32, device=q.device)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = rotated_attention(q, k, v, cu_seqlens, 200, causal)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad.flatten(1))


def _block(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Output and gradients of a block with a sequence without queries, and one without keys; if causal also of a
    rank's own block."""
    rows = torch.tensor([[0, 5, 5, 70, 270], [0, 64, 69, 69, 270]])
    queries, keys = Bounds.make(rows, q.device)
    results = []
    for bounds in [(queries, keys, False), (keys, keys, True)][: 1 + causal]:
        out, lse = attend_block(q, k, v, *bounds)
        results += out, *block_gradients(grad, q, k, v, out, lse.nan_to_num(neginf=0.0), *bounds)
    return tuple(results)


# ---- the kernels' module, as torch calls it ----------------------------------------------------------------------


def _flash_attn_fwd(*args, **options) -> tuple[Tensor, Tensor]:
    """(output, lse), whatever else the version returns."""
    forward, _ = flash_attention_4()
    return forward(*args, **options)[:2]


def _flash_attn_bwd(*args, **options) -> tuple[Tensor, Tensor, Tensor]:
    _, backward = flash_attention_4()
    return backward(*args, **options)[:3]
