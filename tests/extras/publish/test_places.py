"""What is made to be published names no directory, user, host or environment of the machine that made it."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.decoder_fixtures import decoder_flags, write_text
from tests.extras.after.downstream.tables import write_table
from tests.extras.after.inference.embed_fixtures import make_model
from tests.extras.families.text.test_tokenizers import trained
from tests.extras.publish.test_push_to_hub import hub  # noqa: F401  (a fixture)
from tests.forked import ROOT, run_script
from tests.training.test_trackers import settings  # noqa: F401  (a fixture)
from tests.training_fixtures import environment, flags_of

PLACE, USER, HOST, TOKEN = "secret-place", "secret-user", "secret-host", "secret-token"


def host() -> str:
    return HOST


SETTINGS = {"socket.gethostname": host}


@pytest.fixture
def place(tmp_path) -> Path:
    """A directory whose name is recognised, for inputs and outputs."""
    directory = tmp_path / PLACE
    directory.mkdir()
    return directory


def run(script: str, *argv, env: dict | None = None, **how) -> None:
    told = {"USER": USER, "LOGNAME": USER, "HOSTNAME": HOST, "A_SECRET": TOKEN}
    done = run_script(script, *argv, env=environment() | told | (env or {}), settings=SETTINGS, **how)
    assert done.returncode == 0, done.stderr


def told(content: bytes) -> list[str]:
    return [word for word in (PLACE, USER, HOST, TOKEN) if word.encode() in content.lower()]


def telling(directory: Path) -> dict[str, list[str]]:
    """{file: what it tells} of a directory that is there."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    return {path.name: found for path in files if (found := told(path.read_bytes()))}


def test_uploaded_model_tells_nothing_of_the_machine(dataset, place, hub):  # noqa: F811
    """Of a run on data and weights of the directory, with all that it evaluates at its end."""
    data, model = shutil.copytree(dataset, place / "data"), make_model(place / "model")
    argv = flags_of(data, place / "out", max_steps=2, do_eval=True, model_name_or_path=model, hub_model_id="me/model")
    online = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    run("train_ddp.py", *argv, env=online, anew=("huggingface_hub",))
    sent = [body for _, _, body in hub.asked]
    (commit,) = [body for path, _, body in hub.asked if path.endswith("/commit/main")]
    lines = [json.loads(line)["value"] for line in commit.splitlines()]
    sent += [base64.b64decode(line["content"]) for line in lines if "content" in line]
    assert len(sent) > 6
    assert [told(body) for body in sent if told(body)] == []
    assert telling(place / "out" / "final_model") == {}
    assert PLACE in telling(place / "out")["run_info.json"]  # what a run keeps for itself may: docs/security.md


def test_exported_models_tell_nothing_of_the_machine(dataset, place):
    data, out = shutil.copytree(dataset, place / "data"), place / "out"
    run("train_ddp.py", *flags_of(data, out, max_steps=2, save_steps=2, save_final_model=False))
    for form in ("hf", "nv_esm"):
        run("extras.export", out, place / form, "--format", form)
        assert telling(place / form) == {}


def test_exported_decoder_tells_nothing_of_its_tokenizers_place(place):
    tokenizer = trained(place / "tokenizer")
    flags = {"tokenizer": tokenizer, "vocab_size": 512, "max_steps": 1, "save_final_model": True}
    run("train_fsdp2.py", *decoder_flags(write_text(place / "text"), place / "out", **flags))
    assert telling(place / "out" / "final_model") == {}


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_tuned_model_tells_only_the_place_of_its_base(place, full):
    """Which peft opens it by: docs/after.md says to replace it before it is uploaded."""
    pytest.importorskip("peft", reason="./install.sh --finetune")
    model, random = make_model(place / "model"), np.random.default_rng(1)
    proteins = ["".join(random.choice([*"ACDEFGHIKL"], 20)) for _ in range(40)]
    table = write_table(place / "a.csv", ["sequence", "label"], [(each, each.count("A")) for each in proteins])
    argv = [
        "--model_name_or_path",
        model,
        "--dataset",
        table,
        "--output_dir",
        place / "tuned",
        "--num_train_epochs",
        1,
    ]
    run("finetune.py", *argv, "--use_cpu", "--count_relatives", "False", "--full", full)
    assert telling(place / "tuned") == ({} if full else {"adapter_config.json": [PLACE]})
    if not full:
        adapter = json.loads((place / "tuned" / "model" / "adapter_config.json").read_text())
        assert [name for name, value in adapter.items() if PLACE in str(value)] == ["base_model_name_or_path"]


def test_run_keeps_to_its_own_files_what_it_tells(dataset, place):
    """As the table of docs/security.md has it."""
    pytest.importorskip("tensorboard")
    data, out = shutil.copytree(dataset, place / "data"), place / "out"
    run("train_ddp.py", *flags_of(data, out, max_steps=2, save_steps=2, do_eval=True, report_to="tensorboard"))
    assert telling(out) == {"run_info.json": [PLACE], "trainer_state.json": [PLACE]}  # the latter in checkpoint-2, too
    assert [HOST in path.name for path in (out / "logs").iterdir()] == [True]
    assert telling(out / "checkpoint-2") == {"trainer_state.json": [PLACE]}


@pytest.mark.parametrize("is_quiet", [False, True])
def test_wandb_gets_flags_and_unless_told_otherwise_the_machine(dataset, place, settings, is_quiet):  # noqa: F811
    pytest.importorskip("wandb")
    quiet = {"WANDB__DISABLE_META": "true", "WANDB__DISABLE_MACHINE_INFO": "true", "WANDB_HOST": "hidden"}
    data, out = shutil.copytree(dataset, place / "data"), place / "out"
    argv = flags_of(data, out, max_steps=1, save_final_model=False, report_to="wandb")
    run("train_ddp.py", *argv, env={**settings, "PWD": "/", **(quiet if is_quiet else {})})
    (file,) = (out / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    assert f"{data}".encode() in content  # --dataset_dir, as given
    assert (str(ROOT).encode() in content) == (not is_quiet)
    assert TOKEN.encode() not in content
