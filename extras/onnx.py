"""Write an ESM-2 encoder as an ONNX file, for programs without Python (docs/serving.md).

python -m extras.onnx MODEL OUT.onnx

MODEL: a run's output directory, its final_model/ or a checkpoint, a directory of transformers, or a Hub name.
OUT.onnx: a new file; weights beyond 1.5 GB go into OUT.onnx.data beside it. It takes batches of any size and length,
and gives logits and the last layer's output. onnxruntime computes both on a CPU beside transformers' model, and only a
file that agrees within 1e-4 gets its name. Needs requirements-onnx.txt.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn

from common.cli import UserError, run
from extras.after.inference.exported import exported
from extras.command_line import positional

logger = logging.getLogger(__name__)

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
INPUTS, OUTPUTS = ("input_ids", "attention_mask"), ("logits", "last_hidden_state")
SHAPES = ((1, 3), (3, 41), (2, 258))  # [proteins, tokens] of the check
TOLERANCE = 1e-4  # of the largest number, if that is above 1
ONE_FILE = 1.5e9  # bytes: a protobuf has at most 2 GiB


class Outputs(nn.Module):
    """transformers' EsmForMaskedLM with plain tensors: what is traced."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """[N, L] ids, and 1 where they are no padding -> logits [N, L, vocabulary], last layer [N, L, hidden]."""
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        return found.logits, found.hidden_states[-1]


def load(directory: str) -> Outputs:
    """transformers' model in fp32. UserError unless it is ESM-2."""
    from transformers import AutoConfig, EsmForMaskedLM

    try:
        kind = AutoConfig.from_pretrained(directory, trust_remote_code=False).model_type
        if kind != "esm":
            raise UserError(f"{directory}: model_type {kind}: extras.onnx writes ESM-2 (esm) alone")
        options = {"attn_implementation": "eager", "dtype": torch.float32, "trust_remote_code": False}
        model = EsmForMaskedLM.from_pretrained(directory, **options)
    except (OSError, ValueError) as error:
        raise UserError(f"{directory}: not a model of transformers: {str(error).splitlines()[0]}") from None
    return Outputs(model).eval()


def example(shape: tuple[int, int], vocabulary: int, pad: int, mask: int) -> tuple[Tensor, Tensor]:
    """Random ids with a mask token, the last protein padded to twice its length; (input_ids, attention_mask)."""
    ids = torch.randint(4, min(24, vocabulary), shape, generator=torch.Generator().manual_seed(0))
    present = torch.ones_like(ids)
    ids[0, 1] = mask
    if shape[0] > 1:
        ids[-1, shape[1] // 2 :], present[-1, shape[1] // 2 :] = pad, 0
    return ids, present


def write(outputs: Outputs, file: Path) -> None:
    """Trace the model and write it."""
    config = outputs.model.config
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=2)
    for name in ("torch.onnx", "onnxscript", "onnx_ir"):  # they log each rewritten node
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            outputs,
            example((2, 17), config.vocab_size, config.pad_token_id, config.mask_token_id),
            dynamo=True,
            verbose=False,
            input_names=INPUTS,
            output_names=OUTPUTS,
            dynamic_shapes=dict.fromkeys(INPUTS, {0: batch, 1: length}),
        )
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # the exporter's tracebacks, with paths of this machine
    size = sum(p.numel() * p.element_size() for p in outputs.parameters())
    program.save(str(file), external_data=size > ONE_FILE)


def check(outputs: Outputs, file: Path) -> float:
    """The largest difference over real tokens, over the largest number if that is above 1. UserError if too large."""
    import onnxruntime

    config, worst = outputs.model.config, 0.0
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for shape in SHAPES:
        ids, present = example(shape, config.vocab_size, config.pad_token_id, config.mask_token_id)
        with torch.inference_mode():
            expected = outputs(ids, present)
        found = session.run(list(OUTPUTS), {"input_ids": ids.numpy(), "attention_mask": present.numpy()})
        real = present.numpy() == 1
        for ours, theirs in zip(expected, found, strict=True):
            reference = ours.numpy()[real]
            difference = np.abs(theirs[real] - reference).max() / max(1.0, np.abs(reference).max())
            worst = max(worst, float(difference)) if np.isfinite(difference) else float("inf")
    if worst > TOLERANCE:
        raise UserError(f"the ONNX file differs from the model by {worst:.1g}, more than {TOLERANCE:g}: not written")
    return worst


def save(name: str, file: Path) -> float:
    """Write and check the ONNX file; the largest difference. UserError for a file that exists, or lacking packages."""
    if lacking := [package for package in PACKAGES if find_spec(package) is None]:
        raise UserError(f"extras.onnx needs {', '.join(lacking)}: pip install -r requirements-onnx.txt")
    data = file.with_name(f"{file.name}.data")
    if found := [path for path in (file, data) if path.exists()]:
        raise UserError(f"{found[0]} exists: remove it, or give another name")
    if not file.parent.is_dir():
        raise UserError(f"{file.parent}: no such directory")
    with ExitStack() as stack:
        outputs = load(exported(name, stack))
        directory = Path(stack.enter_context(TemporaryDirectory(dir=file.parent, prefix=".onnx-")))
        partial = directory / file.name  # names its data
        write(outputs, partial)
        difference = check(outputs, partial)
        for path in sorted(directory.iterdir(), reverse=True):  # the data first
            path.replace(file.parent / path.name)
    return difference


def main() -> None:
    name, target = positional(__doc__, "python -m extras.onnx MODEL OUT.onnx", 2)
    difference = save(name, Path(target).resolve())
    logger.info("%s as ONNX: %s; largest difference from transformers' model %.1g", name, target, difference)


if __name__ == "__main__":
    run(main)
