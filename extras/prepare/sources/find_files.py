"""Find the files of a `--dataset` of proteins or text, a local file, directory or glob, or a Hub dataset; by split.

The name of a file decides its format (extras/prepare/sources/formats.py). Files that are left out are named in the
log. A file belongs to the split that its path names (train-00000-of-00004.parquet, validation/part.csv,
test.jsonl.gz), else to `train`. The card of a text dataset may name configurations and splits
(extras/prepare/sources/hub.py).
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from common.cli import UserError, owner_of_denied
from common.files.content_hash import combined_hash
from extras.prepare.sources.compression import check_duplicates, check_file
from extras.prepare.sources.formats import INFO_BYTES, PROTEINS, Content, format_of_file
from extras.prepare.sources.hub import (
    CARD,
    HUB_NAME,
    REMOTE,
    choose_files,
    group_paths,
    hub_advice,
    is_within,
    offline,
    parse_address,
    uncached_advice,
    unreachable_advice,
)
from extras.prepare.sources.saved_datasets import as_parquet, untokenised_columns

logger = logging.getLogger(__name__)

NAMED = 5  # files that are left out, in the log
SAVED = ("dataset_dict.json", "state.json", "dataset_info.json")  # beside the Arrow files of datasets' save_to_disk
LOST = "lost+found"  # at the top of a file system, root's alone
LONGEST_CARD = 4 << 20  # characters; most front matters have some hundreds
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test", "testing"),
}


@dataclass(frozen=True)
class File:
    """One file: a local path, or an hf:// address with a commit as revision, so that it cannot change."""

    path: str
    kind: str  # a key of extras.prepare.sources.formats.FORMATS
    size: int  # bytes
    content: Content = PROTEINS

    @classmethod
    def from_json(cls, value: dict) -> File:
        return cls(**value | {"content": Content.from_json(value["content"])})


@dataclass(frozen=True)
class Source:
    """The files of each split, in a fixed order.

    revision: the commit of Hub files that are read in place; contents: hashes of the splits of local files, set by
    `with_contents`.
    """

    name: str
    splits: dict[str, tuple[File, ...]]
    revision: str | None = None
    contents: dict[str, str] = field(default_factory=dict)

    def identity(self, split: str) -> str:
        """A hash (hex) of a split's contents in order, whatever the files' names."""
        files = self.splits.get(split, ())
        # Gaps and the like only where they are given, so that identities of before these flags hold.
        read_as = [
            (file.kind, content.columns, *filter(None, [content.gaps, content.alphabet, content.chains]))
            for file, content in ((file, file.content) for file in files)
        ]
        held = self.contents[split] if self.revision is None else self._listing(split)
        return hashlib.sha256(repr([held, read_as]).encode()).hexdigest()

    def _listing(self, split: str) -> list:
        """What identifies the Hub files of a split: the revision, and their names and sizes in bytes."""
        return [self.revision] + [[os.path.basename(file.path), file.size] for file in self.splits.get(split, ())]

    def to_json(self) -> dict:
        """To send the source to another rank; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict) -> Source:
        splits = {name: tuple(map(File.from_json, files)) for name, files in value["splits"].items()}
        return cls(**value | {"splits": splits})


@dataclass(frozen=True)
class Request:
    """What to open. given: flag and name, for messages; train: the split that must exist (None: none)."""

    given: str
    content: Content = PROTEINS
    configuration: str | None = None
    train: str | None = "train"

    @property
    def chooses(self) -> bool:
        """Whether a card's configurations are used: not for proteins, of which all files are read."""
        return self.content.name != PROTEINS.name


def open_source(
    name: str,
    streaming: bool,
    flag: str = "--dataset",
    content: Content = PROTEINS,
    configuration: str | None = None,
    train: str = "train",
) -> Source:
    """The source that a flag names. A Hub dataset is read in place with `streaming`, else downloaded first.

    configuration: of a text dataset. UserError for a missing file, for something else than a file, for a place that
    cannot be read, and if no file has a known format or, for --dataset, belongs to the split `train`.
    """
    where = f"{flag} {name}"
    request = Request(where, content, configuration, train if flag == "--dataset" else None)
    local = is_local(name)
    if not local and not HUB_NAME.fullmatch(name) and not name.startswith(REMOTE):
        raise UserError(f"{where}: neither a file, directory or glob, nor a Hub dataset (owner/name)")
    try:
        source = _local(request, name) if local else _hub(request, name, streaming)
    except OSError as error:
        what_to_do = owner_of_denied(error) or "make it readable, or name what to read in it"
        raise UserError(f"{where}: {error.filename}: {error.strerror}: {what_to_do}") from None
    if not source.splits:
        raise UserError(
            f"{where}: no files of {content.name} in it: expected {content.suffixes} (all but parquet also compressed)"
        )
    if request.train and request.train not in source.splits:
        if request.train != "train":
            raise UserError(f"{where}: no split {train}, only {', '.join(source.splits)}: see --train_split")
        raise UserError(
            f"{where}: no training files in it: by their names, these are held out: {held_out_files(source)}: give "
            f"one file by itself ({flag} FILE), or rename them"
        )
    return source


def with_contents(source: Source, *splits: str) -> Source:
    """The source with hashes of these splits, if they are local files, all of which are read once."""
    if source.revision is not None:
        return source
    paths = {split: [file.path for file in source.splits.get(split, ())] for split in splits}
    return replace(source, contents={split: combined_hash(paths[split]) for split in splits})


def check_same_files(source: Source) -> None:
    """UserError for a local file that is missing on this node, or of another size than on rank 0's."""
    for file in (file for files in source.splits.values() for file in files if not file.path.startswith(REMOTE)):
        size = os.path.getsize(file.path) if os.path.isfile(file.path) else None
        if size != file.size:
            here = "is not there" if size is None else f"has {size:,} bytes"
            raise UserError(
                f"{file.path}: {here} on this node, and {file.size:,} bytes on that of rank 0: give all nodes the "
                "same files"
            )


def held_out_files(source: Source) -> str:
    """The held-out splits and the first few of their files, for messages."""
    described = []
    for split, files in source.splits.items():
        if split != "train":
            names = [os.path.basename(file.path) for file in files]
            described.append(f"{split}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")
    return "; ".join(described)


def is_local(name: str) -> bool:
    """Whether --dataset names files, not a Hub dataset."""
    path = os.path.expanduser(name)
    if name.startswith(REMOTE):
        return False
    return name == "-" or os.path.lexists(path) or any(c in name for c in "*?[") or name.startswith(("/", ".", "~"))


def natural_order(path: str) -> list[int | str]:
    """A key to sort paths by: x999 before x1000."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", path)]


def split_of(path: str) -> str:
    """The split that a relative path names; the innermost word decides."""
    words = re.split(r"[^a-z]+", path.lower())
    for word in reversed(words):
        for split, names in SPLIT_WORDS.items():
            if word in names:
                return split
    return "train"


def _hub_file(path: str, name: str, size: int, content: Content) -> File | None:
    """The file of the Hub if its name and size fit the content."""
    kind = content.format_of(name)
    if kind is None or (name.endswith(".json") and size < INFO_BYTES):
        return None  # dataset_infos.json and the like lie beside the data of many Hub datasets
    return File(path, kind, size, content)


def _by_split(request: Request, files: dict[str, File], card: str = "") -> dict[str, tuple[File, ...]]:
    """The files, by relative path, to splits, in the order of the paths."""
    paths, chosen = sorted(files), None
    if request.chooses and files:
        chosen = choose_files(request.given, paths, card, request.configuration, split_of)
    if chosen is None:
        chosen = group_paths(paths, split_of)
    return {split: tuple(files[path] for path in of_split) for split, of_split in chosen.items()}


def _local(request: Request, name: str) -> Source:
    path, where, content = Path(name).expanduser(), request.given, request.content
    if name == "-" or (os.path.lexists(path) and not path.is_dir()):
        check_file(path, where)
        if (kind := content.format_of(path.name) or format_of_file(path, content)) is None:
            raise UserError(f"{where}: its name has no known suffix: expected {content.suffixes}")
        file = File(str(path), kind, path.stat().st_size, content)
        return Source(name, {request.train or "train": (file,)})
    card = ""
    if path.is_dir():
        root, paths = path, [file for file in _files_below(path) if file.name not in SAVED]
        if any((path / name).exists() for name in SAVED[:2]):
            columns = untokenised_columns(path)
            if not columns:
                raise UserError(
                    f"{where}: holds tokenised data already: give it as --dataset_dir, or a split of it as "
                    "--eval_dataset"
                )
            if "arrow" not in content.formats:
                raise UserError(f"{where}: {as_parquet(path, columns)}")
        if request.chooses and (path / CARD).is_file():
            card = _read_card(path / CARD)
    else:
        paths = [Path(p) for p in glob.glob(str(path), recursive=True)]
        if not any(p.is_file() for p in paths):
            raise UserError(f"{where}: no such file or directory, and no file matches it")
        root = Path(os.path.commonpath([p.parent for p in paths]))
    members = {str(p.relative_to(root)): p for p in paths if not p.is_dir()}
    shown = {key: p for key, p in members.items() if not any(part.startswith(".") for part in Path(key).parts)}
    kinds = {key: kind for key, p in shown.items() if (kind := format_of_file(p, content))}
    for key in kinds:
        check_file(shown[key], f"{where}: {shown[key]}")
    check_duplicates(where, [shown[key] for key in kinds])
    _say_left_out(where, content, shown.keys() - kinds.keys())
    files = {key: File(str(shown[key]), kind, shown[key].stat().st_size, content) for key, kind in kinds.items()}
    return Source(name, _by_split(request, _without_links(files), card))


def _files_below(directory: Path) -> list[Path]:
    """All files, links to directories followed, each directory once; hidden directories are left out.

    OSError for a directory that cannot be listed.
    """

    def refuse(error: OSError) -> None:  # os.walk leaves the directory out otherwise
        raise error

    files, seen = [], set()
    for place, directories, names in os.walk(directory, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            directories.clear()
            continue
        seen.add(real)
        directories[:] = [name for name in directories if not name.startswith(".") and name != LOST]
        files += [Path(place, name) for name in names]
    return files


def _say_left_out(given: str, content: Content, names: Iterable[str]) -> None:
    if names := sorted(names):
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        listed = ", ".join(names[:NAMED]) + more
        logger.info("%s: left out, no %s by name or content: %s", given, content.name, listed)


def _read_card(path: Path) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(LONGEST_CARD)


def _without_links(files: dict[str, File]) -> dict[str, File]:
    """Without links to other files of the same split."""
    unique: dict[tuple, str] = {}
    for name in sorted(files):
        stat = os.stat(files[name].path)
        first = unique.setdefault((split_of(name), stat.st_dev, stat.st_ino), name)
        if first != name:
            logger.warning("%s is a link to %s: it is read once", name, first)
    return {name: files[name] for name in unique.values()}


def _hub(request: Request, given: str, streaming: bool) -> Source:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    where, flag = request.given, request.given.split()[0]
    name, revision, within = parse_address(given, where)
    try:
        if offline() or not (streaming or request.chooses):
            asked = {"repo_type": "dataset", "revision": revision, "local_files_only": offline()}
            folder = snapshot_download(name, **asked, allow_patterns=[within, f"{within}/*"] if within else None)
            return replace(_local(request, os.path.join(folder, within)), name=given)
        info = HfApi().dataset_info(name, revision=revision, files_metadata=True)
        members = {member.rfilename: member.size or 0 for member in info.siblings or ()}
        members = {path: size for path, size in members.items() if is_within(path, within)}
        card = ""
        if request.chooses and CARD in members:
            path = hf_hub_download(name, CARD, repo_type="dataset", revision=info.sha)
            card = _read_card(Path(path))
        addresses = ((path, f"{REMOTE}datasets/{name}@{info.sha}/{path}", size) for path, size in members.items())
        files = {path: _hub_file(address, path, size, request.content) for path, address, size in addresses}
        _say_left_out(where, request.content, [path for path, file in files.items() if file is None])
        splits = _by_split(request, {path: file for path, file in files.items() if file}, card)
        source = Source(given, splits, info.sha)
        if not streaming:  # download the files of this configuration only
            paths = [file.path.split("@", 1)[1].split("/", 1)[1] for of in source.splits.values() for file in of]
            asked = {"repo_type": "dataset", "revision": info.sha, "allow_patterns": [CARD, *paths]}
            return replace(_local(request, snapshot_download(name, **asked)), name=given)
        return source
    except LocalEntryNotFoundError:
        raise UserError(f"{where}: {uncached_advice(name, flag=flag)}") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{where}: no such file, and no such dataset on the Hub, or it is private: set HF_TOKEN"
        ) from None
    except HfHubHTTPError as error:
        raise UserError(f"{where}: {hub_advice(name, error, flag=flag)}") from None
    except OSError as error:
        raise UserError(f"{where}: {unreachable_advice(name, error, flag=flag)}") from None
