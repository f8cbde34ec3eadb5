"""docs/decoders.md is what the code says: the published models, and every flag of the FSDP guides."""

from __future__ import annotations

import re

import torch

from common.flags import flag_specs, groups
from common.training.command_line import arguments_of
from extras.families.decoders.config import PRESETS
from extras.families.decoders.model import DecoderForCausalLM
from tests.conftest import ROOT
from tests.data_fixtures import load_script

PAGE = (ROOT / "docs" / "decoders.md").read_text()
# Of the guides' arguments.py.
THEIRS = {
    *("train_batch_size", "val_batch_size", "max_steps", "max_training_steps", "seed", "bf16", "grad_clip"),
    *("weight_decay", "beta1", "beta2", "activation_checkpointing", "offload_activations", "intermediate_size"),
    *("num_key_value_heads", "logging_freq", "max_context_width", "vocab_size", "hidden_width", "num_layers"),
    *("num_heads", "initializer_range", "model_type", "rotary_pct", "rotary_emb_base", "sharding_strategy"),
    *("cpu_offload", "lr", "lr_decay_style", "lr_decay_iters", "min_lr", "warmup", "plateau", "dataset"),
    *("dataset_config_name", "dataset_path", "train_split", "val_split", "tokenizer", "resume_from_checkpoint"),
    *("checkpoint_dir", "epochs", "checkpoint_freq", "validation_freq", "validation_batches", "same_seed"),
    *("tensorboard_dir", "resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_pdrop"),
    *("activation_loading_horizon", "limit_all_gathers"),
}


def test_guide_flags_are_accepted_and_listed():
    defaults = arguments_of(load_script("train_fsdp2.py").FsdpFlags, "clm")
    names = {name for spec in flag_specs(defaults) for name in (f"--{spec.name}", *spec.aliases)}
    names |= {f"--{name}" for part in groups(defaults) for name in part.idle}
    assert [name for name in THEIRS if f"--{name}" not in names] == []
    (section,) = re.findall(r"\n## The guides' flags\n(.*?)\n## ", PAGE, re.S)
    first, second = set(), set()
    for row in re.findall(r"^\| (`.*)$", section, re.M):
        theirs, here, _ = row.split(" | ")
        first |= set(re.findall(r"`(--\w+)`", theirs))
        second |= set(re.findall(r"`(--\w+)`", here))
    assert first == {f"--{name}" for name in THEIRS}
    assert second <= names


def test_models_table_matches_the_presets():
    rows_of_page = re.findall(r"^\| `(\w+)` \| (.*?) \|$", PAGE.partition("## What is computed")[0], re.M)
    found = {}
    for name, row in rows_of_page:
        context, vocabulary, hidden, ffn, layers, heads, _, parameters = row.split(" | ")
        found[name] = [int(n) for n in (context, vocabulary, hidden, ffn, layers, *re.findall(r"\d+", heads))]
        with torch.device("meta"):
            model = DecoderForCausalLM(PRESETS[name].config)
        assert parameters == f"{sum(p.numel() for p in model.parameters()):,}"
    assert found == {
        name: [preset.context, c.vocab_size, c.hidden_size, c.intermediate_size, c.num_hidden_layers]
        + [c.num_attention_heads, c.num_key_value_heads]
        for name, preset in PRESETS.items()
        for c in (preset.config,)
    }
