"""Sources as users give them: several, with checksums, UniProt's own, killed in mid-download; through the script."""

import gzip
import hashlib
import itertools
import os
import signal

import pytest

from common.cli import UserError
from extras.prepare.download import Expected
from extras.prepare.fetch import (
    describe_sources,
    fetch,
    metalink_beside,
    parse_sources,
    published_checksums,
    read_metalink,
)
from extras.prepare.output_directory import read_record
from extras.prepare.transfers import FetchError
from tests.data_fixtures import DOWNLOAD, call, edit_unnoticed, environment, everything_in
from tests.extras.prepare.local_servers import CONTENT, QUICK, THIRD, ftp_server, http_server
from tests.forked import Script, run_script
from tests.patience import wait_until

SCRIPT = "0.download_data.py"
MD5, SHA256 = hashlib.md5(CONTENT).hexdigest(), hashlib.sha256(CONTENT).hexdigest()
UNIREF50 = "/pub/databases/uniprot/uniref/uniref50"
# The form of UniProt's own (metalink 3.0), shortened.
METALINK = """<?xml version="1.0" encoding="UTF-8"?>
<metalink version="3.0" xmlns="http://www.metalinker.org/" type="static">
  <version>2025_01</version>
  <files>
    <file name="README"><size>10</size>
      <verification><hash type="md5">d41d8cd98f00b204e9800998ecf8427e</hash></verification></file>
    <file name="uniref50.fasta.gz"><size>{size}</size>
      <verification><hash type="md5">{md5}</hash></verification>
      <resources><url type="ftp" preference="100">ftp://ftp.uniprot.org/uniref50.fasta.gz</url></resources></file>
  </files>
</metalink>
"""


def rows(directory) -> list[str]:
    lines = (path.read_text().splitlines()[1:] for path in sorted(directory.glob("csv/x*.csv")))
    return list(itertools.chain(*lines))


# --- several sources


def test_fetch_reads_several_sources_in_order(tmp_path):
    (tmp_path / "a.fasta").write_text(">a\nMK\n>b\nLA\n")
    (tmp_path / "b.fasta.gz").write_bytes(gzip.compress(b">c\nGG"))  # no newline at its end
    out = tmp_path / "out"
    with http_server({"/c.fasta": b">d\nVV\n", "/e.fasta": b">f\nYY\n"}) as server, ftp_server(b">e\nAA\n") as ftp:
        web = [f"{server.url}/c.fasta", f"{ftp.url}/d.fasta", f"{server.url}/e.fasta"]
        flags = ["--output_dir", out, "--no_shuffle"]
        call(DOWNLOAD, "--source", tmp_path / "a.fasta", web[0], tmp_path / "b.fasta.gz", *web[1:], *flags)
    assert rows(out) == ["a,MK", "b,LA", "d,VV", "c,GG", "e,AA", "f,YY"]
    assert [path.name for path in out.iterdir()] == ["csv"]


def test_record_has_all_sources_and_checksums(tmp_path, caplog):
    paths = [tmp_path / name for name in ("a.fasta", "b.fasta", "c.fasta")]
    for path in paths:
        path.write_text(f">{path.name}\nMK\n")
    out = tmp_path / "out"
    call(DOWNLOAD, "--source", *paths[:2], "--output_dir", out)
    sources = read_record(out / "csv")["made_from"]["sources"]
    assert sources == [{"source": f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"} for path in paths[:2]]
    with caplog.at_level("INFO"):
        call(DOWNLOAD, "--source", *paths[:2], "--output_dir", out)
    assert "nothing to do" in caplog.text
    sums = [hashlib.md5(path.read_bytes()).hexdigest() for path in paths[:2]]
    for other in (paths, paths[1::-1], paths[:1], [*paths[:2], "--md5", *sums]):
        with pytest.raises(UserError, match="give --overwrite"):
            call(DOWNLOAD, "--source", *other, "--output_dir", out)


def test_source_is_identified_by_content(tmp_path, caplog):
    path, out = tmp_path / "a.fasta", ("--output_dir", tmp_path / "out")
    path.write_text(">a\nMK\n")
    about = {"source": f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"}
    assert describe_sources(parse_sources([str(path)])) == about
    assert describe_sources(parse_sources(["https://x/y"])) == {"source": "https://x/y"}
    call(DOWNLOAD, f"--source={path}", *out)
    assert read_record(tmp_path / "out/csv")["made_from"].items() >= about.items()
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere/b.fasta"
    copy.write_bytes(path.read_bytes())
    with caplog.at_level("INFO"):
        call(DOWNLOAD, f"--source={copy}", *out)
    assert "nothing to do" in caplog.text
    edit_unnoticed(path, b"MK", b"ML")
    with pytest.raises(UserError, match="was made from other input"):
        call(DOWNLOAD, f"--source={path}", *out)


def test_fetch_keeps_other_sources_when_one_fails(tmp_path):
    out = tmp_path / "out"
    with http_server({"/a.fasta": b">a\nMK\n"}) as server:
        flags = ("--source", f"{server.url}/a.fasta", f"{server.url}/b.fasta", "--output_dir", out, "--no_shuffle")
        with pytest.raises(FetchError, match="/b.fasta: HTTP 404"):
            call(DOWNLOAD, *flags)
        assert [path.name for path in out.iterdir()] == [".download"]
        server.content["/b.fasta"] = b">b\nLA\n"
        call(DOWNLOAD, *flags)
        assert len(server.ranges) == 2
    assert rows(out) == ["a,MK", "b,LA"]
    assert [path.name for path in out.iterdir()] == ["csv"]


@pytest.mark.parametrize(
    ("sources", "flags", "said"),
    [
        (["absent.fasta"], [], "no such file"),
        (["*.fas"], [], "no such file or directory, and no file matches it"),
        (["."], ["--md5", MD5], "not a file but a directory: .*give the files"),
        (["data/absent.fasta.gz"], [], "no such file"),
        (["hf://models/owner/name"], [], "not a dataset of the Hub: expected hf://datasets/OWNER/NAME"),
        (["owner/name"], [], "owner/name: not in the local cache, and the Hub is switched off or cannot be reached"),
        (["a.fasta", "a.fasta"], [], "the same file as a.fasta"),
        (["http://x/y?sig=1", "http://x/y?sig=2"], [], "given twice"),
        (["gopher://x/y"], [], "cannot fetch gopher://"),
        (["a.fasta", "https:///y"], [], "not a complete address: expected https://HOST/PATH"),
        (["https://x:y/z"], [], "not a complete address"),
        (["https://[x/y?sig=mine"], [], "^https://...: not a complete address"),
        (["http://me:mine@x/y"], [], "^http://x/y: a user or password in the address is not supported"),
        (["a.fasta"], ["--md5", MD5[1:]], "expected 32 hexadecimal digits"),
        (["a.fasta"], ["--sha256", MD5], "expected 64 hexadecimal digits"),
        (["a.fasta"], ["--md5", MD5, MD5], "2 checksums for 1 sources"),
    ],
)
def test_parse_sources_refuses_bad_sources_first(tmp_path, monkeypatch, sources, flags, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.fasta").write_text(">a\nMK\n")
    with pytest.raises(UserError, match=said):
        call(DOWNLOAD, "--source", *sources, *flags, "--output_dir", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.fasta"]


def test_fetch_of_no_fasta_leaves_nothing(tmp_path):
    with http_server(b"<html>login</html>") as server, pytest.raises(UserError, match="not FASTA"):
        call(DOWNLOAD, "--source", f"{server.url}/u.fasta.gz", "--output_dir", tmp_path / "out")
    # Nothing else tells this one from a whole one.
    with (
        http_server(CONTENT, break_after=[THIRD], lacking="length") as server,
        pytest.raises(UserError, match="short"),
    ):
        call(DOWNLOAD, "--source", f"{server.url}/u.fasta.gz", "--output_dir", tmp_path / "out")
    assert not list(tmp_path.iterdir())


# --- checksums


def test_fetch_verifies_checksums_of_files_and_urls(tmp_path, caplog):
    (tmp_path / "a.fasta.gz").write_bytes(CONTENT)
    with http_server(CONTENT) as server:
        sources = [str(tmp_path / "a.fasta.gz"), f"{server.url}/b.fasta.gz"]
        with caplog.at_level("INFO"):
            paths = fetch(parse_sources(sources, [MD5, MD5.upper()], [SHA256] * 2), tmp_path / "d", QUICK)
        assert [path.read_bytes() for path in paths] == [CONTENT] * 2
        assert caplog.text.count("Verified") == 4
        wrong = parse_sources(sources[::-1], ["0" * 32, MD5])
        with pytest.raises(
            FetchError, match=f"b.fasta.gz: its md5 is {MD5}, --md5 says {'0' * 32}: the file was remo"
        ):
            fetch(wrong, tmp_path / "e", QUICK)
    with pytest.raises(FetchError, match=f"a.fasta.gz: its sha256 is {SHA256}, --sha256 says {'0' * 64}: it is"):
        fetch(parse_sources(sources[:1], sha256=["0" * 64]), tmp_path / "e", QUICK)
    assert (tmp_path / "a.fasta.gz").exists()  # the user's own


def test_download_data_reports_a_wrong_checksum_in_one_line(tmp_path):
    with http_server(CONTENT) as server:
        url = f"{server.url}/u.fasta.gz"
        arguments = ("--source", url, "--md5", "0" * 32, "--output_dir", tmp_path / "out")
        done = run_script(SCRIPT, *arguments, env=environment())
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == done.stderr.splitlines()[-1:]
    assert f"{url}: its md5 is {MD5}, --md5 says {'0' * 32}: the file was removed" in errors[0]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


# --- UniProt's own files


def uniprot(monkeypatch, server) -> str:
    """Have `server` stand for ftp.uniprot.org (as a proxy); returns the address of UniRef50 there."""
    monkeypatch.setenv("http_proxy", server.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return f"http://ftp.uniprot.org{UNIREF50}/uniref50.fasta.gz"


@pytest.mark.parametrize("broken", [[], [THIRD]])
def test_fetch_verifies_uniprot_files_by_metalink(tmp_path, monkeypatch, caplog, broken):
    metalink = METALINK.format(size=len(CONTENT), md5=MD5).encode()
    files = {f"{UNIREF50}/uniref50.fasta.gz": CONTENT, f"{UNIREF50}/RELEASE.metalink": metalink}
    with http_server(files, break_after=[len(metalink), *broken]) as server, caplog.at_level("INFO"):
        paths = fetch(parse_sources([uniprot(monkeypatch, server)]), tmp_path, QUICK)
    assert paths[0].read_bytes() == CONTENT
    assert f"uniref50.fasta.gz: md5 {MD5}" in caplog.text
    assert list(tmp_path.iterdir()) == paths


@pytest.mark.parametrize(
    ("size", "md5", "said"),
    [
        (len(CONTENT), "0" * 32, f"its md5 is {MD5}, RELEASE.metalink says {'0' * 32}"),
        (1, MD5, "RELEASE.metalink says 1: a release may be under way there"),
    ],
)
def test_fetch_refuses_uniprot_files_that_differ_from_the_metalink(tmp_path, monkeypatch, size, md5, said):
    metalink = METALINK.format(size=size, md5=md5).encode()
    files = {f"{UNIREF50}/uniref50.fasta.gz": CONTENT, f"{UNIREF50}/RELEASE.metalink": metalink}
    with http_server(files) as server, pytest.raises(FetchError, match=said):
        fetch(parse_sources([uniprot(monkeypatch, server)]), tmp_path / "d", QUICK)
    assert not list(tmp_path.rglob("*.gz*"))


@pytest.mark.parametrize("metalink", [None, b"<html>", METALINK.replace("uniref50.fasta", "other").encode()])
def test_fetch_without_metalink_warns_and_checks_the_size(tmp_path, monkeypatch, caplog, metalink):
    files = {f"{UNIREF50}/uniref50.fasta.gz": CONTENT}
    if metalink:
        files[f"{UNIREF50}/RELEASE.metalink"] = metalink
    with http_server(files) as server:
        paths = fetch(parse_sources([uniprot(monkeypatch, server)]), tmp_path, QUICK)
    assert paths[0].read_bytes() == CONTENT
    assert [r.levelname for r in caplog.records if "only" in r.message and "size" in r.message] == ["WARNING"]
    assert list(tmp_path.iterdir()) == paths


def test_fetch_fails_when_the_metalink_is_temporarily_unavailable(tmp_path, monkeypatch):
    with http_server({}, statuses=[503] * 3) as server, pytest.raises(FetchError, match="RELEASE.metalink: HTTP 503"):
        fetch(parse_sources([uniprot(monkeypatch, server)]), tmp_path / "d", QUICK)
    assert not list(tmp_path.iterdir())


def test_published_checksums_over_ftp(tmp_path):
    metalink = METALINK.format(size=len(CONTENT), md5=MD5.upper()).encode()
    with ftp_server({f"{UNIREF50}/RELEASE.metalink": metalink}) as server:
        beside = f"{server.url}{UNIREF50}/RELEASE.metalink"
        found = published_checksums(f"{server.url}{UNIREF50}/uniref50.fasta.gz", beside, tmp_path, QUICK)
    assert found == Expected({"md5": MD5}, len(CONTENT), "RELEASE.metalink")


def test_metalink_beside_uniprot_addresses_only():
    for scheme in ("https", "ftp"):
        beside = metalink_beside(f"{scheme}://ftp.uniprot.org{UNIREF50}/uniref50.fasta.gz")
        assert beside == f"{scheme}://ftp.uniprot.org{UNIREF50}/RELEASE.metalink"
    assert metalink_beside(DOWNLOAD.UNIREF50)
    assert metalink_beside(f"https://example.org{UNIREF50}/uniref50.fasta.gz") is None
    assert metalink_beside("https://ftp.ebi.ac.uk/pub/databases/ena/x.fasta.gz") is None
    assert read_metalink(METALINK.format(size=1, md5=MD5).encode(), "README").size == 10


# --- killed


def test_download_data_resumes_a_killed_download(tmp_path):
    out = tmp_path / "out"
    with http_server(CONTENT, break_after=[THIRD], stall_s=60.0) as server:
        arguments = ("--source", f"{server.url}/u.fasta.gz", "--sha256", SHA256, "--output_dir", out)
        process = Script(SCRIPT, *arguments, env=environment())
        there = lambda: any(path.stat().st_size >= THIRD for path in out.glob(".download/*.part"))  # noqa: E731
        assert wait_until(there, lambda: process.poll() is None), "the script ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (out / "csv").exists()
        call(DOWNLOAD, *arguments)
        assert server.ranges == [None, f"bytes={THIRD}-"]
        call(DOWNLOAD, *arguments)  # complete: no network needed
        assert len(server.ranges) == 2
        call(DOWNLOAD, *arguments[:-1], tmp_path / "undisturbed")
    assert everything_in(out) == everything_in(tmp_path / "undisturbed")
    assert len(rows(out)) == 50_000
    assert [path.name for path in out.iterdir()] == ["csv"]


def test_a_directory_that_cannot_be_listed_is_not_left_out(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.fasta").write_bytes(CONTENT)
    (tmp_path / "deep").mkdir()
    place = os.open(tmp_path / "deep", os.O_RDONLY)
    for _ in range(20):  # a path of more than PATH_MAX bytes, which not even root can list
        os.mkdir("d" * 250, dir_fd=place)
        place, above = os.open("d" * 250, os.O_RDONLY, dir_fd=place), place
        os.close(above)
    os.close(place)
    for name in (".deep", "lost+found"):  # not looked into
        (tmp_path / "deep").rename(tmp_path / "source" / name)
        assert [source.path.name for source in parse_sources([str(tmp_path / "source")])] == ["a.fasta"]
        (tmp_path / "source" / name).rename(tmp_path / "deep")
    (tmp_path / "deep").rename(tmp_path / "source/deep")
    with pytest.raises(UserError, match=r"--source .*source: .*File name too long: make it readable, or name what"):
        parse_sources([str(tmp_path / "source")])
