"""Write docs/flags.md: the training scripts' flags, beside those of transformers' TrainingArguments and run_mlm.py.

python docs/make_flags.py
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.cli_help import FlagSpec  # noqa: E402
from common.flags import changed_defaults, flag_specs  # noqa: E402
from common.training.arguments import RunArguments  # noqa: E402
from common.training.command_line import arguments_of  # noqa: E402
from common.training.masked_lm import TrainArguments  # noqa: E402
from extras.families.decoders.causal_arguments import CausalArguments  # noqa: E402
from extras.families.decoders.protein_arguments import ProteinDecoderArguments, ResidueFlags  # noqa: E402
from extras.interop.flag_tables import ACCELERATE, RECIPE, TRANSFORMERS, Ours  # noqa: E402
from train_ddp import DdpFlags  # noqa: E402
from train_ddp_cp import DdpCpFlags  # noqa: E402
from train_fsdp2 import FsdpFlags  # noqa: E402
from train_mfsdp import MegatronFlags  # noqa: E402

STRATEGIES = {"train_ddp.py": DdpFlags, "train_ddp_cp.py": DdpCpFlags, "train_fsdp2.py": FsdpFlags}
STRATEGIES |= {"train_mfsdp.py": MegatronFlags}
SCRIPTS = {script: arguments_of(strategy, "mlm") for script, strategy in STRATEGIES.items()}
# {name: default} of the arguments of its example run_mlm.py, which is in no package; None for the others of them.
RUN_MLM = {
    "use_fast_tokenizer": True,
    "model_revision": "main",
    "trust_remote_code": False,
    "low_cpu_mem_usage": False,
    "overwrite_cache": False,
    "validation_split_percentage": 5,
    "mlm_probability": 0.15,
    "line_by_line": False,
    "pad_to_max_length": False,
    "streaming": False,
    **dict.fromkeys(("model_name_or_path", "model_type", "config_name", "config_overrides", "tokenizer_name")),
    **dict.fromkeys(("cache_dir", "token", "dtype", "max_seq_length", "max_train_samples", "max_eval_samples")),
    **dict.fromkeys(("dataset_name", "dataset_config_name", "train_file", "validation_file")),
    **dict.fromkeys(("preprocessing_num_workers",)),
}


def default_of(field: Field) -> object:
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return value.value if isinstance(value, Enum) else value


def shown(value: object) -> str:
    return "" if value in (None, "") else f"`{value}`"


def specs_of(args: RunArguments) -> dict[str, FlagSpec]:
    """{flag: its specification}, with the defaults that the groups of these arguments change."""
    return {spec.name: spec for spec in flag_specs(changed_defaults(args))}


def text_of(spec: FlagSpec) -> str:
    text = spec.help.replace("<", "&lt;").replace("|", "&#124;")
    return f"{', '.join(f'`{choice}`' for choice in spec.choices)}. {text}" if spec.choices else text


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page() -> str:
    """The text of docs/flags.md."""
    theirs = {field.name: default_of(field) for field in fields(transformers.TrainingArguments)} | RUN_MLM
    of_all = specs_of(TrainArguments())
    of_scripts = {script: specs_of(args) for script, args in SCRIPTS.items()}
    ours = {name: spec for own in (*of_scripts.values(), of_all) for name, spec in own.items()}

    def row(name: str, *more: str) -> tuple[str, ...]:
        default = ours[name].default
        having = {script: own[name].default for script, own in of_scripts.items() if name in own}
        others = "".join(f", {script} {shown(value)}" for script, value in having.items() if value != default)
        text = text_of(ours[name])
        only = "" if name in of_all else f"{', '.join(having)}: "
        key = name if ours[name].level == "file_only" else f"--{name}"
        return f"`{key}`", shown(default) + others, *more, only + text

    same = [row(name, shown(theirs[name])) for name in sorted(ours.keys() & theirs.keys())]
    file_only = {name for name, spec in ours.items() if spec.level == "file_only"}
    own = [row(name) for name in sorted(ours.keys() - theirs.keys() - file_only)]
    keys = [row(name) for name in sorted(file_only)]
    absent = {name: TRANSFORMERS[name] for name in sorted(theirs.keys() - ours.keys())}
    return f"""# Flags

Made from the code by `python docs/make_flags.py`. An empty default: none, or it follows from other flags. More is in
[training.md](training.md), [data.md](data.md), [checkpoints.md](checkpoints.md), [precision.md](precision.md) and
[distributed.md](distributed.md).

## As in transformers {transformers.__version__}

Flags of `TrainingArguments` and `run_mlm.py` that are here under the same name. What differs, and why, is in
[training.md](training.md).

{table(("flag", "default", "there", ""), same)}
## Not here

{len(absent)} other flags of `TrainingArguments` and `run_mlm.py` are unknown: one that is given ends the run with
status 2 before it begins, and the error says what is here in its place.

{table(("there", "here"), in_place_of(absent, "--"))}
## Of NVIDIA's recipe and of accelerate

The same holds for hydra keys of NVIDIA's ESM-2 recipe and for flags of `accelerate launch`. `--config-name L0_sanity`
and the recipe's other names run the file of [configs/](training.md#files-of-flags) that has its values. This command
translates a whole command of theirs, of `run_mlm.py` or of the FSDP guides, and runs none of it. (The FSDP guides'
arguments are [flags of decoders](#of-decoders).)

```sh
python -m extras.migrate 'python train_fsdp2.py --config-name L0_sanity fp8_config.enabled=true'
```

{table(("recipe", "here"), in_place_of(RECIPE, ""))}
{table(("accelerate launch", "here"), in_place_of(ACCELERATE, "--"))}
## Only here

{table(("flag", "default", ""), own)}
## Keys of a file of flags

Few runs need these. They are no flags of a command line: write `key: value` into a YAML or JSON file, and give it
first, as in `python train_ddp.py my_run.yaml --output_dir out` ([files of flags](training.md#files-of-flags)).

{table(("key", "default", ""), keys)}
## Of decoders

With `--model` or `--model_type` a script trains a decoder ([decoders.md](decoders.md)). These flags are then new, or
have another default, or another name besides; the rest are as above, but for those of proteins and of ESM-2, which are
unknown.

{table(("flag", "also", "default", ""), decoders(of_all))}
With `--tokenizer residues` the decoder reads proteins ([decoders.md](decoders.md#protein-decoders)): the data flags
are those of proteins above, without masking and sets, and these.

{table(("flag", "default", ""), protein_decoders())}"""


def protein_decoders() -> list[tuple[str, ...]]:
    """Rows of the flags of protein decoders alone."""
    specs = specs_of(ProteinDecoderArguments())
    return [(f"`--{name}`", shown(specs[name].default), text_of(specs[name])) for name in ResidueFlags.advanced]


def in_place_of(rows: dict[str, Ours], prefix: str) -> list[tuple[str, ...]]:
    """Rows of another program's flags: those with one answer in one row."""
    together: dict[str, list[str]] = {}
    for name, ours in rows.items():
        named = " ".join(f"`--{flag}`" for flag in ours.flag.split())
        together.setdefault("; ".join(part for part in (named, ours.why) if part), []).append(f"`{prefix}{name}`")
    return [(", ".join(names), said) for said, names in together.items()]


def decoders(of_esm2: dict[str, FlagSpec]) -> list[tuple[str, ...]]:
    """Rows of the flags of a decoder's run that are not ESM-2's."""
    rows = []
    for name, spec in sorted(specs_of(CausalArguments()).items()):
        same = of_esm2.get(name)
        if same is None or spec.aliases or (same.default, same.help) != (spec.default, spec.help):
            rows.append(
                (f"`--{name}`", ", ".join(f"`{each}`" for each in spec.aliases), shown(spec.default), text_of(spec))
            )
    idle = CausalArguments.idle.items()
    return rows + [(f"`--{name}`", "", "", f"No effect: {why}") for name, why in sorted(idle)]


if __name__ == "__main__":
    (ROOT / "docs" / "flags.md").write_text(page(), encoding="utf-8")
