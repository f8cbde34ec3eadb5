"""What a causal run reads: text as it is or prepared, held-out text, and how both answer the trainer."""

from __future__ import annotations

import json
import os
from itertools import islice

import datasets
import numpy as np
import pytest
import torch

from common.cli import UserError
from common.data.loader import TrainLoader, merge_positions
from common.data.packing import Position
from common.data.packs_per_step import PacksPerStep
from common.distributed.world import Mesh, World
from common.flags import changed_defaults, with_flags
from common.training.same_run import check_same_data
from extras.families.text.contexts import ContextPlan, causal_batches
from extras.families.text.data import held_out_contexts, open_text
from extras.families.text.flags import TextFlags
from extras.families.text.store import TextMemory, TextStore
from extras.families.text.tokenizers import load_tokenizer
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.formats import documents
from tests.data_fixtures import TOKENIZE, call, edit_unnoticed, expect_error, load_script, write_csv
from tests.data_fixtures import proteins as protein_rows
from tests.extras.families.text.fixtures import BYTES, decoded, texts, write_c4, write_jsonl
from tests.extras.families.text.test_tokenizers import trained
from tests.extras.prepare.sources.hub_server import hub_server
from tests.forked import run_script

PREPARE = load_script("1.tokenize_text.py")
SMALL = {"max_seq_length": 64, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """(what 1.tokenize_text.py wrote of C4's layout, the training documents)."""
    root = tmp_path_factory.mktemp("prepared")
    expected = write_c4(root / "c4")
    given = ("--dataset", root / "c4", "--dataset_config_name", "en", "--preprocessing_num_workers", 1)
    call(PREPARE, *given, "--output_dir", root / "out")
    return root / "out" / "text", expected


def opened(tokenizer=BYTES, evaluates: bool = True, **flags):
    flags = with_flags(changed_defaults(TextFlags()), **(SMALL | flags))
    world = World.from_environment(use_cpu=True)
    return flags, open_text(flags, world, evaluates, tokenizer)


def test_text_configuration_is_streamed(tmp_path):
    expected = write_c4(tmp_path)
    flags, data = opened(dataset=str(tmp_path), dataset_config_name="en", max_steps=10)
    held_out = data.held_out("validation")
    assert data.held_out("test") is None
    packs, steps = PacksPerStep.of(3), data.total_steps(PacksPerStep.of(3), 0, {})
    loader = TrainLoader(data.order(packs), causal_batches(flags, Mesh()), Mesh(), num_steps=steps)
    steps = list(loader)
    assert len(steps) == 10
    assert not data.finished(9, {})
    assert data.finished(10, steps[-1].position)
    words = b"".join(bytes(t for t in b["input_ids"].tolist() if t < 256) for s in steps for b in s.micro_batches)
    assert b"english" in words
    assert not any(other in words for other in (b"held out", b"other", b"deutsch"))
    assert b"held out 99 0 " in bytes(held_out.ids[held_out.ids < 256].tolist())
    tokens = sum(len(text.encode()) + 1 for text in expected)
    assert data.epochs(1000) == pytest.approx(1000 * 64 / tokens)  # small files: counted
    with pytest.raises(UserError, match="the checkpoint.s position is for streams of 3 packs a step"):
        data.check_packs(packs, PacksPerStep.of(4))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_text_of_small_files_is_counted(tmp_path, monkeypatch, name):
    """Their first documents are shorter than the others."""
    monkeypatch.setattr("extras.families.text.data.SAMPLE_TOKENS", 4000)
    some = [text.replace("\n", " ") for text in texts(300) + [text * 5 for text in texts(300, seed=2)]]
    if name == "a.txt":
        (tmp_path / name).write_text("\n\n".join(some))
    else:
        write_jsonl(tmp_path / name, some)
    _, data = opened(dataset=str(tmp_path / name), max_steps=1, evaluates=False)
    assert data.tokens == sum(len(text.encode()) + 1 for text in some)
    assert data.epochs(data.tokens) == 64  # contexts of 64 tokens


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_text_epoch_is_estimated(tmp_path, monkeypatch, name):
    monkeypatch.setattr("extras.families.text.data.SAMPLE_TOKENS", 4000)
    monkeypatch.setattr("extras.families.text.data.COUNTED_BYTES", 100_000)
    path = write_jsonl(tmp_path / name, some := texts(2000))
    _, data = opened(dataset=str(path), max_steps=1, evaluates=False)
    assert data.tokens != sum(len(text.encode()) + 1 for text in some)
    assert data.tokens == pytest.approx(sum(len(text.encode()) + 1 for text in some), rel=0.1)


@pytest.mark.parametrize("streaming", [True, False])
def test_text_of_hub_is_read_in_place(tmp_path, streaming):
    """A configuration of the card; not fetched whole, nor anything else of the data set."""
    write_c4(tmp_path / "repo")
    (tmp_path / "repo" / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en/c4-train.*.json.gz\n"
        "  - split: validation\n    path: en/c4-validation.*.json.gz\n- config_name: multilingual\n---\n"
    )
    # What nobody asked for would be noticed; and the files that are read are so small that they come as one block.
    (tmp_path / "repo" / "multilingual" / "c4-de.tfrecord-00001.json.gz").write_bytes(os.urandom(1 << 20))
    home, script = tmp_path / "home", tmp_path / "read.py"
    script.write_text(READ)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    with hub_server("allenai/c4", tmp_path / "repo") as hub:
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        done = run_script(str(script), str(streaming), env=environment, anew=("huggingface_hub", "common", "extras"))
        sent = hub.sent
    assert done.returncode == 0, done.stderr
    flags, data = opened(dataset=str(tmp_path / "repo"), dataset_config_name="en", max_steps=1, evaluates=False)
    (local,) = TrainLoader(data.order(PacksPerStep.of(2)), causal_batches(flags, Mesh()), num_steps=1)
    assert json.loads(done.stdout) == [batch["input_ids"].tolist() for batch in local.micro_batches]
    assert sent < 1 << 20
    assert bool(list(home.rglob("*.json.gz"))) != streaming
    assert not list(home.rglob("c4-de*"))


READ = """
import json, sys
from common import cli
from extras.families.text.contexts import causal_batches
from common.data.packs_per_step import PacksPerStep
from common.data.loader import TrainLoader
from common.distributed.world import Mesh
from tests.extras.families.text.test_data import opened
with cli.user_errors():
    streaming = sys.argv[1] == "True"
    flags, data = opened(dataset="allenai/c4", dataset_config_name="en", max_steps=1, streaming=streaming)
    (step,) = TrainLoader(data.order(PacksPerStep.of(2)), causal_batches(flags, Mesh()), num_steps=1)
    print(json.dumps([batch["input_ids"].tolist() for batch in step.micro_batches]))
"""


def test_prepared_text_opens_with_datasets(prepared):
    directory, expected = prepared
    loaded = datasets.load_from_disk(str(directory))
    assert [decoded(ids) for ids in loaded["train"]["input_ids"]] == expected
    assert loaded["validation"].num_rows == 30
    store = TextStore(directory / "train")
    assert len(store) == len(expected)
    assert store.num_tokens == sum(len(text.encode()) + 1 for text in expected)
    whole, _ = store.gather(*store.pieces(0, store.num_tokens))
    assert whole.dtype == np.uint16
    for begin, end in ((0, 1), (5, 700), (store.num_tokens - 3, store.num_tokens)):
        assert store.gather(*store.pieces(begin, end))[0].tolist() == whole[begin:end].tolist()


@pytest.mark.parametrize("context", [64, 7, 5000])
def test_context_plan_has_every_context_once(prepared, monkeypatch, context):
    store = TextStore(prepared[0] / "train")
    whole = store.gather(*store.pieces(0, store.num_tokens))[0]
    plan = ContextPlan(store, 5, context, 3)
    cuts = []
    for epoch in (0, 1):
        (window,) = plan.windows(epoch)
        packs = [window.pack(number) for number in range(len(window))]
        contexts = [store.gather(p.records, p.starts, p.lengths)[0].reshape(-1, context) for p in packs]
        contexts = np.concatenate(contexts)
        rolled = np.roll(whole, -window.shift)[: len(contexts) * context].reshape(-1, context)
        assert len(whole) - contexts.size < context  # no more than that is left out
        assert sorted(map(bytes, contexts)) == sorted(map(bytes, rolled))
        assert len(contexts) < 3 or contexts.tolist() != rolled.tolist()  # shuffled
        cuts.append(rolled[0].tolist())
    assert cuts[0] != cuts[1], "cut at the same places in every epoch"


def test_text_store_finds_positions(prepared):
    plan = ContextPlan(TextStore(prepared[0] / "train"), 5, 64, 3)
    all_places = [Position(*where) for *where, _ in islice(plan.places(Position()), 3 * plan.packs_per_epoch)]
    for at in (0, 1, plan.packs_per_epoch - 1, plan.packs_per_epoch, 2 * plan.packs_per_epoch + 1):
        assert plan.position_after(Position(), at) == all_places[at]
        assert plan.count(Position(), all_places[at]) == at
        assert plan.epochs_before(all_places[at]) == pytest.approx(at / plan.packs_per_epoch)
    assert plan.position_at(2.0) == Position(2)
    with pytest.raises(UserError, match="belongs to other data or other batch arguments"):
        plan.position_after(Position(0, 1, 0), 0)
    with pytest.raises(UserError, match="do not fill one context of --max_seq_length 1000000"):
        ContextPlan(plan.store, 5, 1_000_000, 1)


def test_prepared_text_is_independent_of_ranks_and_resumes(prepared):
    flags, data = opened(dataset_dir=str(prepared[0]), num_train_epochs=1.5, document_masks=True)

    def steps_of(ranks: int, workers: int = 0, first: int = 0, position=None):
        """[(the batches of a step in the order of its packs, the position after it)]."""
        meshes = [Mesh(rank, ranks) for rank in range(ranks)]
        of_ranks = [
            TrainLoader(
                data.order(PacksPerStep.of(4)), causal_batches(flags, mesh), mesh, first, position, num_workers=workers
            )
            for mesh in meshes
        ]
        steps = []
        for parts in zip(*of_ranks, strict=True):
            rounds = zip(*(part.micro_batches for part in parts), strict=True)
            batches = [batch for of_all in rounds for batch in of_all]
            told = [[b[name].tolist() for name in ("input_ids", "cu_seqlens")] for b in batches if b["num_tokens"]]
            steps.append((told, merge_positions([part.position for part in parts])))
        return steps

    whole = steps_of(1)
    assert len(whole) == data.total_steps(PacksPerStep.of(4), 0, {}) == -(-round(1.5 * data.plan.packs_per_epoch) // 4)
    assert data.finished(len(whole), whole[-1][1])
    assert data.num_examples == data.plan.num_contexts
    assert steps_of(2, workers=2) == whole
    position = json.loads(json.dumps(whole[4][1]))
    assert steps_of(4, first=5, position=position) == whole[5:]


@pytest.mark.parametrize("kind", ["prepared", "streamed"])
def test_held_out_contexts_are_independent_of_ranks(tmp_path, prepared, kind):
    if kind == "prepared":
        where = {"dataset_dir": str(prepared[0])}
    else:
        write_c4(tmp_path)
        where = {"dataset": str(tmp_path), "dataset_config_name": "en", "max_steps": 1}
    for most, contexts in ((2, 6), (100, None)):
        flags, data = opened(**where, validation_batches=most)
        store = data.held_out("validation")
        contexts = contexts or -(-store.num_tokens // 64)
        by_ranks = []
        for ranks in (1, 2, 4):
            worlds = [World(rank, rank, ranks, torch.device("cpu")) for rank in range(ranks)]
            made = [list(held_out_contexts(flags, store, causal_batches(flags, w.mesh), w)[0]) for w in worlds]
            assert len({len(batches) for batches in made}) == 1
            batches = [batch for together in zip(*made, strict=True) for batch in together]
            by_ranks.append([t for batch in batches if batch["num_tokens"] for t in batch["input_ids"].tolist()])
            assert sum(batch["num_sequences"] for batch in batches) == contexts
        assert by_ranks[0] == by_ranks[1] == by_ranks[2]
        assert len(by_ranks[0]) == min(contexts * 64, store.num_tokens)


def test_text_memory_ends_within_a_document(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["abcdef", "", "ghi"])
    files = open_source(str(path), True, content=documents("text")).splits["train"]
    for most, expected in ((9, [7, 2]), (7, [7]), (100, [7, 4])):
        store = TextMemory.read(files, BYTES, most)
        assert np.diff(store.bounds).tolist() == expected
        assert store.num_tokens == sum(expected)


def test_text_without_validation_split(tmp_path):
    """The same ones whatever the number of processes; plain text is parted by empty lines."""
    some = [text.replace("\n", " ") for text in texts(400)]
    for number in (0, 1):
        (tmp_path / f"{number}.txt").write_text("\n \n\n".join(some[200 * number :][:200]))
    given = ("--dataset", f"{tmp_path}/*.txt", "--validation_size", 0.1)
    by_workers = []
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        call(PREPARE, *given, "--output_dir", out, "--preprocessing_num_workers", workers)
        loaded = datasets.load_from_disk(out / "text")
        by_workers.append({split: rows["input_ids"][:] for split, rows in loaded.items()})
    assert by_workers[0] == by_workers[1]
    held_out, rest = (list(map(decoded, by_workers[0][split])) for split in ("validation", "train"))
    assert sorted(held_out + rest) == sorted(some)
    assert 20 <= len(held_out) <= 60


def test_text_identity_depends_on_content(tmp_path, caplog):
    """By 1.tokenize_text.py, in what it made and in what a killed run left, and by a streamed run."""
    path = tmp_path / "in/a.txt"
    path.parent.mkdir()
    path.write_text("the quick fox\n\n" * 20)
    out = ("--output_dir", tmp_path / "out", "--preprocessing_num_workers", 1)
    call(PREPARE, "--dataset", path, *out)
    copy = tmp_path / "b.txt"
    copy.write_bytes(path.read_bytes())
    with caplog.at_level("INFO"):
        call(PREPARE, "--dataset", copy, *out)
    assert "nothing to do" in caplog.text
    identity, moved = (opened(dataset=str(p), max_steps=1, evaluates=False)[1].identity for p in (path, copy))
    assert identity == moved
    edit_unnoticed(path, b"quick", b"QUICK")
    with pytest.raises(UserError, match="was made from other input"):
        call(PREPARE, "--dataset", path, *out)
    edited = opened(dataset=str(path), max_steps=1, evaluates=False)[1]
    assert edited.identity | {"dataset": ""} == identity | {"dataset": ""}
    with pytest.raises(UserError, match="the data have changed since the checkpoint"):
        check_same_data(identity, edited.identity)


def test_text_identity_depends_on_column(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "body": "b"}\n' * 9)
    given = {"dataset": str(tmp_path / "a.jsonl"), "max_steps": 1, "evaluates": False}
    assert opened(**given)[1].identity != opened(**given, text_column="body")[1].identity


def test_text_error_is_one_line(tmp_path, prepared):
    directory, _ = prepared
    other = load_tokenizer(str(trained(tmp_path / "other")))[0]
    call(TOKENIZE, "--input_dir", write_csv(tmp_path / "csv", protein_rows(30)), "--output_dir", tmp_path / "proteins")
    jsonl = write_jsonl(tmp_path / "a.jsonl", texts(3))
    (tmp_path / "split").mkdir()
    write_jsonl(tmp_path / "split" / "validation.jsonl", texts(3))
    cases = [
        ({"dataset_dir": str(directory)}, other, "tokenised with bytes .* is another one .*: give --tokenizer bytes"),
        (
            {"dataset_dir": str(tmp_path / "proteins" / "arrow")},
            BYTES,
            "no tokens.json in it, .*of proteins. Then add --tokenizer residues",
        ),
        ({"dataset_dir": str(directory), "val_split": "dev"}, BYTES, "no text in a split dev: give --val_split"),
        ({"dataset": str(jsonl)}, BYTES, "no text in a split validation: hold documents out with 1.tokenize_text.py"),
        ({"dataset": str(jsonl), "text_column": "body"}, BYTES, "no column body, only text, .*: --text_column"),
        ({"dataset": str(tmp_path / "split")}, BYTES, "no training files in it"),
        ({"dataset": str(tmp_path / "nowhere")}, BYTES, "no such file or directory"),
        ({"dataset": str(tmp_path / "split"), "train_split": "x"}, BYTES, "no split x, only validation"),
    ]
    for flags, tokenizer, message in cases:
        steps = {"max_steps": 1} if "dataset" in flags else {}
        with pytest.raises(UserError, match=message) as raised:
            opened(tokenizer, **flags, **steps)
        assert "\n" not in str(raised.value)
    assert "is another one" not in expect_error("1.tokenize_text.py", "--dataset", tmp_path / "nowhere")
    assert not (tmp_path / "processed").exists()
