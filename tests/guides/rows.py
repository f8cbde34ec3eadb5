"""Every command and every promise of the five guides, a row each, and what holds it here.

A row: what the guide's user types or expects; the check (tests/guides/checks.py); `command`, as it is typed;
`blocks`, the numbers of the guide's code blocks that it is about (none: its prose). typed: such commands of a guide
are typed one after the other into one shell; `before` is typed first, and is ours.

The guides: ESM-2 on EKS and on Slurm (awsome-distributed-training), NVIDIA's recipe esm2_native_te, and PyTorch FSDP
on EKS and on Slurm (awsome-distributed-training).
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from extras.decoders.config import PRESETS
from tests.data_fixtures import DOWNLOAD, call, write_fasta
from tests.forked import context
from tests.guides.checks import (
    Check,
    Here,
    all_of,
    applies,
    asks,
    assert_has,
    defaults,
    differs,
    documented,
    flags_of,
    has_keys,
    held,
    image,
    job_runs,
    leaves,
    logs,
    of_a_pod,
    on_volume,
    parses,
    pod_runs,
    prints,
    refuses,
    resources,
    runs,
    step_has,
    translates,
    understands,
)
from tests.patience import join

GUIDES = {  # prefix of a row's name: the end of the guide's file
    "eks": "esm2_on_eks",
    "slurm": "esm2_on_slurm",
    "recipe": "esm2_native_te_recipe",
    "fsdp-eks": "fsdp_on_eks",
    "fsdp-slurm": "fsdp_on_slurm",
}


@dataclass(frozen=True)
class Row:
    says: str
    check: Check
    command: str = ""
    blocks: tuple[int, ...] = ()
    typed: bool = False
    before: str = ""


def typed(says: str, command: str, *checks, blocks: tuple[int, ...], before: str = "") -> Row:
    """A command that works when it is typed, and what else is checked of it."""
    return Row(says, runs(*checks), command, blocks, True, before)


# ---- ESM-2 on EKS ---------------------------------------------------------------------------------------------------

ECR = "123456789012.dkr.ecr.us-east-1.amazonaws.com/"
EKS_EXPORTS = """\
export TARGET_PATH=/fsx-shared/esm
export DOCKER_IMAGE_NAME=esm
export TAG=aws
export MODEL=facebook/esm2_t36_3B_UR50D
export AWS_REGION=us-east-1
export ACCOUNT=$(aws sts get-caller-identity --query Account --output text)
export REGISTRY=${ACCOUNT}.dkr.ecr.${AWS_REGION}.amazonaws.com/
export GPU_PER_NODE=8
export EFA_PER_NODE=32
export NUM_NODES=2
export OUTPUT_DIR=/fsx-shared
"""
EKS_DDP = """\
torchrun --nproc_per_node=1 --nnodes=4 /workspace/train.py --config_name=facebook/esm2_t6_8M_UR50D
--dataloader_num_workers=8 --bf16=True --do_eval=True --do_preprocess=False --do_train=True
--gradient_accumulation_steps=1 --logging_steps=16 --num_train_epochs=1 --output_dir=/fsx-shared/esm
--per_device_train_batch_size=8 --max_train_samples=100000 --tokenizer_name=facebook/esm2_t6_8M_UR50D
--dataset_dir=/fsx-shared/esm/processed/arrow --torch_compile=True --pad_to_max_length=True --max_seq_length=512
--ddp_bucket_cap_mb=125"""
EKS_FSDP_FLAGS = """\
--config_name=facebook/esm2_t6_8M_UR50D --dataloader_num_workers=2 --bf16=True --do_eval=True --do_preprocess=False
--do_train=True --gradient_accumulation_steps=11 --logging_steps=16 --num_train_epochs=1
--output_dir=/fsx-shared/fsdp-ouput --overwrite_output_dir --per_device_train_batch_size=4 --max_train_samples=100000
--tokenizer_name=facebook/esm2_t6_8M_UR50D --dataset_dir=/fsx-shared/esm/processed/arrow --torch_compile=False
--pad_to_max_length=True --max_seq_length=512"""
EKS_FSDP = f"""\
accelerate launch --num_processes=2 --num_machines=2 --machine_rank=$(POD_RANK) --rdzv_backend=etcd
--main_process_port=2379 --main_process_ip=etcd --use_fsdp --fsdp_sharding_strategy=FULL_SHARD
--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap=EsmLayer
--fsdp_backward_prefetch=BACKWARD_PRE --fsdp_cpu_ram_efficient_loading=True --fsdp_sync_module_states=True
--fsdp_use_orig_params=True /workspace/train.py {EKS_FSDP_FLAGS}"""
GUIDE_DATA = {"dataset_dir": "/fsx-shared/esm/processed/arrow"}
DDP_RUN = {
    "config_name": "facebook/esm2_t6_8M_UR50D",
    "dataloader_num_workers": 8,
    "bf16": True,
    "do_eval": True,
    "gradient_accumulation_steps": 1,
    "logging_steps": 16,
    "num_train_epochs": 1,
    "output_dir": "/fsx-shared/esm",
    "per_device_train_batch_size": 8,
    "max_train_samples": 100_000,
    "torch_compile": True,
    "pad_to_max_length": True,
    "max_seq_length": 512,
    "ddp_bucket_cap_mb": 125,
} | GUIDE_DATA
FSDP_RUN = {
    "config_name": "facebook/esm2_t6_8M_UR50D",
    "dataloader_num_workers": 2,
    "gradient_accumulation_steps": 11,
    "per_device_train_batch_size": 4,
    "overwrite_output_dir": True,
    "torch_compile": False,
    "max_train_samples": 100_000,
    "output_dir": "/fsx-shared/fsdp-ouput",
} | GUIDE_DATA
# Of the job that the template makes: the 3B model of section 1. GUIDE=1 (or --with guide): the guide's quick run.
EKS_TRAINS = {"config_name": "facebook/esm2_t36_3B_UR50D"} | GUIDE_DATA
TRAIN_KEYS = ("epoch", "total_flos", "train_loss", "train_runtime", "train_samples")
TRAIN_KEYS += ("train_samples_per_second", "train_steps_per_second")
EVAL_KEYS = ("eval_accuracy", "eval_loss", "eval_runtime", "eval_samples", "eval_samples_per_second")
EVAL_KEYS += ("eval_steps_per_second", "perplexity")
ESM2_SIZES = ("t6_8M", "t12_35M", "t30_150M", "t33_650M", "t36_3B", "t48_15B")


def every_size(here: Here) -> None:
    for size in ESM2_SIZES:
        name = f"facebook/esm2_{size}_UR50D"
        assert_has(
            flags_of("train_ddp.py", [f"--config_name={name}", "--dataset=x", "--max_steps=1", "--output_dir=o"]),
            {"config_name": name},
        )


def caches_are_on_the_volume(typed) -> None:
    (pod,) = [document for document in typed.manifest if document["kind"] == "Pod"]
    (container,) = pod["spec"]["containers"]
    assert {e["name"]: e.get("value", "") for e in container["env"]}["HF_HOME"].startswith("/fsx-shared/")


def pods_are_scheduled(typed) -> None:
    (job,) = [document for document in typed.manifest if document["kind"] == "PyTorchJob"]
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    assert template["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
    assert template["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    (container,) = template["spec"]["containers"]
    assert (container["name"], container["imagePullPolicy"]) == ("pytorch", "Always")
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in ("Running", "None"), "finished pods stay, as Completed"


EKS = {
    1: Row("the six published ESM-2 models, by their names", every_size),
    2: typed("11 variables; ACCOUNT asked of aws", EKS_EXPORTS + "echo $REGISTRY", prints(ECR), blocks=(1,)),
    3: typed("builds esm:aws", "./build.sh", asks("docker", "^docker build .*--tag esm:aws "), blocks=(2,)),
    4: typed(
        "pushes it to ECR, making the repository",
        "./push.sh",
        asks("aws", "ecr create-repository", "ecr get-login-password"),
        asks("docker", f"^docker login .*{ECR[:-1]}", f"^docker push {ECR}esm:aws"),
        blocks=(3,),
    ),
    5: Row(
        "push.sh against a registry and ECR's own API",
        held("ops/test_push.py::test_push_makes_the_repository_and_prints_what_can_be_pulled"),
    ),
    6: typed(
        "the template with nothing but those variables",
        "cat download-data-template.yaml | envsubst > download-data-real.yaml",
        blocks=(4,),
        before="cd kubernetes",
    ),
    7: typed(
        "job/download-uniref-data created",
        "kubectl apply -f download-data-real.yaml",
        applies("Job/download-uniref-data"),
        image(f"{ECR}esm:aws"),
        on_volume("/fsx-shared"),
        blocks=(5, 6),
    ),
    8: typed(
        "the job downloads UniRef50 to TARGET_PATH/csv",
        "kubectl apply -f download-data-real.yaml",
        pod_runs("0.download_data.py", output_dir="/fsx-shared/esm"),
        blocks=(5, 6),
    ),
    9: typed(
        "its pod's log", "kubectl logs -f download-uniref-data-g245r", of_a_pod, asks("kubectl", "logs"), blocks=(7,)
    ),
    10: Row(
        "log lines of step 0, MM/DD/YYYY HH:MM:SS - INFO - ...",
        logs(
            "download",
            r"^\d\d/\d\d/\d{4} \d\d:\d\d:\d\d - INFO - Parsing arguments$",
            r" - INFO - Generating csv files$",
            r"Writing \d+ records to .*/csv/x000\.csv$",
            r" - INFO - Save complete$",
        ),
        blocks=(8,),
    ),
    11: Row(
        "from UniProt's server, 500,000 records a file",
        defaults(
            "0.download_data.py",
            max_records_per_partition=500_000,
            source=["https://ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50/uniref50.fasta.gz"],
        ),
        blocks=(8,),
    ),
    12: Row(
        "x000.csv to x138.csv, the last with the rest",
        held("extras/prepare/test_download_data.py::test_download_data_writes_partitions_of_exact_size"),
        blocks=(8, 14),
    ),
    13: Row(
        "partitions get smaller, 1.3 GB to 24 MB: sorted by length",
        differs("csv/x000.csv"),
        blocks=(14,),
    ),
    14: typed("kubectl's alias", "kc get job,po", asks("kubectl", "get job,po"), blocks=(9, 10)),
    15: typed(
        "pod/fsx-share-test created",
        "kubectl apply -f view-fsx.yaml",
        applies("Pod/fsx-share-test"),
        on_volume("/fsx-shared"),
        blocks=(11, 12),
    ),
    16: typed(
        "the volume's csv, through that pod",
        "kubectl exec -it fsx-share-test -- ls -ltr /fsx-shared/esm/csv",
        of_a_pod,
        asks("kubectl", "exec -it fsx-share-test"),
        blocks=(13,),
    ),
    17: typed(
        "the pod's manifest",
        "cat preprocess-template.yaml | envsubst > preprocess-data.yaml\ncat preprocess-data.yaml",
        prints("name: preprocess-data"),
        blocks=(15,),
    ),
    18: typed(
        "pod/preprocess-data created",
        "kubectl apply -f preprocess-data.yaml",
        applies("Pod/preprocess-data"),
        image(f"{ECR}esm:aws"),
        on_volume("/fsx-shared"),
        blocks=(15, 16, 17),
    ),
    19: typed(
        "it reads csv, writes processed; caches (HF_HOME) are on the volume",
        "kubectl apply -f preprocess-data.yaml",
        pod_runs("1.tokenize_uniref_csv.py", input_dir="/fsx-shared/esm/csv", output_dir="/fsx-shared/esm/processed"),
        caches_are_on_the_volume,
        blocks=(15, 16),
    ),
    20: typed(
        "its log", "kc logs -f preprocess-data", of_a_pod, asks("kubectl", "logs -f preprocess-data"), blocks=(18,)
    ),
    21: Row(
        "log lines of step 1",
        logs("tokenize", r" - INFO - Parsing arguments$", r" - INFO - .*csv", r" - INFO - Save complete$"),
        blocks=(19,),
    ),
    22: Row(
        "10,000,000 of 69 million for training, 50,000 and 50,000 held out; all padded to 512",
        all_of(
            parses("1.tokenize_uniref_csv.py", train_size=10_000_000, max_seq_length=512, pad_to_max_length=True),
            differs("--train_size"),
        ),
        "1.tokenize_uniref_csv.py --train_size 10000000 --validation_size 50000 --test_size 50000 "
        "--max_seq_length 512 --pad_to_max_length True",
        blocks=(19,),
    ),
    23: Row(
        "processed/arrow/{train,validation,test}: data-*.arrow, state.json, dataset_info.json",
        leaves(
            *(f"processed/arrow/{split}/data-00000-of-0000?.arrow" for split in ("train", "validation", "test")),
            "processed/arrow/train/state.json",
            "processed/arrow/train/dataset_info.json",
        ),
        blocks=(21,),
    ),
    24: typed(
        "a look at them",
        "kubectl exec -it fsx-share-test  -- ls -ltr /fsx-shared/esm/processed/arrow/train",
        of_a_pod,
        blocks=(20,),
    ),
    25: typed("DDP's manifest", "cat train-ddp-template.yaml | envsubst > train-ddp.yaml", blocks=(22,)),
    26: typed(
        "pytorchjob.kubeflow.org/esm2 created",
        "kubectl apply -f train-ddp.yaml",
        applies("PyTorchJob/esm2"),
        image(f"{ECR}esm:aws"),
        resources(pods=2, gpus=8, efa=32),
        on_volume("/fsx-shared"),
        pods_are_scheduled,
        blocks=(22, 23, 24),
    ),
    27: typed(
        "it trains MODEL on the prepared data",
        "kubectl apply -f train-ddp.yaml",
        pod_runs("train_ddp.py", **EKS_TRAINS),
        blocks=(22,),
    ),
    28: Row(
        "etcd, a service and a deployment (--data-dir --enable-v2 --listen-client-urls --advertise-client-urls "
        "--initial-cluster-state), rdzvBackend etcd",
        differs("etcd"),
        blocks=(22, 24, 35),
    ),
    29: Row(
        "minReplicas 1, maxReplicas 64, maxRestarts 100, an autoscaler on CPU use",
        differs("minReplicas"),
        blocks=(22,),
    ),
    30: Row("NCCL_DEBUG=INFO", differs("NCCL_DEBUG"), blocks=(22, 28, 37)),
    31: Row("train.py", differs("train.py"), "/workspace/train.py", blocks=(22, 33)),
    32: Row("DDP's flags, as they are", parses("train_ddp.py", **DDP_RUN), EKS_DDP, blocks=(22,)),
    33: Row(
        "what those leave to transformers' defaults",
        held("test_configs.py::test_config_matches_its_source"),
        blocks=(22,),
    ),
    34: Row(
        "that run, under torchrun",
        held("training/test_train_ddp.py::test_ddp_guides_command_runs_under_torchrun"),
        blocks=(22,),
    ),
    35: typed("the pods", "kubectl get job,po", blocks=(25, 26)),
    36: typed("the first pod's log", "kubectl logs -f esm2-worker-0", of_a_pod, blocks=(27,)),
    37: Row(
        "what the run is about to do",
        logs(
            "train",
            r"\*{5} Running training \*{5}",
            "Num examples = ",
            "Num Epochs = ",
            "Instantaneous batch size per device",
            "Total train batch size",
            "Gradient Accumulation steps = ",
            "Total optimization steps = ",
            "Number of trainable parameters = ",
        ),
        blocks=(28,),
    ),
    38: Row("8M has 7,840,794 parameters", differs("7,840,794"), blocks=(28,)),
    39: typed("the job, and its finished pods", "kubectl get pytorchjob,po", blocks=(29, 30)),
    40: typed(
        "100,000 proteins with the 8M model in minutes; results in esm/output",
        "(GUIDE=1; source ./env_vars.sh && ./render.sh train-ddp-template.yaml | kubectl apply -f -)",
        pod_runs("train_ddp.py", output_dir="/fsx-shared/esm/output", max_train_samples=100_000),
        blocks=(22, 31),
    ),
    41: typed(
        "the results, through the pod",
        "kubectl exec -it fsx-share-test -- cat /fsx-shared/esm/output/train_results.json",
        of_a_pod,
        blocks=(31,),
    ),
    42: Row("train_results.json", has_keys("train_results.json", *TRAIN_KEYS), blocks=(32, 41)),
    43: typed(
        "FSDP's manifest (the guide has .yaml twice)",
        "cat train-fsdp-template.yaml | envsubst > train-fsdp.yaml",
        blocks=(33,),
    ),
    44: typed(
        "pytorchjob.kubeflow.org/esm2 created",
        "kubectl apply -f train-fsdp.yaml",
        applies("PyTorchJob/esm2"),
        image(f"{ECR}esm:aws"),
        resources(pods=2, gpus=8, efa=32),
        pods_are_scheduled,
        blocks=(33, 34, 35),
    ),
    45: typed(
        "it trains MODEL, sharded",
        "kubectl apply -f train-fsdp.yaml",
        pod_runs("train_fsdp2.py", **EKS_TRAINS),
        blocks=(33,),
    ),
    46: Row(
        "accelerate launch, as torchrun and train_fsdp2.py",
        translates("train_fsdp2.py", **FSDP_RUN),
        EKS_FSDP,
        blocks=(33,),
    ),
    47: Row(
        "accelerate's flags given to the script",
        refuses("train_ddp.py", "train_fsdp2.py"),
        f"train_ddp.py --use_fsdp --fsdp_sharding_strategy=FULL_SHARD {EKS_FSDP_FLAGS}",
        blocks=(33,),
    ),
    48: Row(
        "FSDP's own flags, as they are",
        parses("train_fsdp2.py", **FSDP_RUN),
        f"train.py {EKS_FSDP_FLAGS}",
        blocks=(33,),
    ),
    49: typed("the first pod's log", "kubectl logs -f esm2-worker-0", of_a_pod, blocks=(36,)),
    50: Row(
        "metrics of training and evaluation",
        logs(
            "train",
            r"\*{5} train metrics \*{5}",
            *(rf"^  {key} +=" for key in TRAIN_KEYS[:1]),
            r"train_loss +=",
            r"\*{5} eval metrics \*{5}",
            *(rf"^  {key} +=" for key in sorted(EVAL_KEYS)),
        ),
        blocks=(37,),
    ),
    51: typed("the job, pods and services", "kubectl get pytorchjob,po,svc", blocks=(38, 39)),
    52: typed(
        "FSDP's quick run; results in fsdp-output",
        "(GUIDE=1; source ./env_vars.sh && ./render.sh train-fsdp-template.yaml | kubectl apply -f -)",
        pod_runs("train_fsdp2.py", output_dir="/fsx-shared/fsdp-output", max_train_samples=100_000),
        blocks=(33, 40),
    ),
    53: typed(
        "the results, through the pod",
        "kubectl exec -it fsx-share-test -- cat /fsx-shared/fsdp-output/train_results.json",
        of_a_pod,
        blocks=(40,),
    ),
    54: Row(
        "batches of 88 for 1,136 steps, the rate linear from 5e-5 to 0",
        held("ops/test_defaults.py::test_guide_variable_gives_the_guides_run"),
        blocks=(37, 41),
    ),
    55: Row("each step in less than 30 minutes", documented("docs/data.md", "| 2.3 minutes |")),
}

# ---- ESM-2 on Slurm -------------------------------------------------------------------------------------------------

SLURM_EXPORTS = """\
export TARGET_PATH=/fsx/ubuntu/esm-slurm
export DOCKER_IMAGE_NAME=esm-slurm
export TAG=aws
export MODEL=facebook/esm2_t36_3B_UR50D
"""
SLURM_JOB = {
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
    2: typed(
        "builds esm-slurm:aws", "./build.sh", asks("docker", "^docker build .*--tag esm-slurm:aws "), blocks=(2,)
    ),
    3: Row(
        "on NVIDIA's PyTorch image, with the scripts in /workspace",
        all_of(
            documented("Dockerfile", "ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:"),
            documented("Dockerfile", "WORKDIR /workspace"),
            held("ops/test_containers.py::test_image_builds_and_trains"),
        ),
        blocks=(2,),
    ),
    4: typed("the image is there", "docker image list", blocks=(3,)),
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
        blocks=(6,),
    ),
    9: Row(
        "its flags",
        parses("0.download_data.py", output_dir="/data"),
        "python3 0.download_data.py --output_dir /data",
        blocks=(6,),
    ),
    10: Row("csv/x000.csv and on", leaves("csv/x000.csv"), blocks=(6, 7)),
    11: typed(
        "step 1, in the image",
        "docker run --rm -v ${TARGET_PATH}:/data ${DOCKER_IMAGE_NAME}:${TAG} /bin/bash -c "
        '"python3 1.tokenize_uniref_csv.py --input_dir /data/csv --output_dir /data/processed"',
        asks("docker", "^docker run --rm .* esm-slurm:aws /bin/bash -c python3 1.tokenize_uniref_csv.py"),
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
    17: typed("the job's name is esm2-ddp", "squeue", blocks=(10,), before="export GRES='(null)'"),
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
    20: Row("out-ddp/all_results.json", has_keys("all_results.json", *TRAIN_KEYS, *EVAL_KEYS), blocks=(12, 16)),
    21: Row("eval loss 2.61, perplexity 13.59 after 100,000 proteins", differs("13.59"), blocks=(11, 12, 16)),
    22: typed(
        "the quick run: 100,000 proteins",
        "GUIDE=1 sbatch train_ddp.sh",
        job_runs("train_ddp.py", 2, "esm2-ddp_7.out", max_train_samples=100_000, per_device_train_batch_size=8),
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
    25: typed("the job's name is esm2-fsdp", "squeue", blocks=(14,), before="export GRES='(null)'"),
    26: typed(
        "the quick run, sharded",
        "GUIDE=1 sbatch train_fsdp.sh",
        job_runs("train_fsdp2.py", 2, "esm2-fsdp_7.out", max_train_samples=100_000, per_device_train_batch_size=4),
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

# ---- NVIDIA's recipe ------------------------------------------------------------------------------------------------

SANITY = {"config_name": "facebook/esm2_t6_8M_UR50D", "max_steps": 250, "per_device_train_batch_size": 2}
L0 = "python train_fsdp2.py --config-name L0_sanity"


def inference(here: Here) -> None:
    """The guide's Python: AutoModel and AutoTokenizer, on the green fluorescent protein's first residues."""
    from transformers import AutoModel, AutoTokenizer

    directory = str(here.demonstration() / "out" / "final_model")
    model, tokenizer = AutoModel.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer("MSKGEELFTGVVPILVELDGDVNGHKFSVSGEGEGDATYGKLTLKFICTTGKLPVPWPTL", return_tensors="pt")
    model.eval()
    assert model(**inputs).last_hidden_state.shape[:2] == (1, 62)


RECIPE = {
    1: Row(
        "ESM-2 in BF16, FP8, MXFP8, NVFP4, packed, with context parallelism",
        all_of(
            *(
                defaults(script, *common, **expected)
                for common in [
                    ("--config_name=facebook/esm2_t6_8M_UR50D", "--dataset=x", "--max_steps=1", "--output_dir=o")
                ]
                for script, common, expected in (
                    ("train_ddp.py", (*common, "--bf16"), {"bf16": True}),
                    ("train_fsdp2.py", (*common, "--fp8", "--fp8_recipe=mxfp8"), {"fp8_recipe": "mxfp8"}),
                    ("train_fsdp2.py", (*common, "--fp4"), {"fp4": True}),
                    ("train_ddp_cp.py", (*common, "--cp_size=2"), {"cp_size": 2}),
                )
            )
        ),
    ),
    2: Row("AMPLIFY", differs("AMPLIFY")),
    3: Row(
        "FP8 from 9.0, MXFP8 and NVFP4 from 10.0", held("precision/test_plan.py::test_plan_refuses_unsupported_device")
    ),
    4: typed("an image of the folder", "docker build -t esm2_native_te .", asks("docker", "build"), blocks=(1,)),
    5: typed(
        "a shell in it",
        "docker run -it --gpus all --network host --ipc=host --rm -v ${PWD}:/workspace/bionemo esm2_native_te "
        "/bin/bash",
        blocks=(2,),
    ),
    6: Row(
        "uv venv --python 3.12 --seed; pip install --index-url, --no-build-isolation: torch, flash-attn, TE",
        all_of(
            held("ops/test_install.py::test_install_compiles_after_torch_with_constraints"),
            differs("uv venv"),
        ),
        blocks=(3,),
    ),
    7: typed(
        "the plain CUDA image, and its tests",
        "docker build -t esm2_native_te_cuda -f Dockerfile.cuda .\n"
        "docker run -it --gpus all --network host --ipc=host --rm -v ${PWD}:/workspace/bionemo esm2_native_te_cuda "
        '/bin/bash -c "pytest -v ."',
        asks("docker", "build .*-f Dockerfile.cuda", "run .*pytest -v"),
        blocks=(4,),
    ),
    8: Row(
        "a script alone, on one GPU",
        held(
            "test_configs.py::test_script_without_flags_is_the_sanity_run",
            "test_configs.py::test_script_without_flags_trains",
        ),
        "python train_ddp.py  # or train_fsdp2.py / train_mfsdp.py",
        blocks=(5,),
    ),
    9: Row(
        "two ranks",
        held("test_configs.py::test_sanity_run_of_one_process_is_complete_for_two"),
        "torchrun --nproc_per_node=2 train_fsdp2.py",
        blocks=(6,),
    ),
    10: Row("slurm.sh", translates("slurm/train_fsdp.sh"), "sbatch slurm.sh"),
    11: Row(
        "DDP, FSDP2 and Megatron-FSDP train the same model",
        held("training/test_mfsdp.py::test_mfsdp_every_strategy_equals_one_process_and_fsdp2"),
    ),
    12: Row(
        "FP8 in all layers",
        translates("train_fsdp2.py", ("--fp8",), fp8=True, fp8_layers=None, **SANITY),
        f"{L0} fp8_config.enabled=true",
        blocks=(7,),
    ),
    13: Row(
        "NVFP4",
        translates("train_fsdp2.py", ("--fp4",), fp4=True, **SANITY),
        f"{L0} fp4_config.enabled=true",
        blocks=(8,),
    ),
    14: Row("L0_sanity by its name", parses("train_fsdp2.py", **SANITY), L0, blocks=(7, 8)),
    15: Row(
        "another recipe, by its class",
        translates("train_ddp.py", fp8=True, fp8_recipe="mxfp8", fp8_format="e4m3"),
        "python train_ddp.py --config-name L0_sanity fp8_config.enabled=true fp8_config.fp8_format=E4M3 "
        "fp8_config.fp8_recipe=transformer_engine.common.recipe.MXFP8BlockScaling",
    ),
    16: Row(
        "layers 1-3 in FP8, 4-6 in FP4",
        translates("train_fsdp2.py", ("--fp8", "--fp4", "--fp8_layers", "--fp4_layers"), fp8=True, fp4=True),
        f"{L0} fp8_config.enabled=true fp4_config.enabled=true 'fp8_layers=[1,2,3]' 'fp4_layers=[4,5,6]'",
        blocks=(9,),
    ),
    17: Row(
        "the other format takes the layers that are left; none listed: all",
        held("precision/test_plan.py::test_plan_assigns_formats_to_layers"),
        blocks=(9,),
    ),
    18: Row(
        "statistics of quantisation",
        translates(
            "train_fsdp2.py",
            ("--quant_stats", "--fp8"),
            quant_stats=True,
            quant_stats_file="./fp8_debugging_stats.yaml",
            fp8=True,
        ),
        "python train_fsdp2.py quant_stats_config.enabled=true quant_stats_config.quant_log_dir=./logs/quant_stats "
        "quant_stats_config.quant_stats_file=./fp8_debugging_stats.yaml fp8_config.enabled=true",
        blocks=(10,),
    ),
    19: Row(
        "fp8_debugging_stats.yaml, Transformer Engine's format; freq",
        held(
            "precision/test_stats.py::test_stats_file_of_guides_is_accepted",
            "precision/test_stats_plan.py::test_stats_plan_of_example_file",
        ),
        blocks=(10,),
    ),
    20: Row(
        "only the layers of the format are logged",
        held("precision/test_stats_plan.py::test_stats_plan_selects_layers"),
    ),
    21: Row(
        "sequence packing",
        translates("train_fsdp2.py", ("sequence_packing",), sequence_packing=True),
        f"{L0} use_sequence_packing=true",
        blocks=(11,),
    ),
    22: Row(
        "FP8 and packing",
        translates("train_fsdp2.py", ("--fp8", "sequence_packing"), sequence_packing=True, fp8=True),
        f"{L0} fp8_config.enabled=true use_sequence_packing=true",
        blocks=(12,),
    ),
    23: Row(
        "packs of a multiple of 16 tokens for FP8",
        held("precision/test_plan.py::test_plan_requires_size_multiples"),
        blocks=(12,),
    ),
    24: Row(
        "train_ddp_cp with L0_sanity_cp, --cp_size",
        parses("train_ddp_cp.py", cp_size=2, tokens_per_pack=1600),
        "python train_ddp_cp.py --config-name L0_sanity_cp --cp_size=2",
    ),
    25: Row(
        "1,2,7,8 and 3,4,5,6",
        held("distributed/test_context_parallel.py::test_cp_split_matches_the_guide"),
        blocks=(13,),
    ),
    26: Row(
        "every sequence of a pack is sliced",
        held("distributed/test_context_parallel.py::test_cp_split_splits_each_sequence_separately"),
        blocks=(13,),
    ),
    27: Row(
        "transformers' own model",
        translates("train_fsdp2.py", ("--backend",), backend="hf"),
        f"{L0} model_tag=facebook/esm2_t6_8M_UR50D",
        blocks=(14,),
    ),
    28: Row(
        "the recipe's data set, streamed",
        parses("train_fsdp2.py", dataset="nvidia/esm2_uniref_pretraining_data", streaming=True),
        "train_fsdp2.py --config_name=facebook/esm2_t6_8M_UR50D --dataset=nvidia/esm2_uniref_pretraining_data "
        "--streaming --max_steps=1 --output_dir=out",
        blocks=(15,),
    ),
    29: typed(
        "a copy of it",
        "export HF_TOKEN=hf_token\n"
        "hf download nvidia/esm2_uniref_pretraining_data --repo-type dataset --local-dir /fsx/download/directory",
        asks("hf", "--repo-type dataset"),
        blocks=(16,),
    ),
    30: Row(
        "the copy is trained on",
        translates("train_fsdp2.py", ("--dataset",), dataset="/path/to/download/directory"),
        f"HF_DATASETS_OFFLINE=1 {L0} dataset.load_dataset_kwargs.path=/path/to/download/directory",
        blocks=(17,),
    ),
    31: Row(
        "checkpoints every 100 steps",
        translates("train_fsdp2.py", ("--output_dir", "--save_steps"), output_dir="/path/to/ckpt_dir", save_steps=100),
        f"{L0} checkpoint.ckpt_dir=/path/to/ckpt_dir checkpoint.save_every_n_steps=100",
        blocks=(18,),
    ),
    32: Row(
        "from the newest checkpoint",
        translates("train_fsdp2.py", ("--output_dir",), output_dir="/path/to/ckpt_dir"),
        f"{L0} checkpoint.ckpt_dir=/path/to/ckpt_dir checkpoint.resume_from_checkpoint=true",
        blocks=(19,),
    ),
    33: Row("final_model/ at the end", leaves("out/final_model/model.safetensors")),
    34: Row(
        "checkpoint.save_final_model",
        translates("train_mfsdp.py", ("--save_final_model",), save_final_model=True),
        "python train_mfsdp.py --config-name L0_sanity checkpoint.save_final_model=true",
    ),
    35: Row(
        "checkpoints of all three strategies",
        held("training/test_mfsdp.py::test_mfsdp_checkpoint_of_any_strategy_resumes_on_any_other"),
    ),
    36: Row(
        "the loader's state: only with as many workers and ranks",
        held(
            "training/test_resume.py::test_resume_with_other_number_of_loader_workers",
            "training/test_resume.py::test_resume_with_other_world_size_keeps_global_batch",
        ),
    ),
    37: Row("inference with AutoModel", inference, blocks=(20,)),
    38: Row(
        "recipes_local_test.py",
        differs("recipes_local_test.py"),
        "./ci/scripts/recipes_local_test.py bionemo-recipes/recipes/esm2_native_te/",
        blocks=(21,),
    ),
    39: Row(
        "hydra.verbose=true",
        refuses("train_fsdp2.py", "hydra.verbose=true: "),
        f"{L0} hydra.verbose=true",
    ),
    40: Row(
        "models of the recipe (nv_esm)",
        all_of(differs("nv_esm"), held("extras/test_nv_esm.py::test_recipe_model_has_the_weights_of_its_stock_model")),
    ),
    41: Row("benchmarks of throughput", documented("docs/hardware.md", "benchmarks/")),
    42: Row("a development container of VSCode", differs("devcontainer")),
    43: Row(
        "context-parallel ranks share a pack, data ranks have their own",
        held("data/test_loader.py::test_loader_gives_context_parallel_ranks_the_same_packs"),
        blocks=(13,),
    ),
    44: Row(
        "a run with context parallelism is that of one",
        held("training/test_context_parallel.py::test_cp_run_equals_one_process"),
    ),
    45: Row(
        "statistics need a quantised layer", held("precision/test_stats_plan.py::test_stats_flags_refused_in_one_line")
    ),
    46: Row("several nodes", held("ops/test_slurm.py::test_slurm_runs_the_readmes_commands")),
}

# ---- FSDP: Llama, Mistral, Mixtral ----------------------------------------------------------------------------------

FSDP_ECR = "123456789012.dkr.ecr.us-west-1.amazonaws.com/"
ENV_VARS = """\
cat << EOF > env_vars
export IMAGE_URI=${REGISTRY}fsdp:pytorch2.7.1
export INSTANCE_TYPE=p5.48xlarge
export NUM_NODES=4
export GPU_PER_NODE=8
export EFA_PER_NODE=32
export FI_PROVIDER=efa
export HF_TOKEN=hf_token_of_the_user
EOF"""
PUSH = """\
REGISTRY_COUNT=$(aws ecr describe-repositories | grep \\"fsdp\\" | wc -l)
if [ "$REGISTRY_COUNT" == "0" ]; then
        aws ecr create-repository --repository-name fsdp
fi
aws ecr get-login-password | docker login --username AWS --password-stdin $REGISTRY
docker image push ${REGISTRY}fsdp:pytorch2.7.1"""
NINE = ("llama2_7b", "llama2_13b", "llama2_70b", "llama3_1_8b", "llama3_1_70b", "llama3_2_1b", "llama3_2_3b")
NINE += ("mathstral_7b", "mistral_8x7b")
# The guides' table (their Llama 3.2 3B has an intermediate size of 11008; the published model's is 8192).
TABLE = {  # intermediate_size, num_key_value_heads, hidden_size, num_hidden_layers, num_attention_heads, context
    "llama2_7b": (11008, 32, 4096, 32, 32, 4096),
    "llama2_13b": (13824, 40, 5120, 40, 40, 4096),
    "llama2_70b": (28672, 8, 8192, 80, 64, 4096),
    "llama3_1_8b": (14336, 8, 4096, 32, 32, 8192),
    "llama3_1_70b": (28672, 8, 8192, 80, 64, 8192),
    "llama3_2_1b": (8192, 8, 2048, 16, 32, 8192),
    "llama3_2_3b": (8192, 8, 3072, 28, 24, 8192),
}
LLAMA = {
    "model": "llama3_1_8b",
    "max_seq_length": 8192,
    "per_device_train_batch_size": 1,
    "max_steps": 100,
    "save_steps": 50,
    "eval_steps": 25,
    "sharding_strategy": "full",
    "offload_activations": True,
    "dataset": "allenai/c4",
    "dataset_config_name": "en",
}
LONG = {"max_steps": 5000, "max_seq_length": 32768, "seed": 42, "dataset": "allenai/c4"}


def sizes_of_the_table(here: Here) -> None:
    for name, sizes in TABLE.items():
        preset = PRESETS[name]
        config = preset.config
        found = (config.intermediate_size, config.num_key_value_heads, config.hidden_size, config.num_hidden_layers)
        assert (*found, config.num_attention_heads, preset.context) == sizes, name


def own_dataset(flag: str) -> Check:
    """A job's flags, then the user's: a directory takes the place of C4 and its configuration."""

    def check(here: Here) -> None:
        job = [
            "--model=llama3_1_8b",
            "--dataset=allenai/c4",
            "--dataset_config_name=en",
            "--max_steps=1",
            "--checkpoint_dir=o",
        ]
        expected = {"dataset": "/fsx/mine", "dataset_config_name": None}
        assert_has(flags_of("train_fsdp2.py", [*job, f"{flag}=/fsx/mine"]), expected)

    return check


def rates_of_the_logs(here: Here) -> None:
    """Llama's log over 100 steps without warm-up, Mathstral's over 5,000 with one of 16; a line has the next."""
    from common.training.registry import parse_run
    from tests.data_fixtures import load_script

    for steps, at, expected in (
        (100, range(1, 7), ("0.000100", "0.000100", "0.000100", "0.000100", "0.000099", "0.000099")),
        (5000, range(1, 7), ("0.000006", "0.000013", "0.000019", "0.000025", "0.000031", "0.000038")),
    ):
        words = ["--model=mathstral_7b", f"--max_steps={steps}", "--lr=0.0001", "--min_lr=1e-5", "--warmup=0.0032"]
        words += ["--lr_decay_style=annealing", "--dataset=x", "--checkpoint_dir=o"]
        args = parse_run("", load_script("train_fsdp2.py").FsdpFlags, words)
        rate = args.optimizer.schedule(steps)
        assert tuple(f"{rate(step):.6f}" for step in at) == expected


FSDP_EKS = {
    1: Row("manifests of nine models", held("ops/test_guide_jobs.py::test_guide_jobs_have_the_guides_names")),
    2: typed(
        "the cluster's credentials",
        "aws eks update-kubeconfig --name my-cluster\nkubectl config current-context",
        blocks=(1, 2, 3),
    ),
    3: Row(
        "git clone of the guide",
        differs("git clone"),
        "cd awsome-distributed-training/3.test_cases/pytorch/FSDP/kubernetes",
        blocks=(4,),
    ),
    4: Row("any envsubst, Go's too", held("ops/test_kubernetes.py::test_render_with_gos_envsubst")),
    5: typed(
        "the operator",
        'kubectl apply -k "github.com/kubeflow/training-operator/manifests/overlays/standalone?ref=v1.9.1"',
        asks("kubectl", r"apply -k github.com/kubeflow/training-operator/.*ref=v1\.9\.1"),
        blocks=(5,),
    ),
    6: typed(
        "the image, from the folder above",
        "export AWS_REGION=$(aws ec2 describe-availability-zones --output text "
        "--query 'AvailabilityZones[0].[RegionName]')\n"
        "export ACCOUNT=$(aws sts get-caller-identity --query Account --output text)\n"
        "export REGISTRY=${ACCOUNT}.dkr.ecr.${AWS_REGION}.amazonaws.com/\n"
        "pushd ../ && [ -f Dockerfile ] && docker build -f Dockerfile -t ${REGISTRY}fsdp:pytorch2.7.1 . && popd",
        asks("docker", f"^docker build -f Dockerfile -t {FSDP_ECR}fsdp:pytorch2.7.1 .$"),
        blocks=(6,),
        before="cd kubernetes",
    ),
    7: typed(
        "pushed to ECR",
        PUSH,
        asks("aws", "create-repository --repository-name fsdp"),
        asks(
            "docker", f"login --username AWS --password-stdin {FSDP_ECR}$", f"image push {FSDP_ECR}fsdp:pytorch2.7.1"
        ),
        blocks=(7,),
    ),
    8: Row(
        "C4, streamed, without preparation",
        parses("train_fsdp2.py", dataset="allenai/c4", dataset_config_name="en", streaming=True),
        "train_fsdp2.py --model=llama3_1_8b --dataset=allenai/c4 --dataset_config_name=en --max_steps=1 "
        "--checkpoint_dir=o",
    ),
    9: Row("your own data by --dataset_path", own_dataset("--dataset_path")),
    10: typed("seven variables in a file", ENV_VARS, blocks=(8, 9)),
    11: typed("sourced", "source env_vars; echo $IMAGE_URI", prints(f"{FSDP_ECR}fsdp:pytorch2.7.1\n"), blocks=(10,)),
    12: typed(
        "the job is applied",
        "envsubst < llama3_1_8b-fsdp.yaml | kubectl apply -f -",
        applies("PyTorchJob/llama3-1-8b-fsdp"),
        image(f"{FSDP_ECR}fsdp:pytorch2.7.1"),
        resources(pods=4, gpus=8, efa=32),
        pod_runs("train_fsdp2.py", **LLAMA),
        blocks=(11, 12, 13),
    ),
    13: Row(
        "the same of the other eight",
        held("ops/test_guide_jobs.py::test_guide_jobs_render_with_guide_variables"),
        blocks=(11,),
    ),
    14: Row(
        "FI_* commented out where there is no EFA",
        held("ops/test_guide_jobs.py::test_guide_jobs_render_without_devices_or_token"),
    ),
    15: Row(
        "one directory for --checkpoint_dir and --resume_from_checkpoint; the newest is taken",
        held(
            "ops/test_guide_jobs.py::test_guide_jobs_of_a_model_do_the_guides_run",
            "training/test_checkpoint.py::test_checkpoint_newest_is_by_number",
        ),
    ),
    16: Row(
        "further parameters by the names of model/arguments.py",
        held("test_decoders_page.py::test_guide_flags_are_accepted_and_listed"),
    ),
    17: typed("the job and its pods", "kubectl get pytorchjob \nkubectl get pods ", blocks=(12, 13)),
    18: typed(
        "who leads",
        "kubectl logs llama3-1-8b-fsdp-worker-0 | grep master_addr= || true",
        of_a_pod,
        asks("kubectl", "logs llama3-1-8b-fsdp-worker-0"),
        blocks=(14,),
    ),
    19: Row(
        "master_addr= is in a pod's log; that pod alone shows progress",
        held("ops/test_kubernetes_run.py::test_guide_pods_of_a_decoder_train_and_log_master_addr"),
        blocks=(15,),
    ),
    20: typed("the log", "kubectl logs -f llama3-1-8b-fsdp-worker-0", of_a_pod, blocks=(16,)),
    21: Row(
        "Batch 90 Loss: 7.24291, Speed: 9.41 samples/sec, lr: 0.000010",
        held("training/test_decoders.py::test_decoder_log_has_the_guides_lines"),
        blocks=(17,),
    ),
    22: typed(
        "the job is deleted by its template",
        "kubectl delete -f ./llama3_1_8b-fsdp.yaml",
        asks("kubectl", r"delete -f \./llama3_1_8b-fsdp.yaml"),
        blocks=(18,),
    ),
    23: Row(
        "without variables its name and kind are there; then it can be applied again",
        held(
            "ops/test_guide_jobs.py::test_guide_jobs_can_be_deleted_without_variables",
            "ops/test_kubernetes_api.py::test_apiserver_applies_and_deletes_guide_jobs",
        ),
        blocks=(18,),
    ),
    24: Row("the table of sizes", sizes_of_the_table),
    25: Row("Llama 3.2 3B with an intermediate size of 11008", differs("ffn 11008", page="docs/decoders.md")),
    26: Row(
        "--peak_tflops_per_gpu, which the guide has gained",
        understands("train_fsdp2.py"),
        "train_fsdp2.py --model=llama3_1_8b --dataset=x --max_steps=1 --checkpoint_dir=o --peak_tflops_per_gpu=3000",
    ),
    27: Row(
        "the Hub's token reaches the pods as a secret",
        held("ops/test_guide_jobs.py::test_guide_jobs_render_with_guide_variables"),
        blocks=(8,),
    ),
}

UNCOMMENT = "sed -i 's/^#export CONTAINER_IMAGE/export CONTAINER_IMAGE/' *-training.sbatch"


def decoder_job(name: str, **expected) -> Row:
    return typed(
        f"{name} on 4 nodes of 8 GPUs; its log",
        f"sbatch {name}-training.sbatch",
        job_runs("train_fsdp2.py", 4, f"{name}-FSDP_7.out", model=name, **expected),
        step_has("--container-image={slurm}/pytorch-fsdp.sqsh"),
        blocks={"llama3_1_8b": (7, 8), "mistral_8x7b": (10,), "mathstral_7b": (13,)}[name],
    )


FSDP_SLURM = {
    1: Row(
        "git clone of the guide",
        differs("git clone"),
        "cd awsome-distributed-training/3.test_cases/pytorch/FSDP/slurm",
        blocks=(1,),
    ),
    2: Row(
        "a virtual environment, sourced",
        held(
            "ops/test_slurm.py::test_create_venv_leaves_the_shell_that_sources_it_as_it_is",
            "ops/test_install.py::test_create_venv_warns_without_transformer_engine",
        ),
        ". ./create_venv.sh",
        blocks=(2,),
    ),
    3: Row(
        "an image from slurm/",
        differs("docker build -f ../Dockerfile"),
        "docker build -f ../Dockerfile -t fsdp:pytorch2.7.1 .",
        blocks=(3,),
    ),
    4: typed(
        "the squash file beside the jobs",
        "enroot import -o pytorch-fsdp.sqsh  dockerd://fsdp:pytorch2.7.1",
        asks("enroot", "import -o pytorch-fsdp.sqsh dockerd://fsdp:pytorch2.7.1"),
        blocks=(4,),
        before="cd slurm; mkdir -p $HOME",
    ),
    5: typed("the Hub's token", "export HF_TOKEN=hf_token_of_the_user", blocks=(5, 9, 12)),
    6: Row("your own data by --dataset_path", own_dataset("--dataset_path")),
    7: Row("jobs of nine models", held("ops/test_guide_jobs.py::test_guide_jobs_match_their_generator")),
    8: typed(
        "the container's line, uncommented",
        f"grep -q '^#export CONTAINER_IMAGE=$(pwd)/pytorch-fsdp.sqsh$' llama3_1_8b-training.sbatch && {UNCOMMENT}",
        blocks=(6,),
    ),
    9: decoder_job("llama3_1_8b", **{name: value for name, value in LLAMA.items() if name != "model"}),
    10: Row(
        "number of nodes in #SBATCH --nodes, of GPUs in GPUS_PER_NODE",
        all_of(
            documented("slurm/llama3_1_8b-training.sbatch", "#SBATCH --nodes=4\n"),
            documented("slurm/llama3_1_8b-training.sbatch", ': "${GPUS_PER_NODE:='),
            documented("slurm/llama3_1_8b-training.sbatch", "TRAINING_ARGS=("),
        ),
    ),
    11: Row(
        "EFA's variables on lines 24-25",
        all_of(documented("slurm/llama3_1_8b-training.sbatch", '"${FI_PROVIDER=efa}"'), differs("FI_PROVIDER")),
    ),
    12: Row(
        "torchrun on every node: c10d, the first node's endpoint",
        held("ops/test_slurm.py::test_slurm_guide_job_trains_a_decoder_and_resumes"),
        "--nproc_per_node=8 --nnodes=4 --rdzv_id=288 (--rdzv_id=2515) --rdzv_backend=c10d --rdzv_endpoint=p5-dy-gpu-1",
        blocks=(8, 14),
    ),
    13: Row(
        "their TRAINING_ARGS, unchanged",
        held(
            "training/test_decoder_flags.py::test_decoder_flags_of_guides_are_accepted_unchanged",
            "training/test_decoder_flags.py::test_decoder_commands_of_guides_train",
        ),
        blocks=(8, 11, 14),
    ),
    14: Row("Llama 3.1 8B of 7.39 B parameters", differs("7,392,727,040", page="docs/decoders.md"), blocks=(8,)),
    15: Row(
        "Created model with total parameters; Batch N Loss, Speed, lr",
        held("training/test_decoders.py::test_decoder_log_has_the_guides_lines"),
        blocks=(8, 11, 14),
    ),
    16: Row("the logs' learning rates", rates_of_the_logs, blocks=(8, 11, 14)),
    17: Row("NCCL_DEBUG=INFO", differs("NCCL_DEBUG"), blocks=(8,)),
    18: decoder_job("mistral_8x7b", per_device_train_batch_size=4, **LONG),
    19: decoder_job("mathstral_7b", save_steps=50, eval_steps=500, per_device_train_batch_size=1, **LONG),
    20: Row(
        "Mixtral has 46.70 B, Mathstral 7.25 B parameters",
        held("extras/decoders/test_model.py::test_decoder_presets_equal_published"),
        blocks=(11, 14),
    ),
    21: Row("the table of sizes", sizes_of_the_table),
    22: Row("scancel and the like", held("ops/test_slurm.py::test_slurm_job_resumes_until_cancelled")),
}

ROWS = {
    f"{guide}-{number}": row
    for guide, rows in (
        ("eks", EKS),
        ("slurm", SLURM),
        ("recipe", RECIPE),
        ("fsdp-eks", FSDP_EKS),
        ("fsdp-slurm", FSDP_SLURM),
    )
    for number, row in rows.items()
}
