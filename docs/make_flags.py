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

from common.flags import FlagSpec, changed_defaults, flag_specs  # noqa: E402
from common.training.arguments import RunArguments  # noqa: E402
from common.training.masked_lm import TrainArguments  # noqa: E402
from common.training.registry import arguments_of  # noqa: E402
from extras.decoders.causal_arguments import CausalArguments  # noqa: E402
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
# What does here, in another way, what these do there.
INSTEAD = {
    ("fsdp", "fsdp_config", "deepspeed", "parallelism_config"): "`train_fsdp2.py`",
    ("gradient_checkpointing_kwargs",): "`train_fsdp2.py --activation_checkpointing full`",
    ("fp16",): "`--bf16`, `--fp8`, `--fp4`",
    ("save_strategy", "eval_strategy", "logging_strategy"): "`--save_steps`, `--eval_steps`, `--logging_steps`",
    ("optim", "optim_args"): "AdamW, always",
    ("train_sampling_strategy",): "packing: no padding to save",
    ("data_seed",): "`--seed`: a run is a function of data, flags and seed",
    ("full_determinism",): "`--deterministic`",
    ("use_cpu",): "a machine without GPUs, or `CUDA_VISIBLE_DEVICES=`",
    ("dataset_name", "train_file", "validation_file"): "`--dataset`, `--eval_dataset`",
    ("preprocessing_num_workers", "line_by_line"): "those of `1.tokenize_uniref_csv.py`",
    ("restore_callback_states_from_checkpoint", "ignore_data_skip", "save_only_model"): "checkpoints hold all, always",
    ("push_to_hub",): "`final_model/`, which `hf upload` takes",
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
    return spec.help.replace("<", "&lt;").replace("|", "&#124;")


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
        return f"`--{name}`", shown(default) + others, *more, only + text

    same = [row(name, shown(theirs[name])) for name in sorted(ours.keys() & theirs.keys())]
    own = [row(name) for name in sorted(ours.keys() - theirs.keys())]
    absent = sorted(theirs.keys() - ours.keys())
    instead = [(", ".join(f"`--{name}`" for name in names), what) for names, what in INSTEAD.items()]
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
status 2 before it begins.

{", ".join(f"`--{name}`" for name in absent)}

{table(("in place of", ""), instead)}
## Only here

{table(("flag", "default", ""), own)}
## Of decoders

With `--model` or `--model_type` a script trains a decoder ([decoders.md](decoders.md)). These flags are then new, or
have another default, or another name besides; the rest are as above, but for those of proteins and of ESM-2, which are
unknown.

{table(("flag", "also", "default", ""), decoders(of_all))}"""


def decoders(of_esm2: dict[str, FlagSpec]) -> list[tuple[str, ...]]:
    """Rows of the flags of a decoder's run that are not ESM-2's."""
    rows = []
    for name, spec in sorted(specs_of(CausalArguments()).items()):
        same = of_esm2.get(name)
        if same is None or spec.aliases or same.default != spec.default:
            rows.append(
                (f"`--{name}`", ", ".join(f"`{each}`" for each in spec.aliases), shown(spec.default), text_of(spec))
            )
    idle = CausalArguments.idle.items()
    return rows + [(f"`--{name}`", "", "", f"No effect: {why}") for name, why in sorted(idle)]


if __name__ == "__main__":
    (ROOT / "docs" / "flags.md").write_text(page(), encoding="utf-8")
