"""`kubectl apply` of every template against a real API server, with the operators' definitions.

    KUBE_APISERVER=/path/to/kube-apiserver pytest tests/ops/test_kubernetes_api.py

Server and etcd run on loopback. There is no scheduler: objects are accepted or refused, and nothing runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests import patience
from tests.live_runs import wait_until
from tests.ops.job_schemas import DEFINITIONS, REFERENCE
from tests.ops.manifests import (
    CPU_ONLY,
    EKS_GUIDE,
    ENVSUBSTS,
    FILE_SYSTEM,
    GUIDE_JOBS,
    KUBERNETES,
    TEMPLATES,
    TRAINING,
    documents,
    job_of,
    render,
    substitute,
    switches_of,
)
from tests.training_fixtures import free_port

SERVER = os.environ.get("KUBE_APISERVER", "")
TOOLS = ("etcd", "kubectl", "openssl", "envsubst")
MISSING = [tool for tool in TOOLS if not shutil.which(tool)]
pytestmark = [
    pytest.mark.skipif(not SERVER, reason="KUBE_APISERVER does not name a kube-apiserver"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {' '.join(MISSING)}"),
    pytest.mark.skipif(not REFERENCE.is_dir(), reason="the operators' definitions are not beside this checkout"),
    pytest.mark.xdist_group("kubernetes_api"),
]
Kubectl = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory) -> Iterator[Kubectl]:
    """kubectl against a server of this module's own, which has the operators' definitions."""
    directory = tmp_path_factory.mktemp("kubernetes")
    port = free_port()
    _keys(directory)
    processes: list[subprocess.Popen] = []
    try:
        processes += _start(directory, port)
        _write_config(directory, port)

        def run(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess:
            command = ["kubectl", f"--kubeconfig={directory}/config", *arguments]
            return patience.run(command, 60, text)

        alive = lambda: all(process.poll() is None for process in processes)  # noqa: E731
        ready = lambda: run("get", "--raw=/readyz").returncode == 0  # noqa: E731
        assert wait_until(ready, alive, poll=0.2), (directory / "server.log").read_text()[-2000:]
        for file in DEFINITIONS.values():
            definition = yaml.load((REFERENCE / file).read_text(), Loader=yaml.CSafeLoader)
            made = run("create", "--validate=false", "-f", "-", text=json.dumps(_for_old_servers(definition)))
            assert made.returncode == 0, made.stderr
        done = run("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        assert done.returncode == 0, done.stderr
        for group in ("kubeflow.org/v1", "trainer.kubeflow.org/v1alpha1"):
            assert wait_until(lambda group=group: run("get", f"--raw=/apis/{group}").returncode == 0, alive, poll=0.2)
        yield run
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def _for_old_servers(node):
    """The definition without what Kubernetes 1.20 refuses: `default: ""`, which it reads as null, and with it the keys
    of lists that need the default. Fields and types stay."""
    if isinstance(node, dict):
        dropped = [key for key in node if key.startswith("x-kubernetes-list-")]
        dropped += ["default"] if node.get("default") == "" else []
        return {key: _for_old_servers(value) for key, value in node.items() if key not in dropped}
    return [_for_old_servers(item) for item in node] if isinstance(node, list) else node


def _without_later_fields(text: str) -> str:
    """A manifest without what Kubernetes 1.20 does not know of a Job."""
    if "kind: Job\n" not in text:
        return text
    later = r"  (suspend|completionMode|backoffLimitPerIndex): .*|  podFailurePolicy:\n(    .*\n)*    .*"
    return re.sub(rf"(?m)^({later})\n", "", text)


def _keys(directory: Path) -> None:
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    certificate = [
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-keyout",
        "tls.key",
        "-out",
        "tls.crt",
    ]
    for command in (["genrsa", "-out", "accounts.key", "2048"], [*certificate, *subject]):
        subprocess.run(["openssl", *command], cwd=directory, check=True, capture_output=True)
    (directory / "tokens.csv").write_text("for-this-test,admin,1,system:masters\n")


def _start(directory: Path, port: int) -> Iterator[subprocess.Popen]:
    store, peers = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    etcd = ["etcd", "--data-dir=etcd", f"--listen-client-urls={store}", f"--advertise-client-urls={store}"]
    etcd += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
    etcd += [f"--initial-cluster=default={peers}"]
    server = [SERVER, f"--etcd-servers={store}", "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1"]
    server += [f"--secure-port={port}", "--tls-cert-file=tls.crt", "--tls-private-key-file=tls.key"]
    server += ["--service-cluster-ip-range=10.96.0.0/24", "--authorization-mode=RBAC"]
    server += ["--service-account-key-file=accounts.key", "--service-account-signing-key-file=accounts.key"]
    server += ["--service-account-issuer=https://kubernetes.default.svc", "--token-auth-file=tokens.csv"]
    server += ["--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none"]
    for name, command in (("etcd", etcd), ("server", server)):
        with open(directory / f"{name}.log", "w") as log:
            yield subprocess.Popen(command, cwd=directory, stdout=log, stderr=subprocess.STDOUT)


def _write_config(directory: Path, port: int) -> None:
    cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": f"{directory}/tls.crt"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": "for-this-test"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin", "namespace": "default"}}],
        "current-context": "test",
    }
    (directory / "config").write_text(json.dumps(config))


@pytest.mark.parametrize("switched", [False, True], ids=["plain", "all switches, no devices"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_apiserver_applies_twice_and_deletes(kubectl, template, switched):
    switches = switches_of(template) if switched else []
    text = render(template, *switches, RUN_ID="1", **(CPU_ONLY if switched else {}))
    text = _without_later_fields(text)
    wanted = documents(text)
    try:
        first = kubectl("apply", "-f", "-", text=text)
        assert first.returncode == 0, first.stderr
        assert first.stdout.count(" created") == len(wanted), first.stdout
        again = kubectl("apply", "-f", "-", text=text)
        assert again.returncode == 0, again.stderr
        assert " created" not in again.stdout
        for document in wanted:
            found = kubectl("get", document["kind"], document["metadata"]["name"], "-o", "json")
            kept = json.loads(found.stdout)
            if document["kind"] in DEFINITIONS:  # the server drops what the definition does not know
                assert kept["spec"].items() >= _without_defaults(document["spec"], kept["spec"]).items()
    finally:
        kubectl("delete", "--ignore-not-found", "--grace-period=0", "--force", "--wait=false", "-f", "-", text=text)
        for document in wanted:
            _let_go(kubectl, document)


@pytest.mark.parametrize("envsubst", ENVSUBSTS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_envsubst_and_apply_with_the_guides_variables_alone(kubectl, template, envsubst):
    """`envsubst < TEMPLATE | kubectl apply -f -`."""
    variables = EKS_GUIDE | {"GUIDE": ""} | (FILE_SYSTEM if template.startswith("fsx") else {})
    text = _without_later_fields(ENVSUBSTS[envsubst](template, variables))
    wanted = documents(text)
    try:
        done = kubectl("apply", "-f", "-", text=text)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(" created") == len(wanted), done.stdout
    finally:
        kubectl("delete", "--ignore-not-found", "--grace-period=0", "--force", "--wait=false", "-f", "-", text=text)
        for document in wanted:
            _let_go(kubectl, document)


@pytest.mark.parametrize(
    "template", [*TRAINING, "download-data-template.yaml", "preprocess-template.yaml", *GUIDE_JOBS]
)
def test_envsubst_without_variables_is_refused(kubectl, template):
    """By kubectl, which finds no number of GPUs, or by the server, whose message names the file that has them; but for
    a NetworkPolicy and a Secret, nothing is made."""
    text = ENVSUBSTS["gettext"](template, {})
    job = documents(text)[-1]
    done = kubectl("apply", "-f", "-", text=text)
    kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", text=text)
    assert done.returncode != 0
    said = r'"source-env-vars(.sh)?-before-envsubst/": name part must be non-empty|unknown object type "nil" in .*gpu'
    assert re.search(said, done.stderr), done.stderr
    assert f"{job['kind'].lower()}.kubeflow.org/{job['metadata']['name']} created" not in done.stdout


@pytest.mark.parametrize("job", GUIDE_JOBS)
def test_apiserver_applies_and_deletes_guide_jobs(kubectl, job):
    """`envsubst < NAME-fsdp.yaml | kubectl apply -f -`, and `kubectl delete -f ./NAME-fsdp.yaml` as it lies there."""
    first = kubectl("apply", "-f", "-", text=substitute(job))
    assert first.returncode == 0, first.stderr
    assert first.stdout.count(" created") == 3, first.stdout
    name = job.removesuffix(".yaml").replace("_", "-")
    kept = json.loads(kubectl("get", "pytorchjob", name, "-o", "json").stdout)["spec"]
    wanted = job_of(substitute(job))
    assert kept.items() >= _without_defaults(wanted["spec"], kept).items()
    done = kubectl("delete", "-f", str(KUBERNETES / job))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" deleted") == 3, done.stdout


def _without_defaults(wanted, kept):
    """`wanted`, with the fields that the server has filled in added, so that what it dropped shows as a difference."""
    if isinstance(wanted, dict) and isinstance(kept, dict):
        return kept | {key: _without_defaults(value, kept.get(key)) for key, value in wanted.items()}
    if isinstance(wanted, list) and isinstance(kept, list) and len(wanted) == len(kept):
        return [_without_defaults(*pair) for pair in zip(wanted, kept, strict=True)]
    return wanted


def _let_go(kubectl: Kubectl, document: dict) -> None:
    """No controller is there to remove finalizers."""
    kind, name = document["kind"], document["metadata"]["name"]
    kubectl("patch", kind, name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    wait_until(lambda: kubectl("get", kind, name).returncode != 0, poll=0.1, seconds=20)


@pytest.mark.parametrize(
    ("template", "old", "new"),
    [
        ("train-ddp-template.yaml", "replicas: 2", "replicas: two"),
        ("trainjob-template.yaml", "numNodes: 2", "numNodes: two"),
        ("download-data-template.yaml", "mountPath: /fsx-shared", "mountPath: []"),
        ("preprocess-template.yaml", "restartPolicy: OnFailure", "restartPolicy: Sometimes"),
        ("view-fsx.yaml", "- name: fsx\n          mountPath", "- name: other\n          mountPath"),
    ],
)
def test_apiserver_refuses_broken_manifests(kubectl, template, old, new):
    text = render(template)
    assert old in text
    done = kubectl("apply", "-f", "-", text=text.replace(old, new))
    assert done.returncode != 0, done.stdout
