"""Rows of the guide ESM-2 on EKS, sections 0 to 5: image and data (tests/guides/rows.py says what a row is)."""

from __future__ import annotations

from common.models.esm2.config import ESM2_SIZES
from tests.guides.checks import (
    Here,
    Row,
    all_of,
    applies,
    asks,
    assert_has,
    defaults,
    flags_of,
    image,
    leaves,
    logs,
    of_a_pod,
    on_volume,
    parses,
    pod_runs,
    prints,
    typed,
)
from tests.guides.elsewhere import differs, held
from tests.guides.images import builds

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


def every_size(here: Here) -> None:
    for name in ESM2_SIZES:
        assert_has(
            flags_of("train_ddp.py", [f"--config_name={name}", "--dataset=x", "--max_steps=1", "--output_dir=o"]),
            {"config_name": name},
        )


def caches_are_on_the_volume(typed) -> None:
    (pod,) = [document for document in typed.manifest if document["kind"] == "Pod"]
    (container,) = pod["spec"]["containers"]
    assert {e["name"]: e.get("value", "") for e in container["env"]}["HF_HOME"].startswith("/fsx-shared/")


EKS = {
    1: Row("the six published ESM-2 models, by their names", every_size),
    2: typed("11 variables; ACCOUNT asked of aws", EKS_EXPORTS + "echo $REGISTRY", prints(ECR), blocks=(1,)),
    3: typed("builds esm:aws", "./build.sh", builds("esm:aws"), blocks=(2,)),
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
        "partitions get smaller, 1.3 GB to 24 MB: sorted by length (differs)",
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
}
