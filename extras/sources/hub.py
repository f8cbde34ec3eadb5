"""Which files of a data set make up one of its configurations, and which of its splits each belongs to.

As the Hub has it: the data set's card (the YAML front matter of its README.md) lists configurations with the patterns
of their files; where it lists none of that name, a configuration is a directory.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable

import yaml
from fsspec.utils import glob_translate

from common.cli import UserError, one_line

# What the Hub's answers mean, and how long to ask again: for data sets (`hf://` files) and for tokenizers.

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
REMOTE = "hf://"
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
ATTEMPTS = 6  # failures in a row, without progress in between, that end the run
FIRST_WAIT_S = 1.0


def offline() -> bool:
    """Whether the Hub is switched off, and a name stands for what is in the local cache."""
    return any(os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE") for variable in OFFLINE_VARIABLES)


def download_command(name: str, kind: str) -> tuple[str, str]:
    """What fetches a repository of some kind (`dataset`, `tokenizer`) by hand, and the flag that then takes it."""
    of_kind = "--repo-type dataset " if kind == "dataset" else ""
    return f"hf download {name} {of_kind}--local-dir DIR", f"--{kind} DIR"


def hub_advice(name: str, error: Exception, kind: str = "dataset") -> str:
    """What the Hub's refusal means and what to do, for the end of an error line. kind: as `download_command`."""
    status = _status(error)
    command, then = download_command(name, kind)
    if status == 429:
        return (
            "the Hub answers 429 (too many requests, usually from many nodes at once): set HF_TOKEN, or better "
            f"{command} once, then {then}"
        )
    if refused(error):
        return f"the Hub refuses access ({status}): accept the {kind}'s terms on its page and set HF_TOKEN"
    return f"the Hub failed ({brief(error)}): try again later, or hf download the {kind} and pass its directory"


def unreachable_advice(name: str, error: Exception, kind: str = "dataset") -> str:
    """The same where nobody answers."""
    command, then = download_command(name, kind)
    return (
        f"the Hub cannot be reached ({brief(error)}): check the network, or download the {kind} elsewhere: "
        f"{command}, then {then}"
    )


def uncached_advice(name: str, kind: str = "dataset") -> str:
    """The same where the Hub is not to be asked."""
    command, then = download_command(name, kind)
    return f"not in the local cache, and the Hub is switched off or cannot be reached: {command}, then {then}"


def refused(error: Exception) -> bool:
    """Whether asking again is useless."""
    return _status(error) in (401, 403, 404)


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def brief(error: BaseException) -> str:
    return one_line(error)[:160]


class Patience:
    """Growing waits between attempts, and their end.

    what: is asked for, the beginning of lines; name, kind: of the repository, as in `hub_advice`.
    """

    def __init__(self, what: str, name: str, kind: str = "dataset", first_wait_s: float = FIRST_WAIT_S):
        self.what, self.name, self.kind, self.first_wait_s, self.failures = what, name, kind, first_wait_s, 0

    def wait_after(self, error: Exception) -> None:
        """Wait before the next attempt; UserError after the last one."""
        self.failures += 1
        if self.failures >= ATTEMPTS or refused(error):
            raise UserError(
                f"{self.what}: {hub_advice(self.name, error, self.kind)} (attempts: {self.failures})"
            ) from None
        wait_s = self.first_wait_s * 2 ** (self.failures - 1)
        logger.warning("%s: %s; trying again in %.0f s", self.what, brief(error), wait_s)
        time.sleep(wait_s)


CARD = "README.md"
Files = dict[str, list[str]]  # paths of each split


def choose_files(
    given: str, paths: Iterable[str], card: str, configuration: str | None, split_of: Callable[[str], str]
) -> Files | None:
    """The relative paths of each split of a configuration; None where nothing is to be chosen: all of them are it.

    given: how the user named the data set; card: the text of its README.md, "" without one; configuration: None for
    the default one, or the only one; split_of: the split that a path names. UserError for a configuration that is not
    there, or where several are and none is the default.
    """
    paths = list(paths)
    listed = _listed(given, card)
    if configuration is None:
        chosen = [name for name, entry in listed.items() if entry.get("default") or name == "default"] or [*listed]
        if len(chosen) > 1:
            raise UserError(f"{given}: it has several configurations: choose by --dataset_config_name {_some(listed)}")
        configuration = chosen[0] if chosen else None
    if configuration is None:
        return None
    if configuration in listed:
        files = _of_patterns(given, paths, listed[configuration], split_of)
    else:
        within = re.compile(rf"(?:.*/)?{re.escape(configuration)}/[^/].*")
        files: Files = {}
        for path in filter(within.fullmatch, paths):
            files.setdefault(split_of(path), []).append(path)
    if not any(files.values()):
        there = [*listed] or sorted({path.split("/")[0] for path in paths if "/" in path})
        raise UserError(
            f"{given}: no files of a configuration {configuration}: "
            + (f"it has {_some(there)}" if there else "it has none: drop --dataset_config_name")
        )
    return files


def _listed(given: str, card: str) -> dict[str, dict]:
    """The configurations of a card by their names."""
    front = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---", card, re.DOTALL)
    if not front:
        return {}
    try:
        told = yaml.safe_load(front[1])
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{given}: the front matter of its {CARD} is no YAML ({one_line(error)[:100]})") from None
    entries = told.get("configs") if isinstance(told, dict) else None
    entries = entries if isinstance(entries, list) else []
    return {_word(given, entry.get("config_name", "default")): entry for entry in entries if isinstance(entry, dict)}


def _word(given: str, value) -> str:
    """A name or pattern of a card. UserError for a structure: aliases in it may stand for gigabytes."""
    if isinstance(value, list | dict):
        raise UserError(f"{given}: in the configurations of its {CARD} stands a list or mapping in place of a name")
    return str(value)


def _of_patterns(given: str, paths: list[str], entry: dict, split_of: Callable[[str], str]) -> Files:
    """The paths that a card's entry names, a split's in the order of its patterns."""
    within = f"{_word(given, entry['data_dir']).strip('/')}/" if entry.get("data_dir") else ""
    told = entry.get("data_files")
    if told is None:
        files: Files = {}
        for path in sorted(path for path in paths if path.startswith(within)):
            files.setdefault(split_of(path), []).append(path)
        return files
    if isinstance(told, list) and all(isinstance(each, dict) for each in told):
        told = {_word(given, each.get("split", "train")): each.get("path", ()) for each in told}
    by_split = told if isinstance(told, dict) else {"train": told}
    files = {}
    for split, patterns in by_split.items():
        found: dict[str, None] = {}
        for pattern in patterns if isinstance(patterns, list | tuple) else [patterns]:
            matches = re.compile(glob_translate(within + _word(given, pattern).removeprefix("./")))
            found |= dict.fromkeys(sorted(path for path in paths if matches.match(path)))
        if found:
            files[split] = [*found]
    return files


def _some(names: Iterable[str]) -> str:
    names = [*names]
    return ", ".join(names[:10]) + (" ..." if len(names) > 10 else "")
