"""--dataset owner/name against a Hub on this machine: in place, downloaded, offline, refused, overloaded."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.data.stream_fixtures import first_epoch, plan_of, proteins, write
from tests.extras.prepare.sources.hub_server import COMMIT, hub_server
from tests.forked import run_script

READ = """
import sys
from common import cli
from extras.prepare.sources import hub
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.streams import plan_streams
from tests.data.stream_fixtures import first_epoch, PACKED
if "--impatient" in sys.argv:
    hub.ATTEMPTS = 1
with cli.user_errors():
    name = sys.argv[sys.argv.index("--name") + 1] if "--name" in sys.argv else "org/proteins"
    source = open_source(name, "--streaming" in sys.argv)
    print(source.revision)
    print(*sorted(first_epoch(plan_streams(source.splits["train"], 4, **PACKED))), sep="\\n")
"""


@pytest.fixture
def repo(tmp_path):
    root = tmp_path / "repo"
    write(root / "data" / "train-00000-of-00002.parquet", proteins(60))
    write(root / "data" / "train-00001-of-00002.parquet", proteins(60, seed=2))
    write(root / "data" / "validation.jsonl", proteins(10, seed=3))
    (root / "README.md").write_text("# Proteins")
    return root


def read(home, url: str, *flags, **variables) -> subprocess.CompletedProcess:
    """What another process makes of dataset org/proteins on that Hub, whose address is read by an import."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"} | variables
    script = home.with_suffix(".py")
    script.write_text(READ)
    return run_script(str(script), *flags, env=environment, anew=("huggingface_hub", "common", "extras"))


def test_hub_streamed_downloaded_and_offline_are_the_same(repo, tmp_path):
    expected = sorted(first_epoch(plan_of(repo)))
    assert len(expected) == 120
    with hub_server("org/proteins", repo) as hub:
        streamed = read(tmp_path / "home", hub.url, "--streaming")
        assert streamed.stdout.split() == [COMMIT, *expected], streamed.stderr
        assert not list((tmp_path / "home").rglob("*.parquet")), "streaming has stored the files"
        downloaded = read(tmp_path / "home", hub.url)
        assert downloaded.stdout.split()[1:] == expected, downloaded.stderr
    for switch in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        for flags in ((), ("--streaming",)):
            offline = read(tmp_path / "home", "http://127.0.0.1:9", *flags, **{switch: "1"})
            assert offline.stdout.split()[1:] == expected, offline.stderr


def test_hub_address_of_a_part(repo, tmp_path):
    """A file, a pattern and a directory, in place and downloaded; no other file is fetched."""
    parts = {"data/train-00001-of-00002.parquet": 60, "data/train*": 120, "data": 120, f"@{COMMIT}/data/train*": 120}
    with hub_server("org/proteins", repo) as hub:
        for number, (part, count) in enumerate(parts.items()):
            address = "hf://datasets/org/proteins" + (part if part.startswith("@") else f"/{part}")
            streamed = read(tmp_path / f"home{number}", hub.url, "--streaming", "--name", address)
            assert streamed.stdout.split()[0] == COMMIT, streamed.stderr
            downloaded = read(tmp_path / f"home{number}", hub.url, "--name", address)
            assert downloaded.stdout.split()[1:] == streamed.stdout.split()[1:], downloaded.stderr
            assert len(downloaded.stdout.split()) == 1 + count
            assert not list((tmp_path / f"home{number}").rglob("README.md"))


def test_hub_retries_when_overloaded(repo, tmp_path):
    with hub_server("org/proteins", repo, refuse=1) as hub:
        done = read(tmp_path / "home", hub.url, "--streaming")
    assert len(done.stdout.split()) == 121, done.stderr


def test_hub_overload_ends_in_one_line(repo, tmp_path):
    with hub_server("org/proteins", repo, refuse=10**6) as hub:
        failed = read(tmp_path / "home", hub.url, "--streaming", "--impatient")
        assert hub.calls["GET"] > 1
    assert failed.returncode == 2, failed.stderr
    last = failed.stderr.strip().splitlines()[-1]
    assert "429 (too many requests, usually from many nodes at once): set HF_TOKEN, or better hf download" in last


@pytest.mark.parametrize(
    ("behaviour", "name", "variables", "message"),
    [
        ({}, "org/other", {}, "no such dataset on the Hub, or it is private: set HF_TOKEN"),
        ({"refuse": 10**6, "status": 403}, "org/proteins", {}, "the Hub refuses access (403)"),
        ({}, "org/proteins", {"HF_HUB_OFFLINE": "1"}, "hf download org/proteins --repo-type dataset --local-dir DIR"),
    ],
)
def test_hub_refusal_is_one_line(repo, tmp_path, behaviour, name, variables, message):
    with hub_server(name, repo, **behaviour) as hub:
        failed = read(tmp_path / "home", hub.url, "--streaming", **variables)
    assert failed.returncode == 2, failed.stderr
    last = failed.stderr.strip().splitlines()[-1]
    assert message in last
    assert "org/proteins" in last
