"""A LoRA adapter of finetune.py goes with its base model alone, wherever that is; peft gets checked values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.cli import UserError
from common.models.layers.hf_directory import model_hash
from extras.after.downstream.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_HASH, lora_config
from extras.after.downstream.prediction import PREDICTED, TABLE
from extras.after.downstream.tuned_model import HEADS
from tests.data_fixtures import call, load_script
from tests.extras.after.downstream.tables import write_table

pytest.importorskip("peft", reason="./install.sh --finetune")
FINETUNE, PREDICT = load_script("finetune.py"), load_script("predict.py")


@pytest.fixture(scope="module")
def tuned(model, proteins, tmp_path_factory) -> Path:
    """The --output_dir of finetune.py. The base model is where the fixture `model` says."""
    directory = tmp_path_factory.mktemp("tuned")
    table = write_table(directory / "a.csv", ["sequence", "label"], [(text, len(text)) for _, text in proteins])
    given = ("--model_name_or_path", model, "--dataset", table, "--output_dir", directory / "out")
    call(FINETUNE, *given, "--use_cpu", "--count_relatives", "False", "--num_train_epochs", 1)
    return directory / "out"


@pytest.fixture
def copy(tuned, tmp_path) -> Path:
    return Path(shutil.copytree(tuned, tmp_path / "copy"))


def predicted(tuned, fasta, out, *flags) -> bytes:
    call(PREDICT, "--model", tuned, "--fasta", fasta, "--output_dir", out, "--use_cpu", *flags)
    return (out / PREDICTED / TABLE).read_bytes()


def change(file: Path, **values) -> None:
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def test_adapter_takes_its_base_wherever_it_is(tuned, model, fasta, tmp_path, caplog):
    assert json.loads((tuned / "model" / "config.json").read_text())[BASE_HASH] == model_hash(str(model))
    elsewhere = shutil.copytree(model, tmp_path / "elsewhere")
    first = predicted(tuned, fasta, tmp_path / "first")
    assert predicted(tuned, fasta, tmp_path / "second", "--model_name_or_path", elsewhere) == first
    assert "no hash of its base model" not in caplog.text


def test_adapter_refuses_another_base_of_equal_shapes(tuned, model, fasta, tmp_path):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in tensors if name.endswith("query.weight"))
    tensors[name] = torch.nextafter(tensors[name], torch.tensor(1.0))
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="not the model of --model .*: give that one as --model_name_or_path") as error:
        predicted(tuned, fasta, tmp_path / "out", "--model_name_or_path", other)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out" / PREDICTED).exists()


def test_adapter_says_itself_which_base_it_has(copy, fasta, tmp_path):
    """Not the results beside it, which another adapter may have been put to."""
    change(copy / "model" / "config.json", **{BASE_HASH: "ab" * 32})
    with pytest.raises(UserError, match="not the model of --model"):
        predicted(copy, fasta, tmp_path / "out")
    change(copy / "model" / "config.json", **{BASE_HASH: 5})
    with pytest.raises(UserError, match="base_model_hash is 5, expected str: run finetune.py again"):
        predicted(copy, fasta, tmp_path / "out")


def test_adapter_without_a_hash_is_taken_with_a_warning(copy, tuned, fasta, tmp_path, caplog):
    change(copy / "model" / "config.json", **{BASE_HASH: ...})
    assert predicted(copy, fasta, tmp_path / "out") == predicted(tuned, fasta, tmp_path / "expected")
    assert caplog.text.count("its config.json has no hash of its base model") == 1


def test_peft_gets_what_finetune_wrote(tuned):
    written = json.loads((tuned / "model" / ADAPTER_CONFIG).read_text())
    made = lora_config(tuned / "model", HEADS).to_dict()
    made["target_modules"] = sorted(made["target_modules"])  # a set
    unlike = {name for name, value in written.items() if made[name] != value}
    assert unlike == {"base_model_name_or_path", "inference_mode", "task_type"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "PROMPT_TUNING", "tokenizer_name_or_path": "x"}, "it has 'PROMPT_TUNING'"),
        ({"megatron_config": {}, "megatron_core": "a_module"}, "it has 'megatron_co"),
        ({"corda_config": {"cache_file": "a.pt"}}, "it has 'corda_config'"),
        ({"init_lora_weights": "olora"}, "it has 'init_lora_weights'"),
        ({"use_dora": True}, "it has 'use_dora'"),
        ({"of_a_later_peft": {"file": "a"}}, "it has 'of_a_later_peft'"),
        ({"target_modules": "(a+)+b"}, "target_modules is '.*', expected list"),
        ({"target_modules": ["query$"]}, "it has 'query\\$'"),
        ({"modules_to_save": ["esm"]}, "it has 'esm'"),
        ({"modules_to_save": None}, "modules_to_save is None, expected list"),
        ({"r": 1 << 40}, "r is 1099511627776, that of '.*' 8"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True, expected int"),
        ({"lora_alpha": float("inf")}, "r is 8, lora_alpha inf"),
        ({"lora_alpha": float("nan")}, "r is 8, lora_alpha nan"),
        ({"lora_alpha": ...}, "lora_alpha is None"),
    ],
)
def test_adapter_with_other_settings_is_refused_in_one_line(copy, values, message):
    change(copy / "model" / ADAPTER_CONFIG, **values)
    with pytest.raises(UserError, match=f"no adapter as finetune.py makes it: {message}.*: merge it by ") as error:
        lora_config(copy / "model", HEADS)
    assert "\n" not in str(error.value)


def test_pickled_adapter_is_not_opened(copy, fasta, tmp_path):
    weights = copy / "model" / ADAPTER_WEIGHTS
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises((UserError, OSError), match=ADAPTER_WEIGHTS):
        predicted(copy, fasta, tmp_path / "out")
    with pytest.raises(UserError, match="no adapter as finetune.py makes it"):
        lora_config(copy / "model", HEADS)
