import hashlib
import os
import time

import pytest

from common.cli import UserError
from common.files import content_hash as module
from common.files.content_hash import combined_hash, content_hash


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, that keeps files however new they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SETTLED_S", 0.0)
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "proteins.fasta"
    path.write_bytes(b">a\nMKV\n")
    return path


def test_hash_is_sha256_of_the_content(file):
    assert content_hash(file) == hashlib.sha256(b">a\nMKV\n").hexdigest()


def test_cached_hash_is_used(file, cache):
    content_hash(file)
    (entry,) = cache.rglob("content/*")
    entry.write_text(entry.read_text().replace(hashlib.sha256(b">a\nMKV\n").hexdigest(), "cached"))
    assert content_hash(file) == "cached"


def test_content_hashes_logs_progress(file, monkeypatch, caplog):
    monkeypatch.setattr(module, "LOG_EVERY_S", 0.001)
    (file.parent / "large").write_bytes(bytes(64 << 20))
    with caplog.at_level("INFO"):
        combined_hash([file, file.parent / "large"])
    assert "Hashing 2 input files" in caplog.text


def test_replaced_file_of_same_size_and_mtime_is_hashed_again(file):
    before, times = content_hash(file), file.stat()
    other = file.with_name("other")
    other.write_bytes(b">a\nMKL\n")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.rename(file)
    assert content_hash(file) != before


def test_file_rewritten_in_place_with_its_mtime_restored_is_hashed_again(file):
    before, times = content_hash(file), file.stat()
    time.sleep(0.02)
    file.write_bytes(b">a\nMKL\n")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert content_hash(file) != before


def test_new_file_is_not_cached(file, cache, monkeypatch):
    monkeypatch.setattr(module, "SETTLED_S", 3600.0)
    content_hash(file)
    assert not list(cache.rglob("content/*"))


def test_torn_cache_entry_is_ignored(file, cache):
    before = content_hash(file)
    (entry,) = cache.rglob("content/*")
    entry.write_text('{"stat": ')
    assert content_hash(file) == before


def test_unwritable_cache_is_no_error(file, cache):
    cache.write_text("a file, not a directory")
    assert content_hash(file) == content_hash(file)


def test_combined_hash_depends_on_content_and_order(file, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b">b\nMKL\n")
    copy = tmp_path / "copy"
    copy.write_bytes(file.read_bytes())
    assert combined_hash([file, other]) == combined_hash([copy, other]) != combined_hash([other, file])


def test_fifo_is_refused_without_reading(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="not a regular file"):
        content_hash(tmp_path / "fifo")
