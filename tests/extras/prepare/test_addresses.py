"""Keys in URLs: neither shown nor kept, and a new one opens the same file."""

from __future__ import annotations

import pytest

from extras.prepare.download import RetryPolicy, download
from extras.prepare.output_directory import read_record
from extras.prepare.transfers import FetchError, identity, shown
from tests.data_fixtures import environment
from tests.extras.prepare.local_servers import CONTENT, QUICK, THIRD, http_server
from tests.forked import run_script


@pytest.mark.parametrize(
    "keys",
    [
        "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=topsecret&X-Amz-Date={0}&X-Amz-Signature=topsecret{0}",
        "AWSAccessKeyId=topsecret&Expires={0}&Signature=topsecret{0}",
        "Policy=topsecret{0}&Signature=topsecret{0}&Key-Pair-Id=topsecret",
        "X-Goog-Signature=topsecret{0}&X-Goog-Expires={0}",
        "sv=2022-11-02&se={0}&sr=b&sp=r&sig=topsecret{0}",
        "access_token=topsecret{0}",
        "api_key=topsecret{0}",
    ],
)
def test_shown_and_identity_drop_access_keys(keys):
    urls = [f"https://me:topsecret@host:8443/a.fasta?{keys.format(n)}#x" for n in (1, 2)]
    assert {identity(url) for url in urls} == {"https://host:8443/a.fasta"}
    assert {shown(url) for url in urls} == {"https://host:8443/a.fasta?..."}


def test_identity_keeps_other_parameters():
    urls = [f"https://rest.uniprot.org/stream?format=fasta&query={asked}" for asked in ("reviewed", "human")]
    assert len({identity(url) for url in urls}) == 2
    assert identity(f"{urls[0]}&token=topsecret") == identity(urls[0])
    assert not any("reviewed" in text for text in (identity(urls[0]), shown(urls[0])))
    assert identity("s3://bucket/a.fasta") == shown("s3://bucket/a.fasta") == "s3://bucket/a.fasta"


def test_download_resumes_with_a_new_signature(tmp_path):
    with http_server(CONTENT, break_after=[THIRD]) as server:
        url = server.url + "/a.fasta.gz?X-Amz-Signature="
        with pytest.raises(FetchError, match=r"/a\.fasta\.gz\?\.\.\.: ") as stopped:
            download(url + "topsecret1", tmp_path, retries=RetryPolicy(attempts=1))
        assert "topsecret" not in str(stopped.value)
        assert download(url + "topsecret2", tmp_path, retries=QUICK).read_bytes() == CONTENT
        assert server.ranges == [None, f"bytes={THIRD}-"]


def test_download_data_neither_logs_nor_records_a_signature(tmp_path):
    out, said = tmp_path / "out", ""
    with http_server(CONTENT) as server:
        for n in (1, 2):
            source = f"{server.url}/a.fasta.gz?X-Amz-Signature=topsecret{n}"
            done = run_script("0.download_data.py", "--source", source, "--output_dir", out, env=environment())
            assert done.returncode == 0, done.stderr
            said += done.stdout + done.stderr
        assert len(server.ranges) == 1
    assert "nothing to do" in said
    assert "topsecret" not in said
    assert "topsecret" not in str(read_record(out / "csv"))
