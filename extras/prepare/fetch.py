"""Turn sources (files, directories, patterns, datasets of the Hub, and URLs) into verified local files."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

from common.cli import UserError
from common.files.content_hash import combined_hash, content_hashes
from extras.prepare.download import ANYTHING, RETRIES, DownloadFiles, Expected, RetryPolicy, download
from extras.prepare.sources.compression import check_duplicates, check_file
from extras.prepare.sources.csv_records import csv_files
from extras.prepare.sources.find_files import is_local, natural_order, open_source
from extras.prepare.sources.formats import PROTEINS, Content
from extras.prepare.sources.hub import HUB_NAME, REMOTE
from extras.prepare.transfers import SCHEMES, FetchError, TemporaryError, identity, shown

logger = logging.getLogger(__name__)
HEX_DIGITS = {"md5": 32, "sha256": 64}
# UniProt's server and its official mirrors publish checksums in a RELEASE.metalink beside the data.
UNIPROT_HOSTS = ("ftp.uniprot.org", "ftp.ebi.ac.uk", "ftp.expasy.org")
METALINK = "RELEASE.metalink"
TAKEN = "files, directories, patterns, datasets of the Hub (OWNER/NAME, hf://datasets/...) and URLs"


@dataclass(frozen=True)
class Source:
    """A file or URL as given by the user, and its expected content."""

    address: str
    expected: Expected = ANYTHING

    @property
    def is_url(self) -> bool:
        return "://" in self.address

    @property
    def shown(self) -> str:
        """For log lines and errors."""
        return shown(self.address) if self.is_url else self.address

    @property
    def path(self) -> Path:
        """Only of a local file."""
        return Path(self.address).expanduser()


def parse_sources(
    addresses: list[str],
    md5: Sequence[str] = (),
    sha256: Sequence[str] = (),
    content: Content = PROTEINS,
    flag: str = "--source",
) -> list[Source]:
    """Sources of `addresses`, with checksums: none, or one for each, in order. A dataset of the Hub is downloaded to
    the Hub's cache.

    content: what is looked for in directories; flag: for messages. UserError for an unreadable file, an address that
    cannot be fetched, a duplicate, or an invalid checksum.
    """
    checksums = {"md5": md5, "sha256": sha256}
    for algorithm, sums in checksums.items():
        if sums and len(sums) != len(addresses):
            raise UserError(
                f"--{algorithm}: {len(sums)} checksums for {len(addresses)} sources: give one each, in order"
            )
        for text in sums:
            if not re.fullmatch(rf"[0-9a-fA-F]{{{HEX_DIGITS[algorithm]}}}", text):
                raise UserError(f"--{algorithm} {text}: expected {HEX_DIGITS[algorithm]} hexadecimal digits")
    if not any(checksums.values()):
        addresses = [file for address in addresses for file in _files_of(address, content, flag)]
    sources: list[Source] = []
    for number, address in enumerate(addresses):
        source = Source(address, Expected({name: sums[number].lower() for name, sums in checksums.items() if sums}))
        if not source.is_url:
            _check_file(source, flag)
        elif identity(address) in [identity(other.address) for other in sources if other.is_url]:
            raise UserError(f"{flag} {source.shown}: given twice: its records would come twice")
        else:
            _check_address(source)
        for other in () if source.is_url else sources:
            if not other.is_url and source.path.samefile(other.path):
                raise UserError(f"{flag} {address}: the same file as {other.address}: its records would come twice")
        sources.append(source)
    check_duplicates(flag, [source.path for source in sources if not source.is_url])
    return sources


def _files_of(address: str, content: Content, flag: str) -> list[str]:
    """An address, or the files of a directory, pattern or dataset of the Hub, x999 before x1000."""
    path = Path(address).expanduser()
    from_hub = address.startswith(REMOTE)
    if not is_local(address) and HUB_NAME.fullmatch(address):
        from_hub = content.format_of(address) is None  # else a file that is not there
    is_pattern = any(character in address for character in "*?[") and "://" not in address
    if not (from_hub or path.is_dir() or (is_pattern and not os.path.lexists(path))):
        return [address]
    found = open_source(address, streaming=False, flag=flag, content=content).splits
    if held_out := sorted(found.keys() - {"train"}):
        logger.info("%s %s: files of %s are read like the others", flag, address, " and ".join(held_out))
    files = [file for files in found.values() for file in files]
    kinds = Counter(file.kind for file in files)
    logger.info("%s %s: reading %s", flag, address, ", ".join(f"{n:,} {kind}" for kind, n in sorted(kinds.items())))
    return sorted((file.path for file in files), key=natural_order)


def directory_sources(given: str, content: Content) -> list[Source]:
    """Sources of step 1's --input_dir: its *.csv files, or if there are none its files of any format; or one file.

    UserError if there are none.
    """
    flag, path = "--input_dir", Path(given).expanduser()
    if os.path.lexists(path) and not path.is_dir():
        return parse_sources([given], content=content, flag=flag)
    if files := csv_files(path):
        return [Source(str(file)) for file in files]
    if not any(name for name in os.listdir(path) if not name.startswith(".")):  # an OSError where glob finds nothing
        raise UserError(f"{flag} {given}: no files in it: run 0.download_data.py first")
    return parse_sources([given], content=content, flag=flag)


def describe_sources(sources: list[Source]) -> dict:
    """The identity of the sources, for the record of an output: a hash of each file's content, and URLs."""
    digests = iter(content_hashes(source.path for source in sources if not source.is_url))
    described = []
    for source in sources:
        known_by = identity(source.address) if source.is_url else f"sha256:{next(digests)}"
        described.append({"source": known_by} | source.expected.sums)
    return described[0] if len(described) == 1 else {"sources": described}


def name_sources(sources: list[Source], is_own: Callable[[int], bool]) -> dict:
    """The sources by name and size, and its own by content, for the record of a shard: a machine need not read the
    others' files. is_own: whether the source of a number is the shard's."""
    own = [source.path for number, source in enumerate(sources) if is_own(number) and not source.is_url]
    names = [identity(source.address) if source.is_url else _name_and_size(source.path) for source in sources]
    return {"input": names, "content": combined_hash(own)}


def _name_and_size(path: Path) -> list:
    return [path.name, path.stat().st_size]


def fetch(sources: list[Source], directory: Path, retries: RetryPolicy = RETRIES) -> list[Path]:
    """Local paths of the sources, in order. URLs are downloaded into `directory`. FetchError if one fails."""
    paths = []
    for source in sources:
        address, expected = source.address, source.expected
        if source.is_url:
            if not expected.sums and (metalink := metalink_beside(address)):
                expected = published_checksums(address, metalink, directory, retries)
            logger.info("Downloading FASTA")
            logger.info("Downloading %s to %s", shown(address), directory)
            path = download(address, directory, expected, retries)
        else:
            path = source.path
            if mismatch := expected.mismatch(path):
                raise FetchError(f"{path}: {mismatch}: it is another file, or damaged: get it again")
        for name, value in expected.sums.items():
            logger.info("Verified %s: %s %s", shown(address), name, value)
        paths.append(path)
    return paths


def published_checksums(url: str, metalink: str, directory: Path, retries: RetryPolicy = RETRIES) -> Expected:
    """Size and checksums of the file at `url` from the publisher's `metalink`; else ANYTHING and a warning."""
    name = Path(unquote(urlsplit(url).path)).name
    DownloadFiles(directory, metalink).remove()  # of an earlier run, and maybe of an earlier release
    try:
        path = download(metalink, directory, retries=retries)
    except FetchError as error:
        if isinstance(error.__cause__, TemporaryError):
            raise
        logger.warning("%s: only the size of %s will be checked", error, name)
        return ANYTHING
    expected = read_metalink(path.read_bytes(), name)
    path.unlink()
    if expected is None:
        logger.warning("%s does not list %s: only its size will be checked", metalink, name)
    return expected or ANYTHING


def metalink_beside(url: str) -> str | None:
    """URL of the metalink that lists a file of UniProt; None for other servers."""
    parts = urlsplit(url)
    if parts.hostname not in UNIPROT_HOSTS or "/uniprot/" not in parts.path:
        return None
    return parts._replace(path=str(PurePosixPath(parts.path).parent / METALINK), query="", fragment="").geturl()


def read_metalink(text: bytes, name: str) -> Expected | None:
    """Size and checksums of the file `name` in a metalink (3.0, http://www.metalinker.org); None if not listed.

    <metalink><files><file name="..."><size>...</size><verification><hash type="md5">...
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return None
    for file in root.iterfind(".//{*}file"):
        if PurePosixPath(file.get("name", "")).name != name:
            continue
        sums = {
            kind: (element.text or "").strip().lower()
            for element in file.iterfind(".//{*}verification/{*}hash")
            if (kind := element.get("type", "").lower().replace("-", "")) in HEX_DIGITS
        }
        size = file.findtext("{*}size", "").strip()
        if sums or size.isdigit():
            return Expected(sums, int(size) if size.isdigit() else None, METALINK)
    return None


def _check_address(source: Source) -> None:
    scheme, _, place = source.address.partition("://")
    scheme = scheme.lower()
    if scheme in ("http", "https") and "@" in place.partition("/")[0]:
        raise UserError(
            f"{source.shown}: a user or password in the address is not supported, and would be seen by others: use a "
            "presigned address, or download it by other means"
        )
    if scheme not in SCHEMES:
        raise UserError(f"{source.shown}: cannot fetch {scheme}:// (only {', '.join(SCHEMES)}, or a local file)")
    try:
        complete = bool(urlsplit(source.address).hostname and (scheme == "s3" or urlsplit(source.address).port != 0))
    except ValueError:  # an invalid port, an unclosed bracket
        complete = False
    if not complete:
        raise UserError(f"{source.shown}: not a complete address: expected {scheme}://HOST/PATH")


def _check_file(source: Source, flag: str) -> None:
    path = source.path
    if path.is_dir():
        raise UserError(f"{source.address}: not a file but a directory: checksums are of files: give the files in it")
    if not os.path.lexists(path) and source.address != "-":
        raise UserError(f"{source.address}: no such file: {flag} takes {TAKEN}")
    check_file(path, source.address)
