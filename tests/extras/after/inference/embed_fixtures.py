"""A small model, embed.py run on it in this process or in one of its own, and what transformers computes with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, EsmForMaskedLM

from common.models.esm2.config import esm2_config
from common.models.esm2.convert import ADAPTER
from tests.data_fixtures import call, environment, load_script
from tests.forked import run_script
from tests.models.reference import reference_model

EMBED = load_script("embed.py")


def make_model(directory: Path, seed: int = 5) -> Path:
    """A directory of transformers' own: every weight random and of a size that shows."""
    reference_model(esm2_config(2, 32, 4, initializer_range=0.2), seed=seed).save_pretrained(directory)
    ADAPTER.write_tokenizer(directory)
    return directory


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def call_embed(model: Path, fasta: Path, output_dir: Path, *flags) -> None:
    """In this process: errors come through."""
    call(EMBED, "--model_name_or_path", model, "--fasta", fasta, "--output_dir", output_dir, *flags)


def refused(script: str, *flags) -> str:
    done = run_script(script, *flags, env=environment())
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(errors)) == (2, 1), done.stderr
    return errors[0]


def ran(script: str, *flags) -> str:
    done = run_script(script, *flags, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stderr


@functools.cache
def stock(model: Path) -> tuple:
    return AutoTokenizer.from_pretrained(model), EsmForMaskedLM.from_pretrained(model).eval()


@functools.cache
@torch.no_grad()
def stock_log_p(model: Path, text: str, masked: int | None = None) -> torch.Tensor:
    """transformers' log-probabilities, float64 [residues, 33]; masked: a position from 0."""
    tokenizer, network = stock(model)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    if masked is not None:
        ids[0, 1 + masked] = tokenizer.mask_token_id
    return network(ids).logits[0, 1:-1].double().log_softmax(-1)
