"""--dataset_mix: shares of tokens, stages, one order whatever the ranks and restarts, and a run with its log."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter

import datasets
import numpy as np
import pytest

from common.cli import UserError
from common.data.flags import DataFlags, ProteinFlags
from common.data.loader import ALONE
from common.data.packs_per_step import PacksPerStep
from common.distributed.world import Mesh
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.prepare.overlap import copies_in_train
from extras.prepare.overlap import main as main_of_overlap
from extras.prepare.sample import write_sample
from extras.prepare.sources import mixture
from extras.prepare.sources.mixture import MixedData, most_lacking, warn_of_copies
from extras.prepare.sources.mixture_weights import check_exponent, parse_sources, stages_of
from tests.data_fixtures import TOKENIZE, call, load_script
from tests.training_fixtures import final_weights, make_dataset, rows, same_bits, train

STAGES = ["6:large=0.2,small=0.8"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A source of 45 training proteins, a sixth of `dataset`'s."""
    return make_dataset(tmp_path_factory.mktemp("small"), 60, 10, 5, seed=8)


@pytest.fixture
def mix(dataset, small):
    return {"dataset_mix": [f"large={dataset}:0.7", f"small={small}:0.3"]}


def opened(mix, **flags) -> MixedData:
    flags = {"max_steps": 50, "max_seq_length": 128, "tokens_per_pack": 512} | mix | flags
    return MixedData(DataFlags(**flags), ESM2_TOKENS, lambda split: None)


def steps_of(data, packs, steps, mesh=ALONE, position=None, first=0, workers=1):
    """[step: (packs with their tokens, position after it)] of a rank, put together from its workers."""
    found = {}
    for worker in range(workers):
        mine = lambda number, worker=worker: number % workers == worker  # noqa: E731
        order = data.order(PacksPerStep.of(packs))
        for step, taken, moved, _ in order.steps(mesh, position or {}, first, range(steps), mine):
            found[step] = taken, json.loads(json.dumps(moved))
    return [found[step] for step in sorted(found)]


def key(pack) -> tuple:
    return pack.source, pack.epoch, pack.records.tolist(), pack.starts.tolist(), pack.lengths.tolist()


# ---- shares ----


def test_mixture_lacks_at_most_a_pack_a_source():
    """A source is at most a pack above its share: it is taken only if it lacks. So below by a pack of each other."""
    generator = np.random.default_rng(0)
    weights, largest, tokens = (0.55, 0.3, 0.1, 0.05), 1000, [0, 0, 0, 0]
    for _ in range(5000):
        tokens[most_lacking(weights, tokens)] += int(generator.integers(1, largest + 1))
        above = np.array(tokens) - np.array(weights) * sum(tokens)
        assert above.max() <= largest
        assert above.min() >= -3 * largest
    assert np.array(tokens) / sum(tokens) == pytest.approx(weights, abs=3 * largest / sum(tokens))
    assert most_lacking((0.0, 1.0), [0, 0]) == 1  # no weight, although it lacks as much


@pytest.mark.parametrize("packing", [{}, {"pad_to_max_length": True, "tokens_per_pack": None}])
def test_mixture_shares_by_tokens_in_each_stage(mix, packing):
    data = opened(mix, dataset_mix_stages=["60:large=0.2,small=0.8", "90:small=1"], **packing)
    taken = Counter()
    for step, (packs, position) in enumerate(steps_of(data, 3, 100)):
        if step in (60, 90):
            taken.clear()
        for pack, ids in packs:
            assert len(ids) == pack.lengths.sum()
            taken[pack.source] += len(ids)
        assert [position[n][3] for n in "01"] == [taken[0], taken[1]]
        weight = 0.7 if step < 60 else 0.2 if step < 90 else 0
        assert abs(taken[0] - weight * sum(taken.values())) <= 8 * 128


def test_mixture_sources_keep_their_own_orders(mix, small):
    """Of each source the packs of its batch plan, one after the other; a small one is repeated in epochs."""
    data = opened(mix)
    packs = [pack for taken, _ in steps_of(data, 3, 60) for pack, _ in taken]
    for number, part in enumerate(data.parts):
        own = [pack for pack in packs if pack.source == number]
        plan = (pack for _, pack in part.plan.packs())
        for pack, expected in zip(own, plan, strict=False):
            assert np.array_equal(pack.records, expected.records)
            assert pack.epoch == 2 * expected.epoch + number  # of masks: none of two sources alike
    small_epochs = [np.concatenate([p.records for p in packs if (p.source, p.epoch) == (1, e)]) for e in (1, 3)]
    assert all(sorted(epoch) == list(range(45)) for epoch in small_epochs)
    assert not np.array_equal(*small_epochs)
    assert data.parts[0].plan.seed != data.parts[1].plan.seed != 42


def test_mixture_is_one_order_on_any_ranks_and_workers(mix):
    data = opened(mix, dataset_mix_stages=STAGES)
    whole = steps_of(data, 4, 12)
    for ranks, workers in ((2, 1), (3, 2), (1, 3)):
        shared = [steps_of(data, 4, 12, Mesh(rank, ranks), workers=workers) for rank in range(ranks)]
        for step, (taken, position) in enumerate(whole):
            of_ranks = [of_rank[step] for of_rank in shared]
            assert all(after == position for _, after in of_ranks)
            assert len({len(packs) for packs, _ in of_ranks}) == 1
            in_turn = itertools.chain(*zip(*(packs for packs, _ in of_ranks), strict=True))
            real = [(key(pack), ids.tolist()) for pack, ids in in_turn if len(ids)]
            assert real == [(key(pack), ids.tolist()) for pack, ids in taken]


def test_mixture_resumes_at_each_step(mix):
    data = opened(mix, dataset_mix_stages=STAGES)
    whole = steps_of(data, 2, 14)
    for at in range(1, 14):
        again = steps_of(opened(mix, dataset_mix_stages=STAGES), 2, 14 - at, position=whole[at - 1][1], first=at)
        for (taken, position), (expected, place) in zip(again, whole[at:], strict=True):
            assert position == place
            assert [key(pack) for pack, _ in taken] == [key(pack) for pack, _ in expected]
    order = data.order(PacksPerStep.of(2))
    order.check_position(whole[-1][1])
    with pytest.raises(UserError, match="position is not one of 2 sources"):
        order.check_position({"0": [0, 0, 0, 0]})


def test_mixture_draws_clusters_where_a_source_has_them(mix, small, tmp_path):
    with_index = tmp_path / "small"
    shutil.copytree(small, with_index)
    (with_index / "train/clusters").mkdir()
    np.save(with_index / "train/clusters/offsets.npy", np.arange(0, 46, 3, dtype=np.uint32))  # 15 of 3
    np.save(with_index / "train/clusters/members.npy", np.arange(45, dtype=np.uint32))
    sources = [mix["dataset_mix"][0], f"small={with_index}:0.3"]
    data = opened({"dataset_mix": sources}, sample_clusters="auto")
    packs = [pack for taken, _ in steps_of(data, 2, 60) for pack, _ in taken]
    for epoch in (1, 3):
        records = np.concatenate([pack.records for pack in packs if (pack.source, pack.epoch) == (1, epoch)])
        assert sorted(records // 3) == list(range(15))
    assert data.num_examples == 240 + 15
    assert data.identity != opened({"dataset_mix": sources}).identity
    with pytest.raises(UserError, match="no clusters: tokenise with --cluster_table"):
        opened({"dataset_mix": sources}, sample_clusters=True)


# ---- weights ----


def test_stages_and_temperature():
    flags = DataFlags(dataset_mix=["a=x:3", "b=y:1"], dataset_mix_stages=["10:b=2", "20:a=1,b=1"])
    stages = stages_of(flags, ["a", "b"], [3.0, 1.0], [])
    assert [stages.at(step) for step in (0, 9, 10, 19, 20, 999)] == [(0.75, 0.25)] * 2 + [(0, 1)] * 2 + [
        (0.5, 0.5)
    ] * 2
    assert stages.line(["a", "b"]) == "a 0.75, b 0.25; from step 10: b 1; from step 20: a 0.5, b 0.5"
    for power, expected in ((1.0, (0.2, 0.8)), (0.5, (1 / 3, 2 / 3)), (0.0, (0.5, 0.5))):
        flags = DataFlags(dataset_mix=["a=x", "b=y"], dataset_mix_exponent=power)
        assert stages_of(flags, ["a", "b"], [], [100, 400]).at(0) == pytest.approx(expected)
    first = DataFlags(dataset_mix=["a=x", "b=y"], dataset_mix_stages=["0:b=1", "5:a=1"])
    assert stages_of(first, ["a", "b"], [], [1, 1]).weights == ((0, 1), (1, 0))


def test_mixture_weights_are_tokens_by_default(dataset, small):
    data = opened({"dataset_mix": [f"large={dataset}", f"small={small}"]})
    tokens = [
        int(np.minimum(part.store.lengths(np.arange(len(part.store))), 128).sum()) for part in data.parts
    ]  # crops of an epoch
    assert data.stages.at(0) == pytest.approx(np.array(tokens) / sum(tokens))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["x:0.5"], "expected NAME=DIRECTORY:WEIGHT, such as"),
        (["a=x:0.5,b=y:0.5"], "separated by blanks"),
        (["a=x:0"], "'0' is no weight: give a number above 0"),
        (["a=x:-1"], "'-1' is no weight"),
        (["a=x:nan"], "'nan' is no weight"),
        (["a=x:inf"], "'inf' is no weight"),
        (["a=x:half"], "'half' is no weight"),
        (["a=x:1", "a=y:1"], "a second a: give each source a name"),
        (["a=x:1", "b=./x:1"], "./x is a source already"),
        (["a=x:1", "b=y"], "1 of 2 sources have a weight: all or none"),
        (["loss=x:1"], "loss is the name of a result"),
        (["validation=x:1"], "validation is the name of a result"),
    ],
)
def test_parse_sources_refuses(entries, message):
    with pytest.raises(UserError, match=message):
        parse_sources(DataFlags(dataset_mix=entries))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["a=1"], "expected STEP:NAME=WEIGHT"),
        (["5:c=1"], "c is no source: they are a, b"),
        (["5:a=0"], "'0' is no weight"),
        (["5:a=1,a=1"], "a second weight of a"),
        (["5:a=1", "5:b=1"], "steps of stages must rise"),
        (["5:a=1", "4:b=1"], "steps of stages must rise"),
        (["0:a=1"], "has the weights from step 0 on"),
    ],
)
def test_stages_of_refuses(stages, message):
    with pytest.raises(UserError, match=message):
        stages_of(DataFlags(dataset_mix_stages=stages), ["a", "b"], [1.0, 1.0], [])


def test_temperature_refused():
    with pytest.raises(UserError, match="a power of sizes, 0 to 1"):
        check_exponent(DataFlags(dataset_mix_exponent=2.0), [])
    with pytest.raises(UserError, match="has weights: drop the one"):
        check_exponent(DataFlags(dataset_mix_exponent=0.5), [1.0])


def test_mixture_refuses_other_tokens(mix, small, tmp_path):
    """A source in another tokenizer's ids, outside the vocabulary or with another first token."""
    from datasets import Dataset, DatasetDict, Features, List, Value

    features = Features({"input_ids": List(Value("uint8"))})
    for first, message in (
        (200, "token id 200, the model has 0-32"),
        (2, "begin with token id 0, those of odd with 2"),
    ):
        directory = tmp_path / str(first)
        rows = Dataset.from_dict({"input_ids": [[first, 5, 6, 2]] * 3}, features=features)
        DatasetDict({"train": rows}).save_to_disk(str(directory))
        with pytest.raises(UserError, match=message):
            opened({"dataset_mix": [mix["dataset_mix"][1], f"odd={directory}:1"]})


def test_mixture_flags_contradict():
    for flags, message in (({"dataset_dir": "x"}, "drop x"), ({"dataset": "y"}, "drop y")):
        with pytest.raises(UserError, match=f"--dataset_mix names all training data: {message}"):
            ProteinFlags(dataset_mix=["a=x:1"], max_steps=1, **flags).check()
    assert [m.flag for m in DataFlags(dataset_mix=["a=x:1"]).missing()] == ["--max_steps"]
    for key in ({"dataset_mix_stages": ["1:a=1"]}, {"dataset_mix_exponent": 0.5}):
        assert [m.flag for m in DataFlags(dataset_dir="x", **key).missing()] == ["--dataset_mix"]


# ---- runs ----


def test_mixture_run_resumes_through_a_stage_with_its_losses(mix, tmp_path):
    """Killed before the stage and between two rows; and on two ranks from within the stage."""
    flags = mix | {"dataset_mix_stages": STAGES, "packs_per_step": 2, "logging_steps": 4, "save_steps": 5}
    said = train(None, tmp_path / "whole", **flags)
    assert "Mixture, by tokens: large 0.7, small 0.3; from step 6: large 0.2, small 0.8" in said
    assert "sampling proteins, uniformly: 45 proteins" in said
    assert "loss_small: " in said
    for name, removed in (("again", (10, 12)), ("shared", (12,))):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        for step in removed:
            shutil.rmtree(tmp_path / name / f"checkpoint-{step}")
    train(None, tmp_path / "again", **flags)
    assert same_bits(final_weights(tmp_path / "again"), final_weights(tmp_path / "whole"))
    train(None, tmp_path / "shared", 2, script="train_fsdp2.py", **flags)
    whole, again, shared = (rows(tmp_path / name) for name in ("whole", "again", "shared"))
    keys = ("loss", "loss_large", "loss_small", "token_share_large", "token_share_small", "epoch_small")
    assert [row["step"] for row in again] == [1, 4, 8, 12]
    assert [[row.get(k) for k in keys] for row in again] == [[row.get(k) for k in keys] for row in whole]
    assert [shared[-1][k] for k in keys] == pytest.approx([whole[-1][k] for k in keys], rel=1e-4)
    assert whole[-1]["token_share_small"] == pytest.approx(0.8, abs=0.1)
    changed = [entry.replace("0.7", "0.6") for entry in mix["dataset_mix"]]
    said = train(None, tmp_path / "again", expect=2, **flags | {"dataset_mix": changed, "max_steps": 14})
    assert "another order of batches: dataset_mix 'large 0.7, small 0.3; from step 6" in said


def test_mixture_loss_of_a_source_is_that_of_its_steps(mix, tmp_path):
    """With a pack a step, each step's loss is that of one source."""
    train(None, tmp_path / "one", **mix | {"packs_per_step": 1, "max_steps": 6})
    of_sources = [[row[k] for k in ("loss_large", "loss_small") if k in row] for row in rows(tmp_path / "one")]
    losses = [row["loss"] for row in rows(tmp_path / "one")]
    assert all(len(each) == 1 for each in of_sources)
    assert [each[0] for each in of_sources] == pytest.approx(losses, rel=1e-6)
    assert {"loss_large", "loss_small"} <= {key for row in rows(tmp_path / "one") for key in row}


def test_mixture_identity_names_what_differs(mix):
    identity = opened(mix).identity
    other_order = opened({"dataset_mix": mix["dataset_mix"][::-1]}).identity
    assert identity["dataset"] != other_order["dataset"]
    staged = opened(mix, dataset_mix_stages=STAGES).identity
    assert {key for key in identity if identity[key] != staged[key]} == {"dataset_mix"}


def test_mixture_evaluates_each_source_as_it_is_alone(mix, dataset, small, tmp_path):
    """The held-out loss of a source is that of an evaluation of its directory."""
    train(None, tmp_path / "mixed", **mix | {"do_eval": True, "max_steps": 2})
    mixed = json.loads((tmp_path / "mixed/eval_results.json").read_text())
    for name, directory in (("large", dataset), ("small", small)):
        given = {"model_name_or_path": tmp_path / "mixed/final_model", "do_train": False, "do_eval": True}
        train(directory, tmp_path / name, **given)
        alone = json.loads((tmp_path / name / "eval_results.json").read_text())
        assert mixed[f"eval_{name}_samples"] == alone["eval_samples"]
        assert mixed[f"eval_{name}_loss_masked"] == pytest.approx(alone["eval_loss_masked"], rel=1e-5)
    assert mixed["eval_large_loss_masked"] != mixed["eval_small_loss_masked"]


def test_mixture_warns_of_held_out_proteins_that_another_source_trains_on(tmp_path, caplog, capsys, monkeypatch):
    """Two splits of the same proteins, compared with Python's sets."""
    write_sample(tmp_path / "a.fasta", num_proteins=120, families=12, seed=3)
    for seed in (1, 2):
        out = ("--output_dir", tmp_path / str(seed), "--validation_size", 30, "--test_size", 10, "--seed", seed)
        call(TOKENIZE, "--source", tmp_path / "a.fasta", *out)
    one, other = (tmp_path / seed / "arrow" for seed in "12")
    trained = {tuple(ids) for ids in datasets.load_from_disk(str(other / "train"))["input_ids"]}
    expected = {}
    for split in ("validation", "test"):
        proteins = [tuple(ids) for ids in datasets.load_from_disk(str(one / split))["input_ids"]]
        expected[split] = sum(ids in trained for ids in proteins), len(proteins)
    assert copies_in_train(one, other) == expected
    data = opened({"dataset_mix": [f"one={one}:1", f"other={other}:1"]})
    parts = dict(zip(data.sources, data.parts, strict=True))
    warn_of_copies(parts)
    said = (
        f"{expected['validation'][0]} of 30 validation proteins of one are trained on in other: eval_one counts them"
    )
    assert said in caplog.text
    monkeypatch.setattr(mixture, "COMPARED_RECORDS", 10)
    with caplog.at_level("INFO"):
        warn_of_copies(parts)
    assert f"python -m extras.prepare.overlap {one} {other}" in caplog.text
    monkeypatch.setattr("sys.argv", ["overlap", str(one), str(other)])
    main_of_overlap()
    assert f"{expected['test'][0]} of 10 test proteins of {one} are in train of {other}" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["padded", "text"])
def test_overlap_counts_copies_in_padded_data_and_in_text(tmp_path, kind):
    """a's records again in b: all that are held out in a and trained on in b, by Python's sets."""
    write_sample(tmp_path / "a.fasta", num_proteins=120, families=12, seed=3)
    lines = [line for line in (tmp_path / "a.fasta").read_text().split("\n") if line and line[0] != ">"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    for seed in (1, 2):
        out = ("--output_dir", tmp_path / str(seed), "--seed", seed)
        if kind == "text":
            call(load_script("1.tokenize_text.py"), "--dataset", tmp_path / "a.jsonl", "--validation_size", 0.3, *out)
        else:
            padding = ("--max_seq_length", 1024, "--pad_to_max_length", "True") if seed == 2 else ()
            call(TOKENIZE, "--source", tmp_path / "a.fasta", "--validation_size", 30, *out, *padding)
    one, other = (tmp_path / seed / ("text" if kind == "text" else "arrow") for seed in "12")
    trained = {
        tuple(ids[: ids.index(1)] if kind == "padded" and 1 in ids else ids)
        for ids in datasets.load_from_disk(str(other / "train"))["input_ids"]
    }
    held_out = [tuple(ids) for ids in datasets.load_from_disk(str(one / "validation"))["input_ids"]]
    expected = sum(ids in trained for ids in held_out)
    assert copies_in_train(one, other)["validation"] == (expected, len(held_out))
    assert expected > len(held_out) / 2
