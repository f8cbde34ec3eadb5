"""What the processes that tests fork find imported: their server imports this module, once.

Imports are most of what a run of seconds takes, and its picture most of the rest: fonts are looked up here, and the
pictures of forked runs have no numbers at their axes (what is in a picture is tested in the test's own process).
"""

from __future__ import annotations

import gc
import io

import matplotlib
import pandas  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.profiler._cupti_monitor
import torch.utils.serialization
from matplotlib.figure import Figure
from PIL import PngImagePlugin  # noqa: F401
from transformers import EsmForMaskedLM, EsmTokenizer, HfArgumentParser, get_scheduler  # noqa: F401

import common.model.recompute
import common.preflight.exchange
import common.preflight.network
import common.preflight.report
import common.training.load_model
import common.training.report
import common.training.trainer  # noqa: F401
import tests.live_runs  # noqa: F401
from tests.forked import UNNUMBERED_AXES

matplotlib.rcParams.update(UNNUMBERED_AXES)
figure = Figure()
axes = figure.subplots(2, 2)
axes[0, 0].plot([1, 2], [1, 2], "o-", label="line")
axes[0, 0].set(xlabel="x", ylabel="y")
axes[0, 0].set_title("title", y=1.0)
axes[0, 0].grid(alpha=0.3)
axes[0, 0].legend(fontsize=8)
figure.savefig(io.BytesIO(), format="png")

torch.empty(1, device="meta")  # the first one imports what it needs
gc.collect()
gc.freeze()  # a fork neither looks through all this for garbage nor copies it by doing so
