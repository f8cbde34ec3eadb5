#!/usr/bin/env python3
r"""A model on ProteinGym: the assays of a directory scored, and averaged as in the official tables.

python proteingym.py --model_name_or_path out/final_model --reference DMS_substitutions.csv \
    --data DMS_ProteinGym_substitutions --output_dir gym
python proteingym.py --model_name_or_path out/final_model --reference DMS_indels.csv \
    --data DMS_ProteinGym_indels --output_dir gym_indels --one_pass
python -m extras.launch --nproc_per_node 8 proteingym.py --model_name_or_path out/final_model \
    --reference DMS_substitutions.csv --data DMS_ProteinGym_substitutions --output_dir gym

Scores are those of score.py. Spearman, AUC, MCC, NDCG and top-10 % recall of each assay, their means by UniProt id
and function type, and beside the model predictors without one. OUTPUT_DIR gets summary.csv, a folder of tables for
each metric, scores/ and results.json. Stopped and started again, on any number of ranks, the same command resumes.
docs/proteingym.md has more.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import os

from common.cli import run
from common.distributed.process_group import ProcessFlags, distributed_run
from common.distributed.world import World
from common.flags import parse_arguments
from extras.after.proteingym.benchmark import GymFlags, benchmark

WEEK_S = 7 * 86400  # timeout of ranks that wait for the others


def main() -> None:
    args = parse_arguments(__doc__, GymFlags)
    if "RANK" not in os.environ:
        benchmark(args, World.from_environment(args.use_cpu))
        return
    with distributed_run(ProcessFlags(use_cpu=args.use_cpu, ddp_timeout=WEEK_S)) as world:
        world.stop.exit_note = "finished assays are kept: the same command resumes"
        benchmark(args, world)


if __name__ == "__main__":
    run(main, resumable="RANK" not in os.environ)
