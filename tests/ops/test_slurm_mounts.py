"""slurm/common.sh refuses paths that a job's container does not have, before the first step. srun is a stand-in."""

from __future__ import annotations

import pytest

from tests.ops.manifests import ROOT, run_shell

JOB = {"SLURM_JOB_ID": 1, "SLURM_JOB_NAME": "job", "SLURM_JOB_NUM_NODES": 1, "NPROC_PER_NODE": 1, "PREFLIGHT": "off"}
JOB |= {"CONTAINER_IMAGE": "registry#image", "MODEL": "facebook/esm2_t6_8M_UR50D", "DATASET_DIR": ""}
SRUN = '#!/bin/sh\n[ "$1" != --help ] || { echo --container-image; exit; }\necho STEP\n'


@pytest.fixture
def job(tmp_path):
    """Runs a job's script with TARGET_PATH tmp_path/target."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)

    def run(script: str, **variables):
        variables = JOB | {"TARGET_PATH": tmp_path / "target", "HOME": tmp_path} | variables
        return run_shell(f"PATH={tmp_path}/bin:$PATH; cd {ROOT}; slurm/{script}", variables)

    return run


@pytest.mark.parametrize(
    ("script", "variables", "refused"),
    [
        ("train_ddp.sh", {"OUTPUT_DIR": "{there}/out"}, "--output_dir={there}/out"),
        ("train_ddp.sh", {"OUTPUT_DIR": "../out"}, "--output_dir=../out"),
        ("train_ddp.sh", {"OUTPUT_DIR": "{there}/target-2"}, "--output_dir={there}/target-2"),
        ("train_ddp.sh", {"DATASET_DIR": "{there}"}, "--dataset_dir={there}"),
        ("train_ddp.sh", {"INIT_FROM": "{there}"}, "--model_name_or_path={there}"),
        ("train_ddp.sh --log_dir {there}/logs", {}, "--log_dir={there}/logs"),
        ("train_clm.sh", {"MODEL": "llama2_7b", "DATASET": "{there}"}, "--dataset={there}"),
        ("llama2_7b-training.sbatch", {"OUTPUT_DIR": "{there}/out"}, "--checkpoint_dir={there}/out"),
        ("preprocess.sh --output_dir={there}/x", {"SLURM_CPUS_PER_TASK": 1}, "--output_dir={there}/x"),
        ("download_data.sh --source {there}", {}, "--source={there}"),
    ],
)
def test_paths_outside_the_container_are_refused(job, tmp_path, script, variables, refused):
    place = {"there": tmp_path}
    variables = {name: str(value).format(**place) for name, value in variables.items()}
    done = job(script.format(**place), **variables)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {refused.format(**place)}: not mounted in the container: ")
    assert "STEP" not in done.stdout


@pytest.mark.parametrize(
    ("script", "variables"),
    [
        ("train_ddp.sh", {}),
        ("train_ddp.sh", {"OUTPUT_DIR": "out"}),
        ("train_ddp.sh", {"OUTPUT_DIR": "{there}/out", "CONTAINER_MOUNTS": "/a:/b,/c:{there}/:rw"}),
        ("train_ddp.sh", {"OUTPUT_DIR": "{there}/out", "CONTAINER_MOUNTS": "{there}"}),
        ("train_ddp.sh", {"INIT_FROM": "/in/the/image"}),
        ("train_ddp.sh --dataset=nvidia/esm2_uniref_pretraining_data", {}),
    ],
)
def test_paths_in_the_container_are_taken(job, tmp_path, script, variables):
    done = job(script, **{name: value.format(there=tmp_path) for name, value in variables.items()})
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("STEP\n")


OUTSIDE = dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NUM_NODES"), "")


@pytest.mark.parametrize("script", ["train_ddp.sh", "train_fsdp.sh", "preprocess.sh", "llama2_7b-training.sbatch"])
def test_a_job_script_without_slurm_checks_its_paths_before_the_queue(job, tmp_path, script):
    """SLURM_* are unset as on a login node: an empty value counts as unset."""
    good = job(script, **OUTSIDE)
    assert good.returncode == 0, good.stderr
    assert f"submit it with sbatch [--nodes=N] slurm/{script}" in good.stdout
    bad = job(f"{script} --output_dir={tmp_path}/out", **OUTSIDE)
    assert bad.returncode == 2
    assert bad.stderr.startswith(f"error: --output_dir={tmp_path}/out: not mounted in the container: ")
    assert "STEP" not in good.stdout + bad.stdout
