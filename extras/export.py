"""The model of a checkpoint, as a directory that transformers' from_pretrained opens: final_model/ of any step.

python -m extras.export CHECKPOINT OUT

CHECKPOINT: checkpoint-N of a run, of whatever script and number of ranks; or the run's --output_dir, for its newest
whole one. OUT: a directory that is not there yet, or empty. One process, without a GPU; tensors go through memory in
files of 5 GB at most.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from common.cli import UserError, one_line, positional, run
from common.distributed.world import World
from common.files import alphabet
from common.files.json_files import check_type, shorten
from common.models.esm2 import convert
from common.models.esm2.config import load_config
from common.models.esm2.convert import save_pretrained
from common.models.esm2.model import Esm2ForMaskedLM
from common.models.layers.hf_directory import Training
from common.training import checkpoint_files as files
from common.training.checkpoint import CONFIG, TRAINER_STATE
from common.training.checkpoint_reader import StoredTensors
from common.training.resume import damage_of, newest_usable
from extras.decoders import convert as decoder_convert
from extras.decoders.config import ARCHITECTURES, load_decoder_config
from extras.decoders.convert import save_decoder
from extras.decoders.model import DecoderForCausalLM
from extras.text.tokenizers import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

MODEL, EXTRAS = "model.", "extras."


def choose(path: Path) -> Path:
    """The checkpoint that is meant, all its files looked through. UserError where there is none that is whole."""
    alone = World(0, 0, 1, torch.device("cpu"))
    if not (path / files.MANIFEST).exists() and files.list_checkpoints(path):
        newest = newest_usable(path, alone, advice="there is nothing to export")
        logger.info("%s: its newest whole checkpoint is %s", path, newest.name)
        return newest
    if damage := damage_of(path, alone):
        raise UserError(f"{path}: {damage}: give a checkpoint-N directory, or the --output_dir of a run")
    return path


def export(checkpoint: Path, directory: Path) -> None:
    """Write the model of a checkpoint that `choose` has looked through.

    UserError where the directory has something in it, and for a checkpoint that has no model of this program in it.
    """
    model, described = files.read_manifest(checkpoint)
    is_decoder = model.get("model_type") in [*ARCHITECTURES]
    if not is_decoder and model.get("alphabet") != " ".join(alphabet.TOKENS):
        raise UserError(f"{checkpoint}: of another alphabet: export it with the version of this program that wrote it")
    if CONFIG not in described:
        raise UserError(
            f"{checkpoint}: of an earlier version, without {CONFIG}: the command of its run with --do_train False "
            f"--save_final_model --resume_from_checkpoint {checkpoint} exports it"
        )
    (_export_decoder if is_decoder else _export_esm2)(checkpoint, StoredTensors(checkpoint), directory)


def _export_esm2(checkpoint: Path, stored: StoredTensors, directory: Path) -> None:
    config = load_config(str(checkpoint))
    read = _reader(checkpoint, stored, partial(Esm2ForMaskedLM, config))
    extras = {name.removeprefix(EXTRAS): stored.read(name) for name in stored.shapes if name.startswith(EXTRAS)}
    training = Training.of_state(files.read_listed(checkpoint, TRAINER_STATE))
    save_pretrained(convert.pieces_to_hf(read, config, extras), config, directory, training)


def _export_decoder(checkpoint: Path, stored: StoredTensors, directory: Path) -> None:
    config = load_decoder_config(str(checkpoint))
    read = _reader(checkpoint, stored, partial(DecoderForCausalLM, config))
    state = files.read_listed(checkpoint, TRAINER_STATE)
    tokenizer = _tokenizer(checkpoint, state)
    pieces = decoder_convert.pieces_to_hf(read, config)
    save_decoder(pieces, config, directory, tokenizer.save, Training.of_state(state))


def _tokenizer(checkpoint: Path, state: dict) -> Tokenizer:
    """That of the run. UserError where the one of its name is another one now."""
    try:
        name, identity = state["arguments"]["tokenizer"], state["data"]["tokenizer"]
        check_type("tokenizer", name, "str")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{checkpoint / TRAINER_STATE}: refused: it names no tokenizer") from error
    tokenizer, _ = load_tokenizer(name)
    if tokenizer.identity != identity:
        raise UserError(f"{checkpoint}: trained with another tokenizer than is at {shorten(name)} now: put it back")
    return tokenizer


def _reader(checkpoint: Path, stored: StoredTensors, make: Callable[[], nn.Module]) -> Callable[[str], Tensor]:
    """What reads a parameter by its name. UserError unless all of the model's are there."""
    with torch.device("meta"):
        expected = make().state_dict()
    for name, tensor in expected.items():
        if stored.shapes.get(MODEL + name) != tensor.shape:
            raise UserError(f"{checkpoint}: its weights are not those of its {CONFIG}: {name}: make a new checkpoint")
    return lambda name: stored.read(MODEL + name)


def check_free(directory: Path) -> None:
    """UserError unless the directory is still to be made, or empty."""
    if os.path.lexists(directory) and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(f"{directory}: there is something already: name a directory that is still to be made")


def main() -> None:
    told, directory = map(Path, positional(__doc__, "python -m extras.export CHECKPOINT OUT", 2))
    directory = directory.resolve()
    check_free(directory)
    checkpoint = choose(told)
    made = [path for path in directory.parents if not path.exists()]
    try:
        export(checkpoint, directory)
    except (OSError, SafetensorError) as error:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise UserError(f"{directory}: {checkpoint.name} not exported: {one_line(error)[:160]}") from error
    logger.info("%s as a model for transformers' from_pretrained: %s", checkpoint, directory)


if __name__ == "__main__":
    run(main)
