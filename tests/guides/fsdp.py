"""Rows of the guides PyTorch FSDP on EKS and on Slurm (tests/guides/rows.py says what a row is)."""

from __future__ import annotations

from extras.families.decoders.config import PRESETS
from tests.guides.checks import (
    Check,
    Here,
    Row,
    all_of,
    applies,
    asks,
    assert_has,
    flags_of,
    image,
    job_runs,
    of_a_pod,
    parses,
    pod_runs,
    prints,
    resources,
    step_has,
    typed,
    understands,
)
from tests.guides.elsewhere import differs, documented, held, made
from tests.guides.images import builds

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
    from common.training.command_line import parse_run
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
    1: Row("manifests of nine models", made(*(f"kubernetes/{name}-fsdp.yaml" for name in NINE))),
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
        "the operator (not ours)",
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
        builds(f"{FSDP_ECR}fsdp:pytorch2.7.1"),
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
    17: typed(
        "the job and its pods (the cluster's own command)",
        "kubectl get pytorchjob \nkubectl get pods ",
        blocks=(12, 13),
    ),
    18: typed(
        "who leads",
        "kubectl logs llama3-1-8b-fsdp-worker-0 | grep master_addr= || true",
        of_a_pod,
        asks("kubectl", "logs llama3-1-8b-fsdp-worker-0"),
        blocks=(14,),
    ),
    19: Row(
        "master_addr= is in a pod's log; that pod alone shows progress",
        held("ops/test_kubernetes_run.py::test_guide_pods_of_a_decoder_train_and_log_master_addr", slow=True),
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
        "a virtual environment, sourced: by install.sh, then activated",
        all_of(
            documented("slurm/create_venv.sh", "  ./install.sh || exit\n"),
            documented("slurm/create_venv.sh", '/../.venv/bin/activate"'),
            held(
                "ops/test_slurm.py::test_create_venv_leaves_the_shell_that_sources_it_as_it_is",
                "ops/test_install.py::test_create_venv_warns_without_transformer_engine",
            ),
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
    7: Row("jobs of nine models", made(*(f"slurm/{name}-training.sbatch" for name in NINE))),
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
        held("extras/families/decoders/test_model.py::test_decoder_presets_equal_published"),
        blocks=(11, 14),
    ),
    21: Row("the table of sizes", sizes_of_the_table),
    22: Row("scancel and the like", held("ops/test_slurm.py::test_slurm_job_resumes_until_cancelled")),
}
