"""Downloads over HTTP and FTP from servers that break off, stall, lie and refuse; none waits for long."""

import hashlib
import random
import subprocess
import time
from contextlib import suppress
from email.utils import formatdate

import pytest

from common.cli import UserError
from extras.prepare.download import Expected, RetryPolicy, download, download_directory
from extras.prepare.transfers import FetchError
from tests.extras.prepare.local_servers import CONTENT, QUICK, THIRD, ftp_server, http_server, sums
from tests.small_disk import small_disk

# --- broken connections


def test_download_resumes_a_broken_transfer(tmp_path):
    with http_server(CONTENT, break_after=[THIRD, 20_000]) as server:
        path = download(f"{server.url}/u.fasta.gz", tmp_path, sums(CONTENT), QUICK)
    assert path.read_bytes() == CONTENT
    assert [path] == list(tmp_path.iterdir())
    assert server.ranges == [None, f"bytes={THIRD}-", f"bytes={THIRD + 20_000}-"]


@pytest.mark.parametrize(("lacking", "requests"), [("", 2), ("if-range", 3)])
def test_download_restarts_when_the_remote_file_changed(tmp_path, lacking, requests):
    """By the answer to If-Range; by the ETag of the rest, where the server does not know If-Range."""
    newer = CONTENT[::-1]
    with http_server(CONTENT, break_after=[THIRD], lacking=lacking, next=(newer, '"2"')) as server:
        path = download(f"{server.url}/u.fasta.gz", tmp_path, retries=QUICK)
    assert path.read_bytes() == newer
    assert server.ranges == [None, f"bytes={THIRD}-", None][:requests]


def test_download_resumes_by_last_modified_not_by_weak_etag(tmp_path):
    date = "Wed, 01 Jan 2025 00:00:00 GMT"
    with http_server(CONTENT, break_after=[THIRD], etag="", last_modified=date) as server:
        assert download(f"{server.url}/a", tmp_path, retries=QUICK).read_bytes() == CONTENT
    assert server.ranges == [None, f"bytes={THIRD}-"]
    with http_server(CONTENT, break_after=[THIRD], etag='W/"1"') as server:
        assert download(f"{server.url}/a", tmp_path, retries=QUICK).read_bytes() == CONTENT
    assert server.ranges == [None, None]


@pytest.mark.parametrize("lacking", ["ranges", "validator"])
def test_download_restarts_without_ranges_or_validator(tmp_path, lacking):
    with http_server(CONTENT, break_after=[THIRD], lacking=lacking) as server:
        path = download(f"{server.url}/u.fasta.gz", tmp_path, sums(CONTENT), QUICK)
        assert path.read_bytes() == CONTENT


def test_download_gives_up_without_progress(tmp_path):
    with (
        http_server(CONTENT, break_after=[THIRD] * 9, lacking="ranges") as server,
        pytest.raises(FetchError, match=rf"{THIRD:,} of {len(CONTENT):,} bytes arrived \(3 attempts\)"),
    ):
        download(f"{server.url}/u.fasta.gz", tmp_path, retries=QUICK)
    assert len(server.ranges) == 3


def test_download_keeps_a_part_that_can_be_resumed(tmp_path):
    with http_server(CONTENT, break_after=[THIRD, 0, 0, 0]) as server:
        url = f"{server.url}/u.fasta.gz"
        with pytest.raises(FetchError, match=rf"\(3 attempts\): .*\({THIRD:,} bytes have arrived and are kept\)"):
            download(url, tmp_path, retries=QUICK)
        assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".part"]
        server.break_after.clear()
        assert download(url, tmp_path, sums(CONTENT), QUICK).read_bytes() == CONTENT
    assert server.ranges[-1] == f"bytes={THIRD}-"


def test_download_removes_a_part_that_cannot_be_resumed(tmp_path):
    with (
        http_server(CONTENT, break_after=[THIRD] * 9, lacking="validator") as server,
        pytest.raises(FetchError, match="start again$"),
    ):
        download(f"{server.url}/u.fasta.gz", tmp_path / "d", retries=QUICK)
    assert not list(tmp_path.iterdir())


def test_download_reports_a_refused_connection(tmp_path):
    with pytest.raises(FetchError, match=r"refused \(3 attempts\): check the network"):
        download("http://127.0.0.1:1/u.fasta", tmp_path / "d", retries=QUICK)
    assert not list(tmp_path.iterdir())


# --- slow servers


def test_download_resumes_after_a_silent_server(tmp_path):
    with http_server(CONTENT, break_after=[THIRD], stall_s=600.0) as server:
        path = download(f"{server.url}/a", tmp_path, retries=RetryPolicy(timeout_s=0.2, first_wait_s=0.01))
    assert path.read_bytes() == CONTENT
    assert server.ranges == [None, f"bytes={THIRD}-"]


@pytest.mark.parametrize("serve", [http_server, ftp_server])
def test_download_resumes_after_a_stall(tmp_path, serve):
    retries = RetryPolicy(timeout_s=0.3, first_wait_s=0.01)
    with serve(CONTENT, trickle_after=[THIRD]) as server:
        assert download(f"{server.url}/a", tmp_path, sums(CONTENT), retries).read_bytes() == CONTENT
    second = server.starts[1] if server.starts else int(server.ranges[1][6:-1])
    assert THIRD < second < THIRD + 3000


def test_download_gives_up_when_every_transfer_stalls(tmp_path):
    retries = RetryPolicy(timeout_s=0.5, attempts=2, first_wait_s=0.01)
    with (
        http_server(CONTENT, trickle_after=[0] * 9) as server,
        pytest.raises(FetchError, match=r"bytes arrived in \d s \(2 attempts\).*are kept"),
    ):
        download(f"{server.url}/a", tmp_path, retries=retries)
    assert len(server.ranges) == 2


# --- refusals


@pytest.mark.parametrize(
    ("status", "said"),
    [(404, "HTTP 404 Not Found: check the address"), (403, "HTTP 403 Forbidden: access is denied"), (410, "Gone")],
)
def test_download_does_not_retry_client_errors(tmp_path, status, said):
    with http_server(CONTENT, statuses=[status]) as server, pytest.raises(FetchError, match=said):
        download(f"{server.url}/u.fasta.gz", tmp_path / "d", retries=QUICK)
    assert server.ranges == []
    assert not list(tmp_path.iterdir())


def test_download_retries_server_errors(tmp_path):
    with http_server(CONTENT, statuses=[503, 429, 500]) as server:
        path = download(f"{server.url}/a", tmp_path, retries=RetryPolicy(first_wait_s=0.01))
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("status", [429, 503])
def test_download_reports_a_busy_server(tmp_path, status):
    with (
        http_server(CONTENT, statuses=[status] * 9) as server,
        pytest.raises(FetchError, match=rf"HTTP {status} .* \(3 attempts\): the server is busy or down: start again"),
    ):
        download(f"{server.url}/a", tmp_path, retries=QUICK)
    assert len(server.statuses) == 6


def test_download_honours_retry_after_up_to_a_limit(tmp_path, monkeypatch, caplog):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    in_an_hour = formatdate(time.time() + 3600, usegmt=True)
    retries = RetryPolicy(first_wait_s=0.01, longest_wait_s=300.0)
    for number, retry_after in enumerate(("7", "3600", in_an_hour, "soon")):
        with http_server(CONTENT, statuses=[429], retry_after=retry_after) as server:
            download(f"{server.url}/{number}", tmp_path, retries=retries)
    assert waits == [7.0, 300.0, 300.0, 0.01]
    with http_server(CONTENT, statuses=[429], retry_after=in_an_hour) as server:
        download(f"{server.url}/a", tmp_path, retries=RetryPolicy(longest_wait_s=9999))
    assert 3000 < waits[-1] <= 3600
    assert "trying again in" in caplog.text


# --- wrong content


def test_download_reports_missing_bytes(tmp_path):
    with (
        http_server(CONTENT, claims=100) as server,
        pytest.raises(FetchError, match=rf"{len(CONTENT):,} of {len(CONTENT) + 100:,} bytes arrived \(3 attempts\)"),
    ):
        download(f"{server.url}/a", tmp_path, retries=QUICK)


def test_download_detects_a_short_length_by_checksum(tmp_path):
    with http_server(CONTENT, claims=-100) as server, pytest.raises(FetchError, match="its md5 is .*, --md5 says"):
        download(f"{server.url}/a", tmp_path / "d", sums(CONTENT), QUICK)
    assert not list(tmp_path.iterdir())


def test_download_checks_a_published_size_first(tmp_path):
    expected = sums(CONTENT, size=len(CONTENT) + 1, authority="RELEASE.metalink")
    said = rf"the server has {len(CONTENT):,} bytes, RELEASE.metalink says {len(CONTENT) + 1:,}"
    with http_server(CONTENT) as server, pytest.raises(FetchError, match=said):
        download(f"{server.url}/a", tmp_path / "d", expected, QUICK)
    assert not list(tmp_path.iterdir())


def test_download_detects_a_broken_transfer_by_published_size(tmp_path):
    with http_server(CONTENT, break_after=[THIRD], lacking="length") as server:
        path = download(f"{server.url}/a", tmp_path, Expected(size=len(CONTENT)), QUICK)
    assert path.read_bytes() == CONTENT
    assert server.ranges == [None, f"bytes={THIRD}-"]


def test_download_removes_a_file_with_a_wrong_checksum(tmp_path):
    wrong = Expected({"sha256": "0" * 64})
    right = hashlib.sha256(CONTENT).hexdigest()
    with (
        http_server(CONTENT) as server,
        pytest.raises(FetchError, match=f"sha256 is {right}, --sha256 says {'0' * 64}"),
    ):
        download(f"{server.url}/a", tmp_path / "d", wrong, QUICK)
    assert server.ranges == [None]  # it came in one piece: this is what the server has
    assert not list(tmp_path.iterdir())


def test_download_restarts_once_after_a_resumed_mismatch(tmp_path):
    """A server that changes a file and keeps its ETag: only the checksum of the whole can tell."""
    newer = CONTENT[::-1]
    with http_server(CONTENT, break_after=[THIRD], next=(newer, '"1"')) as server:
        assert download(f"{server.url}/a", tmp_path, sums(newer), QUICK).read_bytes() == newer
    assert server.ranges == [None, f"bytes={THIRD}-", None]
    with (
        http_server(CONTENT, break_after=[THIRD, len(CONTENT), THIRD]) as server,
        pytest.raises(FetchError, match="its md5 is"),
    ):
        download(f"{server.url}/b", tmp_path, Expected({"md5": "0" * 32}), QUICK)
    assert server.ranges == [None, f"bytes={THIRD}-"] * 2  # and no third time, though it came in pieces again


def test_download_reuses_a_complete_file(tmp_path):
    with http_server(CONTENT) as server:
        url = f"{server.url}/a"
        path = download(url, tmp_path, retries=QUICK)
        assert download(url, tmp_path, sums(CONTENT), QUICK) == path
        assert len(server.ranges) == 1
        path.write_bytes(CONTENT[:-1] + b"x")
        assert download(url, tmp_path, sums(CONTENT), QUICK).read_bytes() == CONTENT
        assert len(server.ranges) == 2


# --- full disks


def test_download_checks_free_space_first(tmp_path):
    with small_disk(tmp_path, "1m") as disk, http_server(bytes(2_000_000)) as server:
        with pytest.raises(
            FetchError, match=r"not enough space for http.*: 2,000,000 bytes to come, 1,\d+,\d+ free: make room"
        ):
            download(f"{server.url}/a", disk / "d", retries=QUICK)
        assert not list(disk.iterdir())


def test_download_resumes_after_a_full_disk(tmp_path):
    content = random.Random(0).randbytes(2_000_000)
    with small_disk(tmp_path, "1m") as disk, http_server(content, lacking="length") as server:
        url = f"{server.url}/a"
        with pytest.raises(FetchError, match=r"d: no space left for http.* bytes have arrived and are kept\)"):
            download(url, disk / "d", sums(content), QUICK)
        subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        assert download(url, disk / "d", sums(content), QUICK).read_bytes() == content
    assert len(server.ranges) == 2
    assert int(server.ranges[1][6:-1]) > 900_000


# --- the directory


@pytest.mark.parametrize(
    ("error", "stays"),
    [(FetchError("x"), True), (ZeroDivisionError("a bug"), True), (UserError("no FASTA"), False), (None, False)],
)
def test_download_directory_stays_for_failures_that_can_resume(tmp_path, error, stays):
    directory = tmp_path / "d"
    directory.mkdir()
    (directory / "a.part").touch()
    with suppress(UserError, ZeroDivisionError), download_directory(directory):
        if error:
            raise error
    assert directory.exists() == stays
