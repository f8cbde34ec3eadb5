"""Where `--dataset` finds proteins: a local file, directory or glob, or a Hub dataset; and which files are its splits.

Formats are told by the name: parquet, JSON lines, CSV, FASTA; all but parquet also gzipped. A file belongs to the
split that its path names (train-00000-of-00004.parquet, validation/part.csv, test.jsonl.gz), and to `train` when it
names none.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from common.cli import UserError, one_line

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


def open_source(name: str, streaming: bool) -> Source:
    """The source that --dataset names. A Hub dataset is read in place with `streaming`, else downloaded first.

    UserError for what isn't there, holds no file of a known format or has no training split.
    """
    local = is_local(name)
    if not local and not HUB_NAME.fullmatch(name):
        raise UserError(f"--dataset {name}: neither a file, directory or glob, nor a Hub dataset (owner/name)")
    source = _local(name, Path(name).expanduser()) if local else _hub(name, streaming)
    if not source.splits.get("train"):
        known = ", ".join(suffix for suffixes in FORMATS.values() for suffix in suffixes)
        raise UserError(f"--dataset {name}: no training files in it: expected {known} (but parquet also with .gz)")
    return source


def is_local(name: str) -> bool:
    """Whether --dataset names files, not a Hub dataset."""
    return Path(name).expanduser().exists() or any(c in name for c in "*?[") or name.startswith(("/", ".", "~"))


def format_of(path: str) -> str | None:
    """The key of FORMATS that a file's name stands for."""
    name = path.lower().removesuffix(".gz")
    for kind, suffixes in FORMATS.items():
        if name.endswith(suffixes) and not (kind == "parquet" and path.lower().endswith(".gz")):
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


def _local(name: str, path: Path) -> Source:
    if path.is_file():
        if (kind := format_of(path.name)) is None:
            raise UserError(f"--dataset {name}: its name says no format: expected .parquet, .jsonl, .csv or .fasta")
        return Source(name, {"train": (File(str(path), kind, path.stat().st_size),)})
    if path.is_dir():
        root, found = path, [p for p in path.rglob("*") if p.is_file()]
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            raise UserError(f"--dataset {name}: holds tokenised data already: give it as --dataset_dir")
    else:
        found = [Path(p) for p in glob.glob(os.path.expanduser(name), recursive=True) if os.path.isfile(p)]
        if not found:
            raise UserError(f"--dataset {name}: no such file or directory, and no file matches it")
        root = Path(os.path.commonpath([p.parent for p in found]))
    files = []
    for member in found:
        relative = member.relative_to(root)
        hidden = any(part.startswith(".") for part in relative.parts)
        if not hidden and (file := _file(str(member), member.name, member.stat().st_size)):
            files.append((str(relative), file))
    return Source(name, _by_split(files))


def _hub(name: str, streaming: bool) -> Source:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    offline = any(os.environ.get(v, "").upper() in ("1", "ON", "YES", "TRUE") for v in OFFLINE_VARIABLES)
    try:
        if offline or not streaming:
            folder = snapshot_download(name, repo_type="dataset", local_files_only=offline)
            return _local(name, Path(folder))
        info = HfApi().dataset_info(name, files_metadata=True)
    except LocalEntryNotFoundError:
        raise UserError(
            f"--dataset {name}: not in the local cache, and the Hub is switched off or cannot be reached: "
            f"hf download {name} --repo-type dataset --local-dir DIR, then --dataset DIR"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"--dataset {name}: no such file, and no such dataset on the Hub, or it is private: set HF_TOKEN"
        ) from None
    except HfHubHTTPError as error:
        raise UserError(f"--dataset {name}: {hub_advice(name, error)}") from None
    except OSError as error:
        raise UserError(
            f"--dataset {name}: the Hub cannot be reached ({brief(error)}): check the network, or download the "
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
