"""--attention on a GPU: which kernels torch's attention is computed by, whether they are right, and which ran.

flash2 is torch's own. flash3 and flash4 replace it by torch.nn.attention.activate_flash_attention_impl, that is what
aten::_flash_attention_forward and _backward run: varlen_attn and the blocks of context parallelism call these, so no
layer knows of the choice; under `--deterministic` both get torch's own flag. cudnn and sdpa are choices of
common.models.layers.attention. Chosen kernels first attend to a small pack, forward and backward: where that fails, or
is not what fp32 attention on the host gives, `auto` takes the next and says why, and any other choice ends the run.

Versions of flash-attn-4 return two, four or five values where torch 2.13 unpacks two, so torch is given this module as
the kernels': `_flash_attn_fwd` and `_flash_attn_bwd` below.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn import attention as switch
from torch.profiler import ProfilerActivity, profile

from common import compat
from common.cli import UserError, log_every, one_line
from common.compat import flash_attention_4
from common.distributed.world import World
from common.models.layers.attention import rotated_attention, use_kernels
from common.models.layers.backend import ATTENTION, Heads
from extras.speed.block_attention import Bounds, attend_block, block_gradients

logger = logging.getLogger(__name__)

FA4_PACKAGE = "flash-attn-4"
FA4_REQUIREMENT = "flash-attn-4[cu13]==4.0.0b36"  # as in requirements-gpu.txt
FA4_ANY_HEADS = Version("4.0.0b30")  # before, heads of a multiple of 32 only
CUDNN_SINCE, CUDNN_HEADS = 92400, 128  # before, torch takes flash for packs without a sequence of more than 128
SWITCHED = {"flash3": "FA3", "flash4": "FA4"}  # their names in torch's switch
MAJORS = {
    "flash4": (9, 10),
    "flash3": (9,),
    "cudnn": (9, 10),
}  # compute capabilities that torch takes, the major number
UNSHARED = ("cudnn", "sdpa")  # which ranks that share packs do not have
AUTO = ("flash4", "flash3", "flash2")  # the fastest first; cuDNN's, which torch 2.15 would try first, never unasked
# Flash attention in bf16, its roundings done one by one on a CPU, differs by at most 0.0033 (heads of 16 to 128).
TOLERANCE = 2 * torch.finfo(torch.bfloat16).eps  # 0.016
LENGTHS = (5, 64, 1, 129, 313)  # of the small pack: ends of tiles of 64 and 128, and one beside each


def choose(asked: str, heads: Heads, bf16: bool, world: World, by: str, compiled: bool) -> tuple[str, str]:
    """`choose_kernels`, and ("", "") where a dry run computes nothing. by: the backend that attends; compiled: whether
    its layers are to be. UserError, too, for what contradicts other flags."""
    on_gpu, shared = bf16 and world.device.type == "cuda", world.cp_size > 1
    reasons = {
        f"--backend {by} has its own: drop the flag": by != "torch",
        "it is of runs on a GPU with --bf16: here there are auto and sdpa": not on_gpu and asked != "sdpa",
        "ranks of --cp_size attend by flash kernels: drop one of the two": shared and asked in UNSHARED,
        "it attends sequence by sequence, which is not compiled: drop --torch_compile": compiled and asked == "sdpa",
    }
    for reason in (reason for reason, holds in reasons.items() if holds and asked != "auto"):
        raise UserError(f"--attention {asked}: {reason}")
    if on_gpu and not world.is_dry_run:
        return choose_kernels(asked, heads, world.device, shared)
    use_kernels(asked)
    return ("sdpa", "Attention: sdpa, sequence by sequence") if asked == "sdpa" else ("", "")


def choose_kernels(asked: str, heads: Heads, device: torch.device, shared: bool) -> tuple[str, str]:
    """(what results record, a line for the log); the kernels are active from here on.

    asked: --attention; shared: whether ranks share packs. UserError if it names what cannot be had here, or is wrong.
    """
    _restore()
    reasons = []
    for name in AUTO if asked == "auto" else (asked,):
        reason = lacking(name, heads.dim, device) or failure(name, heads, device, shared)
        if reason is None:
            others = f" ({'; '.join(reasons)})" if reasons else ""
            recorded = f"{name} {version}" if (version := _version(name)) else name
            return recorded, f"Attention: {recorded}{others}; its results on a small pack are those of fp32 attention"
        reasons.append(f"not {name}: {reason}" if asked == "auto" else reason)
    others = [] if asked == "auto" else ["auto"]
    for name in ATTENTION[1:]:
        tried, fits = name == asked or (asked == "auto" and name in AUTO), not (shared and name in UNSHARED)
        others += [name] * (not tried and fits and lacking(name, heads.dim, device) is None)
    hint = f"choose {', '.join(others)}" if others else "without --cp_size there is sdpa"
    raise UserError(f"--attention {asked}: {'; '.join(reasons)}: {hint}")


def _version(name: str) -> str:
    if name == "flash4":
        return metadata.version(FA4_PACKAGE)
    return _cudnn_version() if name == "cudnn" else ""


def _cudnn_version() -> str:
    number = torch.backends.cudnn.version() or 0
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def lacking(name: str, head_dim: int, device: torch.device) -> str | None:
    """What a choice of --attention lacks here, or None."""
    if name not in MAJORS:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if major not in MAJORS[name]:
        needed = " or ".join(f"{number}.x" for number in MAJORS[name])
        return f"it needs compute capability {needed}, and this device has {major}.{minor}"
    if name == "cudnn":
        if not compat.varlen_takes_cudnn():
            return f"torch {torch.__version__} has none for packs (2.15 has)"
        if (torch.backends.cudnn.version() or 0) < CUDNN_SINCE:
            return f"it needs cuDNN 9.24 or later, not {_cudnn_version()}"
        return f"it has heads of up to {CUDNN_HEADS}, not {head_dim}" if head_dim > CUDNN_HEADS else None
    if (
        not hasattr(switch, "restore_flash_attention_impl")
        or SWITCHED[name] not in switch.list_flash_attention_impls()
    ):
        return f"torch {torch.__version__} has no switch to it"
    if name == "flash3":
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
    # flash-attn 2 has older files of these names: the one installed last has written them. Python 3.12 does not list
    # those that are gone.
    own = [file for file in package.files or () if file.match("flash_attn/cute/interface.py")]
    paths = [(Path(str(package.locate_file(file))), file.size) for file in own]
    if package.files is None or any(path.exists() and path.stat().st_size == size for path, size in paths):
        return None
    return f'flash-attn has replaced its files (pip install --no-deps --force-reinstall "{FA4_REQUIREMENT}")'


def failure(name: str, heads: Heads, device: torch.device, shared: bool) -> str | None:
    """Activate the kernels and try them. None, or why not: then flash2 is active again."""
    try:
        use_kernels(name)
        if name == "flash4":
            flash_attention_4()  # fails here if it does not load
            switch.register_flash_attention_impl(
                SWITCHED[name], register_fn=lambda: compat.register_flash_attention_fa4(__name__)
            )
        if name in SWITCHED:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Warning only once for all operators")  # that kernels are replaced
                switch.activate_flash_attention_impl(SWITCHED[name])
        with log_every(f"Compiling {name}'s kernels"):
            difference = worst_difference(heads, device, shared)
    except torch.AcceleratorError as error:  # the device may be unusable for this process
        another = "sdpa" if name == "flash2" else "flash2"
        raise UserError(
            f"--attention: {name} fails on this GPU ({one_line(error)[:160]}): run again with --attention {another}"
        ) from error
    except Exception as error:  # of compilers, mismatched libraries, unsupported shapes
        _restore()
        return f"it fails ({type(error).__name__}: {one_line(error)[:160]})"
    if difference <= TOLERANCE:
        return None
    _restore()
    return (
        f"its results on a small pack differ from those of fp32 attention by {difference:.1%} (bf16: {TOLERANCE:.1%})"
    )


def _restore() -> None:
    """Back to flash2. Of a torch without the switch nothing else is ever active."""
    use_kernels("auto")
    if getattr(switch, "current_flash_attention_impl", lambda: None)() is not None:
        switch.restore_flash_attention_impl()


def worst_difference(heads: Heads, device: torch.device, shared: bool) -> float:
    """Between bf16 attention on the device and fp32 attention on the host, both of the same rounded numbers: the most
    of any token's output or gradient (`_difference`).

    shared: also of a block of a pack that ranks share, where a sequence may have no queries or no keys in it.
    """
    generator = torch.Generator().manual_seed(0)
    counts = heads.queries, heads.keys, heads.keys, heads.queries
    q, k, v, grad = (torch.randn(sum(LENGTHS), n, heads.dim, generator=generator).bfloat16() for n in counts)
    attends = [_packed, _block] if shared else [_packed]
    differences = []
    for attend in attends:
        ours = attend(*(x.to(device) for x in (q, k, v, grad)), causal=heads.causal)
        exact = attend(*(x.float() for x in (q, k, v, grad)), causal=heads.causal)
        differences += [_difference(x.float().cpu(), y) for x, y in zip(ours, exact, strict=True)]
    return torch.stack(differences).max().item()  # NaN if there is one


def _difference(ours: Tensor, exact: Tensor) -> Tensor:
    """[T, ...]: of the token that differs most, so that the pack does not hide one that attends to a wrong key; over
    its norm plus that of an average token, for some gradients of a sequence of one token are zero."""
    delta, norms = (x.flatten(1).norm(dim=1) for x in (ours - exact, exact))
    return (delta / (norms + norms.square().mean().sqrt())).max()


def _packed(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Output and gradients of a pack."""
    cu_seqlens = torch.tensor([0, *LENGTHS], device=q.device).cumsum(0, dtype=torch.int32)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = rotated_attention(q, k, v, cu_seqlens, max(LENGTHS), causal)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad.flatten(1))


def _block(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Output and gradients of a block with a sequence without queries, and one without keys; if causal also of a
    rank's own block."""
    rows = torch.tensor([[0, 5, 5, 70, 512], [0, 64, 69, 69, 512]])
    queries, keys = Bounds.make(rows, q.device)
    results = []
    for bounds in [(queries, keys, False), (keys, keys, True)][: 1 + causal]:
        out, lse = attend_block(q, k, v, *bounds)
        results += out, *block_gradients(grad, q, k, v, out, lse.nan_to_num(neginf=0.0), *bounds)
    return tuple(results)


# ---- the kernels that ran ------------------------------------------------------------------------------------------

# {a choice of --attention: pattern of its kernels' names}; the first that matches. Of flash2, on an H100:
# benchmarks/results/gpu_profile.md. The others from profiles that other people have published.
NAMES = {
    "cudnn": r"cudnn.*sdpa",
    "flash4": r"flash_?attn_?cute",
    "flash3": r"FlashAttn(Fwd|Bwd)",
    "flash2": r"flash_(fwd|bwd)_",
    "sdpa": r"fmha_cutlass",
}


def kernels_of(names: Iterable[str]) -> str:
    """The choices of --attention whose kernels are among these, "" for none."""
    found = {next((kernels for kernels, pattern in NAMES.items() if re.search(pattern, name)), "") for name in names}
    return ", ".join(sorted(found - {""}))


class KernelWatch:
    """Finds the attention kernels of a run's first step, by torch's profiler. found: `kernels_of`, "" before."""

    def __init__(self, activity: ProfilerActivity = ProfilerActivity.CUDA):
        self.found, self._activity, self._is_over = "", activity, False
        self._profile: profile | None = None

    def begin(self) -> None:
        """Before a step: the first is profiled."""
        if not self._is_over:
            self._is_over = True
            try:  # no step fails for this, whatever a driver or a build of torch has against it
                seen = profile(activities=[self._activity])
                seen.start()
                self._profile = seen
            except Exception as error:
                _say_unknown(error)

    def end(self) -> None:
        if self._profile is None:
            return
        seen, self._profile = self._profile, None
        try:
            seen.stop()
            names = {event.key for event in seen.key_averages()}
            self.found = kernels_of(names) or f"none known by name among {len(names)}"
            logger.info("Attention kernels that ran in the first step: %s", self.found)
        except Exception as error:
            _say_unknown(error)


def _say_unknown(error: Exception) -> None:
    logger.warning("The attention kernels that ran are not known: the profiler failed (%s)", one_line(error)[:160])


# ---- the kernels' module, as torch calls it ----------------------------------------------------------------------


def _flash_attn_fwd(*args, **options) -> tuple[Tensor, Tensor]:
    """(output, lse), whatever else the version returns."""
    forward, _ = flash_attention_4()
    return forward(*args, **options)[:2]


def _flash_attn_bwd(*args, **options) -> tuple[Tensor, Tensor, Tensor]:
    _, backward = flash_attention_4()
    return backward(*args, **options)[:3]
