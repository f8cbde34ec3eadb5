"""What tests of decoders' runs share: a little text, a tiny model, the guides' flags."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.measuring import file_first
from tests.training_fixtures import _main, on_ranks, words_of

SIZES = {"hidden_width": 48, "num_layers": 2, "num_heads": 6, "num_key_value_heads": 2, "intermediate_size": 80}
# Of the flags, the guides' names. fp32, so that runs can be held to a reference.
FLAGS = SIZES | {
    "model_type": "llama_v3",
    "vocab_size": 272,
    "max_context_width": 32,
    "train_batch_size": 2,
    "packs_per_step": 4,
    "max_steps": 6,
    "bf16": 0,
    "lr": 1e-3,
    "initializer_range": 0.1,
    "checkpoint_freq": 3,
    "dataloader_num_workers": 0,
    "disable_tqdm": True,
}
TRAINING_DOCUMENTS, HELD_OUT = 160, 24
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "rests", "under", "trees")


def write_text(directory: Path, seed: int = 11) -> Path:
    """JSON lines, a document a line, numbered, so that no two are alike: train and validation."""
    random = np.random.default_rng(seed)
    directory.mkdir(parents=True)
    for split, count in (("train", TRAINING_DOCUMENTS), ("validation", HELD_OUT)):
        lines = []
        for number in range(count):
            words = random.choice(WORDS, size=random.integers(4, 40))
            lines.append(json.dumps({"text": f"{split} {number}: {' '.join(words)}."}) + "\n")
        (directory / f"{split}.jsonl").write_text("".join(lines))
    return directory


def decoder_flags(text: Path | None, output_dir: Path | None, **flags) -> list[str]:
    """The command line of a run of the tiny model; `flags` add to it, None takes away."""
    first, chosen = file_first({"dataset": text, "checkpoint_dir": output_dir} | FLAGS | flags)
    return [*first, *words_of(chosen)]


def train_decoder(
    text: Path | None,
    output_dir: Path | None,
    nproc: int = 1,
    expect: int = 0,
    script: str = "train_fsdp2.py",
    **flags,
) -> str:
    """Run it in forked processes; asserts that all exit with status `expect`, returns what rank 0 printed."""
    codes, said = on_ranks(nproc, _main, decoder_flags(text, output_dir, **flags), script)
    assert codes == [expect] * nproc, f"exit codes {codes}\n" + "\n".join(said)
    return said[0]
