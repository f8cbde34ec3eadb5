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
def registry(directory: Path, address: str) -> Iterator[None]:
    """Debian's docker-registry at port 443 of a loopback address, for the user AWS. It looks at htpasswd each time."""
    directory.mkdir()
    here = dict(os.environ)
    names = ("-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=registry")
    ok(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names], here, cwd=directory)
    (directory / "htpasswd").write_text(ok(["htpasswd", "-nbB", "AWS", PASSWORD], here))
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


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Engine, registry and ECR; yields the environment of somebody who has the keys to them."""
    need("docker-registry", "htpasswd", "openssl", "tar")
    directory = tmp_path_factory.mktemp("push")
    address = f"127.77.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"  # its port 443 is this process' alone
    with (
        docker_engine({HOST: address}) as environment,
        registry(directory / "registry", address),
        moto_server() as url,
    ):
        keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": REGION}
        own = {"AWS_ENDPOINT_URL": url, "HOME": str(directory), "AWS_EC2_METADATA_DISABLED": "true", "TAG": "1"}
        own |= {"REGISTRY_ADDRESS": address, "PASSWORDS": str(directory / "registry" / "htpasswd")}
        path = f"{Path(sys.executable).parent}:{environment['PATH']}"  # the aws command is there
        unset = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_CA_BUNDLE", "REGISTRY", "ACCOUNT")
        inherited = {name: value for name, value in environment.items() if name not in unset}
        yield inherited | keys | own | {"PATH": path}


@pytest.fixture
def ecr(engine, tmp_path, request) -> dict[str, str]:
    """The same with a repository's name, which is also that of an image, of the test's own."""
    name = f"esm-{request.node.name.removeprefix('test_').replace('_', '-')[:40]}"
    tiny_image(f"{name}:1", "one", tmp_path, engine)
    # aws says what it likes on standard error, of what it then answers.
    aws = tmp_path / "aws"
    aws.write_text(f'#!/bin/sh\necho "warning: this Python is old" >&2\nexec {Path(sys.executable).parent}/aws "$@"\n')
    aws.chmod(0o755)
    return engine | {"DOCKER_IMAGE_NAME": name, "PATH": f"{tmp_path}:{engine['PATH']}"}


@contextlib.contextmanager
def another_password(environment: dict[str, str]) -> Iterator[None]:
    """While it lasts, the registry has another one than ECR gives out."""
    file = Path(environment["PASSWORDS"])
    right = file.read_text()
    file.write_text(ok(["htpasswd", "-nbB", "AWS", "another"], dict(os.environ)))
    try:
        yield
    finally:
        file.write_text(right)


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
    """ECR and its registry are one; here, what was pushed into the registry has to be reported to the stand-in."""
    digest, name = reference.partition("@")[2], environment["DOCKER_IMAGE_NAME"]
    request = urllib.request.Request(f"https://{environment['REGISTRY_ADDRESS']}/v2/{name}/manifests/{digest}")
    request.add_header("Authorization", f"Basic {base64.b64encode(f'AWS:{PASSWORD}'.encode()).decode()}")
    request.add_header("Accept", "application/vnd.docker.distribution.manifest.v2+json")
    manifest = urllib.request.urlopen(request, context=ssl._create_unverified_context()).read().decode()
    client(environment).put_image(repositoryName=name, imageManifest=manifest, imageTag=tag, imageDigest=digest)


def test_push_makes_the_repository_and_prints_what_can_be_pulled(ecr, tmp_path):
    name = ecr["DOCKER_IMAGE_NAME"]
    reference = pushed(ecr)
    repository = client(ecr).describe_repositories(repositoryNames=[name])["repositories"][0]
    assert repository["imageScanningConfiguration"] == {"scanOnPush": True}
    assert repository["imageTagMutability"] == "MUTABLE"
    assert pushed(ecr, REGISTRY=f"{HOST}/") == reference, "again, named as the guides do"
    ok(["docker", "image", "rm", "--force", f"{name}:1", f"{HOST}/{name}:1"], ecr)
    ok(["docker", "pull", reference], ecr)
    tiny_image(f"{name}:1", "two", tmp_path, ecr)
    assert pushed(ecr, ACCOUNT=ACCOUNT) != reference


@pytest.mark.slow
def test_push_keeps_an_immutable_tag(ecr, tmp_path):
    name, ecr = ecr["DOCKER_IMAGE_NAME"], ecr | {"ACCOUNT": ACCOUNT}
    reference = pushed(ecr, ECR_TAG_MUTABILITY="IMMUTABLE")
    tell_ecr(ecr, reference, "1")
    done = push(ecr)
    assert (done.returncode, done.stdout.strip()) == (0, reference), done.stderr
    assert "this very image already" in done.stderr
    assert "Pushing" not in done.stderr
    tiny_image(f"{name}:1", "two", tmp_path, ecr)
    assert f"{name}:1 is another image, and tags of this repository are immutable" in error(ecr)
    ok(["docker", "tag", f"{name}:1", f"{name}:2"], ecr)
    assert pushed(ecr, TAG="2") != reference


def test_push_reports_errors_in_one_line(ecr, tmp_path):
    name = ecr["DOCKER_IMAGE_NAME"]
    with another_password(ecr):
        refusal = error(ecr, ACCOUNT=ACCOUNT)
    assert re.search(rf"^error: {HOST} refuses the login: .*401 Unauthorized", refusal)
    assert f"there is no image {name}:3 here: run ./build.sh" in error(ecr, TAG="3")
    assert "AWS_REGION is not set" in error(ecr, AWS_REGION="")
    assert "ACCOUNT=mine is no account of AWS: twelve digits" in error(ecr, ACCOUNT="mine")
    keyless = ecr | {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    assert re.search("^error: ACCOUNT is not set .*credentials", error(keyless))
    assert re.search(f"^error: cannot look up the repository {name} .*credentials", error(keyless, ACCOUNT=ACCOUNT))
    assert "has no host: unset it" in error(ecr, REGISTRY=".dkr.ecr.us-east-1.amazonaws.com/")
    no_engine = {"DOCKER_HOST": f"unix://{tmp_path}/nothing.sock"}
    assert "no Docker engine answers" in error(ecr, **no_engine)
