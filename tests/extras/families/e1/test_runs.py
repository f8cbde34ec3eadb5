"""E1 in the train scripts: every strategy is the run of one process, its alphabet is its own everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
from safetensors.torch import load_file

from common.data.collators import MaskRates, mask_tokens
from common.data.token_store import TokenStore
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.export import choose, export
from extras.families.e1.alphabet import ALPHABET, TOKENS
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.formats import proteins
from extras.prepare.sources.streamed_data import MemoryStore
from extras.prepare.sources.streams import plan_streams
from tests.extras import encoder_runs
from tests.extras.encoder_runs import results
from tests.files.test_token_store import save
from tests.training_fixtures import final_weights, losses, same_bits, train

SIZES = "num_hidden_layers=3,hidden_size=32,num_attention_heads=2,intermediate_size=64"
RUN = encoder_runs.RUN | {"model_type": "e1", "config_name": None, "config_overrides": SIZES}
SHORT = {"max_steps": 2, "save_final_model": False, "save_steps": 2}
PROTEINS = ["MKTAYIAKQRQISFVKSHFSRQ", "mlknvqvqlv", "ACDBXUZO.-LAGVSERTIDPKQ", "WW"] * 8


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("e1") / "run"
    train(dataset, out, do_eval=True, **RUN)
    return out


def ids_by_letter(protein: str) -> list[int]:
    letters = [letter if letter in TOKENS[8:] else "X" for letter in protein.upper()]
    return [TOKENS.index(token) for token in ("<bos>", "1", *letters, "2", "<eos>")]


def test_e1_ids_of_prepared_and_streamed_proteins_are_by_letter(tmp_path):
    fasta, expected = tmp_path / "a.fasta", [ids_by_letter(protein) for protein in PROTEINS]
    fasta.write_text("".join(f">{n}\n{protein}\n" for n, protein in enumerate(PROTEINS)))
    store = TokenStore(save(tmp_path / "s", [ESM2_TOKENS.encode(protein) for protein in PROTEINS]), ALPHABET)
    files = open_source(str(fasta), streaming=False, content=proteins(gaps="keep")).splits["train"]
    for held in (store, MemoryStore.read(files, 1000, alphabet=ALPHABET)):
        numbers = np.arange(len(PROTEINS))
        ids, offsets = held.gather(numbers, np.zeros_like(numbers), held.lengths(numbers))
        assert [part.tolist() for part in np.split(ids, offsets[1:-1])] == expected
    plan = plan_streams(files, 1, seed=1, max_seq_length=64, tokens_per_pack=4096, alphabet=ALPHABET)
    pack, ids, _ = next(plan.stream(0))
    streamed = np.split(ids, np.cumsum(pack.lengths)[:-1])
    assert sorted(part.tolist() for part in streamed) == sorted(expected)


def test_e1_masks_select_letters_and_never_give_a_special_id():
    ids = np.tile(np.arange(len(TOKENS), dtype=np.uint8), 400)
    where = (np.arange(4), np.zeros(4, np.int64), np.full(4, len(ids) // 4))
    masked, labels = mask_tokens(ids, *where, ALPHABET, 1, 0, MaskRates(1.0, 0.5, 0.5))
    is_residue = ids >= TOKENS.index("A")
    assert np.array_equal(labels, np.where(is_residue, ids.astype(np.int64), -100))
    assert np.array_equal(masked[~is_residue], ids[~is_residue])
    amino_acids = {TOKENS.index(letter) for letter in "ACDEFGHIKLMNPQRSTVWY"}
    assert set(masked[is_residue].tolist()) == {TOKENS.index("?"), *amino_acids}


@encoder_runs.every_strategy(slow={"train_ddp.py", "train_mfsdp.py", "train_ddp_cp.py"})
def test_e1_run_of_every_strategy_equals_one_process(dataset, alone, tmp_path, script, flags):
    encoder_runs.assert_two_ranks_equal_one(dataset, alone, tmp_path, script, RUN | flags)


def test_e1_resumes_bit_identically(dataset, alone, tmp_path):
    encoder_runs.assert_resumes(dataset, alone, tmp_path, RUN)


def test_e1_export_is_evaluated_alike_and_a_start(dataset, alone, tmp_path):
    assert losses(alone)[0] == pytest.approx(math.log(34), rel=0.02)  # it begins by guessing among its tokens
    again = {"model_name_or_path": alone / "final_model", "do_train": False, "do_eval": True}
    train(dataset, tmp_path / "again", **again)
    assert results(tmp_path / "again")["eval_loss"] == results(alone)["eval_loss"]
    export(choose(alone / "checkpoint-6"), tmp_path / "model")
    assert same_bits(load_file(tmp_path / "model" / "model.safetensors"), final_weights(alone))
    further = {"model_name_or_path": alone / "final_model", "max_steps": 1}
    train(dataset, tmp_path / "further", **encoder_runs.RUN | further)
    assert losses(tmp_path / "further")[0] < losses(alone)[0]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{"fp8": True}, {"fp4": True}], ids=["fp8", "nvfp4"])
def test_e1_layers_compute_in_emulated_formats(dataset, alone, tmp_path, flags):
    run = RUN | SHORT | flags | {"emulate_precision": True}
    train(dataset, tmp_path, **run)
    assert losses(tmp_path) != losses(alone)[:2]
    assert losses(tmp_path) == pytest.approx(losses(alone)[:2], rel=0.03)


@pytest.mark.slow
def test_e1_with_muon_equals_one_process(dataset, tmp_path):
    encoder_runs.assert_muon_on_two_ranks_equals_one(dataset, tmp_path, RUN)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"gelu": "tanh"}, "--gelu: is of ESM-2 only, and this is E1"),
        ({"backend": "hf"}, "--backend hf: is of ESM-2 only"),
        ({"backend": "te"}, "--backend te: E1 has torch layers only: choose auto or torch"),
        ({"fp8": True}, "--fp8"),
        ({"eval_contacts": "here", "do_eval": True}, "--eval_contacts: E1 has no contact head in transformers"),
        ({"config_overrides": "num_hidden_layers=2,num_attention_heads=5"}, "rotary embeddings need an even head"),
    ],
)
def test_e1_refuses_what_it_lacks_in_one_line(dataset, tmp_path, flags, said):
    printed = train(dataset, tmp_path / "out", expect=2, **RUN | flags)
    assert said in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()
