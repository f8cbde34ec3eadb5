"""Each row of the guides holds (tests/guides/rows.py), and no command or flag of the guides is without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.measuring import FILE_ONLY
from extras.interop.flag_tables import PROGRAMS
from tests.data_fixtures import environment, write_fasta
from tests.forked import run_script
from tests.guides.checks import Here, Row
from tests.guides.rows import GUIDES, ROWS
from tests.guides.session import ROOT, Typed, has_envsubst, type_commands
from tests.training.test_decoder_flags import GUIDES as TRAINING_ARGS
from tests.training_fixtures import TINY_OVERRIDES

# The guides as published, where they lie beside this checkout; nothing of them is copied.
PUBLISHED = ROOT.parent / "shared" / "seeds"
# In what other programs print: warnings of accelerate and of NVIDIA's image.
OTHERS = {"eks": {"--dynamo_backend", "--mixed_precision"}, "slurm": {"--ulimit"}}


def of_guide(guide: str) -> dict[str, Row]:
    return {name: row for name, row in ROWS.items() if name.rpartition("-")[0] == guide}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Guide -> {row: what came of its command}: all of a guide's commands, in order, in one shell; once."""
    made: dict[str, dict[str, Typed]] = {}

    def of(guide: str) -> dict[str, Typed]:
        if guide not in made:
            rows = {name: row for name, row in of_guide(guide).items() if row.typed}
            commands = {name: f"{row.before}\n{row.command}" for name, row in rows.items()}
            made[guide] = type_commands(commands, tmp_path_factory.mktemp(guide))
        return made[guide]

    return of


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory):
    """Data, training, evaluation and export by the guides' commands, for real: 60 proteins and a tiny model."""
    here = tmp_path_factory.mktemp("demonstration")

    def directory() -> Path:
        if not (here / "download.log").exists():
            _demonstrate(here)
        assert (here / "out" / "final_model").is_dir(), "the run has failed: see the first test that asked for it"
        return here

    return directory


def _demonstrate(here: Path) -> None:
    letters = "ACDEFGHIKLMNPQRSTVWY"
    records = [(f"P{n}", "".join(letters[(n * n + 7 * k * k + k) % 20] for k in range(20 + n))) for n in range(60)]
    fasta = write_fasta(here / "proteins.fasta", records)
    sizes = ("--validation_size=6", "--test_size=6", "--preprocessing_num_workers=1")
    model = ("--config_name=facebook/esm2_t6_8M_UR50D", f"--config_overrides={TINY_OVERRIDES}")
    batch = ("--per_device_train_batch_size=8", "--max_train_samples=32", "--gradient_accumulation_steps=1")
    shape = ("--pad_to_max_length=True", "--max_seq_length=96", "--num_train_epochs=1", "--logging_steps=1")
    todo = ("--do_train=True", "--do_eval=True", "--do_preprocess=False", "--dataloader_num_workers=0")
    places = (f"--dataset_dir={here}/processed/arrow", f"--output_dir={here}/out")
    for step, script, *words in (
        ("download", "0.download_data.py", f"--source={fasta}", f"--output_dir={here}"),
        ("tokenize", "1.tokenize_uniref_csv.py", f"--input_dir={here}/csv", f"--output_dir={here}/processed", *sizes),
        ("train", "train_ddp.py", *model, *batch, *shape, *todo, *places),
    ):
        done = run_script(script, *words, env=environment())
        (here / f"{step}.log").write_text(done.stderr.replace("\r", "\n") + done.stdout)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ROWS)
def test_guide_row_holds(name, session, demonstration, tmp_path):
    row, guide = ROWS[name], name.rpartition("-")[0]
    if row.typed and guide in ("eks", "fsdp-eks") and not has_envsubst():
        pytest.skip("envsubst (gettext-base) is not installed")
    typed = session(guide).get(name) if row.typed else None
    row.check(Here(row.command, typed, tmp_path, demonstration))


def test_guide_rows_are_numbered_without_a_gap():
    for guide in GUIDES:
        assert list(of_guide(guide)) == [f"{guide}-{n}" for n in range(1, len(of_guide(guide)) + 1)]
    assert len(ROWS) >= 103


def test_no_flag_of_a_guide_is_a_key_of_a_file_alone():
    """Neither one that a guide types nor one that `extras.migrate` prints in place of its own."""
    rows = " ".join(f"{row.says} {row.command}" for row in ROWS.values())
    typed = set(re.findall(r"(?<![\w-])--(?:no[_-])?([a-z]\w[\w-]*)", rows))
    typed |= {word.partition("=")[0].removeprefix("--") for run in TRAINING_ARGS.values() for word in run}
    printed = {flag for table in PROGRAMS.values() for ours in table.values() for flag in ours.flag.split()}
    assert {name.replace("-", "_") for name in typed | printed} & FILE_ONLY == set()
    assert {"config_name", "pad_to_max_length", "plateau"} <= typed
    assert {"adam_epsilon", "quant_stats_file"} <= printed


def published(guide: str) -> str:
    files = [*PUBLISHED.glob(f"*_{GUIDES[guide]}.md")] if PUBLISHED.is_dir() else []
    if not files:
        pytest.skip("the guides are not beside this checkout")
    return files[0].read_text(errors="replace")


@pytest.mark.parametrize("guide", GUIDES)
def test_guide_blocks_have_rows(guide):
    """Every code block of a guide, by its number."""
    count = len(re.findall(r"(?m)^\s*```", published(guide))) // 2
    assert {number for row in of_guide(guide).values() for number in row.blocks} == {*range(1, count + 1)}


@pytest.mark.parametrize("guide", GUIDES)
def test_guide_flags_have_rows(guide):
    """Every flag in a guide, and every key of the recipe, is in a row's command or words."""
    text, rows = published(guide), " ".join(f"{row.says} {row.command}" for row in ROWS.values())
    flags = set(re.findall(r"(?<![\w-])--[a-z]\w[\w-]*", text)) - OTHERS.get(guide, set())
    if guide == "recipe":
        flags |= set(
            re.findall(r"(?<![\w.])(\w+_config\.\w+|checkpoint\.\w+|fp[48]_layers|use_\w+|model_tag)(?==)", text)
        )
    elif guide == "fsdp-slurm":  # TRAINING_ARGS of the logs: held by test_decoder_flags.py, word for word
        words = set(re.findall(r"'(--\w+=[^']*)'", text))
        flags -= {word.partition("=")[0] for word in words}
        assert {word for word in words if word not in rows} <= {word for run in TRAINING_ARGS.values() for word in run}
    assert {flag for flag in flags if flag not in rows} == set()
