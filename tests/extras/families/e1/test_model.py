"""Our E1 beside plain float64 with explicit masks: logits, loss, gradients, leaks, sizes, files."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from common.cli import UserError
from common.models.layers.compiling import compile_layers
from common.models.layers.config_base import override
from common.models.layers.initialise import count_parameters, initialise
from common.models.layers.recompute import save_activations
from extras.families.e1.alphabet import TOKENS
from extras.families.e1.config import E1_SIZES, E1Config, e1_config, load_config
from extras.families.e1.convert import ADAPTER
from extras.families.e1.family import FAMILY
from extras.families.e1.model import E1ForMaskedLM
from tests.extras.families.e1.reference import Reference, gradients, pack_of, sets_of
from tests.marks import cases
from tests.models.reference import adapted, relative

# Layer 2 of 0 .. 3 attends to sets; a sixth of queries, keys and values is clipped.
TINY = replace(e1_config(4, 32, 4, 48), max_num_sequences=16, clip_qkv=2.0)
SETS = [[9], [30, 5, 41], [4, 4], [17, 60, 25, 8, 33], [12]]


def fresh(config: E1Config = TINY) -> E1ForMaskedLM:
    model = E1ForMaskedLM(config)
    initialise(model, 1, config.initializer_range)
    return model


@torch.no_grad()
def logits_of(model: E1ForMaskedLM, pack: dict, **more) -> torch.Tensor:
    return model(**{name: value for name, value in pack.items() if name != "labels"}, **more).logits


def check_against_reference(config: E1Config, sets: list[list[int]]) -> None:
    reference, pack = Reference(config), pack_of(sets)
    model = adapted(ADAPTER, reference, config)
    with torch.no_grad():
        expected = torch.cat([reference.logits(of_set) for of_set in sets_of(pack)])
    logits = logits_of(model, pack)
    assert (logits - expected).abs().max() < 1e-5 * (expected.max() - expected.min())
    theirs = reference.loss(pack)
    theirs.backward()
    ours = model(**pack).loss_sum
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    ours.backward()
    found = gradients(model, config)
    assert found.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        assert relative(found[name], weight.grad) < 1e-5, name


@pytest.mark.parametrize("name", cases(E1_SIZES, slow={"Profluent-Bio/E1-300m", "Profluent-Bio/E1-600m"}))
def test_e1_every_size_equals_reference(name):
    check_against_reference(replace(load_config(name), num_hidden_layers=3), [[10, 7], [12]])


def test_e1_ragged_sets_equal_reference():
    check_against_reference(TINY, SETS)


def test_e1_float64_of_halving_equals_reference():
    """The same code as on a GPU."""
    reference, pack = Reference(TINY), pack_of(SETS)
    model = adapted(ADAPTER, reference, TINY).double()
    expected = torch.cat([reference.logits(of_set) for of_set in sets_of(pack)])
    assert relative(logits_of(model, pack), expected) < 1e-6


def test_e1_clips_queries_keys_and_values():
    reference, pack = Reference(TINY), pack_of(SETS)
    plain = adapted(ADAPTER, reference, replace(TINY, clip_qkv=None))
    clipped = adapted(ADAPTER, reference, replace(TINY, clip_qkv=0.5))
    assert relative(logits_of(clipped, pack), logits_of(plain, pack)) > 1e-3


def test_e1_set_of_one_is_a_lone_sequence():
    model, pack = adapted(ADAPTER, Reference(TINY), TINY), pack_of([[30], [5], [41]])
    alone = {name: value for name, value in pack.items() if name != "sets"}
    assert torch.equal(logits_of(model, pack), logits_of(model, alone))


def changed(pack: dict, sequence: int) -> dict:
    """The pack with other residues in one sequence."""
    ids, begin = pack["input_ids"].clone(), pack["cu_seqlens"][sequence]
    ids[begin + 2] = 8 + (ids[begin + 2] - 7) % 26
    return pack | {"input_ids": ids}


@pytest.mark.parametrize("sequence", range(1, 12))
def test_e1_change_is_seen_by_later_sequences_of_its_set_alone(sequence):
    """Bit for bit; a sequence of four tokens has no residue, but changes all the same."""
    model, pack = adapted(ADAPTER, Reference(TINY), TINY), pack_of(SETS)
    before, after = (logits_of(model, each) for each in (pack, changed(pack, sequence)))
    bounds, of_sets = pack["sets"].tolist()
    end = next(b for b in of_sets if b > sequence)  # of its set
    differs = (before != after).any(1)
    for n, (first, last) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        assert differs[first:last].any() == (sequence <= n < end), n


def test_e1_order_of_sets_in_a_pack_changes_nothing():
    model, first, second = adapted(ADAPTER, Reference(TINY), TINY), [30, 5, 41], [17, 60]
    pack = pack_of([first, second])
    ids, split = pack["input_ids"], sum(first)
    turned = pack_of([second, first]) | {"input_ids": torch.cat((ids[split:], ids[:split]))}
    there, back = logits_of(model, pack), logits_of(model, turned)
    assert torch.equal(there, torch.cat((back[-split:], back[:-split])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_e1_after_a_context_is_the_last_of_the_whole_set(dtype):
    model = adapted(ADAPTER, Reference(TINY), TINY).to(dtype)
    context, queries = [30, 5, 41], [17, 60]
    read = pack_of([context])
    kept = model.read_context(read["input_ids"], read["cu_seqlens"])
    pack = pack_of([[length] for length in queries], seed=1)
    del pack["sets"]
    found = logits_of(model, pack, context=kept).split(queries)
    for query, logits in zip(pack["input_ids"].split(queries), found, strict=True):
        whole = pack_of([[*context, len(query)]]) | {"input_ids": torch.cat((read["input_ids"], query))}
        assert relative(logits, logits_of(model, whole)[-len(query) :]) < (1e-6 if dtype == torch.float64 else 1e-5)


def test_e1_refuses_sets_beyond_its_limits():
    pack = pack_of(SETS)
    few, short = fresh(replace(TINY, max_num_sequences=4)), fresh(replace(TINY, max_num_positions_global=142))
    said = "a set of 5 sequences: this model's have at most 4: give smaller sets"
    with pytest.raises(UserError, match=said):
        logits_of(few, pack)
    with pytest.raises(UserError, match="a set of 143 tokens: this model's have at most 142: give smaller sets"):
        logits_of(short, pack)
    read, query = pack_of([[9, 9, 9, 9]]), pack_of([[9]])
    context = few.read_context(read["input_ids"], read["cu_seqlens"])
    del query["sets"]
    with pytest.raises(UserError, match=said):
        logits_of(few, query, context=context)


@pytest.mark.parametrize(
    ("name", "parameters"),
    # layers x (4 h^2 + 3 h f + 2 h) + embeddings 34 h + 512 h + norm h + head h^2 + 3 h + 34 h + 34
    [
        ("Profluent-Bio/E1-150m", 154_423_330),
        ("Profluent-Bio/E1-300m", 274_317_346),
        ("Profluent-Bio/E1-600m", 641_438_754),
    ],
)
def test_e1_parameter_counts(name, parameters):
    with torch.device("meta"):
        assert count_parameters(E1ForMaskedLM(load_config(name))) == parameters


def test_e1_flops_equal_pytorchs_count():
    """Of sets of one, as the reference's masks do not spare it the pairs that they hide."""
    reference, counted, lengths = Reference(TINY), 0, [5, 33, 120]
    for length in lengths:
        with FlopCounterMode(display=False) as counter:
            reference.logits([torch.full((length,), 9)]).sum().backward()
        counted += counter.get_total_flops()
    tokens, squared = sum(lengths), sum(n * n for n in lengths)
    assert FAMILY.flops(TINY, tokens, squared, tokens) == counted
    more = FAMILY.flops(TINY, tokens, squared, tokens, set_pairs=squared + 7)
    assert more - counted == 3 * 4 * TINY.hidden_size * 7  # in the one layer that attends to sets


@pytest.mark.parametrize("bf16", [False, True])
def test_e1_layers_compile_to_two_graphs(bf16):
    """One of layers within sequences, one of those over sets."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    models = [fresh() for _ in range(2)]
    compile_layers(models[0], "cpu", backend="aot_eager")
    for sets in ([[100, 28], [64]], [[200, 56, 64]]):
        for model in models:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                model(**pack_of(sets)).loss_sum.backward()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert relative(ours.grad, theirs.grad) < (2e-2 if bf16 else 1e-5), name
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_e1_recomputed_layers_give_the_same_gradients(mode):
    models = [fresh() for _ in range(2)]
    save_activations(models[0].layers, mode)
    for model in models:
        model(**pack_of(SETS)).loss_sum.backward()
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


def test_e1_fillers_and_empty_sequences_change_nothing():
    """As runs on a GPU have them behind a pack (FillingCollator, SetCollator)."""
    pack, models = pack_of(SETS), [fresh() for _ in range(2)]
    tokens, bounds = len(pack["input_ids"]), pack["cu_seqlens"]
    ends = torch.tensor([tokens + 60, tokens + 72, tokens + 72, tokens + 72], dtype=torch.int32)
    of_sets, count = pack["sets"][1].unique(), len(bounds) - 1
    own = torch.arange(count + 1, count + 5, dtype=torch.int32)
    row = torch.cat((of_sets, own, own[-1:].expand(count - len(of_sets) + 1)))
    full = {
        "input_ids": torch.nn.functional.pad(pack["input_ids"], (0, 72)),
        "labels": torch.nn.functional.pad(pack["labels"], (0, 72), value=-100),
        "cu_seqlens": torch.cat((bounds, ends)),
        "max_seqlen": 60,
    }
    full["sets"] = torch.stack((full["cu_seqlens"], row))
    for model, batch in zip(models, (pack, full), strict=True):
        model(**batch).loss_sum.backward()
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert relative(ours.grad, theirs.grad) < 1e-5, name


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16])
def test_e1_bf16_is_near_fp32(residual):
    reference, pack = Reference(TINY), pack_of(SETS)
    model = adapted(ADAPTER, reference, TINY)
    other = E1ForMaskedLM(TINY, residual=residual)
    other.load_state_dict(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        found = other(**pack).loss_sum
    found.backward()
    assert found.item() == pytest.approx(model(**pack).loss_sum.item(), rel=2e-2)


def test_e1_export_has_its_authors_names_and_is_read_again(tmp_path):
    from transformers import AutoTokenizer

    model, directory = fresh(), tmp_path / "model"
    ADAPTER.save(ADAPTER.to_hf(model.state_dict().__getitem__, TINY), TINY, directory)
    content = json.loads((directory / "config.json").read_text())
    assert TINY.content().items() <= content.items()
    assert (content["model_type"], content["architectures"]) == ("E1", ["E1ForMaskedLM"])
    theirs = load_file(directory / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == Reference(TINY).shapes
    again = load_config(str(directory))
    assert again.fingerprint() == TINY.fingerprint()
    pieces, extras = ADAPTER.read(str(directory), again)
    read, weights = dict(pieces), model.state_dict()
    assert not extras
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    expected = [TOKENS.index(token) for token in ("<bos>", "1", "M", "?", "K", "X", "J", "X", "2", "<eos>")]
    assert tokenizer("M?KXJ*")["input_ids"] == expected
    assert "transformers has no class of it" in (directory / "README.md").read_text()
    del theirs["model.embed_seq_id.weight"]
    with pytest.raises(UserError, match=r"no tensor model.embed_seq_id.weight"):
        ADAPTER.from_hf(theirs, again, "here")


def test_e1_published_weights_are_named_at_each_launch(tmp_path, caplog):
    """Also those that were trained from them; weights that began as random ones are not."""
    caplog.set_level(logging.INFO)
    pieces = dict(ADAPTER.to_hf(fresh().state_dict().__getitem__, TINY))
    own, trained = tmp_path / "own", tmp_path / "trained"
    ADAPTER.save(iter(pieces.items()), TINY, own)
    ADAPTER.read(str(own), load_config(str(own)))
    assert "Profluent" not in caplog.text
    content = json.loads((own / "config.json").read_text())
    del content["profluent_e1"]  # as published ones are
    (own / "config.json").write_text(json.dumps(content))
    config = load_config(str(own))
    ADAPTER.read(str(own), config)
    assert caplog.text.count("Profluent-E1") == 1
    ADAPTER.save(iter(pieces.items()), config, trained)
    ADAPTER.read(str(trained), load_config(str(trained)))
    assert caplog.text.count("Profluent-E1") == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 33}, "vocab_size is 33, E1 here has 34"),
        ({"model_type": "esm"}, "model_type is 'esm', not E1"),
        ({"gated_mlp": False}, "gated_mlp is False, E1 here has True"),
        ({"num_key_value_heads": 2}, "E1 here has no grouped queries"),
        ({"rope_theta_within_seq": 2e4}, r"rope_theta_within_seq is 20000.0, E1 here has 10000.0"),
        ({"clip_qkv": -8.0}, "clip_qkv is -8.0: must be above 0"),
        ({"max_num_sequences": 0}, "max_num_sequences is 0: must be above 0"),
        ({"global_attention_every_n_layers": -1}, "global_attention_every_n_layers is -1"),
        ({"hidden_size": 36}, "rotary embeddings need an even head dimension"),
    ],
)
def test_e1_config_refuses_what_it_would_not_compute(tmp_path: Path, changes, said):
    (tmp_path / "config.json").write_text(json.dumps(TINY.content() | changes))
    with pytest.raises(UserError, match=said):
        load_config(str(tmp_path))


def test_e1_config_of_its_authors_has_their_defaults(tmp_path: Path):
    """Values that are their class's defaults are not in a file that transformers writes."""
    content = TINY.content()
    for name in ("profluent_e1", "max_num_positions_within_seq", "initializer_range", "rms_norm_eps", "vocab_size"):
        del content[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert replace(load_config(str(tmp_path)), others={}) == replace(TINY, profluent_e1=True)


def test_e1_overrides_change_sizes():
    sizes = "num_hidden_layers=2,hidden_size=32,num_attention_heads=4,intermediate_size=64"
    assert override(load_config("Profluent-Bio/E1-300m"), sizes) == e1_config(2, 32, 4, 64)


def test_e1_initial_weights():
    model = fresh(e1_config(1, 128, 4, 192))
    for name, tensor in model.state_dict().items():
        rows = tensor[: len(TOKENS)] if name in model.padded_vocab else tensor
        assert not tensor[len(rows) :].any()
        if tensor.dim() == 1:
            assert torch.equal(rows, torch.full_like(rows, float(not name.endswith("bias")))), name
        else:
            assert rows.std().item() == pytest.approx(0.02, rel=0.05), name
    assert not model.embeddings.word_embeddings.weight[0].any()  # <pad>
    assert np.isfinite(logits_of(model, pack_of([[9, 9]]))).all()
