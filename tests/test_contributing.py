"""CONTRIBUTING.md's examples, added to a copy of the code as the page says."""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.typed import contributing, sh


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of the packages."""
    for name in ("common", "extras"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def insert(path: Path, text: str, before: str) -> None:
    old = path.read_text()
    assert old.count(before) == 1
    path.write_text(old.replace(before, text + before))


def printed_by(checkout: Path, program: str) -> list[str]:
    (checkout / "program.py").write_text(program)
    done = sh("python program.py", checkout)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_table_names_every_section():
    _, _, section = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## How to add\n")
    listed = re.findall(r"^\| \[(.*)\]\(#(.*)\) \|", section, re.MULTILINE)
    headings = re.findall(r"^### (.*)", section, re.MULTILINE)
    assert listed == [(name, name.lower().replace(" ", "-")) for name in headings]


def test_schedule_is_one_function(checkout):
    (function,) = contributing("A schedule")
    insert(checkout / "common/training/schedule.py", f"{function}\n\n", "# ---- flags and lengths")
    found = printed_by(
        checkout,
        """
import extras
from common.distributed.strategy import StrategyFlags
from common.flags import changed_defaults, flag_specs
from common.training.command_line import arguments_of
from common.training.schedule import ScheduleFlags
from extras.families.decoders.causal_arguments import DecayFlags

given = {"learning_rate": 1.0, "lr_scheduler_type": "sqrt", "warmup_steps": 2.0}
for flags in (ScheduleFlags(**given, min_lr_rate=0.2), DecayFlags(**given, min_lr=0.2)):
    flags.check()
    print(*(f"{flags.schedule(18)(step):.6f}" for step in (0, 1, 6, 17)), f"{flags.run(18).floor:.2f}")
for task in ("mlm", "clm"):
    specs = flag_specs(changed_defaults(arguments_of(StrategyFlags, task)))
    (spec,) = (spec for spec in specs if spec.name == "lr_scheduler_type")
    print("sqrt" in spec.choices, "sqrt: falls as the square root of the way" in spec.help)
""",
    )
    # 1 - 0.8 times the root of 4 and 15 of 16 steps done; of decoders of 5 and 16, and the warm-up ends at the peak.
    assert found[0] == "0.000000 0.500000 0.600000 0.225403 0.20"
    assert found[1] == "0.500000 1.000000 0.552786 0.200000 0.20"
    assert found[2:] == ["True True"] * 2


def test_alphabet_is_one_file_and_one_line(checkout):
    module, line = contributing("An alphabet")
    (checkout / "extras/families/alphabets/phospho.py").write_text(module)
    insert(checkout / "extras/catalogue.py", line, '        "codon": ')
    found = printed_by(
        checkout,
        """
import extras
import numpy as np
from common.hooks import extra
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from extras.after.inference.mutation_scores import amino_acids_of

alphabet = extra().alphabet("phospho", "")
ids = alphabet.encode("M-SpX-")
print(ids.tolist(), alphabet.is_maskable[ids].tolist(), amino_acids_of(b"M-SpX-", alphabet).decode())
config = esm2_config(1, 32, 2).in_alphabet(alphabet)
config.check("phospho")
print(config.alphabet, build_model(config, seed=1).embeddings.word_embeddings.weight.any(1).sum().item())
""",
    )
    assert found[0] == "[0, 15, 25, 28, 2] [False, True, True, False, False] MSX"
    assert found[1] == "{'name': 'phospho'} 28"  # 29 tokens; <pad> is zero


def test_number_format_is_one_file_and_one_line(checkout):
    module, line = contributing("A number format")
    (checkout / "extras/formats/rows.py").write_text(module)
    insert(checkout / "extras/catalogue.py", line, '        "mxfp8": ')
    found = printed_by(
        checkout,
        """
import extras
import torch
from common.flags import checked
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.precision import PrecisionFlags
from extras.formats.casts import COLUMNS, INPUT
from extras.formats.emulation import Emulation
from common.cli import UserError
from extras.formats.plan import check_device, describe, our_name, resolve

flags = checked(PrecisionFlags(bf16=True, fp8=True, fp8_recipe="rows", emulate_precision=True))
model, plan = build_model(esm2_config(1, 32, 2), seed=1), resolve(flags, 1)
print(describe(plan, "BF16").splitlines()[1])
Emulation(model, plan, seed=1)
matmul = model.encoder.layers[0].self_attention.proj.matmul
x = torch.tensor([[448.0, 100.0, -3.0], [1344.0, 300.0, 9.0]])
values, scale = matmul.quantize(x, INPUT, COLUMNS, torch.bfloat16)
print(values.dtype, (values * scale).round().int().tolist())
mxfp8 = resolve(checked(PrecisionFlags(fp8=True, fp8_recipe="mxfp8")), 1)
for refused in (
    lambda: check_device(plan, "a GPU", (9, 0)),
    lambda: check_device(mxfp8, "an H200", (9, 0)),
    lambda: plan[0].stored(x, COLUMNS),
):
    try:
        refused()
    except UserError as error:
        print(error)
print(our_name("transformer_engine.common.recipe."))
""",
    )
    # Each row's largest value becomes 448; 100 lies between 96 and 104, and goes to the even mantissa.
    assert found[0].strip() == "1       FP8, a scale a row, hybrid"
    assert found[1] == "torch.float32 [[448, 96, -3], [1344, 288, 9]]"
    # Transformer Engine has no such format: no GPU computes in it, and it is no advice for one.
    assert found[2] == "--fp8: FP8, a scale a row is emulated only: add --emulate_precision"
    assert "delayed, current or block works on it" in found[3]
    assert found[4].startswith("--quant_stats: FP8, a scale a row: only of emulated layers: add --emulate_precision")
    assert found[5] == "transformer_engine.common.recipe."


def test_data_format_is_one_file_and_one_line(checkout):
    module, line = contributing("A data format")
    (checkout / "extras/prepare/sources/uniprot_flat.py").write_text(module)
    insert(checkout / "extras/prepare/sources/formats.py", line, '    "parquet": ')
    record = "ID   {0}   Reviewed;   13 AA.\nSQ   SEQUENCE   13 AA;\n     MLAGVSERTI {1}\n     DPK\n//\n"
    whole = "".join(record.format(f"P{n}", "KQN"[n % 3]) for n in range(2_000))
    (checkout / "long.dat").write_text(whole)
    (checkout / "two.dat.gz").write_bytes(gzip.compress("".join(record.format(n, n) for n in "AC").encode()))
    (checkout / "cut.dat").write_text(whole[:-4])
    found = printed_by(
        checkout,
        """
import pyarrow as pa
from common.cli import UserError
from extras.prepare.sources import record_counts
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.sequence_files import Unit, check_columns, read_sequences

def files_of(name):
    return open_source(name, False).splits["train"]

for name in ("two.dat.gz", "cut.dat"):
    check_columns(files_of(name))
    try:
        rows = list(read_sequences(Unit(files_of(name)[0]), 0))
        print(*(text.tobytes().decode() for text, offsets in rows), record_counts.count_records(files_of(name)))
    except UserError as error:
        print(error)
print(record_counts.count_records(files_of("long.dat")))
record_counts.HEAD_BYTES = record_counts.CHUNK_BYTES
print(record_counts.count_records(files_of("long.dat")))
""",
    )
    assert found[0] == "MLAGVSERTIADPK MLAGVSERTICDPK 2"
    assert found[1].endswith("cut.dat: its last record has no end: fetch it again")
    assert found[2] == "2000"
    assert float(found[3]) == pytest.approx(2000, rel=0.02)
