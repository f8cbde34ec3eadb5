"""--help, as somebody reads it in a terminal of 100 columns."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from benchmarks.measuring import FILE_ONLY
from common.checkpoint.checkpointer import CheckpointFlags
from common.cli import UserError
from common.cli_help import FlagSpec
from common.data.flags import DataFlags
from common.flags import Flags, changed_defaults, checked, flag, flag_specs, flat, parse_arguments, with_flags
from common.models.esm2.family import ModelFlags
from common.training.arguments import RunArguments
from common.training.command_line import arguments_of, parse_run
from tests.conftest import ROOT
from tests.data_fixtures import environment, load_script
from tests.forked import run_script

STRATEGIES = {"train_ddp.py": "DdpFlags", "train_ddp_cp.py": "DdpCpFlags", "train_fsdp2.py": "FsdpFlags"}
STRATEGIES |= {"train_mfsdp.py": "MegatronFlags"}
TRAINING = [(script, ()) for script in STRATEGIES] + [("train_fsdp2.py", ("--model", "llama3_2_1b"))]
DATA = [(script, ()) for script in ("0.download_data.py", "1.tokenize_uniref_csv.py", "1.tokenize_text.py")]


# How a line says when one would change the flag; those that every run has to think of need not.
WHEN = re.compile(r"\b([Ii]f|[Ff]or|[Tt]o|[Ii]nstead|[Ii]n place|[Rr]aise|[Ll]ower|[Cc]hange)\b")
NEEDED = {"output_dir", "task"}
OTHER = {  # values of keys of a file of flags, where True is none
    "cp_comm_type": "all_gather",
    "cp_layout": "contiguous",
    "dataset_mix_stages": ["1:a=1"],
    "dataset_mix_exponent": 0.5,
    "sample_clusters_exponent": 0.5,
    "ddp_bucket_dtype": "bf16",
    "device_reserve": 2.5,
    "diffusion_schedule": "cosine",
    "eval_mask_replace_prob": 0.5,
    "eval_mlm_probability": 0.3,
    "mask_replace_prob": 0.7,
    "packs_per_step_schedule": "0:2,9:4",
    "random_replace_prob": 0.2,
    "set_size": 16,
    "straggler_every": 7,
}


def flags_of(script: str) -> RunArguments:
    return arguments_of(getattr(load_script(script), STRATEGIES[script]), "mlm")


def specs_of(script: str, task: str, tokenizer: str | None = None) -> list[FlagSpec]:
    strategy = getattr(load_script(script), STRATEGIES[script])
    return flag_specs(changed_defaults(arguments_of(strategy, task, tokenizer)))


def file_only(script: str) -> list[str]:
    return [spec.name for spec in specs_of(script, "mlm") if spec.level == "file_only"]


def said(script: str, *flags: str) -> list[str]:
    done = run_script(script, *flags, env=environment() | {"COLUMNS": "100"})
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("script", "flags"), TRAINING + DATA)
def test_help_fits_the_terminal(script, flags):
    lines = said(script, *flags, "--help")
    assert lines[0].startswith(f"usage: {script} ")
    assert len(lines) < 165
    assert max(map(len, lines)) <= 100, max(lines, key=len)
    groups = [line for line in lines if re.fullmatch(r"[a-z ,]+:", line)]
    if (script, flags) in TRAINING:
        assert groups[0] == "needed:"
        assert {"model:", "data:", "batches:", "optimiser:", "precision:", "checkpoints:", "logging:"} < set(groups)
        needed = "\n".join(lines[lines.index("needed:") : lines.index(groups[1])])
        for name in (
            ("--model", "--dataset", "--output_dir") if flags else ("--config_name", "--dataset_dir", "--output_dir")
        ):
            assert f"  {name} TEXT" in needed or f"  {name}, " in needed


@pytest.mark.parametrize("width", [1, 40])
def test_help_of_a_narrow_terminal_has_texts_below_the_flags(width):
    done = run_script("train_fsdp2.py", "--help_all", env=environment() | {"COLUMNS": str(width)})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    at = lines.index("  --config_name TEXT")
    assert lines[at + 1].startswith("      The model to train")
    assert len(lines) < 450


MODULES = ("report", "export", "formats.stats_report", "prepare.sample", "preflight")


@pytest.mark.parametrize("module", MODULES)
def test_module_help_has_a_purpose(module):
    lines = said(f"extras.{module}", "--help")
    assert lines[0].startswith("usage: ")
    assert len(lines) >= 5


@pytest.mark.parametrize("script", STRATEGIES)
def test_help_all_lists_every_flag(script):
    of_it = "\n".join(said(script, "--help_all"))
    of_it, _, keys = of_it.partition("\nKeys of a file of flags alone, see docs/flags.md: ")
    shown = set(re.findall(r"--(?:no_)?(\w+)", of_it)) | set(re.findall(r"\w+", keys))
    assert set(flat(flags_of(script))) <= shown
    assert not set(file_only(script)) & set(re.findall(r"--(?:no_)?(\w+)", "\n".join(said(script, "--help_all"))))
    assert "--help_all: " not in of_it
    assert "--help_all: " in "\n".join(said(script, "--help"))


@pytest.mark.parametrize("task", ["mlm", "clm", "clm --tokenizer residues"])
@pytest.mark.parametrize("script", STRATEGIES)
def test_help_all_lists_at_most_60_flags_and_when_to_change_them(script, task):
    """A flag above 60 replaces another one, or is unlisted, or a key of a file of flags."""
    task, *tokenizer = task.split()
    lines = said(script, "--task", task, *tokenizer, "--help_all")
    assert 50 < sum(line.startswith("  --") for line in lines) <= 60
    listed = [spec for spec in specs_of(script, task, *tokenizer[1:]) if spec.level not in ("unlisted", "file_only")]
    assert [spec.name for spec in listed if not WHEN.search(spec.help) and spec.name not in NEEDED] == []


@pytest.mark.parametrize("script", STRATEGIES)
def test_key_of_a_file_of_flags_is_no_flag_of_a_command_line(script, tmp_path):
    given = {"config_name": "facebook/esm2_t6_8M_UR50D", "dataset_dir": "x", "output_dir": "y", "bf16": True}
    given |= {
        "sample_clusters": "auto",
        "fp8": True,
        "fp8_recipe": "current",
        "cp_size": 1 if script == "train_ddp.py" else 2,
    }
    others = OTHER | ({"cp_layout": "dual_chunk"} if script == "train_ddp.py" else {})
    own = file_only(script)
    file, strategy = tmp_path / "run.yaml", getattr(load_script(script), STRATEGIES[script])
    assert len(own) >= 11
    for name in own:
        value = others.get(name, True)
        data = {"dataset_dir": None, "dataset_mix": ["a=x"], "max_steps": 1} if name.startswith("dataset_mix") else {}
        file.write_text(yaml.safe_dump(given | data | {name: value}))
        assert flat(parse_run("", strategy, [str(file)]))[name] == value
        text = value[0] if isinstance(value, list) else str(value)
        words = [f"--{name}"] if value is True else [f"--{name.replace('_', '-')}", text]
        line = f"`{name}: {str(value).lower()}`"
        with pytest.raises(UserError) as refused:
            parse_run("", strategy, words)
        prog = Path(sys.argv[0]).name
        instead = f"write {line} into FILE.yaml and give that first: {prog} FILE.yaml"
        assert str(refused.value) == f"--{name} is a key of a file of flags: {instead}"
        with pytest.raises(UserError, match=f"write {re.escape(line)} into {file} or a copy of it$"):
            parse_run("", strategy, [str(file), *words])


def test_key_of_a_file_of_flags_is_no_guess_at_a_word_of_a_command_line(tmp_path):
    file, strategy = tmp_path / "run.yaml", load_script("train_ddp.py").DdpFlags
    with pytest.raises(UserError, match=r"^unknown flag --triton_adam \(see"):
        parse_run("", strategy, ["--triton_adam"])
    file.write_text("triton_adam: true")
    with pytest.raises(UserError, match="unknown flag --triton_adam: did you mean --triton_adamw?"):
        parse_run("", strategy, [str(file)])


def test_flag_that_replaces_a_key_of_a_file_of_flags_says_so(tmp_path, caplog):
    file, strategy = tmp_path / "run.yaml", load_script("train_ddp.py").DdpFlags
    file.write_text(yaml.safe_dump({"packs_per_step_schedule": "0:2,9:4", "dataset_dir": "x", "output_dir": "y"}))
    found = flat(parse_run("", strategy, [str(file), "--config_name=facebook/esm2_t6_8M_UR50D", "--packs_per_step=3"]))
    assert (found["packs_per_step_schedule"], found["packs_per_step"]) == (None, 3)
    assert f"--packs_per_step=3 replaces the packs_per_step_schedule of {file}" in caplog.text


def test_file_of_flags_may_follow_a_jobs_own_flags(tmp_path):
    """slurm/*.sh and TRAIN_FLAGS of kubernetes/ put what a user adds behind theirs."""
    file, strategy = tmp_path / "run.yaml", load_script("train_ddp_cp.py").DdpCpFlags
    file.write_text(yaml.safe_dump({"cp_comm_type": "all_gather", "max_steps": 7, "logging_steps": 3}))
    job = ["--cp_size=2", "--config_name=facebook/esm2_t6_8M_UR50D", "--output_dir=y", "--dataset_dir=x"]
    found = flat(parse_run("", strategy, [*job, str(file), "--max_steps", "9"]))
    assert (found["cp_comm_type"], found["max_steps"], found["logging_steps"]) == ("all_gather", 9, 3)
    assert flat(parse_run("", strategy, [*job, "--run_name", str(file)]))["run_name"] == str(file)  # a value
    with pytest.raises(UserError, match=f"{file}: a file of flags comes first"):
        parse_run("", strategy, [str(file), *job, str(file)])


def test_no_document_types_a_key_of_a_file_of_flags():
    keys = {name for script in STRATEGIES for name in file_only(script)}
    assert keys == FILE_ONLY, "those of benchmarks/measuring.py"
    typed = re.compile(rf"--(?:no_)?(?:{'|'.join(keys)})\b")
    files = [ROOT / "README.md", ROOT / "quickstart.sh", *(ROOT / "docs").glob("*.md")]
    files += [
        file for name in ("configs", "kubernetes", "slurm") for file in (ROOT / name).rglob("*") if file.is_file()
    ]
    found = {file.name: typed.findall(file.read_text()) for file in files if file.name != "log.md"}
    assert {name: words for name, words in found.items() if words} == {}


def test_help_all_names_flags_without_effect_in_one_line():
    of_it = " ".join(said("train_fsdp2.py", "--task", "clm", "--help_all"))
    assert "Accepted for compatibility, without effect: --same_seed, --tensorboard_dir, --resid_pdrop," in of_it


@pytest.mark.parametrize("script", STRATEGIES)
def test_help_shows_choices_beside_their_flag(script):
    """Those that the error names for a value that is none of them."""
    args = flags_of(script)
    shown = "".join(line.strip() for line in said(script, "--help_all"))
    found = 0
    for spec in flag_specs(args):
        if "str" not in spec.type or spec.name == "task":
            continue
        try:
            flags = {"config_name": "facebook/esm2_t6_8M_UR50D", "dataset_dir": "x", "output_dir": "y"}
            checked(with_flags(args, **flags | {spec.name: "nonsense"}))
        except UserError as error:
            if choices := re.search(rf"--{spec.name} nonsense: choose (.*)", str(error)):
                beside = f"--{spec.name} {{{choices[1].replace(', ', ',')}}}"
                is_listed = spec.level not in ("unlisted", "file_only")
                found += is_listed
                assert not is_listed or beside in shown, beside
    assert found >= 5


def test_help_breaks_many_choices_after_commas_and_no_word_at_a_hyphen(capsys, monkeypatch):
    @dataclass
    class Paint(Flags):
        colour: str = flag("red", "Say " + "blue-green " * 12, choices=[f"colour_{n}" for n in range(9)])

    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        parse_arguments("Paints.", Paint, argv=["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert "  --colour {colour_0,colour_1,colour_2,colour_3,colour_4," in lines
    assert "      colour_5,colour_6,colour_7,colour_8}" in lines
    assert " " * 30 + "Say blue-green blue-green" in lines


def test_help_shows_groups_and_defaults(capsys, monkeypatch):

    @dataclass
    class Loud(Flags):
        group = "sound"
        required = ("file",)
        advanced = ("echo",)

        file: str | None = flag(None, "What to play.")
        volume: float = flag(0.5, "How loud.", "gain")
        stereo: bool = flag(True, "Two channels.")
        echo: int = flag(3, "How often it comes back...")

    monkeypatch.setenv("COLUMNS", "100")
    texts = []
    for word in ("--help", "--help_all"):
        with pytest.raises(SystemExit) as end:
            parse_arguments("Plays.", Loud, argv=[word])
        assert end.value.code == 0
        texts.append(capsys.readouterr().out)
    short, whole = texts
    assert short.index("needed:") < short.index("--file TEXT") < short.index("sound:") < short.index("--volume")
    assert "  --volume, --gain X          How loud [0.5]\n" in short
    assert "  --no_stereo                 Switches off what is on: two channels.\n" in short
    assert "--echo" not in short
    assert "--help_all: 1 more flags" in short
    assert "  --echo N                    How often it comes back... [3]\n" in whole
    with pytest.raises(UserError, match="unknown flag --volu 1: did you mean --volume?"):
        parse_arguments("Plays.", Loud, argv=["--volu", "1"])
    assert {ModelFlags.group, DataFlags.group, CheckpointFlags.group} == {"model", "data", "checkpoints"}
