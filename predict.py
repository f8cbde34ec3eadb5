#!/usr/bin/env python3
r"""Classes or numbers of new proteins or residues, by a probe of probe.py or a model of finetune.py.

python predict.py --model probed --fasta new.fasta --output_dir predicted
python predict.py --model tuned --fasta new.fasta --output_dir predicted --coverage 0.95
python -m extras.launch --nproc_per_node 8 predict.py --model tuned --fasta new.fasta --output_dir predicted

OUTPUT_DIR/predictions/predictions.csv has a number with an interval, or a class with probabilities and a set of
classes; the same as Parquet beside it. Stopped and started again, on any number of ranks, the same command resumes.
docs/predicting.md has more.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import logging
import os
from pathlib import Path

from common.cli import run
from common.distributed.process_group import ProcessFlags, distributed_run
from common.distributed.world import World
from common.flags import parse_arguments
from extras.after.downstream.prediction import PREDICTED, TABLE, PredictionFlags, predict_all

logger = logging.getLogger(__name__)
WEEK_S = 7 * 86400  # timeout of ranks that wait for the others


def main() -> None:
    args = parse_arguments(__doc__, PredictionFlags)
    written = Path(str(args.output_dir)) / PREDICTED / TABLE
    if "RANK" not in os.environ:
        predict_all(args, World.from_environment(args.use_cpu))
        logger.info("Written: %s", written)
        return
    with distributed_run(ProcessFlags(use_cpu=args.use_cpu, ddp_timeout=WEEK_S)) as world:
        world.stop.exit_note = "finished parts are kept: the same command resumes"
        predict_all(args, world)
        logger.info("Written: %s", written)


if __name__ == "__main__":
    run(main, resumable="RANK" not in os.environ)
