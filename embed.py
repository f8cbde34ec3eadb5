#!/usr/bin/env python3
r"""Embeddings of the proteins of a FASTA file, by a model that you trained or any ESM-2, as Parquet.

python embed.py --model_name_or_path out/final_model --fasta my.fasta --output_dir embedded
python embed.py --model_name_or_path out/final_model --fasta my.fasta --output_dir embedded --per_residue
python -m extras.launch --nproc_per_node 8 embed.py --model_name_or_path out/final_model \
    --fasta my.fasta --output_dir embedded

OUTPUT_DIR/embeddings/part-00000.parquet, ...: id, length, embedding, in the order of the file. Stopped and started
again, on any number of ranks, the same command resumes. docs/after.md has more.
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
from extras.after.downstream.results import to_open
from extras.after.inference.embedding import OUTPUT, EmbeddingFlags, embed_all

logger = logging.getLogger(__name__)
WEEK_S = 7 * 86400  # timeout of ranks that wait for the others


def main() -> None:
    args = parse_arguments(__doc__, EmbeddingFlags)
    if "RANK" not in os.environ:
        embed_all(args, World.from_environment(args.use_cpu))
        logger.info("Written: %s", to_open(Path(str(args.output_dir)) / OUTPUT))
        return
    with distributed_run(ProcessFlags(use_cpu=args.use_cpu, ddp_timeout=WEEK_S)) as world:
        world.stop.exit_note = "finished parts are kept: the same command resumes"
        embed_all(args, world)
        logger.info("Written: %s", to_open(Path(str(args.output_dir)) / OUTPUT))


if __name__ == "__main__":
    run(main, resumable="RANK" not in os.environ)
