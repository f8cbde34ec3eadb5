"""HyperPodPyTorchJob: `render.sh --with hyperpodjob`, the rules of its hang detection, and the agent's launcher."""

from __future__ import annotations

import copy
import os
import re
import shutil

import pytest

from tests.ops.manifests import (
    FSDP_GUIDE,
    GUIDE,
    SWITCHED,
    TRAINING,
    containers,
    documents,
    job_of,
    render,
    run_shell,
    values,
)
from tests.ops.mutations import MUTATIONS
from tests.ops.policy import RULES, broken_rules
from tests.training_fixtures import run_forked

pytestmark = pytest.mark.skipif(not shutil.which("envsubst"), reason="envsubst (gettext-base) is not installed")
PYTORCH_JOBS = [name for name in TRAINING if name != "trainjob-template.yaml"]


@pytest.mark.parametrize(
    ("template", "switched"),
    [
        *((template, ()) for template in [*PYTORCH_JOBS, "llama3_1_8b-fsdp.yaml"]),
        *((template, ("kueue", "hyperpod", "instance", "preflight")) for template in PYTORCH_JOBS),
        ("train-ddp-template.yaml", ("open", "guide")),
    ],
)
def test_render_hyperpodjob_makes_the_same_pods_for_hyperpods_operator(template, switched):
    others = {"RUN_ID": "1"} | ({} if template in PYTORCH_JOBS else FSDP_GUIDE)
    text = render(template, "hyperpodjob", *switched, **others)
    for document in documents(text):
        assert broken_rules(document) == {}
    made, plain = job_of(text), job_of(render(template, *switched, **others))
    assert (made["kind"], made["metadata"]) == ("HyperPodPyTorchJob", plain["metadata"])
    assert "elasticPolicy" not in made["spec"]
    (replica,), worker = made["spec"]["replicaSpecs"], plain["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert replica["replicas"] == worker["replicas"]
    (container,), (other,) = containers(made), containers(plain)
    elastic = plain["spec"]["elasticPolicy"]
    told = {"PET_NNODES": str(worker["replicas"]), "PET_NPROC_PER_NODE": "8", "PET_RDZV_ID": elastic["rdzvId"]}
    assert values(container) == told | values(other)
    assert container["args"] == [other["args"][0].replace("python3 -m extras.launch ", "hyperpod-launch ")]
    for guard in documents(text):
        if guard["kind"] == "NetworkPolicy":
            own, operator = guard["spec"]["ingress"]
            assert own["from"] == [{"podSelector": guard["spec"]["podSelector"]}]
            assert operator["ports"] == [{"port": 8080}]


@pytest.mark.parametrize(
    ("template", "switches", "message"),
    [
        ("train-ddp-template.yaml", "hyperpodjob,elastic", "error: --with hyperpodjob excludes elastic and uid"),
        ("trainjob-template.yaml", "hyperpodjob", "trainjob-template.yaml has no switch 'hyperpodjob'"),
    ],
)
def test_render_hyperpodjob_refuses_what_its_operator_cannot_do(template, switches, message):
    done = run_shell(f"kubernetes/render.sh --with {switches} {template}", GUIDE | SWITCHED)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_policy_catches_broken_hyperpod_jobs():
    uncaught, caught = [], set()
    for document in documents(render("train-ddp-cp-template.yaml", "hyperpodjob")):
        for rule, what, change in MUTATIONS:
            broken = copy.deepcopy(document)
            if rule != "restarts" and change(broken):  # those are the operator's own
                caught.add(rule)
                uncaught += [] if rule in broken_rules(broken) else [f"{document['kind']}: {rule}: {what}"]
    assert uncaught == []
    assert {"schema", *RULES} - caught == {"restarts"}


def test_hyperpods_log_rule_matches_each_step_of_a_run_and_its_end(dataset, tmp_path):
    """The agent reads a rank's output by line with these patterns (re.match); no match for so long is a hang."""
    policy = job_of(render("train-ddp-template.yaml", "hyperpodjob"))["spec"]["runPolicy"]
    (rule,) = policy["logMonitoringConfiguration"]
    assert rule.keys() == {"name", "logPattern", "stopPattern", "expectedRecurringFrequencyInSeconds"}
    done = run_forked(dataset, tmp_path / "out", max_steps=3, do_eval=True)
    lines = (done.stderr + done.stdout).splitlines()
    seen = [line for line in lines if re.match(rule["logPattern"], line)]
    assert [re.search(r"step: (\d+/\d+)", line)[1] for line in seen] == ["1/3", "2/3", "3/3"], done
    stops = [line for line in lines if re.match(rule["stopPattern"], line)]
    assert len(stops) == 1


def test_hyperpod_launch_starts_the_agent_with_the_scripts_output_on_stdout(tmp_path):
    agent = 'echo "$NNODES nodes"; while [ "$1" != --no_python ]; do echo "$1"; shift; done; shift; exec "$@"'
    (tmp_path / "hyperpodrun").write_text(f"#!/bin/bash\n{agent}\n")
    (tmp_path / "python3").write_text('#!/bin/bash\necho "$@" >&2\n')
    for program in ("hyperpodrun", "python3"):
        (tmp_path / program).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PET_NNODES": "2",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "540",
    }
    done = run_shell('docker/hyperpod_launch.sh train_ddp.py "--a=b c" --d', variables)
    flags = ["--shutdown-signal=SIGTERM", "--shutdown-timeout=540", "--tee=3", "--log_dir=/tmp/hyperpod"]
    assert done.stdout.splitlines() == ["2 nodes", *flags, "-u train_ddp.py --a=b c --d"]
    assert done.stderr == ""
