"""AMPLIFY in the train scripts: every strategy is the run of one process, its alphabet is its own everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest

from common.cli import UserError
from common.data.collators import MaskRates, mask_tokens
from common.data.token_store import TokenStore
from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.esm2.alphabet import TOKENS as ESM2_LETTERS
from extras.families.amplify.alphabet import ALPHABET, TOKENS
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.formats import proteins
from extras.prepare.sources.streamed_data import MemoryStore
from extras.prepare.sources.streams import plan_streams
from tests.extras import encoder_runs
from tests.extras.after.downstream.test_mutations import write_gym
from tests.extras.encoder_runs import results
from tests.files.test_token_store import save
from tests.training_fixtures import losses, train

SIZES = "num_hidden_layers=2,hidden_size=32,num_attention_heads=4,intermediate_size=72"
RUN = encoder_runs.RUN | {"config_name": "chandar-lab/AMPLIFY_120M", "config_overrides": SIZES}
SHORT = {"max_steps": 2, "save_final_model": False, "save_steps": 2}
# Every letter of ESM-2's alphabet, small letters, and a character of none.
PROTEINS = ["MKTAYIAKQRQISFVKSHFSRQ", "mlknvqvqlv", "".join(ESM2_LETTERS[4:31]), "AC|DB*XUZO.-LAGVSERTIDPKQ", "WW"] * 8
LACKING = "XUZO.-"


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    """One process, which also scores mutations at its end."""
    directory = tmp_path_factory.mktemp("amplify")
    out, table = directory / "run", write_gym(directory / "gym.csv")
    train(dataset, out, do_eval=True, eval_mutations=table, **RUN)
    return out


@pytest.fixture
def fasta(tmp_path):
    path = tmp_path / "a.fasta"
    path.write_text("".join(f">{n}\n{protein}\n" for n, protein in enumerate(PROTEINS)))
    return path


@pytest.fixture
def prepared(tmp_path):
    """The same proteins, as 1.tokenize_uniref_csv.py stores them."""
    return save(tmp_path / "prepared", [ESM2_TOKENS.encode(protein) for protein in PROTEINS])


def ids_by_letter(protein: str) -> list[int]:
    letters = [letter if letter in TOKENS[6:] else "<unk>" for letter in protein.upper()]
    return [TOKENS.index(token) for token in ("<bos>", *letters, "<eos>")]


# The alphabet


def test_amplify_ids_of_prepared_and_streamed_proteins_are_by_letter(fasta, prepared):
    expected = [ids_by_letter(protein) for protein in PROTEINS]
    store = TokenStore(prepared, ALPHABET)
    files = open_source(str(fasta), streaming=False, content=proteins(gaps="keep")).splits["train"]
    for held in (store, MemoryStore.read(files, 1000, alphabet=ALPHABET)):
        numbers = np.arange(len(PROTEINS))
        ids, offsets = held.gather(numbers, np.zeros_like(numbers), held.lengths(numbers))
        assert [part.tolist() for part in np.split(ids, offsets[1:-1])] == expected
    plan = plan_streams(files, 1, seed=1, max_seq_length=64, tokens_per_pack=4096, alphabet=ALPHABET)
    pack, ids, _ = next(plan.stream(0))
    streamed = np.split(ids, np.cumsum(pack.lengths)[:-1])
    assert sorted(part.tolist() for part in streamed) == sorted(expected)


def test_amplify_store_refuses_ids_of_another_alphabet(tmp_path):
    """Its own ids are in the range of ESM-2's: only where a record begins do they differ for certain."""
    path = save(tmp_path / "own", [np.array(ids_by_letter(protein)) for protein in PROTEINS[:3]])
    store = TokenStore(path, ALPHABET)
    with pytest.raises(UserError, match="record 1: begins with token id 3, not with ESM-2's <cls>, 0"):
        store.gather(np.array([1]), np.array([0]), np.array([4]))
    path = save(tmp_path / "longer", [np.array([0, 4, 33, 2])])
    with pytest.raises(UserError, match="record 0: token id 33, the model has 0-32"):
        TokenStore(path, ALPHABET).gather(np.array([0]), np.array([0]), np.array([4]))


def test_amplify_masks_select_residues_and_never_give_a_special_id():
    ids = np.tile(np.arange(len(TOKENS), dtype=np.uint8), 400)
    numbers, lengths = np.arange(4), np.full(4, len(ids) // 4)
    where = (numbers, np.zeros(4, np.int64), lengths)
    masked, labels = mask_tokens(ids, *where, ALPHABET, 1, 0, MaskRates(1.0, 0.5, 0.5))
    is_residue = ids >= TOKENS.index("L")
    assert np.array_equal(labels, np.where(is_residue, ids.astype(np.int64), -100))
    assert np.array_equal(masked[~is_residue], ids[~is_residue])
    assert set(masked[is_residue].tolist()) == {TOKENS.index("<mask>"), *range(6, 26)}  # not B


def test_amplify_positions_of_masks_are_those_of_esm2(prepared):
    """The choice is a hash of record and position, whatever the alphabet; only letters it lacks are left out."""
    numbers = np.arange(len(PROTEINS))
    found = []
    for tokens in (ESM2_TOKENS, ALPHABET):
        store = TokenStore(prepared, tokens)
        lengths = store.lengths(numbers)
        ids, _ = store.gather(numbers, np.zeros_like(numbers), lengths)
        _, labels = mask_tokens(ids, numbers, np.zeros_like(numbers), lengths, tokens, 1, 0, MaskRates(0.5))
        found.append((ids, labels))
    (theirs, of_esm2), (_, of_amplify) = found
    lacking = np.isin(theirs, [ESM2_LETTERS.index(letter) for letter in LACKING])
    assert np.array_equal(of_amplify >= 0, (of_esm2 >= 0) & ~lacking)


# Runs


@encoder_runs.every_strategy(slow={"train_ddp.py", "train_mfsdp.py", "train_ddp_cp.py"})
def test_amplify_run_of_every_strategy_equals_one_process(dataset, alone, tmp_path, script, flags):
    encoder_runs.assert_two_ranks_equal_one(dataset, alone, tmp_path, script, RUN | flags)


def test_amplify_resumes_bit_identically(dataset, alone, tmp_path):
    encoder_runs.assert_resumes(dataset, alone, tmp_path, RUN)


def test_amplify_export_is_evaluated_alike_and_a_start(dataset, alone, tmp_path):
    assert losses(alone)[0] == pytest.approx(math.log(27), rel=0.02)  # it begins by guessing among its tokens
    assert results(alone)["eval_unigram_loss_masked"] < math.log(21)
    encoder_runs.assert_export_is_the_model(dataset, alone, tmp_path, alone.parent / "gym.csv")


def test_amplify_streams_what_it_would_read_prepared(fasta, tmp_path):
    """--dataset and --eval_dataset of one protein many times: whichever is drawn, the ids are the same."""
    fasta.write_text("".join(f">{n}\n{'MKTAYIAKQRXISFVKSHFSRQ' * 3}\n" for n in range(40)))
    flags = RUN | SHORT | {"config_name": None, "model_type": "amplify", "do_eval": True}
    train(None, tmp_path / "out", dataset=fasta, eval_dataset=fasta, **flags)
    assert losses(tmp_path / "out") == pytest.approx([math.log(27)] * 2, rel=0.05)
    # 3 of 66 characters are <unk>: never masked, so that the baseline knows of 14 letters' frequencies alone
    letters = "MKTAYIAKQRISFVKSHFSRQ"
    shares = [letters.count(letter) / len(letters) for letter in set(letters)]
    entropy = -sum(share * math.log(share) for share in shares)
    assert results(tmp_path / "out")["eval_unigram_loss_masked"] == pytest.approx(entropy, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{"fp8": True}, {"fp4": True}], ids=["fp8", "nvfp4"])
def test_amplify_layers_compute_in_emulated_formats(dataset, alone, tmp_path, flags):
    sizes = SIZES.replace("intermediate_size=72", "intermediate_size=96")  # SwiGLU of 64
    run = RUN | SHORT | flags | {"config_overrides": sizes, "emulate_precision": True}
    train(dataset, tmp_path, **run)
    assert losses(tmp_path) != losses(alone)[:2]
    assert losses(tmp_path) == pytest.approx(losses(alone)[:2], rel=0.03)


@pytest.mark.slow
def test_amplify_with_muon_equals_one_process(dataset, tmp_path):
    encoder_runs.assert_muon_on_two_ranks_equals_one(dataset, tmp_path, RUN)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"gelu": "tanh"}, "--gelu: is of ESM-2 only, and this is AMPLIFY"),
        ({"backend": "hf"}, "--backend hf: is of ESM-2 only"),
        ({"backend": "te"}, "it needs an NVIDIA GPU, and this run is on a CPU"),
        ({"model_type": "esmc"}, "--model_type esmc: chandar-lab/AMPLIFY_120M is of another family"),
        ({"fp8": True, "fp8_recipe": "mxfp8", "emulate_precision": True}, "and ffn_size is 48: ffn_size is int(2 x"),
        ({"eval_contacts": "here", "do_eval": True}, "--eval_contacts: AMPLIFY has no contact head in transformers"),
    ],
)
def test_amplify_refuses_what_it_lacks_in_one_line(dataset, tmp_path, flags, said):
    printed = train(dataset, tmp_path / "out", expect=2, **RUN | flags)
    assert said in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()
