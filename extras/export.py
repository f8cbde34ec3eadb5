"""Export a checkpoint's model to a directory for transformers' from_pretrained: the final_model/ of any step.

python -m extras.export CHECKPOINT OUT [--format hf|nv_esm]

CHECKPOINT: a run's checkpoint-N, of any script and number of ranks; or its --output_dir, for the newest intact one.
OUT: a new or empty directory. nv_esm: the format of NVIDIA's recipe, as `python -m extras.nv_esm` writes it; the model
is in the temporary directory meanwhile. Runs in one process without a GPU, and holds at most one 5 GB file in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from common.checkpoint import files
from common.checkpoint.files import CONFIG, TRAINER_STATE, damage_of, newest_usable
from common.checkpoint.reader import open_checkpoint
from common.cli import UserError, one_line, run
from common.distributed.world import World
from common.files.runs import list_checkpoints
from common.files.safe_files import check_type, shorten
from common.models.family import Family, families, family_of
from common.models.layers.model_card import Training
from extras.command_line import positional
from extras.families.text.tokenizers import Tokenizer, load_tokenizer
from extras.interop.stored_tensors import StoredTensors
from extras.prepare.output_directory import check_free

logger = logging.getLogger(__name__)

MODEL, EXTRAS = "model.", "extras."


def choose(path: Path) -> Path:
    """The checkpoint that `path` stands for, with its files verified. UserError if none is intact."""
    alone = World(0, 0, 1, torch.device("cpu"))
    if not (path / files.MANIFEST).exists() and list_checkpoints(path):
        newest = newest_usable(path, alone, advice="there is nothing to export")
        logger.info("%s: its newest whole checkpoint is %s", path, newest.name)
        return newest
    if damage := damage_of(path, alone):
        raise UserError(f"{path}: {damage}: give a checkpoint-N directory, or the --output_dir of a run")
    return path


def export(checkpoint: Path, directory: Path, tokenizer: Tokenizer | None = None) -> str:
    """Write the model of a checkpoint that `choose` has verified, and return its form (`Family.form`).

    tokenizer: of text; None: the one the run names.

    UserError if the directory is not empty, or the checkpoint holds no model of this program.
    """
    family = _family(checkpoint)
    config = family.load_config(str(checkpoint))
    read, extras = read_checkpoint(checkpoint, config)
    state = files.read_listed(checkpoint, TRAINER_STATE)
    if family.task == "clm" and tokenizer is None:
        tokenizer = _tokenizer(checkpoint, state)
    tensors = family.adapter.to_hf(read, config, extras)
    family.adapter.save(tensors, config, directory, Training.of_state(state), tokenizer)
    return family.form


def add_model(checkpoint: Path, tokenizer: Tokenizer | None) -> None:
    """Add the model's files to a checkpoint that is being written (--save_hf), read from its shards one at a time.

    No rank's memory nor a GPU takes part, whatever the strategy. config.json becomes transformers'.
    """
    directory = checkpoint / "model"
    export(checkpoint, directory, tokenizer)
    for path in directory.iterdir():
        path.replace(checkpoint / path.name)
    directory.rmdir()


def _tokenizer(checkpoint: Path, state: dict) -> Tokenizer:
    """The run's tokenizer. UserError if another one has that name now."""
    try:
        name, identity = state["arguments"]["tokenizer"], state["data"]["tokenizer"]
        check_type("tokenizer", name, "str")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{checkpoint / TRAINER_STATE}: refused: it names no tokenizer") from error
    tokenizer, _ = load_tokenizer(name)
    if tokenizer.identity != identity:
        raise UserError(f"{checkpoint}: trained with another tokenizer than is at {shorten(name)} now: put it back")
    return tokenizer


def _family(checkpoint: Path) -> Family:
    """UserError if this version cannot read its model."""
    manifest = files.read_manifest(checkpoint)
    model_type = manifest.model.get("model_type")
    family = family_of(model_type if isinstance(model_type, str) and model_type in families() else "esm")
    alphabet = _alphabet(checkpoint, family) if CONFIG in manifest.files else family.alphabet
    if family.task == "mlm" and manifest.model.get("alphabet") != alphabet:
        raise UserError(f"{checkpoint}: of another alphabet: export it with the version of this program that wrote it")
    if CONFIG not in manifest.files:
        raise UserError(
            f"{checkpoint}: of an earlier version, without {CONFIG}: the command of its run with --do_train False "
            f"--save_final_model --resume_from_checkpoint {checkpoint} exports it"
        )
    return family


def _alphabet(checkpoint: Path, family: Family) -> str:
    """As the manifest of this version's checkpoints has it."""
    return getattr(family.load_config(str(checkpoint)), "vocabulary", family.alphabet)


def read_checkpoint(checkpoint: Path, config: Any) -> tuple[Callable[[str], Tensor], dict[str, Tensor]]:
    """(a function that reads a parameter by name, the tensors that training leaves as they are) of a checkpoint.

    config: of its model. UserError if it holds no model of this program.
    """
    with torch.device("meta"):
        expected = _family(checkpoint).make(config).state_dict()
    stored = StoredTensors(open_checkpoint(checkpoint))
    for name, tensor in expected.items():
        if stored.shapes.get(MODEL + name) != tensor.shape:
            raise UserError(f"{checkpoint}: its weights are not those of its {CONFIG}: {name}: make a new checkpoint")
    extras = {name.removeprefix(EXTRAS): stored.read(name) for name in stored.shapes if name.startswith(EXTRAS)}
    model = files.read_manifest(checkpoint).model
    if "lora" not in model:
        return lambda name: stored.read(MODEL + name), extras
    from extras.after.adapting import lora

    alpha = lora.alpha_of(model, str(checkpoint / files.MANIFEST))
    names = {name.removeprefix(MODEL) for name in stored.shapes}
    return lora.merged(lambda name: stored.read(MODEL + name), names, alpha), extras


def main() -> None:
    usage = "python -m extras.export CHECKPOINT OUT [--format hf|nv_esm]"
    source, target, *flags = positional(__doc__, usage, 2, 4)
    if flags not in ([], ["--format", "hf"], ["--format", "nv_esm"]):
        raise UserError(f"usage: {usage}")
    directory = Path(target).resolve()
    check_free(directory)
    checkpoint = choose(Path(source))
    new_parents = [path for path in directory.parents if not path.exists()]
    try:
        if "nv_esm" in flags:
            from extras.nv_esm import save

            with TemporaryDirectory(prefix="exported-") as temporary:
                export(checkpoint, Path(temporary) / "model")
                save(f"{temporary}/model", directory)
            form = "of the recipe"
        else:
            form = export(checkpoint, directory)
    except (OSError, SafetensorError) as error:
        for path in new_parents:
            with suppress(OSError):
                path.rmdir()
        raise UserError(f"{directory}: {checkpoint.name} not exported: {one_line(error)[:160]}") from error
    logger.info("%s as a model %s: %s", checkpoint, form, directory)


if __name__ == "__main__":
    run(main)
