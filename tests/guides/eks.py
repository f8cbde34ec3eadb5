"""Rows of the guide ESM-2 on EKS (tests/guides/rows.py says what a row is)."""

from __future__ import annotations

from common.models.esm2.config import ESM2_SIZES
from tests.guides.checks import (
    EVAL_KEYS,
    TRAIN_KEYS,
    Here,
    Row,
    all_of,
    applies,
    asks,
    assert_has,
    defaults,
    flags_of,
    has_keys,
    image,
    leaves,
    logs,
    of_a_pod,
    on_volume,
    parses,
    pod_runs,
    prints,
    refuses,
    resources,
    translates,
    typed,
)
from tests.guides.elsewhere import differs, documented, held
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
# Of the job that the template makes: the 3B model of section 1, and its log says how to get the guide's run.
EKS_TRAINS = {"config_name": "facebook/esm2_t36_3B_UR50D"} | GUIDE_DATA
EKS_TRAINS |= {
    "says": "The guide's run of 100,000 proteins with the 8M model, in minutes: export GUIDE=1 before envsubst\n"
}
# GUIDE=1, whatever MODEL says: 3,125 steps of 32 proteins (DDP) or 1,136 of 88 (test_defaults.py counts them).
QUICK = {name: DDP_RUN[name] for name in ("config_name", "max_train_samples", "pad_to_max_length", "max_seq_length")}
QUICK |= {"learning_rate": 5e-5, "lr_scheduler_type": "linear", "save_hf": True}
QUICK_DDP = QUICK | {"per_device_train_batch_size": 8, "packs_per_step": 4, "num_train_epochs": 1}
QUICK_FSDP = QUICK | {"per_device_train_batch_size": 4, "packs_per_step": 22, "max_steps": 1136}


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
    25: typed(
        "DDP's manifest, which says what it trains",
        "cat train-ddp-template.yaml | envsubst > train-ddp.yaml\nhead -n 4 train-ddp.yaml",
        prints("# Trains facebook/esm2_t36_3B_UR50D for an epoch of all proteins"),
        blocks=(22,),
    ),
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
        held("training/test_train_ddp.py::test_ddp_guides_command_runs_under_torchrun", slow=True),
        blocks=(22,),
    ),
    35: typed("the pods (the cluster's own command)", "kubectl get job,po", blocks=(25, 26)),
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
    39: typed(
        "the job, and its finished pods (the cluster's own command)", "kubectl get pytorchjob,po", blocks=(29, 30)
    ),
    40: typed(
        "100,000 proteins with the 8M model in minutes; results in esm/output",
        "(GUIDE=1; source ./env_vars.sh && ./render.sh train-ddp-template.yaml | kubectl apply -f -)",
        pod_runs("train_ddp.py", output_dir="/fsx-shared/esm/output", **QUICK_DDP),
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
    51: typed(
        "the job, pods and services (the cluster's own command)", "kubectl get pytorchjob,po,svc", blocks=(38, 39)
    ),
    52: typed(
        "FSDP's quick run; results in fsdp-output",
        "(GUIDE=1; source ./env_vars.sh && ./render.sh train-fsdp-template.yaml | kubectl apply -f -)",
        pod_runs("train_fsdp2.py", output_dir="/fsx-shared/fsdp-output", **QUICK_FSDP),
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
        held("ops/test_defaults.py::test_pods_guide_variable_gives_the_guides_run"),
        blocks=(37, 41),
    ),
    55: Row(
        "each step in less than 30 minutes (measured once, in docs/data.md)",
        documented("docs/data.md", "| 2.3 minutes |"),
    ),
    56: typed(
        "DDP's quick run, by envsubst as the guide has it",
        "export GUIDE=1; cat train-ddp-template.yaml | envsubst | kubectl apply -f -",
        pod_runs("train_ddp.py", output_dir="/fsx-shared/esm/output", **QUICK_DDP),
        blocks=(22, 31),
    ),
    57: typed(
        "FSDP's likewise",
        "cat train-fsdp-template.yaml | envsubst | kubectl apply -f -",
        pod_runs("train_fsdp2.py", output_dir="/fsx-shared/fsdp-output", **QUICK_FSDP),
        blocks=(33, 40),
    ),
}
