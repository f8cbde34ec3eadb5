"""The job's own command line, behind preflight's flags: what it trains, on which data, and where it writes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from common.cli import UserError
from common.flags import flat
from common.models.layers.config_base import override
from common.training.arguments import RunArguments
from common.training.command_line import parse_run
from extras.families.decoders.config import PRESETS
from extras.migrate import STRATEGIES, strategy_of
from extras.prepare.sample import SAMPLE

# Flags of a run that preflight has, too.
OF_RUN = ("dataset_dir", "dataset", "output_dir", "save_total_limit", "optim", "dataloader_num_workers", "use_cpu")


def split_command(argv: list[str]) -> tuple[list[str], RunArguments | None]:
    """Preflight's own flags, and the run of `SCRIPT FLAGS...` behind them (None without). UserError for its flags."""
    index = next((number for number, word in enumerate(argv) if Path(word).name in STRATEGIES), len(argv))
    if index == len(argv):
        return argv, None
    if not argv[index + 1 :]:
        raise UserError(f"{argv[index]}: its flags are missing: give the command of the job")
    script = Path(argv[index]).name
    return argv[:index], parse_run(None, strategy_of(script), argv[index + 1 :], program=script)


def flags_of(run: RunArguments) -> dict:
    """Preflight's flags as a run has them. Text is not looked at, nor proteins that the run itself makes."""
    flags = {name: value for name, value in flat(run).items() if name in OF_RUN}
    if run.task == "clm":
        flags |= {"dataset": None, "dataset_dir": None}
    elif flags["dataset"] == SAMPLE:
        flags["dataset"] = None
    return flags | {"config_name": run.model_named}


def model_of(run: RunArguments) -> nn.Module | None:
    """The model of a run with all flags that change its size, on the meta device.

    None for a name on the Hub, whose configuration would have to be downloaded. UserError for an impossible size.
    """
    name, family = run.model_named, run.family
    if name and name not in (*PRESETS, *family.published) and not Path(name).is_dir():
        return None
    if run.task == "clm":
        config, _ = run.model.decoder_config(run.data.max_seq_length)
    else:
        config = family.load_config(name)
        if run.model.config_overrides:
            config = override(config, run.model.config_overrides, check=False)  # the run checks it
    with torch.device("meta"):
        return family.make(config)
