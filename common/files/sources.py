"""Where `--dataset` finds proteins: a local file, directory or glob, or a Hub dataset; and which files are its splits.

Formats are told by the name: parquet, JSON lines, CSV, FASTA; all but parquet also packed. A file belongs to the
split that its path names (train-00000-of-00004.parquet, validation/part.csv, test.jsonl.gz), and to `train` when it
names none.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from common.cli import UserError, one_line
from common.files.packed import check_file, refuse_twice, unpacked_name

logger = logging.getLogger(__name__)

FORMATS = {
    "parquet": (".parquet", ".pq"),
    "json": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv", ".tsv"),
    "fasta": (".fasta", ".fa", ".faa"),
}
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test", "testing"),
}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
REMOTE = "hf://"


@dataclass(frozen=True)
class File:
    """One file: a local path, or an hf:// address whose revision is a commit, so that it can never change."""

    path: str
    kind: str  # a key of FORMATS
    size: int  # bytes


@dataclass(frozen=True)
class Source:
    """The files of each split, in a fixed order. `identity` is equal for sources of equal content, as far as names,
    sizes and the Hub's commit tell."""

    name: str
    splits: dict[str, tuple[File, ...]]
    revision: str | None = None

    def identity(self, split: str) -> list:
        return [self.revision] + [[os.path.basename(file.path), file.size] for file in self.splits.get(split, ())]


def open_source(name: str, streaming: bool, flag: str = "--dataset") -> Source:
    """The source that a flag names. A Hub dataset is read in place with `streaming`, else downloaded first.

    UserError for what isn't there or is no file, and where no file is of a known format, or none is for training (for
    --dataset).
    """
    given = f"{flag} {name}"
    local = is_local(name)
    if not local and not HUB_NAME.fullmatch(name):
        raise UserError(f"{given}: neither a file, directory or glob, nor a Hub dataset (owner/name)")
    source = _local(given, name) if local else _hub(given, name, streaming)
    if not source.splits:
        known = ", ".join(suffix for suffixes in FORMATS.values() for suffix in suffixes)
        raise UserError(f"{given}: no files of proteins in it: expected {known} (all but parquet also packed)")
    if flag == "--dataset" and "train" not in source.splits:
        raise UserError(
            f"{given}: no training files in it: by their names, these are held out: {held_out_files(source)}: give "
            f"one file by itself ({flag} FILE), or rename them"
        )
    return source


def held_out_files(source: Source) -> str:
    """The files of the splits that nobody trains on, a few of them by name."""
    told = []
    for split, files in source.splits.items():
        if split != "train":
            names = [os.path.basename(file.path) for file in files]
            told.append(f"{split}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")
    return "; ".join(told)


def is_local(name: str) -> bool:
    """Whether --dataset names files, not a Hub dataset."""
    path = os.path.expanduser(name)
    return name == "-" or os.path.lexists(path) or any(c in name for c in "*?[") or name.startswith(("/", ".", "~"))


def format_of(path: str) -> str | None:
    """The key of FORMATS that a file's name stands for."""
    name = unpacked_name(path.lower())
    for kind, suffixes in FORMATS.items():
        if name.endswith(suffixes) and not (kind == "parquet" and name != path.lower()):
            return kind
    return None


def split_of(path: str) -> str:
    """The split that a relative path names; the innermost word decides."""
    words = re.split(r"[^a-z]+", path.lower())
    for word in reversed(words):
        for split, names in SPLIT_WORDS.items():
            if word in names:
                return split
    return "train"


def _file(path: str, name: str, size: int) -> File | None:
    """The file of that name if it holds proteins, as far as name and size tell."""
    kind = format_of(name)
    if kind is None or (name.endswith(".json") and size < 1 << 16):
        return None  # dataset_infos.json and the like lie beside the data of many Hub datasets
    return File(path, kind, size)


def _by_split(files: list[tuple[str, File]]) -> dict[str, tuple[File, ...]]:
    """(relative path, file) pairs to splits, in the order of the paths."""
    splits: dict[str, list[File]] = {}
    for relative, file in sorted(files, key=lambda pair: pair[0]):
        splits.setdefault(split_of(relative), []).append(file)
    return {split: tuple(members) for split, members in splits.items()}


def _local(given: str, name: str) -> Source:
    path = Path(name).expanduser()
    if name == "-" or (os.path.lexists(path) and not path.is_dir()):
        check_file(path, given)
        if (kind := format_of(path.name)) is None:
            raise UserError(f"{given}: its name says no format: expected .parquet, .jsonl, .csv or .fasta")
        return Source(name, {"train": (File(str(path), kind, path.stat().st_size),)})
    if path.is_dir():
        root, found = path, list(path.rglob("*"))
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            raise UserError(f"{given}: holds tokenised data already: give it as --dataset_dir")
    else:
        found = [Path(p) for p in glob.glob(str(path), recursive=True)]
        if not any(p.is_file() for p in found):
            raise UserError(f"{given}: no such file or directory, and no file matches it")
        root = Path(os.path.commonpath([p.parent for p in found]))
    relative = {str(p.relative_to(root)): p for p in found if format_of(p.name) and not p.is_dir()}
    shown = {name: p for name, p in relative.items() if not any(part.startswith(".") for part in Path(name).parts)}
    for member in shown.values():
        check_file(member, f"{given}: {member}")
    refuse_twice(given, list(shown.values()))
    files = [(name, _file(str(p), p.name, p.stat().st_size)) for name, p in shown.items()]
    return Source(name, _by_split(_each_once([(name, file) for name, file in files if file])))


def _each_once(files: list[tuple[str, File]]) -> list[tuple[str, File]]:
    """Without those of a split that are links to others of it."""
    kept: dict[tuple, str] = {}
    for name, file in sorted(files, key=lambda pair: pair[0]):
        stat = os.stat(file.path)
        first = kept.setdefault((split_of(name), stat.st_dev, stat.st_ino), name)
        if first != name:
            logger.warning("%s is %s once more (a link): it is read once", name, first)
    return [(name, file) for name, file in files if name in kept.values()]


def _hub(given: str, name: str, streaming: bool) -> Source:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    offline = any(os.environ.get(v, "").upper() in ("1", "ON", "YES", "TRUE") for v in OFFLINE_VARIABLES)
    try:
        if offline or not streaming:
            folder = snapshot_download(name, repo_type="dataset", local_files_only=offline)
            return replace(_local(given, folder), name=name)
        info = HfApi().dataset_info(name, files_metadata=True)
    except LocalEntryNotFoundError:
        raise UserError(
            f"{given}: not in the local cache, and the Hub is switched off or cannot be reached: "
            f"hf download {name} --repo-type dataset --local-dir DIR, then --dataset DIR"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{given}: no such file, and no such dataset on the Hub, or it is private: set HF_TOKEN"
        ) from None
    except HfHubHTTPError as error:
        raise UserError(f"{given}: {hub_advice(name, error)}") from None
    except OSError as error:
        raise UserError(
            f"{given}: the Hub cannot be reached ({brief(error)}): check the network, or download the "
            f"dataset elsewhere: hf download {name} --repo-type dataset --local-dir DIR, then --dataset DIR"
        ) from None
    files = []
    for member in info.siblings or ():
        address = f"{REMOTE}datasets/{name}@{info.sha}/{member.rfilename}"
        if file := _file(address, member.rfilename, member.size or 0):
            files.append((member.rfilename, file))
    return Source(name, _by_split(files), info.sha)


OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def hub_advice(name: str, error: Exception) -> str:
    """What the Hub's refusal means and what to do, for the end of an error line."""
    status = _status(error)
    if status == 429:
        return (
            "the Hub answers 429 (too many requests, usually from many nodes at once): set HF_TOKEN, or better "
            f"hf download {name} --repo-type dataset --local-dir DIR once, then --dataset DIR"
        )
    if refused(error):
        return f"the Hub refuses access ({status}): accept the dataset's terms on its page and set HF_TOKEN"
    return f"the Hub failed ({brief(error)}): try again later, or hf download the dataset and pass its directory"


def refused(error: Exception) -> bool:
    """Whether asking again is useless."""
    return _status(error) in (401, 403, 404)


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def brief(error: BaseException) -> str:
    return one_line(error)[:160]
