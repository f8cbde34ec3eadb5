"""The project's own rules for its Kubernetes manifests, which no schema knows. `broken_rules` names those a manifest
breaks. Each rule yields one message a violation; tests/ops/mutations.py has, for each, changes that it must catch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tests.ops import job_schemas
from tests.ops.manifests import IMAGE, ROOT, containers, pods, values

VOLUME = "/fsx-shared"
TRAIN_SCRIPTS = ("train_ddp.py", "train_ddp_cp.py", "train_fsdp2.py", "train_mfsdp.py")
JOBS = ("PyTorchJob", "HyperPodPyTorchJob", "TrainJob")
# Images that are not ours: pinned, and only where a pod needs nothing of ours.
OTHER_IMAGES = {
    "fsx-share-test": "public.ecr.aws/docker/library/debian:12-slim",
    "fsx-owner": "public.ecr.aws/docker/library/debian:12-slim",
}
PORTS = {"PyTorchJob": {"pytorchjob-port": 23456}, "HyperPodPyTorchJob": {"agent": 8080}}
DEVICES = ("nvidia.com/gpu", "vpc.amazonaws.com/efa", "hugepages-2Mi")
HYPERPOD = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "aws-hyperpod"}}}  # its operator
PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
METRICS = [{"port": 9464}]
OWN_NAME = "-fsdp"  # the end of the FSDP guide's jobs' names: only the guide's variables, each job has its own Secret
SAVE_S = 300  # the least that ranks get to save after a stop signal
# The rules of a Job's podFailurePolicy: bad input is final, a pod that had to leave its node does not count.
FINAL = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
MOVED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
RULES: dict[str, Callable[[dict], Iterator[str]]] = {}


def rule(check: Callable[[dict], Iterator[str]]) -> Callable[[dict], Iterator[str]]:
    RULES[check.__name__] = check
    return check


def of_the_guide(document: dict) -> bool:
    """Whether it is one of manifests.GUIDE_JOBS."""
    return document["metadata"]["name"].endswith(OWN_NAME)


def broken_rules(document: dict) -> dict[str, list[str]]:
    """{rule: messages}. A rule may stumble over a manifest that breaks the schema, and only over such a one."""
    found = {"schema": list(job_schemas.errors(document))}
    for name, check in RULES.items():
        try:
            found[name] = list(check(document))
        except (LookupError, TypeError, ValueError, AttributeError):
            if not found["schema"]:
                raise
    return {name: messages for name, messages in found.items() if messages}


@rule
def image(document: dict) -> Iterator[str]:
    for container in containers(document):
        wanted = OTHER_IMAGES.get(container["name"], IMAGE)
        if container["image"] != wanted:
            yield f"{container['name']}: image {container['image']}, not {wanted}"


@rule
def pytorch_container(document: dict) -> Iterator[str]:
    """The operator finds the container by its name and the rendezvous by its port's; only one container computes."""
    if document["kind"] in JOBS:
        wanted = "node" if document["kind"] == "TrainJob" else "pytorch"
        names = [container["name"] for container in containers(document)]
        if names != [wanted]:
            yield f"containers {names}, not [{wanted}]"
    if document["kind"] in PORTS:
        (container,) = containers(document)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        if ports != PORTS[document["kind"]]:
            yield f"ports {ports}"


@rule
def volumes(document: dict) -> Iterator[str]:
    for pod in pods(document):
        declared = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        mounts = [mount for c in pod["spec"]["containers"] for mount in c.get("volumeMounts", [])]
        mounted = {mount["mountPath"]: mount["name"] for mount in mounts}
        if set(declared) != set(mounted.values()) or len(mounts) != len(mounted):
            yield f"volumes {sorted(declared)}, mounts {mounted}"
        for volume in declared.values():
            if "hostPath" in volume:
                yield f"hostPath {volume['hostPath']}"
        claim = declared.get(mounted.get(VOLUME), {}).get("persistentVolumeClaim")
        if claim != {"claimName": "fsx-claim"}:
            yield f"{VOLUME} is not the claim fsx-claim but {claim}"
        if document["kind"] in JOBS:
            shared_memory = declared.get(mounted.get("/dev/shm"), {}).get("emptyDir", {})
            if shared_memory.get("medium") != "Memory" or not shared_memory.get("sizeLimit"):
                yield "/dev/shm is not a volume of memory with a size limit"


@rule
def resources(document: dict) -> Iterator[str]:
    """Memory and CPU are asked for; devices as limits and requests alike, huge pages only where EFA is."""
    for container in containers(document):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        for name in ("cpu", "memory"):
            if not requests.get(name):
                yield f"{container['name']}: no request for {name}"
        for name in sorted(limits):
            if limits[name] != requests.get(name):
                yield f"{container['name']}: {name}: limit {limits[name]}, request {requests.get(name)}"
        if document["kind"] in JOBS:
            unused = of_the_guide(document) and values(container).get("FI_EFA_USE_HUGE_PAGE") == "0"
            wanted = DEVICES[:2] if unused else DEVICES
            if missing := [name for name in wanted if name not in limits or name not in requests]:
                yield f"no request or limit for {missing}"
            allowed = {"0", "5120Mi" if limits.get("vpc.amazonaws.com/efa") else "0"}
            if not unused and limits.get("hugepages-2Mi") not in allowed:
                yield f"huge pages {limits.get('hugepages-2Mi')}, EFA {limits.get('vpc.amazonaws.com/efa')}"
        elif set(requests) != {"cpu", "memory"}:
            yield f"{container['name']}: requests {sorted(requests)}"


@rule
def security(document: dict) -> Iterator[str]:
    if document["kind"] == "Role" and document["rules"] != [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}
    ]:
        yield "may do more than read pods"
    if document["kind"] == "NetworkPolicy":
        senders = [(s, rule) for rule in document["spec"]["ingress"] for s in rule.get("from", [{}])]
        if document["spec"]["policyTypes"] != ["Ingress"] or not all(
            s.get("podSelector") or s == HYPERPOD or (s == PROMETHEUS and rule["ports"] == METRICS)
            for s, rule in senders
        ):
            yield "anybody reaches these pods"
    for pod in pods(document):
        spec = pod["spec"]
        root = spec["containers"][0]["name"] == "fsx-owner"  # gives the volume's top directory away, and no more
        context = spec["securityContext"]
        if not root and not (context.get("runAsNonRoot") and context.get("runAsUser", 0) > 0):
            yield "may run as root"
        if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield "no seccomp profile"
        if shared := [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]:
            yield f"shares {shared} with the host"
        # A TrainJob's patches have no such field; its runtime decides.
        own = spec.get("serviceAccountName") == "esm2"  # of job-uid.yaml: may read pods, and nothing else
        if spec.get("automountServiceAccountToken", document["kind"] != "TrainJob") and not own:
            yield "the pod gets the API's token"
        allowed = {"CHOWN"} if root else set()
        for container in spec["containers"]:
            context = container["securityContext"]
            added = set(context["capabilities"].get("add", []))
            if context["capabilities"]["drop"] != ["ALL"] or not added <= allowed:
                yield f"capabilities {context['capabilities']}"
            if context.get("privileged") or context.get("allowPrivilegeEscalation", True):
                yield "can gain privileges"
            if not root and context.get("runAsUser", 1000) == 0:
                yield "runs as root"


@rule
def secrets(document: dict) -> Iterator[str]:
    for container in containers(document):
        for name, value in values(container).items():
            if re.search(r"TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_KEY", name):
                yield f"{name}={value[:3]}... in clear: take it from a Secret"
    secret = document["kind"] == "Secret"
    if not secret and (found := re.search(r"hf_[A-Za-z0-9]{8,}|AKIA[A-Z0-9]{12,}", str(document))):
        yield f"{found[0][:5]}... looks like a credential"
    if document["kind"] in JOBS:
        tokens = [entry for c in containers(document) for entry in c["env"] if entry["name"] == "HF_TOKEN"]
        references = [token.get("valueFrom", {}).get("secretKeyRef", {}) for token in tokens]
        if of_the_guide(document):
            if [reference.get("name") for reference in references] != [document["metadata"]["name"]]:
                yield "HF_TOKEN is not the job's own Secret"
        elif [reference.get("optional") for reference in references] != [True]:
            yield "HF_TOKEN is not an optional Secret"


@rule
def lifetime(document: dict) -> Iterator[str]:
    """Nothing lives for ever, and a pod has time to save after a stop signal."""
    spec = document.get("spec", {})
    policy = spec.get("runPolicy", {}) if document["kind"] in PORTS else spec
    tries = "backoffLimitPerIndex" if "completionMode" in spec else "backoffLimit"
    wanted = {
        "Job": ("activeDeadlineSeconds", "ttlSecondsAfterFinished", tries),
        "PyTorchJob": ("activeDeadlineSeconds", "ttlSecondsAfterFinished", "backoffLimit"),
        "HyperPodPyTorchJob": ("activeDeadlineSeconds", "ttlSecondsAfterFinished", "jobMaxRetryCount"),
        "TrainJob": ("activeDeadlineSeconds",),
        "Pod": ("activeDeadlineSeconds",),
    }.get(document["kind"], ())
    if missing := [name for name in wanted if not policy.get(name)]:
        yield f"without {missing}"
    if document["kind"] in JOBS:
        (pod,), (container,) = pods(document), containers(document)
        to_save = int(values(container).get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
        if to_save < SAVE_S:
            yield f"{to_save} s to save"
        if pod["spec"].get("terminationGracePeriodSeconds", 30) <= to_save:
            yield f"the pod is killed before the {to_save} s to save are over"


@rule
def restarts(document: dict) -> Iterator[str]:
    """Preempted work comes back by itself, and meets its own in a rendezvous of its own."""
    if document["kind"] == "Job":
        final = document["spec"].get("podFailurePolicy", {}).get("rules", [])
        (pod,), (container,) = pods(document), containers(document)
        if pod["spec"]["restartPolicy"] != ("Never" if final else "OnFailure"):
            yield "does not start again"
        if final and final != [
            FINAL | {"onExitCodes": FINAL["onExitCodes"] | {"containerName": container["name"]}},
            MOVED,
        ]:
            yield f"podFailurePolicy {final}"
        if ("completionMode" in document["spec"]) != ("JOB_COMPLETION_INDEX" in str(container["args"])):
            yield "an index that is not used, or not there"
    if document["kind"] != "PyTorchJob":
        return
    spec = document["spec"]
    worker, elastic = spec["pytorchReplicaSpecs"]["Worker"], spec["elasticPolicy"]
    if worker["restartPolicy"] != "ExitCode":
        yield f"restartPolicy {worker['restartPolicy']}: starts again what can never work (status 2)"
    if not 1 <= elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]:
        yield f"{worker['replicas']} replicas, elastic {elastic['minReplicas']} to {elastic['maxReplicas']}"
    if not 1 <= elastic.get("maxRestarts", 0) <= 100:
        yield "maxRestarts"
    name = document["metadata"]["name"]
    if not re.fullmatch(name if of_the_guide(document) else rf"{name}-[\w-]+", elastic["rdzvId"]):
        yield f"rdzvId {elastic['rdzvId']}: not this run's own"
    if elastic["rdzvBackend"] != "c10d":
        yield "a rendezvous that needs a server"


@rule
def launch(document: dict) -> Iterator[str]:
    """A bare launcher and `script.py`: torchrun's flags would beat what the operator says through PET_* variables."""
    for container in containers(document):
        script = "\n".join(container.get("args", []))
        if document["kind"] in JOBS:
            if not re.search(r"(?ms)^trap 'exit 143' TERM.*^python3 -m extras\.preflight ", script):
                yield "no preflight, or one that ignores signals"
            if "|| { [ $? = 2 ] && exit 2; exit 143; }" not in re.sub(r"\s+", " ", script):
                yield "a preflight that fails by no fault of the user's is final"
            launcher = "hyperpod-launch" if document["kind"] == "HyperPodPyTorchJob" else "python3 -m extras.launch"
            found = set(re.findall(r"^ *set -- (\S+\.py) ", script, re.MULTILINE))
            if not re.search(rf'^exec {launcher} "\$@"$', script, re.MULTILINE) or found - {*TRAIN_SCRIPTS}:
                yield f"no bare `exec {launcher}` of a script"
            if found == {"train_ddp_cp.py"}:
                spec = document["spec"]
                (pods_of_job,) = (
                    spec["replicaSpecs"] if "replicaSpecs" in spec else spec["pytorchReplicaSpecs"].values()
                )
                ranks = pods_of_job["replicas"] * max(1, int(spec["nprocPerNode"]))
                sizes = [int(size) for size in re.findall(r" --cp_size=(\d+) ", script)]
                if len(sizes) != 2 or any(ranks % size for size in sizes):
                    yield f"--cp_size {sizes} on {ranks} ranks"
            # Not bash: 5.2 takes a trap between two $(...) of a command for part of the second, and ends with 2.
            if container.get("command") != ["/bin/sh", "-euc"]:
                yield f"command {container.get('command')}"
            if "$(printenv TRAIN_FLAGS)" not in script and not of_the_guide(document):
                yield "TRAIN_FLAGS are not used"
        if pasted := re.findall(r"\$\(\w+\)", script):
            yield f"{pasted}: a shell would run what is in them"
        if "$(" in script and not re.match(r"(cd /workspace\n)?set -f\b", script):
            yield "patterns in flags become names of files"
        for file in re.findall(r"[\w.]+\.py\b", script):
            if not (ROOT / file).is_file():
                yield f"{file}: no such script"
        if left := re.findall(r"\$\{\w*\}", str(container)):
            yield f"variables left: {left}"


@rule
def paths(document: dict) -> Iterator[str]:
    """What is to stay is on the volume; so are the caches, which fill small nodes' disks."""
    for container in containers(document):
        script = "\n".join(container.get("args", []))
        for flag, path in re.findall(r"--(\w+_dir)=(\S+)", script):
            if not path.startswith(f"{VOLUME}/"):
                yield f"--{flag} {path} is not on {VOLUME}"
        wanted = ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR") if document["kind"] in JOBS else ()
        found = {k: v for k, v in values(container).items() if k in wanted or k.endswith(("_HOME", "_CACHE_DIR"))}
        for name in {*wanted, *found}:
            if not found.get(name, "").startswith(f"{VOLUME}/"):
                yield f"{name}={found.get(name)} is not on {VOLUME}"
        records = values(container).get("TORCH_FR_DUMP_TEMP_FILE", VOLUME + "/")
        if not records.startswith(f"{VOLUME}/"):
            yield f"records of hung collectives go to {records}, not to {VOLUME}"


@rule
def spread(document: dict) -> Iterator[str]:
    """One pod a node, where there are enough nodes; the label is the one the operator gives its pods."""
    if document["kind"] not in JOBS:
        return
    (pod,), name = pods(document), document["metadata"]["name"]
    if document["kind"] in PORTS:
        terms = pod["spec"].get("topologySpreadConstraints", [])
        label = "training.kubeflow.org/job-name"
        if document["kind"] == "HyperPodPyTorchJob":
            label = "app.kubernetes.io/instance"
            if pod["metadata"]["labels"] != {label: name}:
                yield f"labels {pod['metadata']['labels']}"
    else:
        affinity = pod["spec"].get("affinity", {}).get("podAntiAffinity", {})
        terms = [t["podAffinityTerm"] for t in affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])]
        label = "jobset.sigs.k8s.io/jobset-name"
    found = [(term["topologyKey"], term["labelSelector"]["matchLabels"]) for term in terms]
    if found != [("kubernetes.io/hostname", {label: name})]:
        yield f"not spread over nodes: {found}"
