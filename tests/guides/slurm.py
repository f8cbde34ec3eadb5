"""Rows of the guide ESM-2 on Slurm (tests/guides/rows.py says what a row is)."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from tests.data_fixtures import DOWNLOAD, call, write_fasta
from tests.forked import context
from tests.guides.checks import (
    EVAL_KEYS,
    TRAIN_KEYS,
    Here,
    Row,
    all_of,
    asks,
    has_keys,
    job_runs,
    leaves,
    logs,
    parses,
    prints,
    step_has,
    typed,
)
from tests.guides.eks_training import QUICK_DDP, QUICK_FSDP
from tests.guides.elsewhere import differs, documented, held
from tests.guides.images import builds, starts_in_image
from tests.patience import join

SLURM_EXPORTS = """\
export TARGET_PATH=/fsx/ubuntu/esm-slurm
export DOCKER_IMAGE_NAME=esm-slurm
export TAG=aws
export MODEL=facebook/esm2_t36_3B_UR50D
"""
SLURM_JOB = {
    "says": "This job trains facebook/esm2_t36_3B_UR50D for an epoch of all proteins. The guides' run of 100,000 ",
    "config_name": "facebook/esm2_t36_3B_UR50D",
    "dataset_dir": "{fsx}/ubuntu/esm-slurm/processed/arrow",
    "do_eval": True,
}


def names_the_user_to_add(here: Here) -> None:
    """Step 0 as a user who may not write to the folder: one line, with the option of `docker run`."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        source = write_fasta(Path(directory) / "x.fasta", [("P", "MKTAYIAKQR")])
        folder, said = Path(directory) / "target", here.tmp / "said"
        folder.mkdir(0o555)
        if os.geteuid() != 0:  # nor can it give a folder away: one that is another's already
            folder = Path("/usr")
        process = context().Process(target=_download_as_another_user, args=(source, folder, said))
        process.start()
        join([process])
        assert re.fullmatch("UserError: .*--user.*", said.read_text())


def _download_as_another_user(source: Path, folder: Path, said: Path) -> None:
    with open(said, "w") as file:
        if os.geteuid() == 0:
            os.setuid(12345)
        try:
            call(DOWNLOAD, "--source", source, "--output_dir", folder)
        except Exception as error:
            file.write(f"{type(error).__name__}: {error}")


PREPARED = "mkdir -p $TARGET_PATH/processed/arrow; cd slurm"  # what the commands above it make
SQSH = "--container-image={fsx}/ubuntu/esm-slurm/esm-slurm.sqsh"
SLURM = {
    1: typed("4 variables", SLURM_EXPORTS, blocks=(1,)),
    2: typed("builds esm-slurm:aws", "./build.sh", builds("esm-slurm:aws"), blocks=(2,)),
    3: Row(
        "on NVIDIA's PyTorch image, with the scripts in /workspace",
        all_of(
            documented("Dockerfile", "ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:"),
            documented("Dockerfile", "WORKDIR /workspace"),
            held("ops/test_containers.py::test_image_builds_and_trains"),
        ),
        blocks=(2,),
    ),
    4: typed("the image is there (Docker's own command)", "docker image list", blocks=(3,)),
    5: typed(
        "the squash file, at TARGET_PATH/esm-slurm.sqsh",
        "./enroot.sh",
        asks("enroot", "^enroot import --output .* dockerd://esm-slurm:aws$"),
        blocks=(4,),
    ),
    6: typed("it is there", "ls -al $TARGET_PATH", prints(" esm-slurm.sqsh\n"), blocks=(5,)),
    7: Row(
        "a squash file of the real enroot",
        held("ops/test_enroot.py::test_enroot_itself_makes_a_squashfs"),
        blocks=(4,),
    ),
    8: typed(
        "step 0, in the image",
        "docker run -v ${TARGET_PATH}:/data  ${DOCKER_IMAGE_NAME}:${TAG}  "
        "python3 0.download_data.py --output_dir /data",
        asks(
            "docker",
            "^docker run -v .*/fsx/ubuntu/esm-slurm:/data esm-slurm:aws python3 0.download_data.py --output_dir /data",
        ),
        starts_in_image(),
        blocks=(6,),
    ),
    9: Row(
        "its flags",
        parses("0.download_data.py", output_dir="/data"),
        "python3 0.download_data.py --output_dir /data",
        blocks=(6,),
    ),
    10: Row("csv/x000.csv and on", leaves("csv/x000.csv"), "ls -al  $TARGET_PATH/csv", blocks=(6, 7)),
    11: typed(
        "step 1, in the image",
        "docker run --rm -v ${TARGET_PATH}:/data ${DOCKER_IMAGE_NAME}:${TAG} /bin/bash -c "
        '"python3 1.tokenize_uniref_csv.py --input_dir /data/csv --output_dir /data/processed"',
        asks("docker", "^docker run --rm .* esm-slurm:aws /bin/bash -c python3 1.tokenize_uniref_csv.py"),
        starts_in_image(),
        blocks=(8,),
    ),
    12: Row(
        "its flags",
        parses("1.tokenize_uniref_csv.py", input_dir="/data/csv", output_dir="/data/processed"),
        "python3 1.tokenize_uniref_csv.py --input_dir /data/csv --output_dir /data/processed",
        blocks=(8,),
    ),
    13: Row("a folder that the image's user cannot write", names_the_user_to_add, blocks=(6, 8)),
    14: typed(
        "DDP on 2 nodes, GPUs that Slurm does not manage",
        "sbatch train_ddp.sh",
        job_runs("train_ddp.py", 2, "esm2-ddp_7.out", output_dir="{fsx}/ubuntu/esm-slurm/out-ddp", **SLURM_JOB),
        step_has(SQSH),
        blocks=(9, 12),
        before=PREPARED,
    ),
    15: typed(
        "the same where Slurm manages them (gpu:a10g:1)",
        "sbatch train_ddp.sh",
        job_runs("train_ddp.py", 2, "esm2-ddp_7.out", output_dir="{fsx}/ubuntu/esm-slurm/out-ddp", **SLURM_JOB),
        step_has("--gpus-per-node=1"),
        blocks=(9,),
        before="export GRES=gpu:a10g:1",
    ),
    16: Row(
        "on a real cluster",
        held(
            "ops/test_slurm.py::test_slurm_runs_the_readmes_commands",
            "ops/test_slurm.py::test_slurm_trains_in_an_image_on_unmanaged_gpus",
        ),
        blocks=(9, 13),
    ),
    17: typed(
        "the job is there (Slurm's own command; its name: rows 14, 15)",
        "squeue",
        blocks=(10,),
        before="export GRES='(null)'",
    ),
    18: Row(
        "esm2-ddp-esm2-ddp.N.out",
        differs("esm2-ddp-esm2-ddp.N.out"),
        "tail -f <esm2-ddp-esm2-ddp.N.out>",
        blocks=(11, 15),
    ),
    19: Row(
        "evaluation's metrics and perplexity in the log",
        logs("train", r"\*{5} eval metrics \*{5}", "eval_accuracy", "eval_loss", "perplexity"),
        blocks=(11,),
    ),
    20: Row(
        "in esm-slurm/out-ddp and esm-slurm/out-fsdp",
        has_keys("all_results.json", *TRAIN_KEYS, *EVAL_KEYS),
        "cat all_results.json",
        blocks=(12, 16),
    ),
    21: Row("eval loss 2.61, perplexity 13.59 after 100,000 proteins", differs("13.59"), blocks=(11, 12, 16)),
    22: typed(
        "the quick run: 100,000 proteins",
        "GUIDE=1 sbatch train_ddp.sh",
        job_runs("train_ddp.py", 2, "esm2-ddp_7.out", output_dir="{fsx}/ubuntu/esm-slurm/out-ddp", **QUICK_DDP),
        blocks=(12,),
    ),
    23: typed(
        "FSDP on 2 nodes",
        "sbatch train_fsdp.sh",
        job_runs("train_fsdp2.py", 2, "esm2-fsdp_7.out", output_dir="{fsx}/ubuntu/esm-slurm/out-fsdp", **SLURM_JOB),
        step_has(SQSH),
        blocks=(13,),
    ),
    24: typed(
        "the same where Slurm manages GPUs",
        "sbatch train_fsdp.sh",
        job_runs("train_fsdp2.py", 2, "esm2-fsdp_7.out", **SLURM_JOB),
        step_has("--gpus-per-node=1"),
        blocks=(13,),
        before="export GRES=gpu:a10g:1",
    ),
    25: typed(
        "the job is there (Slurm's own command; its name: rows 23, 24)",
        "squeue",
        blocks=(14,),
        before="export GRES='(null)'",
    ),
    26: typed(
        "the quick run, sharded",
        "GUIDE=1 sbatch train_fsdp.sh",
        job_runs("train_fsdp2.py", 2, "esm2-fsdp_7.out", output_dir="{fsx}/ubuntu/esm-slurm/out-fsdp", **QUICK_FSDP),
        blocks=(13, 16),
    ),
    27: Row(
        "{'loss': ..., 'grad_norm': ..., 'learning_rate': ..., 'epoch': ...}",
        differs("{'loss'"),
        blocks=(15,),
    ),
    28: Row(
        "those values, a line a logged step",
        logs("train", r"step: \d+/\d+  epoch: \S+  loss: \S+ .*grad_norm: \S+  lr: "),
        blocks=(15,),
    ),
    29: Row(
        "checkpoint-1136/{config.json,model.safetensors,tokenizer_config.json,special_tokens_map.json}",
        held("training/test_save_hf.py::test_save_hf_checkpoint_is_the_model_of_its_step"),
        blocks=(15,),
    ),
    30: Row(
        "a model that transformers opens",
        all_of(
            leaves(
                "out/final_model/model.safetensors",
                "out/final_model/config.json",
                "out/final_model/tokenizer_config.json",
            ),
            held("models/test_export.py::test_export_opens_without_warnings"),
        ),
        blocks=(15,),
    ),
}
