"""install.sh --gpu: what it looks for before it compiles, and in which order it installs. --dev: what it sets aside.

nvidia-smi, nvcc, the compilers and Python are stand-ins: this one answers for torch, writes down what pip is told, and
makes no venv but a copy of itself.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.real_downstream import MAVENN
from tests import patience
from tests.training_fixtures import ROOT

PYTHON = f"""\
#!/bin/bash
case "$*" in
  "-m venv .venv")
    mkdir -p .venv/bin .venv/lib/python3.12/site-packages/nvidia/{{cu13,cudnn}}/include
    cp "$0" .venv/bin/python ;;
  "-m pip "*) echo "$CPATH" >cpath; [[ "$*" != *"${{REFUSED:-nothing}}"* ]] || exit 1
    [[ "$*" != *--target* ]] || mkdir -p .venv/te_on_cpu .venv/mavenn
    echo "${{@:4}}" >>pip.log ;;
  *"import torch"*) echo "$TORCH_CUDA" ;;
  *"import flash_attn"*) [ -z "$DOES_NOT_LOAD" ] ;;
  *Python.h*) [ -z "$NO_HEADERS" ] ;;
  *) exec {os.path.realpath(sys.executable)} "$@" ;;
esac
"""
PROGRAMS = {
    "python3": PYTHON,
    "nvcc": '#!/bin/sh\necho "Cuda compilation tools, release ${TOOLKIT:-13.0}, V13.0.88"\n',
    "nvidia-smi": '#!/bin/sh\necho "${DRIVER:-580.65.06}"\n',
    "c++": "#!/bin/sh\n",
    "ninja": "#!/bin/sh\n",
}
NEEDED = ["cat", "cksum", "sed", "grep", "dirname", "uname", "rm", "mkdir", "cp", "bash", "sh", "env"]
REQUIREMENTS = re.findall(r"^[a-z]\S+", (ROOT / "requirements-gpu.txt").read_text(), re.M)


@pytest.fixture
def install(tmp_path):
    """A function that runs the command in a checkout of its own, with these programs and variables: (status, said)."""
    for path in (*ROOT.glob("requirements*.txt"), ROOT / "constraints.txt", ROOT / "install.sh"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm")

    def run(*absent: str, command: str = "./install.sh --gpu", **variables: str) -> tuple[int, str]:
        shutil.rmtree(tmp_path / "bin", ignore_errors=True)
        (tmp_path / "bin").mkdir()
        for name in NEEDED:
            (tmp_path / "bin" / name).symlink_to(shutil.which(name))
        for name in PROGRAMS.keys() - set(absent):
            (tmp_path / "bin" / name).write_text(PROGRAMS[name])
            (tmp_path / "bin" / name).chmod(0o755)
        # A toolkit in its place, where the machine may have one.
        environment = {"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(tmp_path), "TORCH_CUDA": "13"} | variables
        done = patience.run(["bash", "-c", command], 60, cwd=tmp_path, env=environment)
        return done.returncode, done.stdout + done.stderr

    return run


def told(directory: Path) -> list[str]:
    """pip's arguments since the last call."""
    lines = (directory / "pip.log").read_text().splitlines() if (directory / "pip.log").exists() else []
    (directory / "pip.log").unlink(missing_ok=True)
    return lines


def test_install_compiles_after_torch_with_constraints(install, tmp_path):
    status, said = install()
    assert status == 0, said
    first, tools, *rest = told(tmp_path)
    assert first == "install --progress-bar off -r requirements.txt -c constraints.txt"
    assert tools == "install --quiet -r requirements-build.txt -c constraints.txt"
    how = "install --quiet --no-cache-dir --no-build-isolation -c constraints.txt"
    assert rest == [f"{how} {requirement}" for requirement in REQUIREMENTS]
    assert len(rest) == 5
    packages = tmp_path / ".venv" / "lib" / "python3.12" / "site-packages" / "nvidia"
    assert (tmp_path / "cpath").read_text() == f"{packages}/cu13/include:{packages}/cudnn/include\n"
    assert install() == (0, "")
    assert told(tmp_path) == []


def test_install_reports_missing_tools_first(install, tmp_path):
    status, said = install("nvidia-smi", "nvcc", "ninja", "c++", NO_HEADERS="yes")
    assert (status, said.count("\n")) == (2, 1), said
    assert said.startswith("error: Transformer Engine cannot be compiled here: missing: an NVIDIA GPU with its driver")
    for lacking in ("the toolkit of CUDA 13 (nvcc, on PATH or in CUDA_HOME/bin),", "c++ (", "ninja (", "Python.h of "):
        assert lacking in said
    assert install(TOOLKIT="12.8")[1].count("/nvcc is of CUDA 12)") == 1
    assert "missing: a driver for CUDA 13: 580 or later, not 550.54.15;" in install(DRIVER="550.54.15\n550.54.15")[1]
    assert not (tmp_path / ".venv").exists()
    # Of a login node, whose nodes have the GPUs, nothing is asked that only a GPU has.
    assert install("nvidia-smi", TORCH_BUILD="cuda", DOES_NOT_LOAD="yes")[0] == 0


def test_install_refuses_torch_without_cuda(install, tmp_path):
    status, said = install(TORCH_CUDA="(none: for CPUs)")
    assert status == 2
    assert said.splitlines()[-1].startswith("error: pip gave a torch==2.13.0 for CUDA (none: for CPUs), Transformer")
    assert [line for line in told(tmp_path) if "isolation" in line] == []


def test_install_repeats_failed_and_outdated_builds(install, tmp_path):
    status, said = install(REFUSED="flash-attn")
    assert (status, said.splitlines()[-1]) == (2, f"error: pip could not install {REQUIREMENTS[1]}: see above")
    assert told(tmp_path)[-1].endswith(REQUIREMENTS[0])
    status, said = install(DOES_NOT_LOAD="yes")
    assert (status, "is installed but does not load" in said) == (2, True)
    told(tmp_path)
    assert install()[0] == 0
    (tmp_path / ".venv" / "installed-gpu").write_text("with another torch")
    told(tmp_path)
    assert install()[0] == 0
    assert told(tmp_path)[0] == "uninstall --quiet --yes transformer-engine-torch flash-attn flash-attn-4"


def test_install_of_what_tests_set_aside_is_optional(install, tmp_path):
    """Transformer Engine in the version that GPUs get, mavenn in the benchmark's; both without what they require."""
    folder, command = tmp_path / ".venv" / "te_on_cpu", "./install.sh --dev"
    status, said = install(command=command, REFUSED="--target")
    assert (status, said.count("warning:")) == (0, 2)
    assert "the tests of tests/te_on_cpu will skip\n" in said
    assert said.endswith(f"{MAVENN.package}=={MAVENN.version}: tests on measured mutations will skip\n")
    assert not folder.exists()
    assert sum("--target" in line for line in told(tmp_path)) == 0
    assert install(command=command) == (0, "")
    line, tables = told(tmp_path)
    how = "install --quiet --retries 1 --timeout 20 --no-deps --only-binary :all: --target "
    assert line.startswith(how)
    assert tables == f"{how}.venv/mavenn {MAVENN.package}=={MAVENN.version}"
    engine = next(re.sub(r"\[.*\]", "", name) for name in REQUIREMENTS if name.startswith("transformer-engine"))
    (einops,) = re.findall(r"^einops==.*", (ROOT / "constraints.txt").read_text(), re.M)
    inspect = next(name for name in REQUIREMENTS if name.startswith("nvdlfw-inspect"))
    assert line.split()[-3:] == [engine, inspect, einops]
    assert install(command=command) == (0, "")
    assert told(tmp_path) == []


def test_create_venv_warns_without_transformer_engine(install, tmp_path):
    """Where there are GPUs it installs them, too; a venv without them is a venv."""
    source = ". slurm/create_venv.sh; echo status $?"
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text(PYTHON)
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    _, said = install("nvcc", command=source)
    assert "error: Transformer Engine cannot be compiled here: missing: the toolkit of CUDA 13" in said
    assert "warning: .venv is without Transformer Engine: training computes in torch's own kernels\n" in said
    assert "\nstatus 0\n" in said
    told(tmp_path)
    assert install("nvidia-smi", command=source)[1].endswith("status 0\n")
    assert told(tmp_path) == []
    assert install(command=source)[1].endswith("status 0\n")
    assert told(tmp_path)[-1].endswith(REQUIREMENTS[-1])
