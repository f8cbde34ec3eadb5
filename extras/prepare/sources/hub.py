"""The Hub: advice for its errors, retries, and the files of a dataset's configuration by split.

A dataset's card (the YAML front matter of its README.md) lists configurations with the patterns of their files; a
configuration that it does not list is a directory. `datasets.data_files` (5.2) would resolve the patterns by requests
to the Hub, and its import takes 0.5 s of CPU more than this; here the list of files is at hand.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatch

import yaml
from fsspec.utils import glob_translate

from common.cli import UserError, one_line

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
REMOTE = "hf://"
ADDRESS = re.compile(r"(?:hf://datasets/)?([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.*))?")
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
ATTEMPTS = 6  # consecutive failures, without progress, after which the run ends
FIRST_WAIT_S = 1.0


def offline() -> bool:
    """Whether the Hub is switched off, so that only the local cache is used."""
    return any(os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE") for variable in OFFLINE_VARIABLES)


def parse_address(given: str, where: str) -> tuple[str, str | None, str]:
    """OWNER/NAME, the revision or None, and the path within, of OWNER/NAME or hf://datasets/OWNER/NAME[@REVISION][/PATH].

    where: flag and name, for the error."""
    if not (parts := ADDRESS.fullmatch(given)):
        raise UserError(f"{where}: not a dataset of the Hub: expected hf://datasets/OWNER/NAME[@REVISION][/PATH]")
    return parts[1], parts[2], (parts[3] or "").strip("/")


def is_within(path: str, within: str) -> bool:
    """Whether a file is the one, in the directory or of the pattern `within`; "": any."""
    return not within or path == within or path.startswith(f"{within}/") or fnmatch(path, within)


def local_path(path: str) -> str:
    """A local path of a file: one of the Hub (hf://datasets/OWNER/NAME@REVISION/FILE) is downloaded to the cache."""
    if not path.startswith(REMOTE):
        return path
    from huggingface_hub import hf_hub_download

    owner, rest, name = path.removeprefix(REMOTE + "datasets/").split("/", 2)
    repo, revision = rest.split("@")
    return hf_hub_download(f"{owner}/{repo}", name, repo_type="dataset", revision=revision)


def download_command(name: str, kind: str, flag: str = "") -> tuple[str, str]:
    """The command that downloads a repository (kind: `dataset` or `tokenizer`), and the flag, by default that of the
    kind, to use it."""
    of_kind = "--repo-type dataset " if kind == "dataset" else ""
    return f"hf download {name} {of_kind}--local-dir DIR", f"{flag or f'--{kind}'} DIR"


def hub_advice(name: str, error: Exception, kind: str = "dataset", flag: str = "") -> str:
    """Meaning of an HTTP error of the Hub and what to do, to end an error. kind, flag: of `download_command`."""
    status = _status(error)
    command, then = download_command(name, kind, flag)
    if status == 429:
        return (
            "the Hub answers 429 (too many requests, usually from many nodes at once): set HF_TOKEN, or better "
            f"{command} once, then {then}"
        )
    if refused(error):
        return f"the Hub refuses access ({status}): accept the {kind}'s terms on its page and set HF_TOKEN"
    return f"the Hub failed ({brief(error)}): try again later, or hf download the {kind} and pass its directory"


def unreachable_advice(name: str, error: Exception, kind: str = "dataset", flag: str = "") -> str:
    """The end of an error line where the Hub does not answer: how to download the files elsewhere."""
    command, then = download_command(name, kind, flag)
    return (
        f"the Hub cannot be reached ({brief(error)}): check the network, or download the {kind} elsewhere: "
        f"{command}, then {then}"
    )


def uncached_advice(name: str, kind: str = "dataset", flag: str = "") -> str:
    """The end of an error line where the Hub is switched off: how to download the files."""
    command, then = download_command(name, kind, flag)
    return f"not in the local cache, and the Hub is switched off or cannot be reached: {command}, then {then}"


def refused(error: Exception) -> bool:
    """Whether a retry is useless."""
    return _status(error) in (401, 403, 404)


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def brief(error: BaseException) -> str:
    return one_line(error)[:160]


class Retries:
    """Retries with exponential backoff. what: the request, for messages; name, kind: as in `hub_advice`."""

    def __init__(self, what: str, name: str, kind: str = "dataset", first_wait_s: float = FIRST_WAIT_S):
        self.what, self.name, self.kind, self.first_wait_s, self.failures = what, name, kind, first_wait_s, 0

    def wait_after(self, error: Exception) -> None:
        """Wait before the next attempt; UserError after ATTEMPTS failures."""
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
    """The relative paths of each split of a configuration; None if there are no configurations: use all files.

    given: flag and name, for messages; card: the text of README.md, "" without one; configuration: None or empty for
    the default or only one; split_of: the split that a path names. UserError for an unknown configuration, or if there
    are several and none is the default.
    """
    paths = list(paths)
    listed = _listed(given, card)
    if not configuration:
        chosen = [name for name, entry in listed.items() if entry.get("default") or name == "default"] or [*listed]
        if len(chosen) > 1:
            raise UserError(
                f"{given}: it has several configurations: choose by --dataset_config_name {_first_ten(listed)}"
            )
        configuration = chosen[0] if chosen else None
    if configuration is None:
        return None
    if configuration in listed:
        files = _of_patterns(given, paths, listed[configuration], split_of)
    else:
        within = re.compile(rf"(?:.*/)?{re.escape(configuration)}/[^/].*")
        files = group_paths(filter(within.fullmatch, paths), split_of)
    if not any(files.values()):
        there = [*listed] or sorted({path.split("/")[0] for path in paths if "/" in path})
        raise UserError(
            f"{given}: no files of a configuration {configuration}: "
            + (f"it has {_first_ten(there)}" if there else "it has none: drop --dataset_config_name")
        )
    return files


def group_paths(paths: Iterable[str], split_of: Callable[[str], str]) -> Files:
    """The paths of each split, in order."""
    files: Files = {}
    for path in paths:
        files.setdefault(split_of(path), []).append(path)
    return files


def _listed(given: str, card: str) -> dict[str, dict]:
    """The configurations of a card by name."""
    front = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---", card, re.DOTALL)
    if not front:
        return {}
    try:
        front_matter = yaml.safe_load(front[1])
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{given}: the front matter of its {CARD} is not YAML ({one_line(error)[:100]})") from None
    entries = front_matter.get("configs") if isinstance(front_matter, dict) else None
    entries = entries if isinstance(entries, list) else []
    return {_scalar(given, entry.get("config_name", "default")): entry for entry in entries if isinstance(entry, dict)}


def _scalar(given: str, value) -> str:
    """A name or pattern of a card. UserError for a list or mapping, which aliases may expand to gigabytes."""
    if isinstance(value, list | dict):
        raise UserError(f"{given}: a list or mapping in place of a name in the configurations of its {CARD}")
    return str(value)


def _of_patterns(given: str, paths: list[str], entry: dict, split_of: Callable[[str], str]) -> Files:
    """The paths of each split of a card's entry, in the order of the patterns."""
    within = f"{_scalar(given, entry['data_dir']).strip('/')}/" if entry.get("data_dir") else ""
    data_files = entry.get("data_files")
    if data_files is None:
        return group_paths(sorted(path for path in paths if path.startswith(within)), split_of)
    if isinstance(data_files, list) and all(isinstance(item, dict) for item in data_files):
        data_files = {_scalar(given, item.get("split", "train")): item.get("path", ()) for item in data_files}
    by_split = data_files if isinstance(data_files, dict) else {"train": data_files}
    files: Files = {}
    for split, patterns in by_split.items():
        matched: dict[str, None] = {}
        for pattern in patterns if isinstance(patterns, list | tuple) else [patterns]:
            matches = re.compile(glob_translate(within + _scalar(given, pattern).removeprefix("./")))
            matched |= dict.fromkeys(sorted(path for path in paths if matches.match(path)))
        if matched:
            files[split] = [*matched]
    return files


def _first_ten(names: Iterable[str]) -> str:
    names = [*names]
    return ", ".join(names[:10]) + (" ..." if len(names) > 10 else "")
