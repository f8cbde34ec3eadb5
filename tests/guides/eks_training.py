"""Rows of the guide ESM-2 on EKS, sections 6 and 7: training."""

from __future__ import annotations

from tests.guides.checks import (
    EVAL_KEYS,
    TRAIN_KEYS,
    Row,
    applies,
    has_keys,
    image,
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
from tests.guides.eks import ECR
from tests.guides.elsewhere import differs, documented, held

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


def pods_are_scheduled(typed) -> None:
    (job,) = [document for document in typed.manifest if document["kind"] == "PyTorchJob"]
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    assert template["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
    assert template["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    (container,) = template["spec"]["containers"]
    assert (container["name"], container["imagePullPolicy"]) == ("pytorch", "Always")
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in ("Running", "None"), "finished pods stay, as Completed"


EKS_TRAINING = {
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
