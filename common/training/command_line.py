"""The tasks, and which one a command line asks for: masked language modelling (ESM-2) or causal (a decoder).

A task is a class with `choose` (the model's specification) and the methods of common.training.task.Task; its flags
are a subclass of `RunArguments`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.cli import UserError
from common.distributed.strategy import StrategyFlags
from common.files.runs import resolve_directory
from common.flags import changed_defaults, flag_specs, flat, is_file_of_flags, parse_arguments, read_file_of_flags
from common.hooks import extra
from common.models.family import families, family_of
from common.training.arguments import RunArguments
from common.training.task import Task

logger = logging.getLogger(__name__)

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPE_CONFIGS = {  # --config-name of NVIDIA's recipe: our file
    "L0_sanity": "sanity",
    "L0_sanity_cp": "sanity_cp",
    "L1_650M": "esm2_650m",
    "L1_3B": "esm2_3b",
    "L1_15B_perf_test": "esm2_15b",
}
TASKS = ("mlm", "clm")
# What the other task has in place of a flag.
COUNTERPARTS = {
    "config_name": "model",
    "model": "config_name",
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers"), "config_overrides"),
    **dict.fromkeys(("num_attention_heads", "initializer_range"), "config_overrides"),
    "tokenizer_name": "tokenizer",
    "max_eval_samples": "validation_batches",
}


def task_of(args: RunArguments) -> type[Task]:
    """The task whose flags these are."""
    if args.task == "mlm":
        from common.training.masked_lm import MaskedLM

        return MaskedLM
    return extra().causal_task(args)


def arguments_of(strategy: type[StrategyFlags], task: str, tokenizer: str | None = None) -> RunArguments:
    """A task's flags and a strategy's, with their defaults. tokenizer: of a decoder, where one is named."""
    if task == "mlm":
        from common.training.masked_lm import TrainArguments

        return TrainArguments(strategy=strategy())
    return extra().causal_arguments(tokenizer)(strategy=strategy())


def parse_run(
    description: str | None,
    strategy: type[StrategyFlags],
    argv: list[str] | None = None,
    without_flags: str = "sanity.yaml",
    program: str | None = None,
) -> RunArguments:
    """The flags of a train script: its strategy's and the task's. Without any, those of configs/`without_flags`.

    program: the script's name in error lines. Default: that of the running one.
    """
    argv = with_named_config(with_file_first(sys.argv[1:] if argv is None else argv))
    sanity = CONFIGS / without_flags
    words = argv or [str(sanity)]
    task = task_name(words)
    if task == "clm":
        words = extra().causal_words(words)
    instead = partial(_instead, strategy, task)
    tokenizer = named_flags(words).get("tokenizer")
    args = parse_arguments(description, arguments_of(strategy, task, tokenizer), words, instead, program)
    if not argv and os.environ.get("RANK", "0") == "0":
        script, file = os.path.basename(sys.argv[0]), os.path.relpath(sanity)
        logger.info(
            f"No flags given, so those of {file}: {args.data.max_steps} short steps of {args.model_named} on "
            f"generated proteins, into {args.checkpoint.output_dir}. On your own: {script} {file} --dataset my.fasta "
            "--output_dir out/mine"
        )
    return args


def with_file_first(argv: list[str]) -> list[str]:
    """A file of flags right behind `--flag=value` as the first word: job scripts put the flags that a user adds behind
    their own. It is no value of the flag, which has one."""
    if argv and is_file_of_flags(argv[0]):
        return argv
    for at, (before, word) in enumerate(pairwise(argv), start=1):
        if is_file_of_flags(word) and before.startswith("--") and "=" in before:
            return [word, *argv[:at], *argv[at + 1 :]]
    return argv


def with_named_config(argv: list[str]) -> list[str]:
    """`--config-name NAME` of a file in configs/, by our name or the recipe's, as that file in first place.

    Other values of --config_name are a model's: facebook/esm2_*, a directory, a name on the Hub.
    """
    for index, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag not in ("--config_name", "--config-name"):
            continue
        name = value if equals else "".join(argv[index + 1 : index + 2])
        if os.path.isdir(name) or not re.fullmatch(r"\w+", name):
            continue
        file = CONFIGS / f"{RECIPE_CONFIGS.get(name, name)}.yaml"
        if file.is_file():
            rest = argv[:index] + argv[index + (1 if equals else 2) :]
            if rest and is_file_of_flags(rest[0]):
                raise UserError(
                    f"--config_name {name}: that is the file of flags {file}, and {rest[0]} another: drop one"
                )
            return [str(file), *rest]
        if re.match(r"L\d_|bench_", name):
            raise UserError(
                f"--config_name {name}: of the recipe's configurations there are {', '.join(RECIPE_CONFIGS)}: choose "
                "one, or see what python -m extras.migrate makes of the command"
            )
    return argv


def _instead(strategy: type[StrategyFlags], task: str, word: str) -> str:
    """What to give in place of an unknown word of a command line; "" if neither a task nor another program has it."""
    return _of_other_task(strategy, task, word.partition("=")[0]) or extra().foreign_flag(word, task)


def _of_other_task(strategy: type[StrategyFlags], task: str, option: str) -> str:
    """Which task has a flag that `task` lacks, and what to give instead; "" if none has it."""
    [other] = (name for name in TASKS if name != task)
    theirs = flag_specs(changed_defaults(arguments_of(strategy, other)))
    spec = next((spec for spec in theirs if option in spec.options), None)
    if spec is None:
        return ""
    ours = flat(arguments_of(strategy, task))  # an alias may be the other task's only
    instead = spec.name if spec.name in ours else COUNTERPARTS.get(spec.name)
    return f"it is a flag of --task {other}; this is --task {task}" + (f": give --{instead}" if instead else "")


def task_name(words: list[str]) -> str:
    """Which task a command line asks for: what --task says, else clm if it names a decoder, else mlm.

    The flags that exist depend on it, so this looks at the words before they are parsed.
    """
    flags = named_flags(words)
    if (task := flags.get("task")) is not None:
        if task not in TASKS:
            raise UserError(f"--task {task}: choose {', '.join(TASKS)}")
        return task
    if (model_type := str(flags.get("model_type"))) in families():
        return family_of(model_type).task
    if not flags.keys().isdisjoint(("model", "model_type")):
        return "clm"
    try:
        config = resolve_directory(str(flags["model_name_or_path"])) / "config.json"
        content = json.loads(config.read_text(encoding="utf-8"))
        return family_of(content["model_type"]).task
    except (KeyError, OSError, ValueError, TypeError, RecursionError):
        return "mlm"


def named_flags(words: list[str]) -> dict[str, Any]:
    """{flag: value} of a command line with its file of flags, not parsed: values are words."""
    flags: dict[str, Any] = {}
    if words and is_file_of_flags(words[0]):
        with suppress(UserError, OSError):  # parse_arguments reports it
            flags |= read_file_of_flags(words[0])
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags[name.lstrip("-").replace("-", "_")] = value if equals else after
    return flags
