"""Several chains in a record: alphabets, stores, masks, and runs of training."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, EsmForMaskedLM

from common.cli import UserError
from common.data.collators import MaskingCollator, MaskRates
from common.data.crops import Pack
from common.data.token_store import TokenStore, open_for_model
from common.distributed.world import World
from common.models.esm2.alphabet import CHAIN_END, ESM2_TOKENS
from common.models.family import family_of
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.families.diffusion.masking import diffusion_batches
from extras.prepare.sources.chains import LINKER, LinkedBatches, LinkedStore, chain_tokens
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.formats import proteins
from extras.prepare.sources.streams import plan_streams
from tests.data_fixtures import TOKENIZE, call, write_fasta
from tests.extras.encoder_runs import assert_resumes_after_kill
from tests.files.test_token_store import save
from tests.training_fixtures import arguments, final_weights, losses, same_bits, train

TEXTS = ["MKTAYIAKQR:GGHHKLLM:LAGV", "AAAAACCCDE", "MKLL:MTREW", "GGG:GGG", "W"]
SEPARATOR, LINKED = (chain_tokens(family_of("esm"), between) for between in ("separator", "linker"))
RATES = MaskRates(0.5)
RUN = {"max_steps": 6, "packs_per_step": 2, "tokens_per_pack": 256, "save_steps": 3, "chains": "linker"}


def stored(texts) -> list[np.ndarray]:
    return [SEPARATOR.encode(text) for text in texts]


@pytest.fixture
def prepared(tmp_path):
    return save(tmp_path / "prepared", stored(TEXTS))


@pytest.fixture(scope="module")
def complexes(tmp_path_factory):
    """Prepared data of random pairs of chains, and of single ones."""
    directory, rng = tmp_path_factory.mktemp("complexes"), np.random.default_rng(3)
    letters = np.frombuffer(b"LAGVSERTIDPKQNFYMHWC", np.uint8)
    chains = [letters[rng.integers(20, size=rng.integers(8, 60))].tobytes().decode() for _ in range(240)]
    texts = [*map(":".join, zip(chains[:100], chains[100:200], strict=True)), *chains[200:]]
    fasta = write_fasta(directory / "pairs.fasta", ((f"p{n}", text) for n, text in enumerate(texts)))
    sizes = ("--validation_size", 20, "--test_size", 0, "--chains", "keep")
    call(TOKENIZE, "--source", fasta, "--output_dir", directory, *sizes)
    return directory / "arrow"


@pytest.mark.parametrize(("kind", "separator"), [("esm", "<null_1>"), ("esmc", "<null_1>"), ("amplify", "|")])
def test_what_stands_between_chains(kind, separator):
    family = family_of(kind)
    with_separator, with_linker = (chain_tokens(family, between) for between in ("separator", "linker"))
    letters = family.tokens.letters
    head, tail = letters[family.tokens.begin], letters[family.tokens.end]
    read = [letters[token] for token in with_separator.encode("MK:AG")]
    assert read == [head, "M", "K", separator, "A", "G", tail]
    read = [letters[token] for token in with_linker.encode("MK:AG")]
    assert read == [head, "M", "K", *"G" * 25, "A", "G", tail]
    assert np.array_equal(with_linker.encode("MKAG"), family.tokens.encode("MKAG"))
    with pytest.raises(UserError, match="--chains: E1 reads one chain a record"):
        chain_tokens(family_of("e1"), "separator")


def test_stores_of_linkers_have_them_in_records_and_crops(prepared):
    store, rng = pickle.loads(pickle.dumps(LinkedStore(prepared, LINKED))), np.random.default_rng(0)
    expected = [SEPARATOR.encode(text) for text in TEXTS]
    expected = [np.concatenate([np.full(LINKER, i) if i == CHAIN_END else [i] for i in ids]) for ids in expected]
    numbers = rng.integers(len(TEXTS), size=200)
    lengths = store.lengths(numbers)
    assert lengths.tolist() == [len(expected[n]) for n in numbers]
    starts = rng.integers(lengths)
    sizes = rng.integers(lengths - starts + 1)
    ids, offsets = store.gather(numbers, starts, sizes)
    crops = [expected[n][s : s + size] for n, s, size in zip(numbers, starts, sizes, strict=True)]
    assert np.array_equal(LINKED.plain(ids), np.concatenate(crops))
    assert np.array_equal(np.diff(offsets), sizes)


def test_masks_ask_the_same_whatever_stands_between_chains(prepared):
    """Of whole records, and of every crop of one."""
    numbers = np.arange(len(TEXTS))
    found = []
    for tokens, store in ((SEPARATOR, TokenStore(prepared, SEPARATOR)), (LINKED, LinkedStore(prepared, LINKED))):
        collator = MaskingCollator(tokens, 1, RATES)
        lengths = store.lengths(numbers)
        pack = Pack(numbers, np.zeros_like(numbers), lengths, 0)
        ids, offsets = store.gather(pack.records, pack.starts, pack.lengths)
        batch = (LinkedBatches(collator, tokens) if tokens is LINKED else collator)(pack, ids)
        assert batch["num_tokens"] == len(ids) == len(batch["input_ids"])
        assert batch["sum_squared_lengths"] == (lengths**2).sum()
        assert np.array_equal(batch["predicted"][batch["predicted"] >= 0], np.flatnonzero(batch["labels"] >= 0))
        is_residue = tokens.plain(ids) != CHAIN_END
        found.append([batch[name].numpy()[is_residue] for name in ("input_ids", "labels")])
        others = [batch[name].numpy()[~is_residue] for name in ("input_ids", "labels")]
    assert np.array_equal(*[labels for _, labels in found])
    assert np.array_equal(*[shown for shown, _ in found])
    assert set(others[0]) == {LINKED.glycine}
    assert set(others[1]) == {-100}

    whole, collator = batch["labels"][: offsets[1]], LinkedBatches(collator, LINKED)
    for start in range(0, offsets[1], 3):
        for end in range(start + 1, offsets[1] + 1, 4):
            crop = Pack(np.array([0]), np.array([start]), np.array([end - start]), 0)
            assert torch.equal(collator(crop, ids[start:end])["labels"], whole[start:end])


def test_diffusion_asks_the_same_whatever_stands_between_chains(prepared):
    """With the same weights, of which linkers have none."""
    numbers, found, targets = np.arange(len(TEXTS)), [], []
    for tokens, store in ((SEPARATOR, TokenStore(prepared, SEPARATOR)), (LINKED, LinkedStore(prepared, LINKED))):
        pack = Pack(numbers, np.zeros_like(numbers), store.lengths(numbers), 0)
        ids, _ = store.gather(pack.records, pack.starts, pack.lengths)
        flags = arguments("dir").data
        batch = diffusion_batches(flags, tokens, World(0, 0, 1, torch.device("cpu")).mesh)(pack, ids, 0)
        is_residue = tokens.plain(ids) != CHAIN_END
        found.append([batch[name].numpy()[is_residue] for name in ("labels", "weights")])
        assert not batch["weights"].numpy()[~is_residue].any()
        targets.append(batch["num_targets"])
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])
    assert targets[0] == targets[1] == sum(len(text.replace(":", "")) for text in TEXTS)


def test_separators_are_never_asked_nor_records_without_chains_changed(prepared):
    numbers = np.array([0, 1, 4])
    batches = []
    for tokens in (ESM2_TOKENS, SEPARATOR):
        store = TokenStore(prepared, tokens)
        pack = Pack(numbers, np.zeros_like(numbers), store.lengths(numbers), 0)
        ids, _ = store.gather(numbers, pack.starts, pack.lengths)
        batches.append(MaskingCollator(tokens, 1, MaskRates(1.0))(pack, ids))
    assert (batches[0]["labels"] != CHAIN_END).all()
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in ("input_ids", "labels", "cu_seqlens"))


@pytest.mark.parametrize("tokens", [SEPARATOR, LINKED], ids=["separator", "linker"])
def test_streamed_complexes_are_the_prepared_ones(tmp_path, prepared, tokens):
    path = write_fasta(tmp_path / "a.fasta", ((f"p{n}", text) for n, text in enumerate(TEXTS)))
    files = open_source(str(path), False, content=proteins(chains=True)).splits["train"]
    plan = plan_streams(files, 1, seed=1, max_seq_length=128, tokens_per_pack=4096, alphabet=tokens)
    pack, ids, _ = next(plan.stream(0))
    store = LinkedStore(prepared, tokens) if tokens is LINKED else TokenStore(prepared, tokens)
    numbers = np.arange(len(TEXTS))
    expected = np.split(
        *(a if n == 0 else a[1:-1] for n, a in enumerate(store.gather(numbers, 0 * numbers, store.lengths(numbers))))
    )
    streamed = np.split(ids, np.cumsum(pack.lengths)[:-1])
    assert sorted(part.tolist() for part in streamed) == sorted(part.tolist() for part in expected)


def test_prepared_chains_are_refused_without_the_flag(complexes):
    with pytest.raises(
        UserError, match="its records may have several chains: .*--chains separator or --chains linker"
    ):
        open_for_model(complexes, "train", ESM2_TOKENS)
    with pytest.raises(UserError, match="--chains: E1 reads one chain a record: make a record of each"):
        arguments(
            complexes, model_type="e1", config_name="Profluent-Bio/E1-150m", config_overrides=None, chains="linker"
        )


# Runs


@pytest.fixture(scope="module", params=["separator", "linker"])
def run(complexes, tmp_path_factory, request):
    out = tmp_path_factory.mktemp(request.param)
    train(complexes, out, do_eval=True, **RUN | {"chains": request.param})
    return out, request.param


def test_a_run_resumes_bit_identically(complexes, run, tmp_path):
    out, between = run
    for stop in (3, 6):
        train(complexes, tmp_path, do_eval=True, stop_at_step=stop, **RUN | {"chains": between})
    assert losses(tmp_path) == losses(out)
    assert same_bits(final_weights(tmp_path), final_weights(out))
    other = "linker" if between == "separator" else "separator"
    said = train(complexes, out, expect=2, **RUN | {"chains": other, "max_steps": 7})
    assert "chains" in said


def test_a_run_of_chains_resumes_after_kill(complexes, tmp_path):
    assert_resumes_after_kill(complexes, tmp_path, RUN)


@pytest.mark.parametrize("model", ["biohub/ESMC-300M-hf", "chandar-lab/AMPLIFY_120M"])
def test_other_families_train_on_chains(complexes, tmp_path, model):
    sizes = "num_hidden_layers=2,hidden_size=32,num_attention_heads=4,intermediate_size=64"
    flags = RUN | {"config_name": model, "config_overrides": sizes, "max_steps": 2, "save_steps": 2}
    train(complexes, tmp_path, do_eval=True, **flags)
    encoder = Encoder(EncoderFlags(str(tmp_path), use_cpu=True))
    assert encoder.alphabet.chains == "linker"
    assert len(encoder.alphabet.encode("MK:AG")) == 4 + LINKER + 2


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_ddp.py", "train_ddp_cp.py"])
def test_two_ranks_are_one(complexes, run, tmp_path, script):
    out, between = run
    flags = {"cp_size": 2} if script == "train_ddp_cp.py" else {}
    train(complexes, tmp_path, 2, script=script, **RUN | {"chains": between} | flags)
    assert losses(tmp_path) == pytest.approx(losses(out), rel=1e-5)


def test_stock_transformers_computes_the_same_of_an_export(run):
    """Its tokenizer knows `<null_1>`; a linker is 25 glycines to both."""
    out, between = run
    model = EsmForMaskedLM.from_pretrained(out / "final_model").eval()
    assert AutoConfig.from_pretrained(out / "final_model").chains == between
    text = TEXTS[0].replace(":", "<null_1>" if between == "separator" else "G" * LINKER)
    ids = AutoTokenizer.from_pretrained(out / "final_model")(text, return_tensors="pt")
    encoder = Encoder(EncoderFlags(str(out / "final_model"), use_cpu=True))
    assert encoder.alphabet.encode(TEXTS[0]).tolist() == ids["input_ids"][0].tolist()
    with torch.no_grad():
        expected = model(**ids).logits[0]
    (found,) = encoder.logits([encoder.alphabet.encode(TEXTS[0])])
    assert torch.allclose(found, expected, atol=2e-5)


def test_a_partner_tells_what_a_residue_is(tmp_path):
    """Chain A is one of 4 letters six times, chain B the letter once, another one with probability m. Least possible
    losses of B: log 4 alone, and with A the entropy of the noise."""
    rng, letters, m = np.random.default_rng(0), "LDKW", 0.1
    least = -(1 - m) * math.log(1 - m) - m * math.log(m / 3)
    records = []
    for n in range(600):
        a = rng.integers(4)
        b = a if rng.random() > m else (a + rng.integers(1, 4)) % 4
        records.append((f"p{n}", f"{letters[a] * 6}:{letters[b]}" if n % 3 else letters[b]))
    fasta = write_fasta(tmp_path / "pairs.fasta", records)
    flags = {"max_steps": 60, "tokens_per_pack": 512, "learning_rate": 1e-2, "mlm_probability": 0.3}
    flags |= {"mask_replace_prob": 1.0, "random_replace_prob": 0.0, "dataset": fasta, "chains": "separator"}
    train(None, tmp_path / "out", warmup_steps=10, max_seq_length=64, **flags)
    encoder = Encoder(EncoderFlags(str(tmp_path / "out" / "final_model"), use_cpu=True))

    def loss(before: str, letter: str) -> float:
        ids = encoder.alphabet.encode(before + letter)
        ids[-2] = encoder.alphabet.mask
        return -float(encoder.logits([ids])[0][-2].log_softmax(-1)[ESM2_TOKENS.byte_to_id[ord(letter)]])

    def mean(before) -> float:
        shown = [[loss(before(a), b) * (1 - m if a == b else m / 3) for b in letters] for a in letters]
        return sum(map(sum, shown)) / len(letters)

    alone, together = mean(lambda a: ""), mean(lambda a: f"{a * 6}:")
    assert alone == pytest.approx(math.log(4), abs=0.1)
    assert least - 0.01 < together < alone - 0.5  # of the 0.95 nats that the two share
