"""The templates' containers do their work: each one's very command and environment, from FASTA to a trained model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from extras.launch.__main__ import TRY_AGAIN
from extras.prepare.sample import write_sample
from tests.conftest import ROOT
from tests.live_runs import newest_step, ranks_of, wait_until
from tests.ops.manifests import CPU_ONLY, containers, documents, render
from tests.ops.pod import Pod, local_guide_job, local_job
from tests.training_fixtures import TINY_OVERRIDES, _main, free_port, losses, on_ranks, rows, train

pytestmark = [
    pytest.mark.skipif(not shutil.which("envsubst"), reason="envsubst (gettext-base) is not installed"),
    pytest.mark.xdist_group("kubernetes_run"),
]
MODEL = "facebook/esm2_t6_8M_UR50D"
SMALL = {
    "config_overrides": TINY_OVERRIDES,
    "max_seq_length": 128,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "dataloader_num_workers": 0,
}

SIZES = "--train_size=240 --validation_size=40 --test_size=20 --preprocessing_num_workers=1"


def flags(**more) -> str:
    return " ".join(f"--{name}={value}" for name, value in (SMALL | more).items())


def job(template: str, volume: Path, *switches: str, **variables) -> dict:
    return local_job(template, volume, *switches, MODEL=MODEL, RUN_ID="test", **CPU_ONLY | variables)


@pytest.fixture(scope="module")
def volume(tmp_path_factory) -> Path:
    """/fsx-shared with the data that the two data templates make of a FASTA file on it."""
    volume = tmp_path_factory.mktemp("fsx-shared")
    write_sample(volume / "mine.fasta", num_proteins=300, families=12, seed=7)
    for template, variables in (
        ("download-data-template.yaml", {"DOWNLOAD_FLAGS": "--source=/fsx-shared/mine.fasta"}),
        ("preprocess-template.yaml", {"PREPROCESS_FLAGS": SIZES}),
    ):
        pod = Pod(job(template, volume, **variables), volume / f"{template}.log")
        assert pod.end() == 0, pod.said()
    return volume


@pytest.fixture
def pods():
    """Pods to which a test adds its own; none is left."""
    started: list[Pod] = []
    yield started
    for pod in started:
        pod.kill()


def test_data_templates_prepare_the_data(volume):
    assert sorted(path.name for path in (volume / "esm").iterdir() if path.is_dir() and path.name[0] != ".") == [
        "csv",
        "processed",
    ]
    assert (volume / "esm" / "csv" / "x000.csv").read_text().count("\n") == 301
    assert json.loads((volume / "esm/processed/arrow/train/state.json").read_text())["_data_files"]


def test_shards_of_pods_merge_to_the_bytes_of_one_pod(volume, pods, tmp_path):
    """One pod is killed, and another of its index takes its place. A merge that comes too early ends with 2."""
    (tmp_path / "esm").mkdir()
    shutil.copytree(volume / "esm" / "csv", tmp_path / "esm" / "csv")
    text = (tmp_path / "esm/csv/x000.csv").read_text().splitlines(keepends=True)
    (tmp_path / "esm/csv/x000.csv").write_text("".join(text[:150]))
    (tmp_path / "esm/csv/x001.csv").write_text("".join([text[0], *text[150:]]))
    variables = {"SHARDS": "2", "PREPROCESS_FLAGS": SIZES}
    shards, merge = (job(f"{name}-shards-template.yaml", tmp_path, **variables) for name in ("prepare", "merge"))
    assert (shards["spec"]["completions"], shards["spec"]["parallelism"]) == (2, 2)
    pods.append(early := Pod(merge, tmp_path / "early.log"))
    assert early.end() == 2
    assert "--merge 2: 2 of 2 shards are not complete" in early.said()
    killed = Pod(shards, tmp_path / "killed.log", 0)
    wait_until(lambda: (tmp_path / "esm/processed/shards/0-of-2").exists() or not killed.alive(), said=killed.said)
    killed.kill()
    for index in (0, 1):
        pods.append(pod := Pod(shards, tmp_path / f"{index}.log", index))
        assert pod.end() == 0, pod.said()
    pods.append(last := Pod(merge, tmp_path / "merge.log"))
    assert last.end() == 0, last.said()
    of_shards, of_one = (directory / "esm" / "processed" / "arrow" for directory in (tmp_path, volume))
    for split in ("train", "validation", "test"):
        files = {path.name for path in (of_one / split).glob("*.arrow")}
        assert files
        assert all((of_shards / split / name).read_bytes() == (of_one / split / name).read_bytes() for name in files)


@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        ("fsdp", {"train_fsdp2.py": "train_ddp.py", "FSDP2": "DDP", "fsdp": "ddp"}, None),
        (
            "mfsdp",
            {"train_mfsdp.py": "train_ddp.py", "Megatron-FSDP": "DDP", "mfsdp": "ddp"},
            "--zero_dp_strategy=optim_grads_params",
        ),
        ("ddp-cp", {"train_ddp_cp.py": "train_ddp.py", "DDP-CP": "DDP", "ddp-cp": "ddp"}, "--cp_size=2"),
    ],
)
def test_train_templates_differ_in_script_and_at_most_a_flag(name, words, line):
    """envsubst takes whole files, so each is one; those whose pods run below stand for the others."""
    ddp, other = ((ROOT / f"kubernetes/train-{n}-template.yaml").read_text() for n in ("ddp", name))
    ddp, other = (re.sub(r"configs/guide_\w+", "configs/guide", text) for text in (ddp, other))
    results = [re.search(r"in minutes, to (\S+)\.\n", text)[1] for text in (ddp, other)]  # the guide's run
    other = other.replace(results[1], results[0])
    if line:
        assert other.count(f" {line} ") == 2
        other = other.replace(f" {line} ", " ")
    for theirs, ours in words.items():
        other = other.replace(theirs, ours)
    assert other == ddp


def test_trainjob_pods_train_to_the_end(volume, pods, tmp_path):
    made, port = job("trainjob-template.yaml", volume, TRAIN_FLAGS=flags(max_steps=4)), free_port()
    pods += [Pod(made, tmp_path / f"{index}.log", index, port) for index in range(2)]
    assert [pod.end() for pod in pods] == [0, 0], "\n".join(pod.said() for pod in pods)
    out = volume / "trainjob" / MODEL
    assert [row["step"] for row in rows(out) if "loss" in row] == [1, 2, 3, 4]
    assert_complete(out)
    assert "Device = cpu x 2" in "\n".join(pod.said() for pod in pods)
    train(volume / "esm/processed/arrow", tmp_path / "one", nproc=2, **SMALL, max_steps=4, bf16=True)
    assert losses(out) == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


def assert_complete(out: Path) -> None:
    results = json.loads((out / "all_results.json").read_text())
    assert results["train_loss"] > 0
    assert results["eval_samples"] == 40
    assert (out / "final_model" / "config.json").is_file()


@pytest.mark.slow
def test_pods_resume_after_killed_rank_and_deleted_pod(volume, pods, tmp_path):
    """A rank out of memory: torchrun starts all again. The drain of a node: SIGTERM to one pod; its successor and the
    other pod finish the run, as if nothing had happened."""
    steps = 90
    more = {"max_steps": steps, "save_steps": 10, "eval_steps": steps}
    made, port = job("train-fsdp-template.yaml", volume, TRAIN_FLAGS=flags(**more)), free_port()
    out = volume / "fsdp" / MODEL

    def said() -> str:
        return "\n".join(pod.said() for pod in pods)

    stays = Pod(made, tmp_path / "0.log", 0, port)
    pods.append(stays)
    assert wait_until(lambda: _listens(port), stays.alive, poll=0.1), said()  # it holds the rendezvous
    goes = Pod(made, tmp_path / "1.log", 1, port)
    pods.append(goes)
    assert wait_until(lambda: newest_step(out) >= 10, stays.alive, poll=0.05), said()
    os.kill(*ranks_of(goes.process.pid).values(), signal.SIGKILL)
    assert wait_until(lambda: "Resuming after step" in said(), stays.alive, poll=0.05), said()
    killed = newest_step(out)
    assert wait_until(lambda: newest_step(out) > killed, stays.alive, poll=0.05), said()
    goes.delete()
    assert goes.end() == TRY_AGAIN, said()
    saved = newest_step(out)
    assert killed < saved < steps
    pods.append(Pod(made, tmp_path / "successor.log", 1, port))
    assert [stays.end(), pods[-1].end()] == [0, 0], said()
    assert f"Resuming after step {saved}" in said()
    found = [row for row in rows(out) if "loss" in row]
    assert [row["step"] for row in found] == list(range(1, steps + 1))
    whole = SMALL | {"max_steps": steps, "stop_at_step": saved + 5, "bf16": True}
    assert_complete(out)
    train(volume / "esm/processed/arrow", tmp_path / "whole", nproc=2, script="train_fsdp2.py", **whole)
    assert losses(out)[: saved + 5] == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)


@pytest.mark.slow
def test_guide_pods_of_a_decoder_train_and_log_master_addr(pods, tmp_path):
    """`kubectl logs NAME-worker-0 | grep master_addr=`; two pods' losses are those of two ranks here."""
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{"ab" * n}"}}\n' for n in range(2, 200)))
    tiny = "--vocab_size=320 --hidden_width=32 --intermediate_size=64 --num_layers=2 --num_heads=2"
    tiny += f" --num_key_value_heads=1 --dataset={tmp_path}/text.jsonl --dataset_config_name= --tokenizer=bytes"
    tiny += " --max_context_width=32 --val_split=train --validation_batches=1 --max_steps=4 --dataloader_num_workers=0"
    none = CPU_ONLY | {"NUM_NODES": "2", "FI_PROVIDER": ""}
    made, port = local_guide_job("llama3_2_1b-fsdp.yaml", tmp_path, tiny, **none), free_port()
    # A disk of tests may be too small for the guide's checkpoints.
    (container,) = made["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    container["args"] = [container["args"][0].replace("--model=llama3_2_1b", f"--model={MODEL}", 1)]
    pods += [Pod(made, tmp_path / f"{index}.log", index, port) for index in range(2)]
    assert [pod.end() for pod in pods] == [0, 0], "\n".join(pod.said() for pod in pods)
    assert re.search(r"^I.* +master_addr=\S+$", pods[0].said(), re.MULTILINE)
    whole = [f"--model=llama3_2_1b --train_batch_size=1 --output_dir={tmp_path}/whole {tiny}".split()]
    codes, also = on_ranks(2, _main, *whole, "train_fsdp2.py")
    assert codes == [0, 0], "\n".join(also)
    out = tmp_path / "checkpoints" / "llama3_2_1b"
    assert len(losses(out)) == 4
    assert losses(out) == losses(tmp_path / "whole")


def _listens(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    "template", ["train-ddp-template.yaml", pytest.param("trainjob-template.yaml", marks=pytest.mark.slow)]
)
def test_preflight_stops_a_pod_without_data(tmp_path, pods, template):
    pods.append(Pod(job(template, tmp_path), tmp_path / "log", 0, free_port()))
    assert pods[0].end() == 2, pods[0].said()
    assert str(tmp_path / "esm/processed/arrow") in pods[0].said()
    assert not (tmp_path / "ddp").exists()


@pytest.mark.slow
def test_pod_preflight_of_all_nodes(volume, pods, tmp_path):
    made, port = job("train-ddp-template.yaml", volume, "preflight"), free_port()
    pods += [Pod(made, tmp_path / f"{index}.log", index, port) for index in range(2)]
    assert [pod.end() for pod in pods] == [0, 0], "\n".join(pod.said() for pod in pods)
    assert "2 ranks" in "\n".join(pod.said() for pod in pods)


def test_pod_deleted_during_preflight_ends(volume, pods, tmp_path):
    """The shell is process 1 then: without its trap the signal would be lost."""
    pods.append(Pod(job("train-ddp-template.yaml", volume), tmp_path / "log", 0, free_port()))
    wait_until(lambda: _children(pods[0]), pods[0].alive, poll=0.01)
    pods[0].delete()
    assert pods[0].end() == 143, pods[0].said()


def test_pod_deleted_while_a_word_is_computed(volume, pods, tmp_path, monkeypatch):
    """Of two $(...) in a command the shell must not take its trap for part of the second."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ls").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nsleep 0.5\n")
    (tools / "ls").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    pods.append(Pod(job("train-ddp-template.yaml", volume), tmp_path / "log", 0, free_port()))
    wait_until((tmp_path / "asked").exists, pods[0].alive, poll=0.01)
    pods[0].delete()
    assert pods[0].end() == 143, pods[0].said()


def _children(pod: Pod) -> str:
    pid = pod.process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text() if pod.alive() else ""


def test_view_fsx_waits_and_ends_when_told(tmp_path):
    (made,) = documents(render("view-fsx.yaml"))
    pod = Pod(made, tmp_path / "log")
    time.sleep(0.3)
    assert pod.alive()
    pod.delete()
    assert pod.end() == -15


@pytest.mark.skipif(os.getuid() != 0, reason="giving a directory away needs root, as in the pod")
def test_fsx_owner_makes_missing_directories_only(tmp_path):
    (tmp_path / "fsdp").mkdir()
    os.chown(tmp_path / "fsdp", 2000, 2000)
    (_, _, made) = documents(render("fsx-pv-pvc-template.yaml").replace("/fsx-shared", str(tmp_path)))
    (container,) = containers(made)
    (added,) = container["securityContext"]["capabilities"]["add"]
    able = ["setpriv", f"--bounding-set=-all,+{added.lower()}", "--inh-caps=-all"]
    container["command"] = [*able, *container["command"]]
    for name in ("first", "again"):
        pod = Pod(made, tmp_path / name)
        assert pod.end() == 0, pod.said()
    assert tmp_path.stat().st_uid == 0
    assert (tmp_path / "fsdp").stat().st_uid == 2000
    for name in ("esm", "ddp", "ddp-cp", "mfsdp", "clm", "trainjob", "checkpoints", ".cache"):
        assert ((tmp_path / name).stat().st_uid, (tmp_path / name).stat().st_gid) == (1000, 1000), name


def answer(host: str, port: int, path: str) -> str:
    """ "" where nobody listens."""
    with contextlib.suppress(URLError, ConnectionError):
        return urlopen(f"http://{host}:{port}/{path}", timeout=30).read().decode()
    return ""


def test_pod_shows_its_run_to_prometheus(volume, pods, tmp_path):
    """On all addresses (127.0.0.2 is one), by the job's name."""
    port = free_port()
    told = flags(max_steps=100_000, metrics_port=port)
    made = job("train-ddp-template.yaml", volume, "metrics", NUM_NODES="1", JOB_NAME="mine", TRAIN_FLAGS=told)
    pods.append(pod := Pod(made, tmp_path / "pod.log", port=free_port()))
    assert wait_until(
        lambda: 'esm2_loss{run="mine"}' in answer("127.0.0.2", port, "metrics"), pod.alive, said=pod.said
    )


def test_pod_of_tensorboard_shows_runs_on_its_loopback_alone(volume, pods, tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(volume / "ddp" / "mine" / "logs")) as writer:
        writer.add_scalar("train/loss", 2.5, 1)
    made, port = job("tensorboard-template.yaml", volume), free_port()
    (container,) = made["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    assert mount == {"name": "fsx", "mountPath": mount["mountPath"], "readOnly": True}
    assert container["args"][0].count("6006") == 1
    container["args"] = [container["args"][0].replace("6006", str(port))]
    pods.append(pod := Pod(made, tmp_path / "pod.log"))
    shown = lambda: "ddp/mine/logs" in answer("127.0.0.1", port, "data/runs")  # noqa: E731
    assert wait_until(shown, pod.alive, said=pod.said)
    assert not answer("127.0.0.2", port, "data/runs")
