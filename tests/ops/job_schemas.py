"""Whether a manifest is what the API says: unknown fields, types, missing fields, values of enumerations.

Kubernetes' own kinds, and the pods inside the jobs, are checked by kubernetes-validate. For the operators' kinds there
is a schema of the fields around the pod here, with the enumerations that their definitions leave to a webhook; where
the definitions themselves are beside the checkout they are used too, made strict.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.ops.manifests import ROOT, pods

jsonschema = pytest.importorskip("jsonschema", reason="./install.sh --dev")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="./install.sh --dev")
utils = pytest.importorskip("kubernetes_validate.utils")
# Megabytes, that it would read anew for each document.
utils.schema_contents = functools.cache(utils.schema_contents)

REFERENCE = ROOT.parent / "shared" / "reference"
DEFINITIONS = {"PyTorchJob": "pytorchjob-crd.yaml", "TrainJob": "trainer-v2.3.0-trainjobs-crd.yaml"}


def fields(required: tuple[str, ...] = (), **properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT, COUNT, FLAG, ANY = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}, {"type": "boolean"}, {}
METADATA = fields(
    ("name",),
    name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 50},
    namespace=TEXT,
    labels={"type": "object", "additionalProperties": {"type": "string"}},
    annotations={"type": "object", "additionalProperties": {"type": "string"}},
)

# Kubeflow training operator 1.x, API reference of kubeflow.org/v1.
PYTORCH_JOB = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=METADATA,
    spec=fields(
        ("pytorchReplicaSpecs",),
        nprocPerNode={"type": "string", "pattern": "^(auto|cpu|gpu|[0-9]+)$"},
        elasticPolicy=fields(
            ("minReplicas", "maxReplicas", "rdzvBackend", "rdzvId"),
            minReplicas=COUNT,
            maxReplicas=COUNT,
            maxRestarts=COUNT,
            rdzvBackend={"enum": ["c10d", "etcd", "etcd-v2"]},
            rdzvHost=TEXT,
            rdzvPort=COUNT,
            rdzvId=TEXT,
            rdzvConf={"type": "array", "items": fields(("key", "value"), key=TEXT, value=TEXT)},
        ),
        runPolicy=fields(
            cleanPodPolicy={"enum": ["All", "Running", "None"]},
            backoffLimit=COUNT,
            activeDeadlineSeconds=COUNT,
            ttlSecondsAfterFinished=COUNT,
            suspend=FLAG,
            managedBy=TEXT,
            schedulingPolicy=ANY,
        ),
        pytorchReplicaSpecs={
            "type": "object",
            "propertyNames": {"enum": ["Master", "Worker"]},
            "minProperties": 1,
            "additionalProperties": fields(
                ("replicas", "restartPolicy", "template"),
                replicas=COUNT,
                restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
                template=ANY,
            ),
        },
    ),
)

# HyperPod's training operator: sagemaker.amazonaws.com/v1 as AWS' `hyp` command has it, which knows no other fields.
HYPERPOD_JOB = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "sagemaker.amazonaws.com/v1"},
    kind={"const": "HyperPodPyTorchJob"},
    metadata=METADATA,
    spec=fields(
        ("replicaSpecs", "runPolicy"),
        nprocPerNode={"type": "string", "pattern": "^(auto|cpu|gpu|[0-9]+)$"},
        runPolicy=fields(
            activeDeadlineSeconds=COUNT,
            cleanPodPolicy={"enum": ["All", "OnlyComplete", "None"]},
            faultDeadlineSeconds=COUNT,
            jobMaxRetryCount=COUNT,
            logMonitoringConfiguration={
                "type": "array",
                "items": fields(
                    ("name", "logPattern"),
                    name=TEXT,
                    logPattern=TEXT,
                    stopPattern=TEXT,
                    expectedRecurringFrequencyInSeconds=COUNT,
                    expectedStartCutOffInSeconds=COUNT,
                    metricEvaluationDataPoints=COUNT,
                    metricThreshold=COUNT,
                    operator={"enum": ["gt", "gteq", "lt", "lteq", "eq"]},
                ),
            },
            restartPolicy=fields(
                ("evalPeriodSeconds",),
                evalPeriodSeconds=COUNT,
                maxFullJobRestarts=COUNT,
                numRestartBeforeFullJobRestart=COUNT,
                maxNumRepeatOffendersToAvoid=COUNT,
                scaleUpSnoozeTimeInSeconds=COUNT,
            ),
            startupDeadlineSeconds=COUNT,
            suspend=FLAG,
            ttlSecondsAfterFinished={"type": "integer", "minimum": -1},
        ),
        replicaSpecs={
            "type": "array",
            "minItems": 1,
            "items": fields(
                ("name", "replicas", "template"),
                name=TEXT,
                replicas=COUNT,
                maxReplicas=COUNT,
                spares=COUNT,
                template=fields(metadata=ANY, spec=ANY),
            ),
        },
    ),
)

# Kubeflow Trainer 2.3, API reference of trainer.kubeflow.org/v1alpha1.
PATCHED_POD = fields(metadata=ANY, spec=ANY)
PATCHED_JOB = fields(
    ("name", "template"), name=TEXT, template=fields(metadata=ANY, spec=fields(("template",), template=PATCHED_POD))
)
TRAIN_JOB = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainJob"},
    metadata=METADATA,
    spec=fields(
        ("runtimeRef", "trainer"),
        runtimeRef=fields(
            ("name",), name=TEXT, apiGroup=TEXT, kind={"enum": ["ClusterTrainingRuntime", "TrainingRuntime"]}
        ),
        suspend=FLAG,
        activeDeadlineSeconds=COUNT,
        trainer=fields(
            image=TEXT,
            command={"type": "array", "items": TEXT},
            args={"type": "array", "items": TEXT},
            env=ANY,
            numNodes=COUNT,
            numProcPerNode=COUNT,
            resourcesPerNode=ANY,
        ),
        runtimePatches={
            "type": "array",
            "items": fields(
                ("manager",),
                manager=TEXT,
                trainingRuntimeSpec=fields(
                    template=fields(metadata=ANY, spec=fields(replicatedJobs={"type": "array", "items": PATCHED_JOB}))
                ),
            ),
        },
    ),
)
SCHEMAS = {"PyTorchJob": PYTORCH_JOB, "HyperPodPyTorchJob": HYPERPOD_JOB, "TrainJob": TRAIN_JOB}


def errors(document: dict) -> Iterator[str]:
    kind = document.get("kind")
    if kind in SCHEMAS:
        yield from _errors(document, SCHEMAS[kind])
        if (definition := definition_of(kind)) is not None:
            yield from _errors(document, definition)
        try:
            wrapped = pods(document)
        except (KeyError, ValueError, TypeError) as error:
            yield f"no pod to be found: {error!r}"
            return
        for pod in wrapped:
            yield from _core_errors(pod)
    else:
        yield from _core_errors(document)


def _errors(document: dict, schema: dict) -> Iterator[str]:
    for error in jsonschema.Draft202012Validator(schema).iter_errors(document):
        yield f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"


def _core_errors(document: dict) -> Iterator[str]:
    if missing := {"apiVersion", "kind", "metadata"} - document.keys():
        yield f"without {sorted(missing)}"
        return
    try:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        yield str(error).splitlines()[0]


@functools.cache
def definition_of(kind: str, directory: Path = REFERENCE) -> dict | None:
    """The schema in the operator's own definition, made strict; None where it is not beside the checkout."""
    file = directory / DEFINITIONS.get(kind, "none is public")
    if not file.exists():
        return None
    definition = yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = [version for version in definition["spec"]["versions"] if version["served"]]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = METADATA
    return schema


def strict(schema: dict) -> dict:
    """The same with unknown fields as errors, and Kubernetes' extensions as JSON schema has them."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"], "minLength": 1}
    schema = {key: value for key, value in schema.items() if not key.startswith("x-") and key != "format"}
    if "properties" in schema:
        schema["properties"] = {name: strict(field) for name, field in schema["properties"].items()}
        schema.setdefault("additionalProperties", False)
    if isinstance(schema.get("additionalProperties"), dict):
        schema["additionalProperties"] = strict(schema["additionalProperties"])
    if "items" in schema:
        schema["items"] = strict(schema["items"])
    return schema
