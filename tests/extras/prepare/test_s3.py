"""s3:// sources, against moto's server: resumed, refused, and without credentials."""

import os
import random
from collections.abc import Iterator

import boto3
import pytest

from extras.prepare.download import RetryPolicy, download
from extras.prepare.transfers import FetchError
from tests.data_fixtures import environment, everything_in
from tests.extras.prepare.local_servers import QUICK, breaking_proxy, http_server, sums
from tests.forked import run_script
from tests.moto_server import moto_server

CONTENT = random.Random(0).randbytes(300_000)
FASTA = "".join(f">P{i} x\nMKVLAGTYRR\n" for i in range(1000)).encode()
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
# Nothing of the user's own, and no asking around for what machine this is.
ALONE = {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def s3(server, monkeypatch):
    """A client for the bucket `proteins`, which is there in this process' environment, too."""
    for name, value in (KEYS | ALONE).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    client = boto3.client("s3", endpoint_url=server)
    client.create_bucket(Bucket="proteins")
    client.put_object(Bucket="proteins", Key="dir/u 100%.fasta.gz", Body=CONTENT)
    client.put_object(Bucket="proteins", Key="u.fasta", Body=FASTA)
    return client


URL = "s3://proteins/dir/u 100%.fasta.gz"


def test_s3_downloads_an_object(s3, tmp_path):
    path = download(URL, tmp_path, sums(CONTENT, size=len(CONTENT)), QUICK)
    assert path.read_bytes() == CONTENT
    assert [path] == list(tmp_path.iterdir())


def test_s3_resumes_a_broken_connection(s3, server, tmp_path, monkeypatch):
    with breaking_proxy(server, break_after=[100_000, 50_000]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        assert download(URL, tmp_path, sums(CONTENT), QUICK).read_bytes() == CONTENT
    assert proxy.connections == 3
    assert len(CONTENT) < proxy.passed < len(CONTENT) + 10_000  # with the answers' headers: nothing came twice


def test_s3_restarts_when_the_object_changed(s3, server, tmp_path, monkeypatch):
    newer = CONTENT[::-1]
    change = {"Bucket": "proteins", "Key": "dir/u 100%.fasta.gz", "Body": newer}
    with breaking_proxy(server, [100_000], before_closing=lambda: s3.put_object(**change)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        assert download(URL, tmp_path, retries=QUICK).read_bytes() == newer


def test_s3_resumes_after_a_stall(s3, server, tmp_path, monkeypatch):
    retries = RetryPolicy(timeout_s=0.3, attempts=3, first_wait_s=0.01)
    with breaking_proxy(server, [100_000], trickle=True) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        assert download(URL, tmp_path, sums(CONTENT), retries).read_bytes() == CONTENT
    assert proxy.connections == 2


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://proteins/absent.fasta", "NoSuchKey: .*Check the address"),
        ("s3://no-such-bucket/u.fasta", "NoSuchBucket: .*Check the address"),
        ("s3://proteins", "expected s3://BUCKET/KEY"),
        ("s3://Not_A_Bucket!/u.fasta", "Invalid bucket name.*check the address"),
    ],
)
def test_s3_refuses_wrong_addresses(s3, tmp_path, url, said):
    with pytest.raises(FetchError, match=said):
        download(url, tmp_path / "d", retries=RetryPolicy(first_wait_s=60))
    assert not list(tmp_path.iterdir())


def test_s3_reports_busy_denied_and_unreachable(s3, tmp_path, monkeypatch):
    with http_server(CONTENT, statuses=[503] * 3) as busy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", busy.url)
        with pytest.raises(FetchError, match=r"HTTP 503 .*\(3 attempts\): the server is busy"):
            download(URL, tmp_path / "d", retries=QUICK)
        busy.statuses.append(403)
        with pytest.raises(FetchError, match="Forbidden.*AWS credentials .*aws configure"):
            download(URL, tmp_path / "d", retries=RetryPolicy(first_wait_s=60))
    with pytest.raises(FetchError, match=r"Could not connect.*\(3 attempts\): check the network"):
        download(URL, tmp_path / "d", retries=QUICK)
    assert not list(tmp_path.iterdir())


def test_s3_source_with_and_without_credentials(s3, server, tmp_path):
    def start(**variables):
        own = {name: value for name, value in environment().items() if not name.startswith("AWS_")}
        flags = ("--source", "s3://proteins/u.fasta", "--output_dir", tmp_path / "out")
        return run_script("0.download_data.py", *flags, env=own | ALONE | {"AWS_ENDPOINT_URL": server} | variables)

    done = start()
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]
    assert said.startswith("error: s3://proteins/u.fasta: Unable to locate credentials: run `aws configure`")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    done = start(**KEYS)
    assert done.returncode == 0, done.stderr
    assert everything_in(tmp_path / "out")["csv/x000.csv"].count(b"\n") == 1001
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["csv"]
