"""What a good guess gets wrong in other programs: the rows of docs/differences.md that no test beside our code holds.

A test that fails with a new version says that the row, and what it warns of, has gone.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    EsmcConfig,
    EsmConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from common.data.collators import MaskRates, mask_tokens
from common.models.esm2.alphabet import ESM2_TOKENS, encode
from common.models.esm2.config import esm2_config
from common.models.esm2.convert import ADAPTER
from tests.conftest import ROOT
from tests.models.reference import ours_like, reference_model

RESIDUES = range(4, 24)  # the ids of the 20
PROTEINS = [torch.from_numpy(encode(text).astype(np.int64))[None] for text in ("MKVLA", "MGSSHHHHHHSQ")]
PACKED = torch.cat(PROTEINS, 1)
FIRST, SECOND = (protein.shape[1] for protein in PROTEINS)
POSITIONS = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None]
NUMBER = torch.tensor([0] * FIRST + [1] * SECOND)
OWN = (NUMBER[:, None] == NUMBER)[None, None]  # bool [1, 1, T, T]: each protein its own


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, of the largest number."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture
def esm():
    model = reference_model(esm2_config(2, 64, 4)).eval()
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        yield model


def test_packed_row_of_stock_esm_leaks(esm):
    """position_ids turn the rotary embeddings, and attention goes on across proteins. A block mask keeps these apart,
    and is only taken beside embeddings, which then lack token dropout's 0.88. A pack of our model does both."""
    alone = esm(PROTEINS[1]).logits
    for positions in (None, POSITIONS):
        assert far(esm(PACKED, position_ids=positions).logits[:, FIRST:], alone) > 0.01
    with pytest.raises(RuntimeError, match="must match the size"):
        esm(PACKED, attention_mask=OWN)
    embedded = esm.esm.embeddings.word_embeddings(PACKED)
    assert far(esm(inputs_embeds=embedded, attention_mask=OWN).logits[:, FIRST:], alone) > 0.01
    assert far(esm(inputs_embeds=0.88 * embedded, attention_mask=OWN).logits[:, FIRST:], alone) < 1e-5
    bounds = torch.tensor([0, FIRST, FIRST + SECOND], dtype=torch.int32)
    ours = ours_like(esm)(PACKED[0], cu_seqlens=bounds, max_seqlen=SECOND).logits
    assert far(ours[FIRST:], alone[0]) < 1e-5


def test_positions_with_a_jump_are_computed_by_stock_esm(esm):
    jump = torch.arange(SECOND) + 100 * (torch.arange(SECOND) > 5)
    assert far(esm(PROTEINS[1], position_ids=jump[None]).logits, esm(PROTEINS[1]).logits) > 0.001


def test_embeddings_given_to_stock_esm_lack_token_dropouts_scale(esm):
    ids, embedded = PROTEINS[1], esm.esm.embeddings.word_embeddings(PROTEINS[1])
    assert far(esm(inputs_embeds=embedded).logits, esm(ids).logits) > 0.01
    assert far(esm(inputs_embeds=0.88 * embedded).logits, esm(ids).logits) < 1e-6


def test_bare_configurations_are_other_models():
    bare, ours = EsmConfig(), esm2_config(2, 64, 4).to_transformers()
    other = {
        "position_embedding_type": ("absolute", "rotary"),
        "token_dropout": (False, True),
        "hidden_dropout_prob": (0.1, 0.0),
        "attention_probs_dropout_prob": (0.1, 0.0),
        "layer_norm_eps": (1e-12, 1e-5),
    }
    assert {name: (getattr(bare, name), getattr(ours, name)) for name in other} == other
    six_billion = EsmcConfig()
    assert (six_billion.num_hidden_layers, six_billion.hidden_size) == (80, 2560)


def test_random_words_of_the_stock_collator_are_any_token(tmp_path):
    """13 of 33 are no residue: 39 % of them, here to five standard deviations. Ours are of the 20."""
    ADAPTER.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rates = {"mlm_probability": 1.0, "mask_replace_prob": 0.0, "random_replace_prob": 1.0}
    protein = np.resize(np.array(RESIDUES), 20_000)
    theirs = DataCollatorForLanguageModeling(tokenizer, **rates)([{"input_ids": protein.tolist()}])["input_ids"]
    assert (~np.isin(theirs, RESIDUES)).mean() == pytest.approx(13 / 33, abs=0.018)
    arrays = (np.array([0]), np.array([0]), np.array([len(protein)]))
    ours, _ = mask_tokens(protein.astype(np.uint8), *arrays, ESM2_TOKENS, 0, 0, MaskRates(**rates))
    assert np.isin(ours, RESIDUES).all()
    assert (ours != protein).mean() > 0.9


def test_packed_row_of_a_stock_decoder_needs_no_cache():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=33, **sizes)).eval()
    with torch.no_grad():
        alone = model(PROTEINS[1]).logits

        def apart(**more) -> float:
            return far(model(PACKED, position_ids=POSITIONS, **more).logits[:, FIRST:], alone)

        assert apart(use_cache=False) < 1e-5
        assert apart() > 0.01
        assert apart(use_cache=False, attention_mask=torch.ones_like(PACKED)) > 0.01
        model.train()
        assert apart() > 0.01


def test_resumed_stream_of_datasets_loses_what_was_in_the_buffer():
    def stream():
        return Dataset.from_dict({"n": range(100)}).to_iterable_dataset().shuffle(seed=0, buffer_size=10)

    stopped, resumed = stream(), stream()
    rows = iter(stopped)
    seen = [next(rows)["n"] for _ in range(20)]
    resumed.load_state_dict(stopped.state_dict())
    seen += [row["n"] for row in resumed]
    assert (100 - len(set(seen)), len(seen) - len(set(seen))) == (7, 2)
    assert sorted(row["n"] for row in stream()) == list(range(100))


def test_hugging_face_writer_of_torch_writes_what_nothing_reads(tmp_path):
    """Beside a number; of tensors alone it is read. Our writer: test_writer_refuses_what_is_no_tensor."""
    for name, number in (("tensor", torch.tensor(3)), ("number", 3)):
        writer = HuggingFaceStorageWriter(tmp_path / name, save_distributed=True)
        dcp.save({"x": torch.ones(2), "n": number}, storage_writer=writer, no_dist=True)
    (whole,), (broken,) = ((tmp_path / name).iterdir() for name in ("tensor", "number"))
    with safe_open(whole, "pt") as file:
        assert set(file.keys()) == {"x", "n"}
    with pytest.raises(SafetensorError):
        safe_open(broken, "pt").__enter__()


def test_cast_of_torch_makes_a_number_of_infinity():
    """OFP8's E4M3 has no infinity: NaN, by the specification, unless a conversion saturates."""
    found = torch.tensor([torch.inf, -torch.inf, 1000.0, torch.nan]).to(torch.float8_e4m3fn).float()
    assert found[:3].tolist() == [448, -448, 448]
    assert found[3].isnan()


def test_each_of_these_has_a_row_of_the_page():
    page = (ROOT / "docs" / "differences.md").read_text()
    _, _, section = page.partition("\n## What a good guess gets wrong\n")
    here = re.findall(r"^def (test_\w+)", (ROOT / "tests" / "test_good_guesses.py").read_text(), re.MULTILINE)
    assert [name for name in here[:-1] if f"`{name}`" not in section] == []
