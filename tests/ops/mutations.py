"""Changes to a manifest that must be caught, each by the rule named beside it (or by the schema)."""

from __future__ import annotations

from collections.abc import Callable

from tests.ops.manifests import holders

Change = Callable[[dict], bool]
MUTATIONS: list[tuple[str, str, Change]] = []


def mutation(rule: str, what: str) -> Callable[[Change], Change]:
    """Register a change, made in place; it returns whether the manifest had anything of the kind to change."""

    def register(change: Change) -> Change:
        MUTATIONS.append((rule, what, change))
        return change

    return register


def set_field(rule: str, key: str, value, what: str = "", kinds: tuple[str, ...] = ()) -> None:
    """Give every field of that name another value; DELETE takes it away."""

    @mutation(rule, what or f"{key}: {value}")
    def change(document: dict) -> bool:
        found = list(holders(document, key)) if not kinds or document["kind"] in kinds else []
        for holder in found:
            if value is DELETE:
                del holder[key]
            else:
                holder[key] = value
        return bool(found)


def set_variable(rule: str, name: str, entry: dict | None) -> None:
    """Replace an environment variable, or take it away."""

    @mutation(rule, f"variable {name}: {entry}")
    def change(document: dict) -> bool:
        found = [h for h in holders(document, "env") if any(e["name"] == name for e in h["env"])]
        for holder in found:
            holder["env"] = [e for e in holder["env"] if e["name"] != name]
            if entry is not None:
                holder["env"].append({"name": name} | entry)
        return bool(found)


def edit_script(rule: str, old: str, new: str) -> None:
    @mutation(rule, f"script: {old} -> {new}")
    def change(document: dict) -> bool:
        found = [h for h in holders(document, "args") if any(old in text for text in h["args"])]
        for holder in found:
            holder["args"] = [text.replace(old, new) for text in holder["args"]]
        return bool(found)


def misspell(key: str, wrong: str, kinds: tuple[str, ...] = ()) -> None:
    @mutation("schema", f"{key} misspelt as {wrong}")
    def change(document: dict) -> bool:
        found = list(holders(document, key)) if not kinds or document["kind"] in kinds else []
        for holder in found:
            holder[wrong] = holder.pop(key)
        return bool(found)


DELETE = object()
PYTORCH, TRAIN = ("PyTorchJob",), ("TrainJob",)
JOBS = (*PYTORCH, *TRAIN, "HyperPodPyTorchJob")

# Schema: unknown fields at every level, types, enumerations, missing fields.
for right, wrong in (
    ("volumeMounts", "volumeMount"),
    ("mountPath", "mountpath"),
    ("claimName", "claim"),
    ("securityContext", "securitycontext"),
    ("runAsNonRoot", "runAsNonroot"),
    ("terminationGracePeriodSeconds", "terminationGracePeriod"),
    ("tolerations", "toleration"),
    ("resources", "resource"),
    ("limits", "limit"),
    ("secretKeyRef", "secretRef"),
    ("runPolicy", "runpolicy"),
    ("elasticPolicy", "elastic"),
    ("nprocPerNode", "nProcPerNode"),
    ("rdzvId", "rdzvID"),
    ("cleanPodPolicy", "cleanPodsPolicy"),
    ("pytorchReplicaSpecs", "replicaSpecs"),
    ("runtimeRef", "runtime"),
    ("numNodes", "nodes"),
    ("runtimePatches", "podTemplateOverrides"),
    ("resourcesPerNode", "resources"),
    ("accessModes", "accessMode"),
    ("csi", "CSI"),
    ("claimRef", "claimReference"),
    ("command", "commands"),
    ("podFailurePolicy", "podFailPolicy"),
    ("completionMode", "completionmode"),
    ("apiVersion", "version"),
):
    misspell(right, wrong)
set_field("schema", "replicas", "two")
set_field("schema", "nprocPerNode", 8)
set_field("schema", "nprocPerNode", "many")
set_field("schema", "rdzvBackend", "zookeeper")
set_field("schema", "cleanPodPolicy", "Some")
set_field("schema", "restartPolicy", "Sometimes", kinds=PYTORCH)
set_field("schema", "replicas", DELETE, kinds=PYTORCH)
set_field("schema", "minReplicas", None)
set_field("schema", "rdzvId", "")
set_field("schema", "numNodes", "2")
set_field("schema", "completions", "sixteen")
set_field("schema", "mountPath", 5)
set_field("schema", "mountPath", DELETE)
set_field("schema", "containerPort", "a port")
set_field("schema", "activeDeadlineSeconds", "a day")
set_field("schema", "accessModes", "ReadWriteMany")
set_field("schema", "value", 1, "an environment variable that is a number", kinds=("Pod", "Job", *JOBS))

set_field("image", "image", "123456789012.dkr.ecr.us-east-1.amazonaws.com/esm:latest")
set_field("image", "image", "123456789012.dkr.ecr.us-east-1.amazonaws.com/esm")
set_field("image", "image", "354918380621.dkr.ecr.us-east-1.amazonaws.com/esm:aws")


@mutation("pytorch_container", "container renamed")
def _(document: dict) -> bool:
    found = [h for h in holders(document, "containers") if document["kind"] in JOBS]
    for holder in found:
        holder["containers"][0]["name"] = "main"
    return bool(found)


set_field("pytorch_container", "containerPort", 29500, kinds=PYTORCH)
set_field("volumes", "mountPath", "/data")
set_field("volumes", "claimName", "fsx")
set_field("volumes", "volumes", [])
set_field("volumes", "emptyDir", {}, kinds=JOBS)
set_field("volumes", "emptyDir", {"medium": "Memory"}, kinds=JOBS)


@mutation("volumes", "a mount of a volume that is not there")
def _(document: dict) -> bool:
    found = list(holders(document, "volumeMounts"))
    for holder in found:
        holder["volumeMounts"][0]["name"] = "shared"
    return bool(found)


@mutation("volumes", "hostPath /dev/shm")
def _(document: dict) -> bool:
    found = [h for h in holders(document, "emptyDir") if document["kind"] in JOBS]
    for holder in found:
        del holder["emptyDir"]
        holder["hostPath"] = {"path": "/dev/shm"}
    return bool(found)


OTHER = {"nvidia.com/gpu": 4, "vpc.amazonaws.com/efa": 1, "hugepages-2Mi": "1Gi", "memory": "1Ki"}
for device, wrong in OTHER.items():

    @mutation("resources", f"limit of {device} another than its request")
    def _(document: dict, device=device, wrong=wrong) -> bool:
        found = [h for h in holders(document, "limits") if device in h["limits"]]
        for holder in found:
            holder["limits"][device] = wrong
        return bool(found)


for name in ("cpu", "memory", "nvidia.com/gpu", "vpc.amazonaws.com/efa", "hugepages-2Mi"):

    @mutation("resources", f"no request for {name}")
    def _(document: dict, name=name) -> bool:
        found = [h for h in holders(document, "requests") if name in h["requests"]]
        for holder in found:
            del holder["requests"][name]
        return bool(found)


set_field("security", "runAsNonRoot", False)
set_field("security", "runAsUser", 0, kinds=("Pod", "Deployment", *JOBS))
set_field("security", "seccompProfile", DELETE)
set_field("security", "allowPrivilegeEscalation", True)
set_field("security", "allowPrivilegeEscalation", DELETE)
set_field("security", "capabilities", {"drop": ["ALL"], "add": ["SYS_ADMIN"]})
set_field("security", "capabilities", {"drop": ["ALL"], "add": ["IPC_LOCK"]})
set_field("security", "capabilities", {"drop": ["NET_RAW"]})
set_field("security", "from", [{"podSelector": {}}])
set_field("security", "from", DELETE)
set_field("security", "policyTypes", ["Egress"])
set_field("security", "automountServiceAccountToken", True)
set_field("security", "verbs", ["*"], kinds=("Role",))
set_field("security", "resources", ["secrets"], kinds=("Role",))


@mutation("security", "privileged")
def _(document: dict) -> bool:
    found = [h["securityContext"] for h in holders(document, "volumeMounts")]
    for context in found:
        context["privileged"] = True
    return bool(found)


@mutation("security", "the host's network")
def _(document: dict) -> bool:
    found = [h for h in holders(document, "containers") if document["kind"] != "TrainJob"]
    for holder in found:
        holder["hostNetwork"] = True
    return bool(found)


set_variable("secrets", "HF_TOKEN", {"value": "hf_" + "abcdefgh" * 3})
set_variable("secrets", "HF_TOKEN", {"valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token"}}})
set_variable("secrets", "HF_HOME", {"value": "hf_" + "abcdefgh" * 3})
set_variable("secrets", "HF_TOKEN", None)
for field in ("activeDeadlineSeconds", "ttlSecondsAfterFinished", "backoffLimit", "backoffLimitPerIndex"):
    set_field("lifetime", field, DELETE)
set_field("lifetime", "terminationGracePeriodSeconds", 30, kinds=JOBS)
set_field("lifetime", "terminationGracePeriodSeconds", DELETE, kinds=JOBS)
set_variable("lifetime", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", None)
set_variable("lifetime", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", {"value": "3600"})
for policy in ("Never", "OnFailure"):
    set_field("restarts", "restartPolicy", policy, kinds=PYTORCH)


@mutation("restarts", "a Job's pod with the other restartPolicy")
def _(document: dict) -> bool:
    other = {"Never": "OnFailure", "OnFailure": "Never"}
    found = list(holders(document, "restartPolicy")) if document["kind"] == "Job" else []
    for holder in found:
        holder["restartPolicy"] = other[holder["restartPolicy"]]
    return bool(found)


set_field("restarts", "podFailurePolicy", DELETE)
set_field("restarts", "values", [1], "another exit status is final", kinds=("Job",))
set_field("restarts", "onPodConditions", [])
set_field("restarts", "completionMode", DELETE)
set_field("restarts", "minReplicas", 3)
set_field("restarts", "minReplicas", 0)
set_field("restarts", "maxReplicas", 1)
set_field("restarts", "maxRestarts", DELETE)
set_field("restarts", "rdzvId", "none")
set_field("restarts", "rdzvBackend", "etcd")
LAUNCH = "exec python3 -m extras.launch "
edit_script("launch", LAUNCH, f"{LAUNCH}--nnodes=2 ")
edit_script("launch", LAUNCH, LAUNCH.removeprefix("exec "))
edit_script("launch", LAUNCH, "exec torchrun ")
edit_script("launch", LAUNCH, "exec accelerate launch ")
edit_script("launch", "{ [ $? = 2 ] && exit 2; exit 143; }", "exit 1")
edit_script("launch", "$(printenv TRAIN_FLAGS)", "")
edit_script("launch", "$(printenv ", "$(")
edit_script("launch", "set -f ", ": ")
edit_script("launch", "python3 -m extras.preflight ", "true ")
edit_script("launch", "trap ", "# trap ")
edit_script("launch", ".py", "_.py")
edit_script("launch", " --cp_size=2 ", " ")
edit_script("launch", " --cp_size=2 ", " --cp_size=3 ")
edit_script("launch", "=/fsx-shared", "=${TARGET_PATH}")
edit_script("paths", "=/fsx-shared/", "=/workspace/")
for name in ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
    set_variable("paths", name, {"value": "/root/.cache"})
for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
    set_variable("paths", name, None)
set_variable("paths", "TORCH_FR_DUMP_TEMP_FILE", {"value": "/tmp/nccl_trace_rank_"})
set_field("spread", "topologySpreadConstraints", DELETE)
set_field("spread", "podAntiAffinity", DELETE)
set_field("spread", "topologyKey", "topology.kubernetes.io/zone")
set_field("spread", "matchLabels", {"app": "other"}, kinds=JOBS)
