"""The models whose files are opened: final_model/ of a run of one step of each family, from random weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import completed, say
from common.hooks import extra
from common.models.family import family_of
from common.models.layers.config_base import override
from common.models.layers.hf_directory import read_config
from common.models.layers.initialise import initialise
from extras.after.inference.packed import loaded
from extras.families.decoders.residues import RESIDUE_TOKENS, ResidueTokenizer
from extras.prepare.sample import write_sample

ENCODER = "num_hidden_layers=3,hidden_size=64,num_attention_heads=4"
DECODER = f"{ENCODER},num_key_value_heads=2,intermediate_size=128,vocab_size=64"
PROTEIN = "MSKGEELFTGVVPILVELDGDVNGHKFSVSGEGEGDATYGKLTLKFICTT"


@dataclass(frozen=True)
class Kind:
    """model_type, a built-in name with the published values, what is smaller here; decoders: proteins as text."""

    model_type: str
    name: str
    overrides: str
    alphabet: str = ""


KINDS = {
    "ESM-2": Kind("esm", "facebook/esm2_t6_8M_UR50D", f"{ENCODER},intermediate_size=256"),
    "ESM-2, SaProt's alphabet": Kind("esm", "facebook/esm2_t6_8M_UR50D", f"{ENCODER},intermediate_size=256", "saprot"),
    "ESM C": Kind("esmc", "biohub/ESMC-300M-hf", f"{ENCODER},intermediate_size=192"),
    "AMPLIFY": Kind("amplify", "chandar-lab/AMPLIFY_120M", f"{ENCODER},intermediate_size=192"),
    "E1": Kind("e1", "Profluent-Bio/E1-150m", f"{ENCODER},intermediate_size=192"),
    "ESM-2 with sets": Kind("esm_sets", "facebook/esm2_t6_8M_UR50D", f"{ENCODER},intermediate_size=256"),
    "Llama": Kind("llama", "llama3_1_8b", DECODER),
    "Mistral": Kind("mistral", "mathstral_7b", DECODER),
    "Mixtral": Kind("mixtral", "mistral_8x7b", f"{DECODER},num_local_experts=4"),
}


def family_in(directory: Path) -> Any:
    return family_of(read_config(directory / "config.json")["model_type"])


def begin(kind: Kind, directory: Path) -> None:
    """An export with every parameter random, norms and biases too: a tensor that is lost or swapped shows."""
    family = family_of(kind.model_type)
    config = override(family.load_config(kind.name), kind.overrides)
    if kind.alphabet:
        config = config.in_alphabet(extra().alphabet(kind.alphabet, kind.alphabet))
    with torch.device("meta"):
        model = family.make(config)
    model.to_empty(device="cpu")
    initialise(model, 0, 0.1)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    tokenizer = ResidueTokenizer() if family.task == "clm" else None
    family.adapter.save(
        family.adapter.to_hf(model.state_dict().__getitem__, config), config, directory, None, tokenizer
    )


def train(kind: Kind, start: Path, out: Path, **flags: Any) -> Path:
    """final_model/ of a run from `start` of one step of train_ddp.py."""
    proteins = out.parent / f"{kind.alphabet or 'esm2'}.fasta"
    if not proteins.exists():
        proteins.parent.mkdir(parents=True, exist_ok=True)
        write_sample(proteins, num_proteins=40, families=4, seed=0)
        if kind.alphabet:  # a structure letter behind each residue
            lines = proteins.read_text().splitlines()
            proteins.write_text("\n".join(x if x[0] == ">" else "".join(f"{r}d" for r in x) for x in lines) + "\n")
    given = {"model_name_or_path": start, "dataset": proteins, "output_dir": out, "max_steps": 1, "bf16": 0}
    given |= {"max_seq_length": 128, "learning_rate": 1e-3, "dataloader_num_workers": 0} | flags
    if family_of(kind.model_type).task == "clm":
        given["tokenizer"] = "residues"
    words = (f"--{name}={value}" for name, value in given.items())
    completed([sys.executable, "train_ddp.py", *words], f"training {kind.name}")
    return out / "final_model"


def exports(directory: Path) -> dict[str, Path]:
    """{kind: final_model/}."""
    made = {}
    for number, (name, kind) in enumerate(KINDS.items()):
        say(f"training {name} for a step")
        begin(kind, directory / f"start-{number}")
        made[name] = train(kind, directory / f"start-{number}", directory / f"run-{number}")
    return made


def inputs(directory: Path) -> list[list[int]]:
    """Token ids of two inputs, without and with masks (of encoders)."""
    family = family_in(directory)
    if family.task == "clm":
        return [RESIDUE_TOKENS.encode(text).tolist() for text in (PROTEIN, PROTEIN[::-1])]
    tokens = family.tokens_of(family.load_config(str(directory)))
    text = "".join(letter + "d" for letter in PROTEIN) if tokens.width == 2 else PROTEIN
    plain = tokens.encode(text.encode()).tolist()
    masked = [tokens.mask if n % 7 == 3 else token for n, token in enumerate(plain)]
    return [plain, masked]


@torch.inference_mode()
def ours(directory: Path, ids: Sequence[list[int]], hidden: bool = False) -> list[np.ndarray]:
    """What this project computes in float32: logits, or the last layer."""
    family = family_in(directory)
    config = family.load_config(str(directory))
    model = loaded(family, config, family.adapter.read(str(directory), config)[0], torch.device("cpu"))
    found = []
    for row in ids:
        tokens, ends = torch.tensor(row), torch.tensor([0, len(row)], dtype=torch.int32)
        call = partial(model, tokens, cu_seqlens=ends, max_seqlen=len(row))
        found.append(
            call(labels=torch.full_like(tokens, -100), output_hidden=True).hidden if hidden else call().logits
        )
    return [each.float().numpy() for each in found]
