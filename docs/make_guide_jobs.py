"""Write the FSDP guides' eighteen jobs: slurm/NAME-training.sbatch and kubernetes/NAME-fsdp.yaml of nine decoders.

python docs/make_guide_jobs.py

They are slurm/train_clm.sh and kubernetes/train-clm-template.yaml with a run of the guides (GUIDE_RUNS) in place of
variables: change those, not the files that are made of them.
"""

from __future__ import annotations

import re
import sys
from fnmatch import fnmatch
from pathlib import Path

# Without variables the API server refuses a name that ends with a slash.
ANNOTATION = """  annotations:
    "source-env-vars-before-envsubst/${INSTANCE_TYPE}": "" # empty variables are refused
"""
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from extras.families.decoders.config import GUIDE_RUNS, PRESETS  # noqa: E402

MAKER = "docs/make_guide_jobs.py"
# Of all Llamas, as in the guides: Llama 2's own, in a repository that asks for no licence. Llama 3's is another, which
# asks for one; the model has rows for all ids of both.
LLAMA_TOKENIZER = "hf-internal-testing/llama-tokenizer"


def title(name: str) -> str:
    """`Llama 3.1 8B` of llama3_1_8b."""
    family, *version, size = re.sub(r"(?<=llama)(?=\d)", "_", name).split("_")
    return " ".join(word for word in (family.capitalize(), ".".join(version), size.replace("b", "B")) if word)


def directory(name: str) -> str:
    """Below checkpoints/: the run's own, for another model's checkpoints are refused."""
    _, _, own = (GUIDE_RUNS[name].checkpoint_dir or "").partition("checkpoints/")
    return own or name


def training_args(name: str, checkpoint_dir: str) -> list[str]:
    """The flags of a run, under the guides' names."""
    run = GUIDE_RUNS[name]
    flags = {
        "model": name,
        "tokenizer": LLAMA_TOKENIZER if name.startswith("llama") else PRESETS[name].hub,
        "max_context_width": PRESETS[name].context,
        "dataset": "allenai/c4",
        "dataset_config_name": "en",
        "train_batch_size": run.train_batch_size,
        "val_batch_size": run.train_batch_size,
        "max_steps": run.max_steps,
        "seed": run.seed,
        "checkpoint_freq": run.checkpoint_freq,
        "validation_freq": run.validation_freq,
        "checkpoint_dir": checkpoint_dir,
        "resume_from_checkpoint": checkpoint_dir,
        "sharding_strategy": "full",
        "offload_activations": 1,
    }
    return [f"--{flag}={value}" for flag, value in flags.items() if value is not None]


def replaced(text: str, changes: dict[str, str]) -> str:
    """The text with each of these passages, which occur in it once, in another form."""
    for passage, other in changes.items():
        if text.count(passage) != 1:
            raise SystemExit(f"error: {MAKER}: {passage!r} occurs {text.count(passage)} times, not once")
        text = text.replace(passage, other)
    return text


def between(text: str, begin: str, end: str) -> str:
    """The passage from `begin` up to `end`."""
    start = text.index(begin)
    return text[start : text.index(end, start)]


def memory(name: str, nodes: int = 4) -> str:
    """What a pod asks for, as kubernetes/env_vars.sh has it for the guides' four nodes."""
    lines = (ROOT / "kubernetes" / "env_vars.sh").read_text(encoding="utf-8")
    cases = re.search(r"case \$MODEL in\n((?: +\S.*\) MEMORY=\d+ ;;\n)+)", lines)[1]
    for patterns, size in re.findall(r"^ +(.*)\) MEMORY=(\d+)", cases, re.MULTILINE):
        if any(fnmatch(name, pattern) for pattern in patterns.split(" | ")):
            return f"{16 + -(-int(size) // nodes)}Gi"
    raise AssertionError("the last pattern is *")


def sbatch(name: str) -> str:
    """The text of slurm/NAME-training.sbatch."""
    text = (ROOT / "slurm" / "train_clm.sh").read_text(encoding="utf-8")
    args = "".join(f"  {flag}\n" for flag in training_args(name, '"$OUTPUT_DIR"'))
    head = f"""\
# {title(name)} with FSDP2 on streamed C4; resumes from its newest checkpoint. Made by {MAKER}.
#
#   sbatch {name}-training.sbatch [any flag of train_fsdp2.py]
"""
    variables = f"""\

# User variables; more of them in slurm/env.sh. export HF_TOKEN=... before sbatch.
: "${{GPUS_PER_NODE:=}}" # all that a node has; or p4d, p5, p6-b200: 8; g5.12xlarge: 4; g5.xlarge: 1
: "${{FI_PROVIDER=efa}}" # nothing on instances without EFA: FI_PROVIDER= sbatch ...
#export CONTAINER_IMAGE=$(pwd)/pytorch-fsdp.sqsh
MODEL={name}

"""
    return replaced(
        text,
        {
            between(text, "# Pretrain ", "#SBATCH"): head,
            "--job-name=clm\n": f"--job-name={name}-FSDP\n",
            "pipefail\n": f"pipefail\n{variables}",
            "$TARGET_PATH/out-clm/${MODEL##*/}": f"$TARGET_PATH/checkpoints/{directory(name)}",
            between(text, "TRAINING_ARGS=(\n", ")\ntrain_clm"): f"TRAINING_ARGS=(\n{args}",
        },
    )


def manifest(name: str) -> str:
    """The text of kubernetes/NAME-fsdp.yaml, for plain envsubst with the guides' seven variables."""
    job, results = f"{name.replace('_', '-')}-fsdp", f"/fsx-shared/checkpoints/{directory(name)}"
    text = (ROOT / "kubernetes" / "train-clm-template.yaml").read_text(encoding="utf-8")
    # The switch `instance` is on, the others are off.
    text = re.sub(r"(?m)^( *)# \[instance\] ", r"\1", text)
    text = re.sub(r"(?m)^ *# \[\w+\] .*\n|^# \[not \w+\]\n| +# \[not \w+\]$", "", text)
    text = re.sub(r"(?m)^ *hugepages-2Mi: .*\n", "", text)  # libfabric does without, see below
    text = text.replace('"${REGISTRY}${DOCKER_IMAGE_NAME}:${TAG}"', '"${IMAGE_URI}"')
    text = text.replace(": # [INSTANCE_TYPE]", ': "${INSTANCE_TYPE}"')
    text = re.sub(r": clm.* # \[JOB_NAME\].*", f": {job}", text)
    text = re.sub(r"(?m) # \[[A-Z_]+\]$", "", text)
    args = "".join(f"                    {flag} \\\n" for flag in training_args(name, results))
    head = f"""\
# {title(name)} with FSDP2 on streamed C4; resumes from its newest checkpoint. Made by {MAKER}.
# Checkpoints: {results}, on the claim fsx-claim. More: docs/kubernetes.md.
#
#   source env_vars   # IMAGE_URI INSTANCE_TYPE NUM_NODES GPU_PER_NODE EFA_PER_NODE FI_PROVIDER HF_TOKEN
#   envsubst < {name}-fsdp.yaml | kubectl apply -f -        kubectl delete -f ./{name}-fsdp.yaml
apiVersion: v1
kind: Secret
metadata:
  name: {job}
stringData:
  token: "${{HF_TOKEN}}"
---
"""
    command = between(text, "                    --model=", "                  # Check this node first")
    flags = between(text, "                - name: TEXT_FLAGS\n", "                # How long ranks may take to save")
    return replaced(
        text,
        {
            between(text, "# A decoder with FSDP2", "# Only this job's pods"): head,
            "memory: 64Gi\n": f"memory: {memory(name)}\n",
            "if [ ${EFA_PER_NODE} = 0 ]": 'if [ -z "${FI_PROVIDER}" ]',
            between(text, " [preflight]: ", "                  python3 -m extras.preflight"): "\n",
            "MODEL=${MODEL} NUM_NODES": "NUM_NODES",
            "EFA_PER_NODE=${EFA_PER_NODE} OUTPUT_DIR=${OUTPUT_DIR} |": "EFA_PER_NODE=${EFA_PER_NODE} |",
            "source kubernetes/env_vars.sh before": "source env_vars before",
            between(text, "  annotations: {", "spec:\n  # torchrun"): ANNOTATION,
            command: args.removesuffix(" \\\n") + "\n",
            flags: "",
            '"${OUTPUT_DIR}/clm/${MODEL}/nccl_trace_rank_"': f"{results}/nccl_trace_rank_",
            "logs clm-worker-0": f"logs {job}-worker-0",
            "                  value: efa\n": '                  value: "${FI_PROVIDER}"\n',
            between(text, "                # kubectl create secret", "                - name: HF_TOKEN"): "",
            "name: hf-token\n": f"name: {job}\n",
            "                      optional: true\n": "",
        },
    )


def files() -> dict[Path, str]:
    """What is to stand in each of the eighteen files."""
    made = {ROOT / "slurm" / f"{name}-training.sbatch": sbatch(name) for name in GUIDE_RUNS}
    return made | {ROOT / "kubernetes" / f"{name}-fsdp.yaml": manifest(name) for name in GUIDE_RUNS}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if path.suffix == ".sbatch" else 0o644)
