"""fused_gelu: exact GELU in the matmuls of ESM-2's MLP, by QuACK's kernels for Hopper and Blackwell.

`gemm_act` adds fc1's bias and applies GELU while the sums are in registers: the forward pass has no kernel that reads
them again. `gemm_dact` multiplies fc2's input gradient by GELU's derivative there, and computes GELU once more for the
gradient of fc2's weight: a layer saves fc1's sums alone. Both compute in fp32 and round once: GELU and its derivative
meet numbers that separate kernels round to bf16 first.

Each is one operator, which a compiled layer takes into its graph as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from common.cli import UserError, log_every, one_line
from common.distributed.world import World
from common.models.esm2.config import Esm2Config
from common.models.layers.linear import copy_of, weight_gradient
from common.models.layers.residual import Model

PACKAGE, SINCE = "quack-kernels", Version("0.6.3")  # flash-attn-4 brings it (requirements.lock); before, tanh alone
MAJORS = (9, 10)  # compute capabilities
MULTIPLE = 8  # of both sizes: rows of bf16 begin at 16 bytes
TOLERANCE = 0.03  # of the norm


def check(args: Any, config: Esm2Config, gelu: str, world: World) -> str:
    """What the log says. UserError if this run or this device cannot have the flag."""
    precision, sizes = args.precision, (config.hidden_size, config.intermediate_size)
    obstacles = {
        "it is the exact GELU, and this run's is the tanh approximation: give --gelu exact": gelu != "exact",
        "it computes in bf16: add --bf16": not precision.bf16,
        "--fp8 and --fp4 have matmuls of their own: drop those": precision.fp8 or precision.fp4,
        "no one has tried it with train_mfsdp.py: use train_fsdp2.py": hasattr(args.strategy, "zero_dp_strategy"),
        "no one has replayed it by --cuda_graphs: drop that": getattr(args.strategy, "cuda_graphs", False),
        f"hidden_size {sizes[0]} and intermediate_size {sizes[1]} must be multiples of {MULTIPLE}: choose others": any(
            size % MULTIPLE for size in sizes
        ),
    }
    reason = next((text for text, is_so in obstacles.items() if is_so), None)
    if reason is None and not world.is_dry_run:  # which computes nothing
        reason = lacking(world.device) or failure(sizes, world.device)
    if reason:
        raise UserError(f"--fused_gelu: {reason}, or drop the flag")
    return "GELU: exact, in the MLP's matmuls (--fused_gelu)"


def lacking(device: torch.device) -> str | None:
    """What QuACK lacks here, or None."""
    if device.type != "cuda":
        return "QuACK needs an NVIDIA GPU, and this run is on a CPU: run on one"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in MAJORS:
        return f"it is for compute capability 9.x or 10.x, and this device has {major}.{minor}: take another"
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed: ./install.sh --gpu"
    return None if Version(version) >= SINCE else f"{PACKAGE} is {version}, without it: install {SINCE} or later"


def failure(sizes: tuple[int, int], device: torch.device) -> str | None:
    """Why the kernels do not work here, or None: outputs and gradients of 200 tokens, beside fp32's on the host."""
    generator = torch.Generator().manual_seed(0)
    hidden, ffn = sizes
    # Sums of about 1, where GELU is neither 0 nor x.
    shapes = (200, hidden), (ffn, hidden), (ffn,), (hidden, ffn), (hidden,)
    scales = 1.0, hidden**-0.5, 1.0, ffn**-0.5, 1.0
    values = [torch.randn(s, generator=generator) * scale for s, scale in zip(shapes, scales, strict=True)]
    grad = torch.randn(200, hidden, generator=generator)
    try:
        with log_every("Compiling QuACK's kernels"):
            found = _outputs(fused_mlp, [x.to(device) for x in values], grad.to(device))
            differences = [
                (ours.cpu() - exact).norm() / exact.norm()
                for ours, exact in zip(found, _outputs(_apart, values, grad), strict=True)
            ]
    except Exception as error:  # of compilers, mismatched libraries, the device
        return f"QuACK's kernels fail here ({type(error).__name__}: {one_line(error)[:160]}): mend that"
    difference = torch.stack(differences).max().item()
    return None if difference <= TOLERANCE else f"its results differ from fp32's by {difference:.1%}: report it"


def _outputs(mlp: Callable[..., Tensor], values: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The result and the gradients of an MLP, in fp32."""
    leaves = [x.clone().requires_grad_() for x in values]
    result = mlp(*leaves)
    return [result.detach().float(), *torch.autograd.grad(result, leaves, grad.to(result.dtype))]


def _apart(x: Tensor, fc1_weight: Tensor, fc1_bias: Tensor, fc2_weight: Tensor, fc2_bias: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, fc1_weight, fc1_bias)), fc2_weight, fc2_bias)


def with_fused_gelu(make: Callable[[], Model]) -> Model:
    """The model that `make` makes, with `fused_mlp` in its layers."""
    model = make()
    for layer in model.layers:
        layer.layernorm_mlp.fused = fused_mlp
    return model


def fused_mlp(x: Tensor, *parameters: Tensor) -> Tensor:
    """fc2(gelu(fc1(x))) in bf16, x [T, hidden] -> [T, hidden]. parameters: fc1's weight [ffn, hidden] and bias [ffn],
    fc2's weight [hidden, ffn] and bias [hidden], each with a bf16 copy (RoundedWeights) or not."""
    copies = [copy_of(parameter) for parameter in parameters]
    copies = [p.detach().bfloat16() if c is None else c for p, c in zip(parameters, copies, strict=True)]
    return FusedMLP.apply(x.bfloat16(), *parameters, *copies)


class FusedMLP(torch.autograd.Function):
    """Multiplies the copies, which are of x's dtype; gradients are those of the parameters, in their dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters_and_copies: Tensor) -> Tensor:
        fc1_weight, fc1_bias, fc2_weight, fc2_bias = parameters_and_copies[4:]
        sums, activated = matmul_gelu(x, fc1_weight.t(), fc1_bias)
        ctx.save_for_backward(x, sums, fc1_weight, fc2_weight)
        ctx.dtype = parameters_and_copies[0].dtype
        return F.linear(activated, fc2_weight, fc2_bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyrefly: ignore[bad-override]  # torch passes one gradient an output
        x, sums, fc1_weight, fc2_weight = ctx.saved_tensors
        grad_sums, activated = matmul_gelu_backward(grad.contiguous(), fc2_weight, sums)
        of_fc1 = weight_gradient(grad_sums, x, ctx.dtype), grad_sums.sum(0, dtype=ctx.dtype)
        of_fc2 = weight_gradient(grad, activated, ctx.dtype), grad.sum(0, dtype=ctx.dtype)
        return grad_sums @ fc1_weight, *of_fc1, *of_fc2, None, None, None, None


# tuned=False: QuACK's own choice of tiles, else it takes what was fastest in a trial: another sum in another run.


@torch.library.custom_op("esm2::matmul_gelu", mutates_args=())
def matmul_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """x W + b and its GELU, each [T, out], for x [T, in], weight [in, out], bias [out] of one dtype."""
    from quack.gemm_interface import gemm_act

    return gemm_act(x, weight, bias=bias, activation="gelu_erf", tuned=False)


@matmul_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), len(bias)), x.new_empty(len(x), len(bias))


@torch.library.custom_op("esm2::matmul_gelu_backward", mutates_args=())
def matmul_gelu_backward(grad: Tensor, weight: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """grad W times GELU's derivative at the sums [T, in], and their GELU: grad [T, out], weight [out, in]."""
    from quack.gemm_interface import gemm_dact

    return gemm_dact(grad, weight, sums, activation="gelu_erf", tuned=False)


@matmul_gelu_backward.register_fake
def _(grad: Tensor, weight: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(sums), torch.empty_like(sums)
