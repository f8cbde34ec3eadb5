"""build.sh and the image it makes, in a real Docker engine, on a base image made of this machine's own files."""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from docker.install_requirements import plan
from tests.conftest import ROOT
from tests.ops.base_image import BASE_TQDM, import_base_image, mounts
from tests.ops.docker_engine import docker_engine, need, ok
from tests.training_fixtures import DEFAULTS, TINY_MODEL

REQUIREMENTS = "REQUIREMENTS=requirements.txt requirements-test.txt"
ON_THE_TEST_BASE = ("BASE_IMAGE=base:1", "EFA_INSTALLER_VERSION=", REQUIREMENTS)
TESTS = {"tests", "benchmarks", "pytest.ini", "fp8_debugging_stats.yaml"}
SECRET = "_".join(("hf", "secret", "of", "the", "user"))  # not as it stands in this file, which the images hold


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A commit of this project's files in a private folder, with data, secrets and results lying about."""
    directory = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "shared", "out", "out-*", ".*_cache")
    shutil.copytree(ROOT, directory, ignore=ignored)
    git = ["git", "-C", str(directory), "-c", "user.name=t", "-c", "user.email=t@t"]
    for step in (["init", "-q"], ["add", "--all"], ["commit", "-qm", "One commit"]):
        ok([*git, *step], dict(os.environ))
    for name in ("data/x000.csv", "out/checkpoint-1/weights", "notes.parquet", "common/__pycache__/old.pyc"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(bytes(8 << 20))
    (directory / ".env").write_text(f"HF_TOKEN={SECRET}")
    ok(["chmod", "--recursive", "go=", str(directory)], dict(os.environ))
    return directory


def test_the_image(checkout, dataset, tmp_path):
    need("git", "dpkg-query", "ldd")
    with docker_engine() as environment:
        import_base_image("base:1", environment)
        environment |= {"DOCKER_IMAGE_NAME": "team/esm"}
        build = ["./build.sh", "--network=host", *(part for arg in ON_THE_TEST_BASE for part in ("--build-arg", arg))]
        assert ok(build, environment, cwd=checkout).endswith("./enroot.sh for Slurm\n")

        commit = ok(["git", "rev-parse", "HEAD"], environment, cwd=checkout).strip()
        image = f"team/esm:{commit[:12]}"
        inspected = json.loads(ok(["docker", "image", "inspect", image], environment))[0]
        assert inspected["Config"]["User"] == "1000:1000"
        assert inspected["Config"]["Labels"]["org.opencontainers.image.revision"] == commit
        ok(build, environment, cwd=checkout)
        again = json.loads(ok(["docker", "image", "inspect", image], environment))[0]
        assert again["Id"] == inspected["Id"]

        def run(*command, options: tuple = ()) -> str:
            return ok(["docker", "run", "--rm", "--network=host", *mounts(), *options, image, *command], environment)

        assert run("id", "-u").strip() == "1000"
        files = set(run("ls", "-A", "/workspace").split())
        assert {"train_ddp.py", "0.download_data.py", "common"} <= files
        assert files <= {path.name for path in ROOT.glob("*.py")} | {"common", "configs", "LICENSE"} | TESTS
        of = "from importlib.metadata import version as v; print(v('torch'), v('tqdm'), v('transformers'))"
        versions = [metadata.version("torch"), BASE_TQDM, metadata.version("transformers")]
        assert run("python3", "-c", of).split() == versions, "torch and constraints of the base, the rest ours"

        # `pytest` finds its tests: those of the model, of data and of a run pass, one of GPUs is skipped; of
        # what is not there it finds none, not this one.
        some = "test_attention.py or test_alphabet or test_an_epoch_of_packs_sees_every_protein or test_containers"
        some += " or test_weights_in_host_memory"
        passed = run("python3", "-m", "pytest", "-v", "-k", some, options=("--ipc=host",))
        tests = dict(re.findall(r"^tests/(\w+)/\S+ ([.s])+ ", passed, re.M))
        assert tests == {"layers": ".", "files": ".", "training": ".", "gpu": "s"}, passed
        assert re.search(r"^=* ?\d+ passed, 1 skipped, \d+ deselected in ", passed, re.M), passed

        # As the image's user on two ranks; then as somebody whom the image does not know.
        for user, launch in (
            (1000, ["torchrun", "--standalone", "--nproc_per_node=2"]),
            (12345, ["python3"]),
        ):
            out = tmp_path / f"out-{user}"
            out.mkdir()
            os.chown(out, user, user)
            flags = {**TINY_MODEL, **DEFAULTS, "max_steps": 2, "dataset_dir": "/data", "output_dir": "/out"}
            volumes = ("-v", f"{dataset}:/data:ro", "-v", f"{out}:/out", "--user", f"{user}:{user}")
            run(*launch, "train_ddp.py", *(f"--{name}={value}" for name, value in flags.items()), options=volumes)
            assert json.loads((out / "train_results.json").read_text())["train_loss"] > 0
            assert (out / "final_model" / "model.safetensors").stat().st_uid == user


def test_the_context_is_small_and_holds_no_data_and_no_secret(checkout, tmp_path):
    need("git")
    with docker_engine() as environment:
        (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
        ok(["docker", "build", "--tag", "context", "--file", tmp_path / "Dockerfile", checkout], environment)
        container = ok(["docker", "create", "context", "nothing"], environment).strip()
        ok(["docker", "export", "--output", tmp_path / "context.tar", container], environment)
    with tarfile.open(tmp_path / "context.tar") as archive:
        names = {entry.name for entry in archive if entry.isfile()}
        assert SECRET.encode() not in (tmp_path / "context.tar").read_bytes()
    assert {"train_ddp.py", "common/training/trainer.py", "configs/sanity.yaml", "constraints.txt"} <= names
    assert not {name for name in names if name.startswith(("data/", "out/", ".git/")) or name.endswith(".pyc")}
    assert (tmp_path / "context.tar").stat().st_size < 3 << 20


def test_what_the_base_brings_stays():
    requirements = [
        "torch==2.13.0",
        "numpy==2.4.6",
        "datasets==5.2.0",
        "transformer-engine[core-cu13,pytorch]==2.20.2",
    ]
    constraints = ["torch==2.13.0", "filelock==4.2.11", "Jinja2==3.1.6"]
    base = ["numpy==2.1.0", "jinja2==3.1.0", "scipy==1.16.0"]
    wanted, limits = plan(requirements, constraints, base, {"torch": "2.13.0a0+nv26.07", "transformer-engine": "2.18"})
    assert wanted == ["numpy", "datasets==5.2.0"]
    assert limits == [*base, "filelock==4.2.11", "torch==2.13.0a0+nv26.07", "transformer-engine==2.18"]
    # A plain base: everything as in the files.
    assert plan(requirements, constraints, [], {}) == (requirements, constraints)
