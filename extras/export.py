"""Export a checkpoint's model to a directory for transformers' from_pretrained: the final_model/ of any step.

python -m extras.export CHECKPOINT OUT [--format hf|nv_esm]

CHECKPOINT: a run's checkpoint-N, of any script and number of ranks; or its --output_dir, for the newest intact one. Or
a model's directory, to write it anew: tensors that transformers 5 has named otherwise get their published names.
OUT: a new or empty directory. nv_esm: the format of NVIDIA's recipe, as `python -m extras.nv_esm` writes it; the model
is in the temporary directory meanwhile. Runs in one process without a GPU, and holds at most one 5 GB file of a
checkpoint in memory; of a model's directory all weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
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
from common.models.esm2.convert import CONTACT_CHAINS
from common.models.family import Family, families, family_of
from common.models.layers.hf_directory import read_config, read_tensors
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
        advice = "give a checkpoint-N directory, the --output_dir of a run, or a model's directory"
        raise UserError(f"{path}: {damage}: {advice}")
    return path


def is_model(path: Path) -> bool:
    """Whether a directory holds a model alone: neither a checkpoint nor a run."""
    return (path / CONFIG).is_file() and not (path / files.MANIFEST).exists() and not list_checkpoints(path)


def export_model(source: Path, directory: Path) -> str:
    """Write a model's directory anew as an export, and return its form (`Family.form`). The log has what was renamed.

    Tensors are the same bits in fp32. UserError if the directory holds no model of a family here.
    """
    try:
        model_type = read_config(source / CONFIG)["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{source / CONFIG}: cannot be used ({one_line(error)[:160]})") from error
    family = family_of(model_type if str(model_type).lower() in families() else "esm")  # which says what it lacks
    adapter, config = family.adapter, family.load_config(str(source))
    tokenizer = load_tokenizer(str(source))[0] if family.task == "clm" else None
    pieces, extras = adapter.read(str(source), config)
    tensors = adapter.to_hf(dict(pieces).__getitem__, config, extras)
    fitted_on = getattr(config, "others", {}).get(CONTACT_CHAINS) or ()
    adapter.save(tensors, config, directory, Training(contacts=tuple(map(str, fitted_on))), tokenizer)
    logger.info("%s: %s", source, renamed(read_tensors(str(source))[1], family, config))
    return family.form


def renamed(stored: Iterable[str], family: Family, config: Any) -> str:
    """What an export changes in the names of tensors, in a line."""
    current = {name: family.adapter.current_name(name, config) for name in stored}
    others = {name: now for name, now in current.items() if now not in (None, name)}
    endings = sorted({f".{name.rpartition('.')[2]} to .{now.rpartition('.')[2]}" for name, now in others.items()})
    parts = [f"{len(others)} tensors renamed: {', '.join(endings)}"] if others else []
    for name in (name for name in current if "*" in name):  # one tensor in the place of one a layer
        written = [each for each in family.adapter.constants(config) if fnmatchcase(each, name)]
        parts.append(f"{name} written as {len(written)} tensors, one a layer")
    return "; ".join(parts) or "no tensor renamed, all names are the published ones"


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
    checkpoint = Path(source) if (whole := is_model(Path(source))) else choose(Path(source))
    write = export_model if whole else export
    new_parents = [path for path in directory.parents if not path.exists()]
    try:
        if "nv_esm" in flags:
            from extras.nv_esm import save

            with TemporaryDirectory(prefix="exported-") as temporary:
                write(checkpoint, Path(temporary) / "model")
                save(f"{temporary}/model", directory)
            form = "of the recipe"
        else:
            form = write(checkpoint, directory)
    except (OSError, SafetensorError) as error:
        for path in new_parents:
            with suppress(OSError):
                path.rmdir()
        raise UserError(f"{directory}: {checkpoint.name} not exported: {one_line(error)[:160]}") from error
    logger.info("%s as a model %s: %s", checkpoint, form, directory)


if __name__ == "__main__":
    run(main)
