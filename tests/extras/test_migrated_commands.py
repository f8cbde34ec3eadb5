"""What extras/migrate.py prints for the guides' commands starts: each line is typed into a shell, for a small step.

`python` and `torchrun` are those of tests/warm_python.py. Of several nodes one is started, but for the guide's etcd:
there two agents meet. Commands without flags are held by tests/test_configs.py.
"""

from __future__ import annotations

import re
import shlex

import pytest

from extras.migrate import translate
from tests.conftest import ROOT
from tests.data_fixtures import environment
from tests.extras.test_migrate import GUIDES
from tests.forked import run_script
from tests.guides.rows import ROWS
from tests.training_fixtures import TINY_OVERRIDES, _main, free_port, on_ranks, rows
from tests.typed import checkout_in, sh

# Appended, where the last of a flag's values counts: one step, without the Hub, a GPU and a compiler.
STEP = "--max_steps=1 --stop_at_step=1 --dataloader_num_workers=0 --use_cpu --torch_compile=False --max_seq_length=64"
ENCODER = f"{STEP} --config_overrides={TINY_OVERRIDES.replace('layers=2', 'layers=6')}"
DECODER = (
    f"{STEP} --dataset=text --dataset_config_name= --tokenizer=bytes --vocab_size=320 --num_hidden_layers=2 "
    "--hidden_size=32 --num_attention_heads=2 --num_key_value_heads=2 --intermediate_size=64 "
    "--per_device_train_batch_size=1"
)
COMMANDS = (*(row.command for row in ROWS.values() if row.check.__qualname__.startswith("translates.")), *GUIDES)
MADE = [translate(shlex.split(command.replace("\\\n", " "))) for command in COMMANDS]
LINES = {str(made).splitlines()[0]: made for made in MADE if made.script.endswith(".py") and made.argv}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    directory = checkout_in(tmp_path_factory.mktemp("checkout"))
    (directory / "fp8_debugging_stats.yaml").symlink_to(ROOT / "fp8_debugging_stats.yaml")
    return directory


def small(line: str, output, dataset) -> str:
    """The line with directories of this machine, models that are built in, and at most two ranks."""
    line = re.sub(r"--(output_dir|checkpoint_dir|resume_from_checkpoint)=\S+", rf"--\1={output}", line)
    line = re.sub(r"--dataset_dir=\S+", f"--dataset_dir={dataset}", line)
    line = re.sub(r"--rdzv_endpoint=[\w-]+", "--rdzv_endpoint=localhost", line).replace(":2379", f":{free_port()}")
    line = line.replace("meta-llama/Llama-3.2-1B", "llama3_2_1b").replace("--nnodes=4", "--nnodes=1")
    line = re.sub(r"--(nproc_per_node|cp_size)=[48]", r"--\1=2", line)
    more = DECODER if "--task=clm" in line or "--hidden_width" in line else ENCODER
    more += "" if "--dataset_dir" in line else " --dataset=my_proteins.fasta" * (more == ENCODER)
    more += " --emulate_precision" if "--fp8" in line or "--fp4" in line else ""
    return f"{line} {more} --output_dir={output}"


@pytest.mark.parametrize(
    "line", [line for line, made in LINES.items() if made.script != "train_mfsdp.py"], ids=lambda line: line[-80:]
)
def test_printed_command_takes_a_step(line, checkout, dataset, tmp_path):
    typed = small(line, tmp_path, dataset)
    if "MASTER_ADDR" in line:
        typed = f"export MASTER_ADDR=127.0.0.1; {typed} & {typed}; wait $!"
    done = sh(f'srun() {{ shift; "$@"; }}; {typed}', checkout)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1]
    if "--sequence_packing" in line:
        assert "batch size per device (tokens)" in done.stderr


@pytest.mark.parametrize(
    "line", [line for line, made in LINES.items() if made.script == "train_mfsdp.py"], ids=lambda line: line[-80:]
)
def test_printed_command_of_megatron_takes_a_step(line, checkout, dataset, tmp_path):
    """On one rank, forked: without a GPU the script needs stand-ins for what its library calls of CUDA."""
    words = shlex.split(small(line, tmp_path, dataset).replace("my_proteins", f"{checkout}/my_proteins"))
    codes, said = on_ranks(1, _main, words[words.index("train_mfsdp.py") + 1 :], "train_mfsdp.py")
    assert codes == [0], said
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1]


def test_guides_name_of_the_script_names_ours():
    refused = run_script("train.py", "--bf16", env=environment())
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: train.py: here a script is one strategy: use train_ddp.py")
    assert refused.stderr.count("\n") == 1
    described = run_script("train.py", "--help", env=environment())
    assert (described.returncode, described.stdout) == (0, refused.stderr.removeprefix("error: "))
