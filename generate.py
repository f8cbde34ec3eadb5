#!/usr/bin/env python3
r"""Generate with a model that you trained: text with a decoder, proteins with an encoder or a protein decoder.

python generate.py --model_name_or_path out-llama --prompt "Once upon a time"
python generate.py --model_name_or_path out-llama/checkpoint-500 --prompt_file prompts.txt --temperature 0
python generate.py --model_name_or_path out-llama
python generate.py --model_name_or_path out --length 200 --num_samples 100 --output new.fasta
python generate.py --model_name_or_path out --fasta template.fasta --fix 10-45,60 --output redesigned.fasta
python generate.py --model_name_or_path out-protein-llama --prompt MK --num_samples 100 --output new.fasta

The third one asks for prompts in the terminal until Ctrl-D; a model whose tokenizer has a chat template then keeps the
conversation. Text appears as it is generated, proteins as FASTA when all are done. docs/after.md has more.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
from contextlib import ExitStack
from pathlib import Path

from common.cli import UserError, run
from common.flags import parse_arguments
from common.models.family import families, family_of
from common.models.layers.hf_directory import load_config, local_directory, read_config
from extras.after.generation.flags import GenerateFlags
from extras.after.inference.exported import exported
from extras.families.decoders.residues import reads_residues
from extras.prepare.sources.hub import HUB_NAME


def model_directory(name: str, stack: ExitStack) -> tuple[Path, str]:
    """(directory as of `exported`, downloaded if it is a name on the Hub; config.json's model_type, "" without one).

    UserError if there is no model.
    """
    name = exported(name, stack)
    if not Path(name).is_dir() and not HUB_NAME.fullmatch(name):
        raise UserError(f"--model_name_or_path {name}: no such directory, and no name on the Hub (owner/name)")
    content = load_config(name, read_config, f"--model_name_or_path {name}", (), "")
    return local_directory(name), str(content.get("model_type", "")).lower()


def is_encoder(model_type: str) -> bool:
    return model_type == "nv_esm" or (model_type in families() and family_of(model_type).task == "mlm")


def main() -> None:
    args = parse_arguments(__doc__, GenerateFlags)
    with ExitStack() as stack:
        directory, model_type = model_directory(args.model_name_or_path or "", stack)
        if is_encoder(model_type):
            from extras.after.generation.encoders import write_proteins

            write_proteins(args, directory)
        elif reads_residues(directory):
            from extras.after.generation.decoders import write_proteins

            write_proteins(args, directory)
        else:
            from extras.after.generation.text import write_text

            write_text(args, directory)


if __name__ == "__main__":
    run(main)
