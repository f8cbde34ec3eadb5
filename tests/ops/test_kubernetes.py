"""kubernetes/: every template renders to what the API, the operators and our own rules want, and broken ones don't."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.marks import cases
from tests.ops.job_schemas import DEFINITIONS, METADATA, definition_of
from tests.ops.manifests import (
    CPU_ONLY,
    EKS_GUIDE,
    ENVSUBSTS,
    FILE_SYSTEM,
    FSDP_GUIDE,
    GUIDE,
    GUIDE_JOBS,
    IMAGE,
    KUBERNETES,
    ROOT,
    SWITCHES,
    TEMPLATES,
    TRAINING,
    containers,
    documents,
    holders,
    job_of,
    pods,
    render,
    run_shell,
    switches_of,
    values,
)
from tests.ops.mutations import MUTATIONS
from tests.ops.pod import started
from tests.ops.policy import RULES, broken_rules

pytestmark = pytest.mark.skipif(not shutil.which("envsubst"), reason="envsubst (gettext-base) is not installed")
MODEL = GUIDE["MODEL"]
SETTINGS = {"": {}, "without devices": CPU_ONLY}
SLOW = {f"train-{strategy}-template.yaml" for strategy in ("ddp-cp", "mfsdp", "fsdp")}


def assert_good(text: str) -> None:
    for document in documents(text):
        assert broken_rules(document) == {}


def test_templates_have_the_guides_names():
    guides = {"download-data", "preprocess", "train-ddp", "train-ddp-cp", "train-fsdp", "train-mfsdp", "trainjob"}
    guides |= {"fsx-pv-pvc", "train-clm", "prepare-shards", "merge-shards", "tensorboard"}
    others = {"view-fsx.yaml", "job-uid.yaml"}
    assert {f"{name}-template.yaml" for name in guides} | others == set(TEMPLATES)
    names = {d["metadata"]["name"] for template in TEMPLATES for d in documents(render(template))}
    assert {"download-uniref-data", "preprocess-data", "fsx-share-test", "fsx-claim", "esm2"} <= names


def test_readme_kubernetes_commands(tmp_path):
    """All but the image, which test_containers.py builds and test_push.py pushes; kubectl keeps what it is given."""
    (tmp_path / "kubectl").write_text(
        f'#!/bin/sh\n[ "$*" = "apply -f -" ] && cat >>{tmp_path}/applied && echo --- >>{tmp_path}/applied\n'
    )
    (tmp_path / "kubectl").chmod(0o755)
    readme = (ROOT / "README.md").read_text()
    commands = re.search(r"### Kubernetes.*?```sh\n(.*?)```", readme, re.DOTALL)[1]
    assert "./build.sh && IMAGE_URI=$(./push.sh)\n" in commands
    commands = commands.replace("./build.sh && IMAGE_URI=$(./push.sh)\n", "")
    done = run_shell(commands, {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ACCOUNT": GUIDE["ACCOUNT"]})
    assert done.returncode == 0, done.stderr
    applied = [document for document in documents((tmp_path / "applied").read_text()) if document]
    assert [document["kind"] for document in applied] == ["Job", "Pod", "NetworkPolicy", "PyTorchJob"]
    for document in applied:
        assert broken_rules(document) == {}
    assert [container["image"] for document in applied for container in containers(document)] == [IMAGE] * 3


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_render_makes_valid_manifests(template, settings):
    assert_good(render(template, **SETTINGS[settings]))


@pytest.mark.parametrize("template", cases(TEMPLATES, slow=SLOW))
def test_render_switches_alone_and_together(template):
    switches = switches_of(template)
    plain = documents(render(template, RUN_ID="1"))
    for chosen in [[s] for s in switches] + ([switches] if len(switches) > 1 else []):
        text = render(template, *chosen, RUN_ID="1")
        assert_good(text)
        assert documents(text) != plain, f"{chosen} changes nothing"
        assert not re.search(r"# \[(not )?\w+\] ", text)


def test_render_switches_change_what_they_name():
    (job,) = documents(render("train-ddp-template.yaml", *SWITCHES))  # `open`: without its policy
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert job["spec"]["runPolicy"]["suspend"] is True
    assert job["metadata"]["annotations"] == {
        "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
        "sagemaker.amazonaws.com/job-max-retry-count": "10",
    }
    elastic = job["spec"]["elasticPolicy"]
    assert elastic["rdzvBackend"] == "c10d"
    assert (elastic["minReplicas"], elastic["maxReplicas"]) == (1, 2)
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["Schedulable"]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_envsubst_needs_the_guides_variables_alone(template, settings):
    """The guide's `export`s and `envsubst < TEMPLATE`: a good manifest, and render.sh's but for what only that sets.

    Shell and $(...) inside the containers' commands survive."""
    variables = EKS_GUIDE | SETTINGS[settings] | (FILE_SYSTEM if template.startswith("fsx") else {}) | {"GUIDE": ""}
    rendered = run_shell(f"kubernetes/render.sh {template}", variables | {"RUN_ID": "mine", "HUGEPAGES": "0"})
    assert rendered.returncode == 0, rendered.stderr
    for substitute in ENVSUBSTS.values():
        text = substitute(template, variables)
        assert_good(text)
        found = documents(text)
        for container in [c for document in found for c in holders(document, "args")]:
            # Switches in a script are comments.
            container["args"] = [re.sub(r"(?m)^# \[\w+\] .*\n", "", text) for text in container["args"]]
        for document in found:
            if annotations := document["metadata"].pop("annotations", None):
                assert annotations == {"source-env-vars.sh-before-envsubst/aws": ""}
        assert found == documents(rendered.stdout.replace("-mine", "").replace('[ "0" = 1 ]', '[ "" = 1 ]'))


@pytest.mark.parametrize("template", TRAINING)
def test_envsubst_makes_jobs_with_the_guides_names(template):
    job = job_of(ENVSUBSTS["gettext"](template, EKS_GUIDE))
    assert job["metadata"]["name"] == ("clm" if "clm" in template else "esm2")
    (container,) = containers(job)
    assert container["image"] == f"{EKS_GUIDE['REGISTRY']}esm:aws"


def test_render_with_gos_envsubst(tmp_path):
    """It fills in variables and knows none of gettext's flags: what is missing must be found without it."""
    script = "import os, sys\nif sys.argv[1:]: sys.exit('flag provided but not defined')\n"
    script += "print(os.path.expandvars(sys.stdin.read()), end='')\n"
    (tmp_path / "envsubst").write_text(f"#!{sys.executable}\n{script}")
    (tmp_path / "envsubst").chmod(0o755)
    go = GUIDE | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN_ID": "1"}
    done = run_shell("kubernetes/render.sh train-ddp-template.yaml", go)
    assert done.returncode == 0, done.stderr
    assert {container["image"] for container in containers(job_of(done.stdout))} == {IMAGE}
    done = run_shell("kubernetes/render.sh train-ddp-template.yaml", go | {"MODEL": ""})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unset or empty: MODEL; see")


def test_push_prints_the_image_that_runs(tmp_path):
    image = f"{GUIDE['REGISTRY']}esm@sha256:{'a' * 64}"
    for template in TRAINING:
        job = job_of(render(template, IMAGE_URI=image))
        assert {container["image"] for container in containers(job)} == {image}
    (tmp_path / "aws").write_text("#!/bin/sh\necho 'Unable to locate credentials' >&2; exit 253\n")
    (tmp_path / "aws").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run_shell('source kubernetes/env_vars.sh || echo "status $? ${REGISTRY:-none}"', path)
    assert done.stdout == "status 2 none\n"
    assert done.stderr.splitlines()[-1].startswith("error: ACCOUNT is not set and the aws command cannot tell it: ")
    done = run_shell('source kubernetes/env_vars.sh && echo "$IMAGE_URI"', path | {"IMAGE_URI": image})
    assert (done.stdout, done.stderr) == (f"{image}\n", "")


def test_templates_variables_are_documented():
    explained = (KUBERNETES / "env_vars.sh").read_text() + (ROOT / "docs" / "kubernetes.md").read_text()
    for template in TEMPLATES:
        for name in re.findall(r"\$\{(\w+)\}", (KUBERNETES / template).read_text()):
            assert name in explained, f"{template}: {name}"


def test_env_vars_holds_the_guides_values_and_keeps_what_is_set(tmp_path):
    (tmp_path / "aws").write_text("#!/bin/sh\necho 123456789012\n")
    (tmp_path / "aws").chmod(0o755)
    show = "source kubernetes/env_vars.sh; env"
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = dict(line.split("=", 1) for line in run_shell(show, path).stdout.splitlines())
    assert {name: found.get(name) for name in GUIDE} == GUIDE
    assert re.fullmatch(r"\d{8}-\d{6}", found["RUN_ID"])
    mine = {"MODEL": "facebook/esm2_t6_8M_UR50D", "REGISTRY": "localhost:5000/", "ACCOUNT": "1", "RUN_ID": "mine"}
    found = dict(line.split("=", 1) for line in run_shell(show, mine).stdout.splitlines())
    assert {name: found[name] for name in mine} == mine


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ("train-ddp-template.yaml", {"TAG": "", "MODEL": ""}, "error: unset or empty: MODEL TAG; see"),
        ("fsx-pv-pvc-template.yaml", {}, "error: unset or empty: FSX_ID FSX_MOUNT_NAME; see"),
        ("--with kueue train-ddp-template.yaml", {}, "error: unset or empty: QUEUE_NAME; see"),
        ("--with kueu train-ddp-template.yaml", {}, "has no switch 'kueu'"),
        ("--with guide train-clm-template.yaml", {}, "has no switch 'guide'"),
        ("--with guide preprocess-template.yaml", {}, "has no switch 'guide'"),
        ("train-ddp-template.yaml", {"GUIDE": "yes"}, "GUIDE=yes: 1 for the guide's run, else 0"),
        ("train-dpp-template.yaml", {}, "no such template; there are"),
        ("train-ddp-template.yaml", {"OUTPUT_DIR": "/scratch"}, "OUTPUT_DIR=/scratch is not on the volume"),
        ("train-ddp-template.yaml", {"NUM_NODES": "two"}, "NUM_NODES=two: not a number of nodes, at least 1"),
        ("train-ddp-template.yaml", {"REGISTRY": ".dkr.ecr.eu-1.amazonaws.com/"}, "is no image: REGISTRY has no host"),
        ("train-ddp-template.yaml", {"REGISTRY": ""}, "error: unset or empty: REGISTRY; see"),
        ("train-ddp-cp-template.yaml", {"CP_SIZE": "two"}, "CP_SIZE=two: not a number of ranks, at least 1"),
        ("train-ddp-cp-template.yaml", {"CP_SIZE": "0"}, "CP_SIZE=0: not a number of ranks, at least 1"),
        ("train-ddp-cp-template.yaml", {"CP_SIZE": "3"}, "CP_SIZE=3 does not divide the job's 16 ranks (nodes: 2, r"),
        ("train-ddp-cp-template.yaml", CPU_ONLY | {"CP_SIZE": "4"}, "CP_SIZE=4 does not divide the job's 2 ranks"),
        ("train-ddp-template.yaml", {"MODEL": "x; touch /tmp/x"}, "MODEL=x; touch /tmp/x: only letters, digits and"),
        ("train-ddp-template.yaml", {"TRAIN_FLAGS": "--seed=1\x1b[2J"}, "TRAIN_FLAGS has a control character in it"),
        ("train-ddp-template.yaml", {"JOB_NAME": "My_job"}, "JOB_NAME=My_job: small letters, digits and - between"),
        ("", {}, "usage:"),
        ("--with", {}, "usage:"),
    ],
)
def test_render_refuses_in_one_line(arguments, variables, message):
    done = run_shell(f"kubernetes/render.sh {arguments}", GUIDE | variables)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_render_warns_if_context_parallelism_crosses_nodes():
    for nodes, size, warned in (("2", "8", False), ("2", "16", True), ("1", "1", False)):
        variables = GUIDE | {"NUM_NODES": nodes, "CP_SIZE": size}
        done = run_shell("kubernetes/render.sh train-ddp-cp-template.yaml", variables)
        assert done.returncode == 0, done.stderr
        assert f" --cp_size={size} \\\n" in done.stdout
        said = f"warning: CP_SIZE={size} on 8 ranks a node: keys cross the network in every layer\n"
        assert done.stderr == (said if warned else "")


def test_render_from_anywhere_and_with_a_path(tmp_path):
    command = f"{KUBERNETES}/render.sh {KUBERNETES}/train-ddp-template.yaml"
    by_path = run_shell(command, GUIDE | {"RUN_ID": "1"}, tmp_path)
    assert by_path.stdout == render("train-ddp-template.yaml", RUN_ID="1")


@pytest.mark.parametrize("template", TRAINING)
def test_render_names_job_and_policy(template):
    """Name, namespace, rendezvous and the label that their pods are spread and guarded by."""
    guard, job = documents(render(template, JOB_NAME="mine", NAMESPACE="team", RUN_ID="1"))
    assert (job["metadata"]["name"], job["metadata"]["namespace"]) == ("mine", "team")
    assert "esm2" not in str(job).replace(MODEL, "").replace("esm2.example.com", "").replace("amazonaws.com/esm:", "")
    label = "jobset.sigs.k8s.io/jobset-name" if job["kind"] == "TrainJob" else "training.kubeflow.org/job-name"
    own = {"podSelector": {"matchLabels": {label: "mine"}}}
    assert guard["spec"] == own | {"policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}
    assert (guard["kind"], guard["metadata"]["namespace"]) == ("NetworkPolicy", "team")
    assert [document["kind"] for document in documents(render(template, "open"))] == [job["kind"]]


def test_env_vars_memory_follows_the_model():
    show = "source kubernetes/env_vars.sh; echo $JOB_NAME $MEMORY"
    found = run_shell(f"MODEL=llama3_1_8b; {show}; MODEL=facebook/esm2_t6_8M_UR50D; {show}", {"ACCOUNT": "1"})
    assert found.stdout.split("\n") == ["clm 64Gi", "esm2 24Gi", ""]
    mine = {"ACCOUNT": "1", "JOB_NAME": "mine", "MEMORY": "1Ti"}
    assert run_shell(f"{show}; {show}", mine).stdout == "mine 1Ti\nmine 1Ti\n"


@pytest.mark.parametrize("template", TRAINING)
def test_render_puts_user_flags_last(template):
    job = job_of(render(template, TRAIN_FLAGS="--max_steps=5 --learning_rate=1e-4"))
    (container,) = containers(job)
    assert values(container)["TRAIN_FLAGS"].strip() == "--max_steps=5 --learning_rate=1e-4"
    script = container["args"][0]
    assert script.index("$(printenv TRAIN_FLAGS)") > script.rindex(" --dataloader_num_workers=")
    assert script.endswith('\nexec python3 -m extras.launch "$@"\n')


HOSTILE = [
    "--source=https://host/a.fasta.gz?X-Date=1&X-Signature=a%2Bb;touch",
    "--fp8_recipe_kwargs",
    '{"a":1}',
    "*",
    "$(touch",
    "owned)",
    "`touch",
    "owned`",
    "'",
    "$HOME",
    "$(FLAGS)",
    "$$",
    "#",
    "- a: b",
    "---",
]


@pytest.mark.parametrize("template", [name for name in TEMPLATES if "_FLAGS]" in (KUBERNETES / name).read_text()])
def test_render_passes_flags_unchanged(template, tmp_path):
    """No shell, no YAML and no kubelet finds anything in them; python3 here writes down its arguments."""
    program = tmp_path / "python3"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/said\n')
    program.chmod(0o755)
    words = " ".join(HOSTILE).split()
    names = re.findall(r"# \[(\w+_FLAGS)\]", (KUBERNETES / template).read_text())
    *_, job = documents(render(template, **dict.fromkeys(names, "\n".join(HOSTILE))))
    (container,) = containers(job)
    command, told = started(container, {"FLAGS": "of the pod"})
    path = f"{tmp_path}:{os.environ['PATH']}"
    (tmp_path / "in").mkdir()
    text = [word.replace("cd /workspace", ":") for word in command]
    assert subprocess.run(text, env=told | {"PATH": path}, cwd=tmp_path / "in", check=False).returncode == 0
    assert (tmp_path / "said").read_text().splitlines()[-len(words) :] == words
    assert list((tmp_path / "in").iterdir()) == []


@pytest.mark.parametrize("template", cases(TEMPLATES, slow=SLOW))
def test_policy_catches_broken_manifests(template):
    """Each change that can be made to the template is caught, by the rule it is meant for; each rule has some."""
    caught, uncaught = set(), []
    for document in documents(render(template)):
        for rule, what, change in MUTATIONS:
            broken = copy.deepcopy(document)
            if not change(broken):
                continue
            if rule in broken_rules(broken):
                caught.add(rule)
            else:
                uncaught.append(f"{document['kind']}: {rule}: {what}")
    assert not uncaught
    has_pods = template != "job-uid.yaml"
    assert {"schema", "security", *(("image", "volumes", "resources") if has_pods else ())} <= caught
    if template in TRAINING:
        assert {"schema", *RULES} - caught <= ({"restarts"} if template == "trainjob-template.yaml" else set())


def test_mutations_apply_to_some_template():
    everything = [document for template in TEMPLATES for document in documents(render(template))]
    for rule, what, change in MUTATIONS:
        assert any(change(copy.deepcopy(document)) for document in everything), f"{rule}: {what}"


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_apiserver_uses_the_operators_crd(kind):
    definition = definition_of(kind)
    if definition is None:
        pytest.skip(f"{DEFINITIONS[kind]} is not beside this checkout")
    assert definition["additionalProperties"] is False
    assert definition["properties"]["metadata"] is METADATA


def commands_of_the_page(*words: str) -> str:
    """The one command of docs/kubernetes.md with these words, without kubectl."""
    lines = (ROOT / "docs" / "kubernetes.md").read_text().splitlines()
    (line,) = [line for line in lines if all(word in line for word in words)]
    return line.removesuffix(" | kubectl apply -f -")


def test_page_makes_directories_of_a_claim_that_is_there():
    made = run_shell(commands_of_the_page("FSX_ID=-"), GUIDE)
    assert [(d["kind"], d["metadata"]["name"]) for d in documents(made.stdout)] == [("Job", "fsx-owner")], made.stderr


@pytest.mark.parametrize("template", ["train-ddp-template.yaml", "preprocess-template.yaml", "trainjob-template.yaml"])
def test_page_runs_pods_as_root(template):
    made = run_shell(commands_of_the_page("runAsNonRoot").replace("TEMPLATE", f"kubernetes/{template}"), EKS_GUIDE)
    (pod,) = pods(documents(made.stdout)[-1])
    found = pod["spec"]["securityContext"]
    assert (found["runAsNonRoot"], found["runAsUser"], found["runAsGroup"]) == (False, 0, 0)


def test_page_tries_a_decoder_without_a_claim():
    command = commands_of_the_page("emptyDir").replace("NAME-fsdp.yaml", "kubernetes/llama3_2_1b-fsdp.yaml")
    made = job_of(run_shell(command, FSDP_GUIDE).stdout)
    (pod,) = pods(made)
    assert {"name": "fsx", "emptyDir": {}} in pod["spec"]["volumes"]
    assert made["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1
    assert "persistentVolumeClaim" not in str(made)


def test_gitignore_has_the_guides_files_and_no_tracked_one(tmp_path):
    """The guide's file of variables holds HF_TOKEN."""
    names = [
        "env_vars",
        "kubernetes/env_vars",
        "kubernetes/download-data-real.yaml",
        "kubernetes/preprocess-data.yaml",
    ]
    names += ["kubernetes/train-ddp.yaml", "kubernetes/train-fsdp.yaml", "train-fsdp.yaml", "slurm/pytorch-fsdp.sqsh"]
    ours = ["kubernetes/env_vars.sh", "slurm/env.sh", *(f"kubernetes/{name}" for name in (*TEMPLATES, *GUIDE_JOBS))]
    ours += [f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")]
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    done = run_shell(f"git init -q; git check-ignore {' '.join(names + ours)}", {"HOME": tmp_path}, tmp_path)
    assert done.stdout.split() == names
    if (ROOT / ".git").exists():
        assert run_shell("git ls-files -ci --exclude-standard", {"HOME": tmp_path}).stdout == ""
