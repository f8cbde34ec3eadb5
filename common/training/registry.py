"""What a run can learn, and which of it the flags mean: ESM-2 (masked), or with --model or --model_type a decoder.

A task is a class with `choose` (of the model, before there is one) and what the trainer asks for, as
common.training.masked_lm tells it; it has a dataclass of flags of its own. A script adds its strategy's.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from common.cli import Flags, flag, is_file_of_flags, parse_arguments
from common.models.registry import family_of
from common.training.arguments import RunArguments, TrainArguments
from common.training.task import Task

logger = logging.getLogger(__name__)

CONFIGS = Path(__file__).parents[2] / "configs"
OF_DECODERS = ("model", "model_type")  # flags that tell a decoder's run, and no other's


def task_of(args: RunArguments) -> type[Task]:
    """The task whose flags these are."""
    if isinstance(args, TrainArguments):
        from common.training.masked_lm import MaskedLM

        return MaskedLM
    from extras.decoders.causal_lm import CausalLM

    return CausalLM


def arguments_of(strategy: type[Flags], task: type[RunArguments]) -> type[RunArguments]:
    """A dataclass of a strategy's flags and a task's."""
    own = {field.name: field for field in fields(strategy)}
    changed = {name: value for name, value in getattr(task, "strategy_defaults", {}).items() if name in own}
    body = {name: flag(value, own[name].metadata["help"].replace("%%", "%")) for name, value in changed.items()}
    body["__annotations__"] = {name: own[name].type for name in changed}
    return dataclass(type(strategy.__name__, (strategy, task), body | {"__module__": strategy.__module__}))


def parse_run(
    description: str | None,
    strategy: type[Flags],
    argv: list[str] | None = None,
    without_flags: str = "sanity.yaml",
) -> RunArguments:
    """The flags of a train script: its strategy's and those of the task. No flags stand for the file of configs/ named
    so."""
    argv = sys.argv[1:] if argv is None else argv
    sanity = CONFIGS / without_flags
    words = argv or [str(sanity)]
    task: type[RunArguments] = TrainArguments
    if _tells_a_decoder(words):
        from extras.decoders.causal_arguments import CausalArguments

        task, words = CausalArguments, _without_comments(words)
    (args,) = parse_arguments(description, arguments_of(strategy, task), argv=words)
    if not argv and os.environ.get("RANK", "0") == "0":
        script, file = os.path.basename(sys.argv[0]), os.path.relpath(sanity)
        logger.info(
            f"No flags given, so those of {file}: {args.max_steps} short steps of {args.config_name} on generated "
            f"proteins, into {args.output_dir}. On your own: {script} {file} --dataset my.fasta --output_dir out/mine"
        )
    return args


def _tells_a_decoder(words: list[str]) -> bool:
    """Whether a flag of decoders alone is given, or weights in a directory that are a decoder's."""
    given: dict[str, str] = {}
    if words and is_file_of_flags(words[0]):
        try:
            text = Path(words[0]).read_text(encoding="utf-8")
            given = dict(json.loads(text) if words[0].endswith(".json") else yaml.safe_load(text))
        except (OSError, ValueError, TypeError, yaml.YAMLError):
            pass  # parse_arguments says what is wrong with it
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            given[name.lstrip("-").replace("-", "_")] = value if equals else after
    if not given.keys().isdisjoint(OF_DECODERS):
        return True
    try:
        content = json.loads((Path(str(given["model_name_or_path"])) / "config.json").read_text(encoding="utf-8"))
        return family_of(content["model_type"]).task == "clm"
    except (KeyError, OSError, ValueError, TypeError):
        return False


def _without_comments(words: list[str]) -> list[str]:
    """A word that begins with # is a comment, up to the next flag: the guides' lists of flags hold one in quotes."""
    kept, comment = [], []
    for word in words:
        begins = word.lstrip().startswith("#")
        if begins or (comment and not word.startswith("--")):
            comment.append(word.strip())
        else:
            if comment:
                logger.info("Not a flag, taken for a comment: %s", " ".join(comment))
                comment = []
            kept.append(word)
    if comment:
        logger.info("Not a flag, taken for a comment: %s", " ".join(comment))
    return kept
