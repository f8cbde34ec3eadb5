"""Translate a command of another program: NVIDIA's recipe, `accelerate launch`, run_mlm.py, the FSDP guides' train.py.

python -m extras.migrate 'accelerate launch --use_fsdp ... train.py --config_name=facebook/esm2_t6_8M_UR50D ...'
python -m extras.migrate 'python train_fsdp2.py --config-name L0_sanity fp8_config.enabled=true'

Prints the command to give here, and each difference as a comment below it. It runs nothing of the command. Status 2 if
the train script would refuse the result: the error says why.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.cli import UserError, run
from common.cli_help import FlagSpec
from extras.interop.flag_tables import (
    ACCELERATE,
    CLM_DEFAULTS,
    EARLIER,
    RECIPE,
    RECIPE_OBJECTS,
    TRAINER_DEFAULTS,
    TRANSFORMERS,
    Ours,
    number,
)
from extras.interop.foreign_command import Translation, entry_of, note_of, of_recipe, pairs, shown
from extras.interop.foreign_launch import accelerate, rendezvous, shell_variables

# The train scripts, and the class of each one's own flags.
STRATEGIES = {
    "train_ddp.py": "DdpFlags",
    "train_ddp_cp.py": "DdpCpFlags",
    "train_fsdp2.py": "FsdpFlags",
    "train_mfsdp.py": "MegatronFlags",
}
TRAINER = ("train.py", "run_mlm.py", "run_clm.py")  # transformers' Trainer; train.py is the FSDP guides', too
ROOT = Path(__file__).resolve().parent.parent


def hint(word: str) -> str:
    """What to give in place of another program's flag, given as a word of a command line; "" for none of them."""
    if override := of_recipe(word):
        group, entry, value = override
        if entry:
            return f"here --{RECIPE_OBJECTS[group]} {shown([entry_of(group, {entry: value})])}"
        ours = RECIPE[group]
        return _in_words(ours, ours.words(value))
    name, equals, value = word.partition("=")
    name = name.removeprefix("--").replace("-", "_") if word.startswith("--") else ""
    ours = ACCELERATE.get(name) or TRANSFORMERS.get(name) or EARLIER.get(name)
    if ours:
        return _in_words(ours, ours.words(value) if equals else [])
    if any(key.startswith(f"{name}.") for key in RECIPE) and name:  # of a file of the recipe
        return "a group of the recipe's: docs/flags.md has our flags for its keys"
    return "of protein decoders: add --tokenizer residues" if name in ("directions", "fill_in") else ""


def _in_words(ours: Ours, words: list[str]) -> str:
    if not ours.flag:
        return ours.why
    names = " and ".join(f"--{name}" for name in ours.flag.split())
    return f"here {shown(words) or names}" + (f" ({ours.why})" if ours.why else "")


def script_with(option: str, task: str) -> str:
    """Which of the train scripts has an option; "" if none has."""
    from common.flags import flag_specs
    from common.training.command_line import arguments_of

    for script in STRATEGIES:
        with suppress(ImportError):  # installed without the scripts
            specs = flag_specs(arguments_of(strategy_of(script), task))
            if (spec := next((spec for spec in specs if option in spec.options), None)) is not None:
                what = "key of a file of flags" if spec.level == "file_only" else "flag"
                return f"it is a {what} of {script}"
    return ""


def strategy_of(script: str) -> Any:
    """The class of a train script's own flags. Loaded by name: no module of extras/ depends on a script."""
    return getattr(importlib.import_module(script.removesuffix(".py")), STRATEGIES[script])


def translate(words: list[str]) -> Translation:
    """Another program's command in this project's words. UserError if it is none that trains or prepares data."""
    translation = _translate([shell_variables(word) for word in words])
    for name in dict.fromkeys(re.findall(r"\$\((\w+)\)", " ".join(words))):
        if f"${{{name}}}" in str(translation).splitlines()[0]:
            translation.notes.append(f"$({name}): ${{{name}}} in a shell")
    return translation


def _translate(words: list[str]) -> Translation:
    if joined := next((word for word in words if re.fullmatch(r"[|&;<>]+", word) or word.endswith(";")), None):
        raise UserError(f"{joined}: more than one command: give the one that trains")
    if (place := _index(words, lambda word: Path(word).name == "sbatch")) is not None:
        return _job(words[:place], words[place:])
    place = _index(words, lambda word: word.endswith(".py") and " " not in word)
    if place is None:
        raise UserError(
            "no script in this command: give a torchrun, accelerate launch, python, srun or sbatch command"
        )
    launch = _index(words[:place], lambda word: Path(word).name in ("torchrun", "accelerate") or _is_python(word))
    launch = place if launch is None else launch
    translation = Translation(before=words[:launch])
    program, options = words[launch:place][:1], words[launch + 1 : place]
    theirs, flags = Path(words[place]).name, words[place + 1 :]
    sharded = False
    if program and Path(program[0]).name == "accelerate":
        sharded = accelerate(translation, options[1:] if options[:1] == ["launch"] else options)
    elif options[:1] == ["-m"] and options[1:2] in (["torch.distributed.run"], ["torch.distributed.launch"]):
        translation.launcher = ["torchrun", *options[2:]]
    else:
        translation.launcher = [*program, *options] or ["python"]  # a bare train.py is not on the PATH
    if translation.launcher and Path(translation.launcher[0]).name == "torchrun":
        rendezvous(translation)
    if (ROOT / theirs).is_file() and theirs not in (
        *STRATEGIES,
        *TRAINER,
    ):  # prepares data, or uses a model: the same here
        translation.script, translation.flags = theirs, flags
        return translation
    translation.script = _script(theirs, flags, sharded)
    if not translation.script:
        raise UserError(f"{words[place]}: no train script of the guides: {', '.join((*STRATEGIES, *TRAINER))}")
    if translation.script != words[place]:
        translation.notes.append(f"{words[place]}: {translation.script}")
    _flags(translation, flags, theirs)
    return translation


def _index(words: list[str], wanted: Callable[[str], bool]) -> int | None:
    return next((index for index, word in enumerate(words) if wanted(word)), None)


def _is_python(word: str) -> bool:
    return re.fullmatch(r"python[\d.]*", Path(word).name) is not None


def _job(before: list[str], words: list[str]) -> Translation:
    """A job script for sbatch: that of the same name in slurm/."""
    place = _index(words, lambda word: Path(word).suffix in (".sh", ".sbatch", ".sub"))
    if place is None:
        raise UserError("sbatch without a job script (.sh, .sbatch): give the whole command")
    theirs = Path(words[place]).name
    script = f"slurm/{'train_fsdp.sh' if theirs == 'slurm.sh' else theirs}"  # slurm.sh: NVIDIA's recipe, with FSDP2
    if not (ROOT / script).is_file():
        raise UserError(f"{words[place]}: no job script of this name in slurm/: see docs/slurm.md")
    translation = Translation([*before, *words[:place]], script=script, flags=words[place + 1 :])
    if words[place] != script:
        translation.notes.append(f"{words[place]}: {script}, submitted from the repository")
    return translation


def _script(theirs: str, given: list[str], sharded: bool) -> str:
    """The train script for one of another name; "" if there is none."""
    if theirs in STRATEGIES or theirs not in (*TRAINER, "train_fsdp2_cp.py"):
        return theirs if theirs in STRATEGIES else ""
    return "train_fsdp2.py" if sharded or _of_decoder(given) or "fsdp" in theirs else "train_ddp.py"


def _of_decoder(words: list[str]) -> bool:
    return any(word.partition("=")[0] in ("--hidden_width", "--max_context_width") for word in words)


def _flags(made: Translation, given: list[str], theirs: str) -> None:
    """The script's flags."""
    from common.flags import changed_defaults, flag_specs, is_file_of_flags
    from common.training.command_line import COUNTERPARTS, RECIPE_CONFIGS, arguments_of, task_name
    from extras.families.decoders.causal_arguments import CausalArguments, without_comments

    if given and is_file_of_flags(given[0]):
        made.config, given = given[0], given[1:]
    words = without_comments(given)
    if dropped := [word for word in given if word not in words]:
        made.notes.append(f"{shown(dropped)}: a comment")
    task = "clm" if theirs == "run_clm.py" else "mlm"
    if words and theirs not in ("run_mlm.py", "run_clm.py"):
        task = task_name(words)
    if theirs == "train.py" and task == "mlm" and _of_decoder(words):
        task = "clm"
        made.notes.append("without --model_type: gpt_neox there, which is not here: give --model or --model_type")
    made.flags += ["--task=clm"] if task == "clm" and task_name(words) != "clm" else []
    specs = flag_specs(changed_defaults(arguments_of(strategy_of(made.script), task)))
    options = {option for spec in specs for option in spec.options}
    options |= {f"--{name}" for name in CausalArguments.idle} if task == "clm" else set()
    objects: dict[str, dict[str, str]] = {}
    hydra, steps = False, {}
    for name, value in pairs(words):
        word = name if value is None else f"{name}={value}"
        if name in ("--config-name", "-cn") or (name == "--config_name" and value in RECIPE_CONFIGS):
            hydra = True
            _named_config(made, value or "", RECIPE_CONFIGS)
            continue
        if override := of_recipe(name):
            hydra, (group, entry, theirs_value) = True, override
            if entry:
                objects.setdefault(group, {})[entry] = theirs_value
                made.notes.append(f"{word}: in --{RECIPE_OBJECTS[group]}")
                continue
            ours = RECIPE[group]
            if group in ("num_train_steps", "lr_scheduler_kwargs.num_training_steps"):
                steps[group] = theirs_value
                continue
            translated = ours.words(theirs_value)
        elif name in options or re.sub(r"^--no[_-]", "--", name) in options:
            made.flags.append(word)
            continue
        else:
            key = name.removeprefix("--").replace("-", "_")
            ours = (ACCELERATE.get(key) or TRANSFORMERS.get(key)) if name.startswith("--") else None
            if f"--{COUNTERPARTS.get(key)}" in options:  # of another task: a decoder's --config_name
                ours = Ours(COUNTERPARTS[key])
            if ours is None:
                made.notes.append(f"{word}: known neither here nor in the table of docs/flags.md: left out")
                continue
            translated = ours.words("true" if value is None else value)
        made.flags += translated
        made.notes.append(note_of(word, ours, translated))
    for group, entries in objects.items():
        made.flags.append(f"--{RECIPE_OBJECTS[group]}={entry_of(group, entries)}")
    if hydra or steps:
        if not made.config:
            _named_config(made, "L0_sanity_cp" if "_cp" in theirs else "L0_sanity", RECIPE_CONFIGS)
        _steps(made, steps)
    elif theirs in TRAINER and not made.config and (theirs, task) != ("train.py", "clm"):  # that is the FSDP guides'
        _trainer_defaults(made, specs, task)
    if (hydra or (not words and theirs in STRATEGIES)) and Path(made.config or "sanity.yaml").stem in (
        "sanity",
        "sanity_cp",
    ):
        _sanity(made, own_decay="lr_scheduler_kwargs.num_training_steps" in steps)
    if made.script == "train_mfsdp.py" and "--backend=hf" in made.flags:
        made.script = "train_fsdp2.py"
        made.notes.append("train_mfsdp.py: train_fsdp2.py: Megatron-FSDP cannot shard transformers' layers")


def _trainer_defaults(made: Translation, specs: list[FlagSpec], task: str) -> None:
    """Flags for what transformers' Trainer does by default and these scripts do otherwise."""
    names, ours = _names(made), {spec.name: spec.default for spec in specs}
    for name, value in (TRAINER_DEFAULTS | (CLM_DEFAULTS if task == "clm" else {})).items():
        if f"--{name}" not in names:
            made.flags.append(f"--{name}={value}")
            default = "" if ours[name] is None else f": {ours[name]}"
            made.notes.append(f"--{name}={value}: the default there; without it, that here{default}")
    if {"--num_train_epochs", "--gradient_accumulation_steps"} <= names and "--max_steps" not in names:
        made.notes.append("an epoch's last step takes what is left of the data; older transformers leave it out")


def _sanity(made: Translation, own_decay: bool) -> None:
    """What configs/sanity.yaml and sanity_cp.yaml do otherwise than the recipe's L0_sanity and L0_sanity_cp.

    own_decay: the command says where the learning rate's decay ends.
    """
    names = _names(made)
    if "--bf16" not in names:
        if not {"--fp8", "--fp4"}.isdisjoint(made.flags):
            made.flags.append("--bf16")
            made.notes.append("--bf16: as there; Transformer Engine's FP8 and FP4 need it")
        else:
            made.notes.append("computes in bf16 there, in fp32 here: --bf16 for theirs (weights stay fp32)")
    if names.isdisjoint({"--dataset", "--dataset_dir"}):
        made.notes.append("trains on a train.parquet of the recipe there, on generated proteins here (--dataset)")
    if not own_decay:
        made.notes.append("the learning rate falls until num_training_steps there, until the run's last step here")
    if "--torch_compile" not in names and "_cp" not in (made.config or made.script):
        here = "torch's on a GPU, and with --torch_compile; Transformer Engine's never"
        here = "transformers' never" if "--backend=hf" in made.flags else here
        made.notes.append(f"compiles layers there (use_torch_compile), here {here}")


def _names(made: Translation) -> set[str]:
    return {word.partition("=")[0] for word in made.flags}


def _named_config(made: Translation, name: str, files: dict[str, str]) -> None:
    """--config-name of the recipe: our file, and flags for those of its benchmarks."""
    of_benchmark = re.fullmatch(r"bench_\w+?_(3b|15b)_(bf16|fp8|mxfp8|nvfp4)(?:_cp(\d+))?", name)
    if of_benchmark:
        size, number_format, ranks = of_benchmark.groups()
        made.config = f"configs/esm2_{size}.yaml"
        formats = {"fp8": ["--fp8"], "mxfp8": ["--fp8", "--fp8_recipe=mxfp8"], "nvfp4": ["--fp4"]}
        made.flags += [
            "--stop_at_step=500",
            *formats.get(number_format, []),
            *([f"--cp_size={ranks}"] if ranks else []),
        ]
    else:
        made.config = f"configs/{files.get(name, name)}.yaml"
        if not re.fullmatch(r"\w+", name) or not (ROOT / made.config).is_file():
            raise UserError(f"--config-name {name}: no file of this name in configs/, and none of the recipe's names")
    made.notes.append(f"--config-name {name}: {made.config}")


def _steps(made: Translation, steps: dict[str, str]) -> None:
    """The recipe has two numbers: where the schedule ends, and where the run does."""
    schedule, end = steps.get("lr_scheduler_kwargs.num_training_steps"), steps.get("num_train_steps")
    of_file = "sanity" not in made.config  # other files than these have the length of the schedule
    if schedule and not of_file:
        end = end or "250"  # their L0_sanity's
    for key, value, flag in (
        ("lr_scheduler_kwargs.num_training_steps", schedule, "max_steps"),
        ("num_train_steps", end, "stop_at_step" if schedule or of_file else "max_steps"),
    ):
        if value:
            made.flags.append(f"--{flag}={number(value)}")
            made.notes.append(f"{key}={value}: {made.flags[-1]}")


def check(made: Translation) -> None:
    """UserError if the script refuses the translated flags."""
    from common.training.command_line import parse_run

    if made.script in STRATEGIES and made.argv:
        argv = [str(ROOT / made.config), *made.flags] if made.config else made.flags
        args: Any = parse_run(None, strategy_of(made.script), argv, program=made.script)
        if args.task == "mlm" and args.model.backend == "hf":
            import torch

            from common.distributed.world import World
            from extras.interop.hf_backend import check as check_backend

            check_backend(args, World(0, 0, 1, torch.device("cpu"), cp_size=args.process.cp_size))


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: python -m extras.migrate 'COMMAND'\n\n{(__doc__ or '').strip()}")
        raise SystemExit(0 if words else 2)
    if len(words) == 1:
        try:
            words = shlex.split(words[0].replace("\\\n", " "))
        except ValueError as error:
            raise UserError(f"not a command line: {error}") from error
    translation = translate(words)
    print(translation, flush=True)
    check(translation)


if __name__ == "__main__":
    run(main)
