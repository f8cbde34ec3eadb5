"""build.sh and the image it makes, in a real Docker engine, on a base image made of this machine's own files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from docker import install_requirements
from docker.install_requirements import closure, name_of, plan, read_lock, read_requirements
from extras.prepare.sample import write_sample
from tests.conftest import ROOT
from tests.ops.base_image import BASE_TQDM, import_base_image, mounts
from tests.ops.docker_engine import docker_engine, need, ok
from tests.training_fixtures import DEFAULTS, TINY_MODEL

REQUIREMENTS = "REQUIREMENTS=requirements.txt requirements-test.txt"
ON_THE_TEST_BASE = ("BASE_IMAGE=base:1", "EFA_INSTALLER_VERSION=", REQUIREMENTS)
TESTS = {"tests", "benchmarks", "pyproject.toml", "fp8_debugging_stats.yaml"}
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


def test_image_builds_and_trains(checkout, dataset, tmp_path):
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
        labels = inspected["Config"]["Labels"]
        assert labels["org.opencontainers.image.revision"] == commit
        assert labels["org.opencontainers.image.base.name"] == "base:1"
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert labels["org.opencontainers.image.version"] == project["version"]
        ok(build, environment, cwd=checkout)
        again = json.loads(ok(["docker", "image", "inspect", image], environment))[0]
        assert again["Id"] == inspected["Id"]

        def run(*command, options: tuple = ()) -> str:
            return ok(["docker", "run", "--rm", "--network=host", *mounts(), *options, image, *command], environment)

        assert run("id", "-u").strip() == "1000"
        files = set(run("ls", "-A", "/workspace").split())
        assert {"train_ddp.py", "0.download_data.py", "common", "extras"} <= files
        assert files <= {path.name for path in ROOT.glob("*.py")} | {"common", "extras", "configs", "LICENSE"} | TESTS
        of = "from importlib.metadata import version as v; print(v('torch'), v('tqdm'), v('transformers'))"
        versions = [metadata.version("torch"), BASE_TQDM, metadata.version("transformers")]
        assert run("python3", "-c", of).split() == versions, "torch and constraints of the base, the rest ours"

        # `pytest` finds its tests: those of the model pass, one of GPUs is skipped; of what is not there it finds
        # none, not this one. Only these directories: to import all tests takes longer than to run these.
        some = "test_attention.py or test_cpu_offload_trains or test_containers"
        passed = run("python3", "-m", "pytest", "-v", "-k", some, "tests/models", "tests/gpu")
        tests = dict(re.findall(r"^tests/(\w+)/\S+ ([.s])+ ", passed, re.M))
        assert tests == {"models": ".", "gpu": "s"}, passed
        assert re.search(r"^=* ?\d+ passed, 1 skipped, \d+ deselected in ", passed, re.M), passed

        # NVIDIA's guide: a checkout mounted below them, another user's, which has tests of the same names.
        mounted = ("-v", f"{checkout}:/workspace/bionemo")
        collected = run("python3", "-P", "-m", "pytest", "-v", "--collect-only", ".", options=mounted)
        assert "<Module test_attention.py>" in collected
        assert "bionemo" not in collected

        # The guides' command, where the folder is another user's.
        (theirs := tmp_path / "theirs").mkdir()
        write_sample(tmp_path / "a.fasta", num_proteins=9, seed=1)
        volumes = ("-v", f"{theirs}:/data", "-v", f"{tmp_path}/a.fasta:/a.fasta:ro")
        download = ("python3", "0.download_data.py", "--source", "/a.fasta", "--output_dir", "/data")
        denied = subprocess.run(
            ["docker", "run", "--rm", *mounts(), *volumes, image, *download],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        (line,) = [line for line in denied.stderr.splitlines() if line.startswith("error: ")]
        assert denied.returncode == 2
        assert (
            "Permission denied: /data belongs to user 0, and this is user 1000: add --user $(id -u):$(id -g)" in line
        )
        run(*download, options=(*volumes, "--user", "0:0"))
        assert (theirs / "csv" / "x000.csv").exists()

        # As the image's user on two ranks; then as somebody whom the image does not know.
        for user, launch in (
            (1000, ["torchrun", "--standalone", "--nproc_per_node=2"]),
            (12345, ["python3"]),
        ):
            out = tmp_path / f"out-{user}"
            out.mkdir()
            os.chown(out, user, user)
            flags = {**TINY_MODEL, **DEFAULTS, "max_steps": 2, "dataset_dir": "/data", "output_dir": "/out"}
            flags["save_final_model"] = user == 1000
            volumes = ("-v", f"{dataset}:/data:ro", "-v", f"{out}:/out", "--user", f"{user}:{user}")
            run(*launch, "train_ddp.py", *(f"--{name}={value}" for name, value in flags.items()), options=volumes)
            assert json.loads((out / "train_results.json").read_text())["train_loss"] > 0
            assert (out / "train_results.json").stat().st_uid == user
            assert (out / "final_model" / "model.safetensors").exists() == (user == 1000)


def test_image_context_has_no_data_and_no_secrets(checkout, tmp_path):
    need("git")
    with docker_engine() as environment:
        (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
        ok(["docker", "build", "--tag", "context", "--file", tmp_path / "Dockerfile", checkout], environment)
        container = ok(["docker", "create", "context", "nothing"], environment).strip()
        ok(["docker", "export", "--output", tmp_path / "context.tar", container], environment)
    with tarfile.open(tmp_path / "context.tar") as archive:
        sizes = {entry.name: entry.size for entry in archive if entry.isfile()}
        assert SECRET.encode() not in (tmp_path / "context.tar").read_bytes()
    assert {"train_ddp.py", "common/training/loop.py", "configs/sanity.yaml", "requirements.lock"} <= set(sizes)
    assert not {name for name in sizes if name.startswith(("data/", "out/", ".git/")) or name.endswith(".pyc")}
    assert sum(sizes.values()) < 7 << 20
    assert sum(size for name, size in sizes.items() if not name.endswith(".py")) < 1 << 19


LOCK = """\
datasets==5.2.0 \\
    --hash=sha256:01 \\
    --hash=sha256:02
    # via -r requirements.txt
flash-attn==2.8.3 \\
    --hash=sha256:03
    # via -r requirements-gpu.txt
Jinja2==3.1.6 \\
    --hash=sha256:04
    # via torch, -c constraints.txt
numpy==2.4.6 \\
    --hash=sha256:05
    # via -r requirements.txt, datasets
onnx-ir==1.1.0 \\
    --hash=sha256:06
    # via onnx.script
onnx_script==0.7.2 \\
    --hash=sha256:07
    # via transformer-engine
torch==2.13.0 \\
    --hash=sha256:08
    # via -r requirements.txt, flash-attn
transformer-engine==2.20.2 \\
    --hash=sha256:09
    # via -r requirements-gpu.txt
"""


def test_image_keeps_the_base_images_packages(tmp_path):
    (tmp_path / "requirements.lock").write_text(LOCK)
    lock, files = read_lock(tmp_path / "requirements.lock"), ["requirements.txt", "requirements-gpu.txt"]
    kept = {"torch": "2.13.0a0+nv26.07", "transformer-engine": "2.18"}
    base = ["numpy==2.1.0", "scipy==1.16.0"]
    hashed, unhashed, limits = plan(lock, files, base, kept, {"torch", "numpy"})
    assert hashed == ["datasets==5.2.0 --hash=sha256:01 --hash=sha256:02", "flash-attn==2.8.3 --hash=sha256:03"]
    assert unhashed == [], "it is there"
    assert plan(lock, files, base, kept, {"torch"})[1] == ["numpy"]
    assert limits == [*base, "torch==2.13.0a0+nv26.07", "transformer-engine==2.18"]
    # A plain base: everything as in the lock, but for what no file wants.
    assert [line.split("==")[0] for line in plan(lock, files, [], {}, set())[0]] == sorted(
        ["datasets", "flash-attn", "Jinja2", "numpy", "onnx_script", "torch", "transformer-engine"]
        + ["onnx-ir"], key=lambda name: name.lower().replace("_", "-"))  # fmt: skip
    assert len(plan(lock, files[:1], [], {}, set())[0]) == 4


def test_image_installs_flash_attn_4_after_flash_attn(tmp_path, monkeypatch, capsys):
    """Over the files of the same names; where the base rules it out, the image is made without it."""
    locked = (("flash-attn", "-r gpu.txt"), ("flash-attn-4", "-r gpu.txt"), ("quack-kernels", "flash-attn-4"))
    lines = [f"{name}==1 \\\n    --hash=sha256:0{n}\n    # via {by}\n" for n, (name, by) in enumerate(locked)]
    (tmp_path / "requirements.lock").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    wanted = []

    def pip(command: list[str], env: dict) -> int:
        wanted.append(re.findall(r"^[a-z0-9-]+", Path(command[command.index("-r") + 1]).read_text(), re.M))
        return len(wanted) - 1  # fails the second time

    monkeypatch.setattr(subprocess, "call", pip)
    assert install_requirements.main(["gpu.txt"]) == 0
    assert wanted == [["flash-attn"], ["flash-attn", "flash-attn-4", "quack-kernels"]]
    assert "warning: flash-attn-4 does not go with what the base brings" in capsys.readouterr().err


def test_image_lock_hashes_are_checked(tmp_path):
    """With the real pip: a package that is another one than was locked is refused, whatever its version says."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    lines = []
    for name, needs in (("alpha", "Requires-Dist: beta"), ("beta", "")):
        write_wheel(wheels / f"{name}-1.0-py3-none-any.whl", name, needs)
        digest = hashlib.sha256((wheels / f"{name}-1.0-py3-none-any.whl").read_bytes()).hexdigest()
        lines.append(
            f"{name}==1.0 \\\n    --hash=sha256:{digest}\n    # via {'alpha' if not needs else '-r wanted.txt'}\n"
        )
    (tmp_path / "requirements.lock").write_text("".join(lines))

    def install(where: str) -> subprocess.CompletedProcess:
        options = [f"--target={tmp_path / where}", "--no-index", f"--find-links={wheels}"]
        command = [sys.executable, ROOT / "docker" / "install_requirements.py", "wanted.txt", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = install("good")
    assert done.returncode == 0, done.stderr
    assert {"alpha.py", "beta.py"} <= {path.name for path in (tmp_path / "good").iterdir()}
    write_wheel(wheels / "beta-1.0-py3-none-any.whl", "beta", "", "print('not what was locked')")
    done = install("bad")
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "bad").exists()


def write_wheel(path: Path, name: str, needs: str, content: str = "") -> None:
    """A wheel of one module."""
    information = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", content)
        archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}\n")
        archive.writestr(
            f"{information}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{information}/RECORD", "")


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-hyperpod.lock"])
def test_image_lock_matches_requirements(name):
    """Made anew after each change of them (docker/lock.sh): all that they pin, with hashes."""
    own = "requirements-hyperpod.txt"
    others = {path.name for path in ROOT.glob("requirements*.txt")} - {own, "requirements-dev.txt"}
    files = [own] if "hyperpod" in name else sorted(others)
    lock = read_lock(ROOT / name)
    locked = {name: package.pinned.split()[0].split("==")[1] for name, package in lock.items()}
    for file in files:
        for line in read_requirements(ROOT / file):
            assert locked[name_of(line)] == line.split("==")[1], f"{file}: {line}"
            assert f"-r {file}" in lock[name_of(line)].wanted_by
    for line in read_requirements(ROOT / "constraints.txt"):
        assert locked.get(name_of(line), line.split("==")[1]) == line.split("==")[1], line
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}$", package.pinned) for package in lock.values())
    assert set(closure(lock, files, set())) == lock.keys()
