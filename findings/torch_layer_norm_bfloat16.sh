#!/usr/bin/env bash
# torch 2.13.0, CPU: layer_norm of bfloat16 sums the gradients of its parameters over the rows in bfloat16, also where these are
# fp32, as under autocast. The error grows with the rows of a batch: with 16,384 tokens the bias's gradient is a quarter off.
# rms_norm and a linear layer's bias are right to the last place of bfloat16.
# Seen 2026-11-28, Python 3.11, one thread, AMD EPYC; width 320, error of the gradient against float64:
#   rows 1024: layer_norm 0.032, with fp32 bias 0.034, rms_norm 0.002, linear 0.002
#   rows 16384: layer_norm 0.253, with fp32 bias 0.251, rms_norm 0.002, linear 0.001
# Fails if layer_norm is less than 10 % off at 16,384 rows. What helps: x.float() into layer_norm.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$directory/venv/bin/python" - <<'END'
import torch
from torch.nn import functional

torch.manual_seed(0)
WIDTH, matrix = 320, torch.randn(320, 320)


def wide(parameter):
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32))


LAYERS = {
    "layer_norm": lambda x, p: functional.layer_norm(x, (WIDTH,), torch.ones_like(p), p),
    "with fp32 bias": lambda x, p: functional.layer_norm(x, (WIDTH,), wide(torch.ones_like(p)), wide(p)),
    "rms_norm": lambda x, p: functional.rms_norm(x, (WIDTH,), p + 1),
    "linear": lambda x, p: functional.linear(x, matrix.to(x.dtype), p),
}


def error(layer, rows):
    x, grad = torch.randn(rows, WIDTH).bfloat16(), (torch.randn(rows, WIDTH) + 0.05).bfloat16()
    found = []
    for kind in (torch.bfloat16, torch.float64):
        parameter = torch.zeros(WIDTH, dtype=kind, requires_grad=True)
        layer(x.to(kind), parameter).backward(grad.to(kind))
        found.append(parameter.grad.double())
    return float((found[0] - found[1]).norm() / found[1].norm())


errors = {rows: {name: error(layer, rows) for name, layer in LAYERS.items()} for rows in (1024, 16384)}
for rows, of in errors.items():
    print(f"rows {rows}: " + ", ".join(f"{name} {value:.3f}" for name, value in of.items()))
assert min(errors[16384]["layer_norm"], errors[16384]["with fp32 bias"]) > 0.1
assert errors[16384]["rms_norm"] < 0.01 > errors[16384]["linear"]
END
