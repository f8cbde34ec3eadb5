"""push.sh, as it is, against a registry with a password and a stand-in for ECR."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from tests.conftest import ROOT
from tests.moto_server import moto_server
from tests.ops.docker_engine import docker_engine, need, ok, sh, tiny_image

ACCOUNT, REGION = "123456789012", "us-east-1"
HOST = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
PASSWORD = f"{ACCOUNT}-auth-token"  # what the stand-in for ECR gives out
REGISTRY_CONFIG = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {directory}/blobs}}}}
http: {{addr: "{address}:443", tls: {{certificate: {directory}/cert.pem, key: {directory}/key.pem}}}}
auth: {{htpasswd: {{realm: test, path: {directory}/htpasswd}}}}
"""


@contextlib.contextmanager
def registry(directory: Path, address: str, password: str) -> Iterator[None]:
    """Debian's docker-registry at port 443 of a loopback address, for the user AWS."""
    need("docker-registry", "htpasswd", "openssl")
    directory.mkdir()
    here = dict(os.environ)
    names = ("-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=registry")
    ok(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names], here, cwd=directory)
    (directory / "htpasswd").write_text(ok(["htpasswd", "-nbB", "AWS", password], here))
    config = directory / "config.yml"
    config.write_text(REGISTRY_CONFIG.format(directory=directory, address=address))
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(["docker-registry", "serve", config], stdout=log, stderr=log)
    try:
        for _ in range(300):
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(f"https://{address}/", context=ssl._create_unverified_context())
                break
            assert process.poll() is None, (directory / "log").read_text()
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def ecr(tmp_path: Path, password: str = PASSWORD) -> Iterator[dict[str, str]]:
    """Engine, registry and ECR; yields the environment of somebody who has the keys to them and the image esm:1."""
    address = f"127.77.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"  # its port 443 is this test's alone
    with docker_engine({HOST: address}) as environment, registry(tmp_path / "registry", address, password):
        tiny_image("esm:1", "one", tmp_path, environment)
        with moto_server() as url:
            keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": REGION}
            own = {"AWS_ENDPOINT_URL": url, "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true", "TAG": "1"}
            own |= {"REGISTRY_ADDRESS": address}
            path = f"{Path(sys.executable).parent}:{environment['PATH']}"  # the aws command is there
            unset = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_CA_BUNDLE", "REGISTRY", "ACCOUNT")
            inherited = {name: value for name, value in environment.items() if name not in unset}
            yield inherited | keys | own | {"PATH": path}


def push(environment: dict[str, str], **variables: str) -> subprocess.CompletedProcess:
    return sh(["./push.sh"], environment | variables, cwd=ROOT)


def pushed(environment: dict[str, str], **variables: str) -> str:
    """The reference by digest that push.sh prints."""
    done = push(environment, **variables)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{HOST}/\S+@sha256:[0-9a-f]{{64}}\n", done.stdout)
    return done.stdout.strip()


def error(environment: dict[str, str], **variables: str) -> str:
    done = push(environment, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr.strip().splitlines()[-1]


def client(environment: dict[str, str]):
    return boto3.client(
        "ecr",
        REGION,
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )


def tell_ecr(environment: dict[str, str], reference: str, tag: str) -> None:
    """ECR and its registry are one; here, what was pushed into the registry has to be told to the stand-in."""
    digest = reference.partition("@")[2]
    request = urllib.request.Request(f"https://{environment['REGISTRY_ADDRESS']}/v2/esm/manifests/{digest}")
    request.add_header("Authorization", f"Basic {base64.b64encode(f'AWS:{PASSWORD}'.encode()).decode()}")
    request.add_header("Accept", "application/vnd.docker.distribution.manifest.v2+json")
    manifest = urllib.request.urlopen(request, context=ssl._create_unverified_context()).read().decode()
    client(environment).put_image(repositoryName="esm", imageManifest=manifest, imageTag=tag, imageDigest=digest)


def test_push_makes_the_repository_and_prints_what_can_be_pulled(tmp_path):
    with ecr(tmp_path) as environment:
        reference = pushed(environment)
        repository = client(environment).describe_repositories(repositoryNames=["esm"])["repositories"][0]
        assert repository["imageScanningConfiguration"] == {"scanOnPush": True}
        assert repository["imageTagMutability"] == "MUTABLE"
        assert pushed(environment, REGISTRY=f"{HOST}/") == reference, "again, named as the guides do"
        ok(["docker", "image", "rm", "--force", "esm:1", f"{HOST}/esm:1"], environment)
        ok(["docker", "pull", reference], environment)
        tiny_image("esm:1", "two", tmp_path, environment)
        assert pushed(environment) != reference


def test_an_immutable_tag_is_left_as_it_is(tmp_path):
    with ecr(tmp_path) as environment:
        reference = pushed(environment, ECR_TAG_MUTABILITY="IMMUTABLE")
        tell_ecr(environment, reference, "1")
        done = push(environment)
        assert (done.returncode, done.stdout.strip()) == (0, reference), done.stderr
        assert "this very image already" in done.stderr
        assert "Pushing" not in done.stderr
        tiny_image("esm:1", "two", tmp_path, environment)
        assert "esm:1 is another image, and tags of this repository are immutable" in error(environment)
        ok(["docker", "tag", "esm:1", "esm:2"], environment)
        assert pushed(environment, TAG="2") != reference


def test_what_is_wrong_is_said_in_one_line(tmp_path):
    with ecr(tmp_path, password="another") as environment:
        assert re.search(rf"^error: {HOST} refuses the login: .*401 Unauthorized", error(environment))
        assert "there is no image esm:3 here: run ./build.sh" in error(environment, TAG="3")
        assert "AWS_REGION is not set" in error(environment, AWS_REGION="")
        keyless = environment | {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
        assert re.search("^error: ACCOUNT is not set .*credentials", error(keyless))
        assert re.search("^error: cannot look up the repository esm .*credentials", error(keyless, ACCOUNT=ACCOUNT))
        assert "has no host: unset it" in error(environment, REGISTRY=".dkr.ecr.us-east-1.amazonaws.com/")
        nobody = {"DOCKER_HOST": f"unix://{tmp_path}/nothing.sock"}
        assert "no Docker engine answers" in error(environment, **nobody)


@pytest.fixture(autouse=True)
def _needs() -> None:
    need("docker-registry", "htpasswd", "openssl", "tar")
