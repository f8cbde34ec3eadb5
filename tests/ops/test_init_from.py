"""INIT_FROM: the job scripts and templates start from these weights; without it, from random ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.distributed.strategy import ReplicaFlags
from common.training.command_line import parse_run
from tests.ops.manifests import GUIDE, ROOT, TRAINING, containers, job_of, render, run_shell, values

WEIGHTS = "/fsx-shared/first/final_model"
# Writes the words that it is started with, a line each. As srun it knows containers: no .venv is needed then.
RECORD = '#!/bin/sh\n[ "$1" != --help ] || { echo --container-image; exit; }\nprintf "%%s\\n" "$@" > %s\n'
SLURM = {"SLURM_JOB_ID": 1, "SLURM_JOB_NAME": "job", "SLURM_JOB_NUM_NODES": 1, "NPROC_PER_NODE": 1, "DATASET_DIR": ""}
SLURM |= {"CONTAINER_IMAGE": "registry#image", "PREFLIGHT": "off"}


def recorded(command: str, program: str, variables: dict, directory: Path) -> list[str]:
    """The flags of the training script that the command starts by way of `program`. It runs in the repository."""
    stand_in, words = directory / program, directory / "words"
    stand_in.write_text(RECORD % words)
    stand_in.chmod(0o755)
    done = run_shell(f'PATH={directory}:$PATH; eval "$COMMAND"', variables | {"COMMAND": command})
    assert done.returncode == 0, done.stderr
    found = words.read_text().splitlines()
    return found[next(n for n, word in enumerate(found) if word.startswith("train_")) + 1 :]


def assert_starts_from(flags: list[str], weights: str | None, model: str) -> None:
    """As the training script takes them, whether ESM-2 or a decoder is named."""
    own = {"--model", "--config_name", "--model_name_or_path", "--output_dir"}
    words = [word for word in flags if word.partition("=")[0] in own]
    args = parse_run("", ReplicaFlags, [*words, "--dataset=x", "--max_steps=1"])
    assert args.model.model_name_or_path == weights
    assert args.model_named == (weights or model)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize(
    ("script", "model"),
    [
        ("train_ddp.sh", "facebook/esm2_t6_8M_UR50D"),
        ("train_clm.sh", "llama2_7b"),
        ("llama2_7b-training.sbatch", None),
    ],
)
def test_slurm_jobs_start_from_the_weights(tmp_path, script, model, weights):
    variables = SLURM | {"TARGET_PATH": tmp_path, "HOME": tmp_path} | ({"MODEL": model} if model else {})
    variables |= {"INIT_FROM": weights} if weights else {}
    flags = recorded(f"cd {ROOT}; slurm/{script}", "srun", variables, tmp_path)
    assert_starts_from(flags, weights, model or "llama2_7b")


@pytest.mark.parametrize("script", ["train_ddp.sh", "train_clm.sh"])
@pytest.mark.parametrize("model", [None, "facebook/esm2_t6_8M_UR50D"])
def test_slurm_jobs_need_no_model_beside_weights(tmp_path, script, model):
    """INIT_FROM alone, or MODEL and --model_name_or_path after the script's name."""
    if model and "clm" in script:
        model = "llama2_7b"
    given = {"MODEL": model} if model else {"INIT_FROM": WEIGHTS}
    variables = SLURM | {"TARGET_PATH": tmp_path, "HOME": tmp_path} | given
    flags = f"--model_name_or_path={WEIGHTS}" if model else ""
    words = recorded(f"cd {ROOT}; slurm/{script} {flags}", "srun", variables, tmp_path)
    assert_starts_from(words, WEIGHTS, WEIGHTS)


@pytest.mark.parametrize("weights", ["", WEIGHTS])
@pytest.mark.parametrize("template", TRAINING)
def test_pods_start_from_the_weights(tmp_path, template, weights):
    model = "llama2_7b" if "clm" in template else "facebook/esm2_t6_8M_UR50D"
    (container,) = containers(job_of(render(template, INIT_FROM=weights, MODEL=model, TEXT_FLAGS="")))
    script = container["args"][0].replace("cd /workspace\n", "")
    flags = recorded(script, "python3", values(container), tmp_path)
    assert_starts_from(flags, weights or None, model)


def test_render_warns_that_a_directory_as_model_gives_no_weights():
    variables = GUIDE | {"MODEL": WEIGHTS}
    done = run_shell("kubernetes/render.sh train-ddp-template.yaml", variables)
    assert done.returncode == 0
    warning = (
        f"warning: MODEL={WEIGHTS}: only its configuration is read; INIT_FROM={WEIGHTS} starts from its weights\n"
    )
    assert done.stderr == warning
    done = run_shell("kubernetes/render.sh train-ddp-template.yaml", variables | {"INIT_FROM": WEIGHTS})
    assert (done.returncode, done.stderr) == (0, "")


def test_render_refuses_weights_that_a_shell_would_run():
    with pytest.raises(AssertionError, match=r"INIT_FROM=\$\(id\): only letters, digits and"):
        render("train-ddp-template.yaml", INIT_FROM="$(id)")
