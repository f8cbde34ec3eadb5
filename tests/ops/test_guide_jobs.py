"""The FSDP guides' eighteen jobs: as their generator makes them, with the guides' runs, in good manifests."""

from __future__ import annotations

import copy
import re
import shutil

import pytest

from common.flags import flat
from common.training.command_line import parse_run
from extras.families.decoders.config import GUIDE_RUNS, PRESETS
from tests.data_fixtures import load_script
from tests.ops.manifests import (
    FSDP_GUIDE,
    GUIDE_JOBS,
    KUBERNETES,
    ROOT,
    TRAINING,
    containers,
    documents,
    job_of,
    render,
    run_shell,
    substitute,
    values,
)
from tests.ops.mutations import MUTATIONS
from tests.ops.policy import broken_rules

NAMES = (
    *("llama2_7b", "llama2_13b", "llama2_70b", "llama3_1_8b", "llama3_1_70b", "llama3_2_1b", "llama3_2_3b"),
    *("mathstral_7b", "mistral_8x7b"),
)
# Steps, steps between checkpoints and validations (the scripts' defaults where the guides have none), batch.
RUNS = {
    "llama2_7b": (100, 50, 100, 1),
    "llama2_13b": (50, 50, 25, 1),
    "llama2_70b": (30, 1000, 10, 1),
    "llama3_1_8b": (100, 50, 25, 1),
    "llama3_1_70b": (30, 1000, 10, 1),
    "llama3_2_1b": (100, 50, 100, 1),
    "llama3_2_3b": (100, 50, 100, 1),
    "mathstral_7b": (5000, 50, 500, 1),
    "mistral_8x7b": (5000, 1000, None, 4),
}
needs_envsubst = pytest.mark.skipif(not shutil.which("envsubst"), reason="envsubst (gettext-base) is not installed")


def test_guide_jobs_match_their_generator():
    made = load_script("docs/make_guide_jobs.py").files()
    there = {*(ROOT / "slurm").glob("*.sbatch"), *(KUBERNETES / name for name in GUIDE_JOBS)}
    assert {path.relative_to(ROOT) for path in made} == {path.relative_to(ROOT) for path in there}
    assert len(made) == 18
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name}: python docs/make_guide_jobs.py makes it anew"


def test_guide_jobs_have_the_guides_names():
    assert {path.name for path in (ROOT / "slurm").glob("*.sbatch")} == {f"{name}-training.sbatch" for name in NAMES}
    assert set(GUIDE_JOBS) == {f"{name}-fsdp.yaml" for name in NAMES}
    assert set(NAMES) == set(GUIDE_RUNS)


def flags_of(text: str, **variables: str) -> list[str]:
    """The flags of train_fsdp2.py in a job's file, with the shell's variables filled in."""
    begin, end = r"(?:set -- train_fsdp2\.py|\nTRAINING_ARGS=\()", r"\n(?:\)\n| +# Check this)"
    (flags,) = re.findall(f"{begin}(.*?){end}", text, re.DOTALL)
    for name, value in variables.items():
        flags = flags.replace(f'"${name}"', value)
    return re.findall(r"--\S+", flags)


@pytest.mark.parametrize("name", NAMES)
def test_guide_jobs_of_a_model_do_the_guides_run(name):
    script = load_script("train_fsdp2.py")
    slurm = flags_of((ROOT / "slurm" / f"{name}-training.sbatch").read_text(), OUTPUT_DIR=f"/fsx-shared/{name}")
    pods = flags_of((KUBERNETES / f"{name}-fsdp.yaml").read_text())
    args, other = (flat(parse_run("", script.FsdpFlags, flags)) for flags in (slurm, pods))
    batches = [f"per_device_{kind}_batch_size" for kind in ("train", "eval")]
    places = {"output_dir": "", "resume_from_checkpoint": ""}
    assert args["resume_from_checkpoint"] == args["output_dir"]
    assert other["resume_from_checkpoint"] == other["output_dir"]
    assert args | places == other | places
    names = ("max_steps", "save_steps", "eval_steps", *batches)
    assert [args[each] for each in names] == [*RUNS[name], RUNS[name][-1]]
    assert args["do_eval"] == (args["eval_steps"] is not None)
    expected = {"model": name, "max_seq_length": PRESETS[name].context, "bf16": True}
    expected |= {"dataset": "allenai/c4", "dataset_config_name": "en"}
    expected |= {"seed": 42 if name in ("mathstral_7b", "mistral_8x7b") else 12345}
    expected |= {"sharding_strategy": "full", "offload_activations": True, "activation_checkpointing": "full"}
    assert expected.items() <= args.items()


@pytest.mark.parametrize(
    ("given", "dataset", "dataset_dir", "configuration"),
    [
        ("--dataset_path=my/texts", "my/texts", None, None),
        ("--dataset my/texts --dataset_config_name de", "my/texts", None, "de"),
        ("--dataset_config_name=de", "allenai/c4", None, "de"),
        ("--dataset=allenai/c4", "allenai/c4", None, "en"),
        ("--dataset_config_name=", "allenai/c4", None, ""),
        ("--dataset_dir=processed/text", None, "processed/text", None),
    ],
)
def test_guide_jobs_take_another_dataset(given, dataset, dataset_dir, configuration):
    """C4's configuration goes with C4, whether a job's file or a file of flags names it."""
    script = load_script("train_fsdp2.py")
    for name in NAMES[-1], NAMES[0]:
        job = flags_of((ROOT / "slurm" / f"{name}-training.sbatch").read_text(), OUTPUT_DIR="out")
        for flags in job, [str(ROOT / "configs" / f"{name}.yaml")]:
            data = parse_run("", script.FsdpFlags, [*flags, *given.split()]).data
            assert (data.dataset, data.dataset_dir, data.dataset_config_name) == (dataset, dataset_dir, configuration)


def test_guide_jobs_keep_an_earlier_dataset_configuration():
    flags = ["--model=llama3_2_1b", "--dataset_config_name=en", "--dataset=allenai/c4"]
    assert parse_run("", load_script("train_fsdp2.py").FsdpFlags, flags).data.dataset_config_name == "en"


@needs_envsubst
@pytest.mark.parametrize("job", GUIDE_JOBS)
def test_guide_jobs_render_with_guide_variables(job):
    name = job.removesuffix(".yaml").replace("_", "-")
    secret, policy, made = documents(substitute(job))
    for document in (secret, policy, made):
        assert broken_rules(document) == {}
        assert document["metadata"]["name"] == name
    (container,) = containers(made)
    token = {entry["name"]: entry.get("valueFrom") for entry in container["env"]}["HF_TOKEN"]["secretKeyRef"]
    assert secret["kind"] == "Secret"
    assert secret["stringData"] == {token["key"]: FSDP_GUIDE["HF_TOKEN"]}
    assert FSDP_GUIDE["HF_TOKEN"] not in str(made)
    assert container["image"] == FSDP_GUIDE["IMAGE_URI"]
    worker = made["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert (worker["replicas"], made["spec"]["nprocPerNode"]) == (4, "8")
    assert worker["template"]["spec"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32}
    told = values(container)
    assert (told["FI_PROVIDER"], told["LOGLEVEL"]) == ("efa", "INFO")
    assert f"kubectl logs {name}-worker-0" in (KUBERNETES / job).read_text()


@needs_envsubst
def test_guide_jobs_render_without_devices_or_token():
    none = {"GPU_PER_NODE": "0", "EFA_PER_NODE": "0", "FI_PROVIDER": "", "HF_TOKEN": ""}
    for document in documents(substitute("llama3_1_8b-fsdp.yaml", **none)):
        assert broken_rules(document) == {}


@pytest.mark.parametrize("job", GUIDE_JOBS)
def test_guide_jobs_can_be_deleted_without_variables(job):
    """`kubectl delete -f ./NAME-fsdp.yaml`: nothing but these is read."""
    name = job.removesuffix(".yaml").replace("_", "-")
    there = documents((KUBERNETES / job).read_text())
    found = [(document["kind"], document["metadata"]["name"]) for document in there]
    assert found == [("Secret", name), ("NetworkPolicy", name), ("PyTorchJob", name)]


@needs_envsubst
def test_guide_jobs_policy_catches_broken_ones():
    """Of one: all nine are made of the same template. What the guide has no variable for, it does not have."""
    (_, _, job), uncaught, caught = documents(substitute("llama3_1_8b-fsdp.yaml", NUM_NODES="2")), [], set()
    for rule, what, change in MUTATIONS:
        broken = copy.deepcopy(job)
        if change(broken):
            caught.add(rule)
            uncaught += [] if rule in broken_rules(broken) else [f"{rule}: {what}"]
    assert uncaught == []
    assert len(caught) >= 10


@needs_envsubst
def test_decoder_template_equals_fsdp_but_for_names_and_flags():
    """Neither gets ahead of the other: how pods start, stop and are spread is the same."""
    switches = ("elastic", "hyperpod", "instance", "kueue", "uid")
    found = []
    for template in ("train-fsdp-template.yaml", "train-clm-template.yaml"):
        assert template in TRAINING
        job = job_of(render(template, *switches, RUN_ID="1").replace("/fsx-shared/fsdp/", "/fsx-shared/clm/"))
        (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        found.append((job, container.pop("args")[0], {entry["name"]: entry for entry in container.pop("env")}))
    (fsdp, script, environment), (clm, clm_script, clm_environment) = found
    for job in (fsdp, clm):
        job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"].pop("topologySpreadConstraints")
    assert fsdp == clm
    assert environment.items() <= clm_environment.items()
    shell, clm_shell = (re.findall(r'(?m)^(?:if \[ [^"]|trap |exec |  \{).*', text) for text in (script, clm_script))
    assert shell == clm_shell
    assert len(shell) >= 5


def test_slurm_and_kubernetes_train_decoders_with_the_same_defaults():
    script = load_script("train_fsdp2.py")
    text = "MODEL=llama3_2_1b OUTPUT_DIR=out TARGET_PATH=/x\n"
    text += (ROOT / "slurm" / "env.sh").read_text()
    text += re.search(r"TRAINING_ARGS=\(.*?\n\)\n", (ROOT / "slurm" / "train_clm.sh").read_text(), re.DOTALL)[0]
    slurm = run_shell(text + "printf '%s\\n' \"${TRAINING_ARGS[@]}\"", {}).stdout.splitlines()
    source = "IMAGE_URI=x source kubernetes/env_vars.sh; echo $TEXT_FLAGS"
    words = run_shell(source, {}).stdout.split()
    pods = flags_of((KUBERNETES / "train-clm-template.yaml").read_text().replace("${MODEL}", "llama3_2_1b"))
    pods = [flag for flag in pods if not flag.startswith("--output_dir") and "${INIT_FROM}" not in flag]
    pods.append("--output_dir=out")
    assert parse_run("", script.FsdpFlags, slurm) == parse_run("", script.FsdpFlags, words + pods)


@pytest.mark.parametrize("name", NAMES)
def test_guide_jobs_of_llamas_need_no_licence(name):
    """As in the guides. Those of Mistral name the model's own, as there."""
    script, llama = load_script("train_fsdp2.py"), "hf-internal-testing/llama-tokenizer"
    expected = llama if name.startswith("llama") else PRESETS[name].hub
    for flags in (
        flags_of((ROOT / "slurm" / f"{name}-training.sbatch").read_text(), OUTPUT_DIR="o"),
        flags_of((KUBERNETES / f"{name}-fsdp.yaml").read_text()),
        [str(ROOT / "configs" / f"{name}.yaml")],
    ):
        assert parse_run("", script.FsdpFlags, flags).data.tokenizer == expected


def test_guide_jobs_use_the_published_tokenizer():
    script = load_script("train_fsdp2.py")

    def chosen(*flags: str) -> str:
        return parse_run("", script.FsdpFlags, [*flags, "--dataset=x.jsonl", "--tokenizer=model"]).data.tokenizer

    assert chosen("--model=llama3_1_8b") == "meta-llama/Llama-3.1-8B"
    assert chosen("--model=some/decoder") == "some/decoder"
    with pytest.raises(ValueError, match="--tokenizer model: is that of --model: name a --model, or the tokenizer"):
        chosen("--model_type=llama_v3")
