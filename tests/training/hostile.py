"""Checkpoints as somebody with bad intentions would make them: each a small change of a good one.

A change gets a copy of a good checkpoint. Where it is `vouched`, the manifest is written anew afterwards, as the
attacker would. `earlier` ones are changes of a checkpoint in format 1; of those, `old` ones have no metadata.json:
their `.metadata` are read.
"""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.training.hostile_changes import SHARD, Case, edited, put, replaced, vouch, written
from tests.training.hostile_items import ITEMS, VALUE_THAT_RUNS
from tests.training.hostile_pickles import NO_PART, PICKLES, Evil


def old(content: bytes | Callable[[Any], Any]) -> Callable[[Path], None]:
    """A change to a checkpoint without metadata.json: its pickle, or what is made of the Metadata in it."""

    def change(checkpoint: Path) -> None:
        (checkpoint / "metadata.json").unlink()
        file = checkpoint / ".metadata"
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            metadata = pickle.loads(file.read_bytes())
            other = content(metadata)
            file.write_bytes(pickle.dumps(metadata if other is None else other))

    return change


def _shared_chunks(metadata) -> None:
    """Many tensors with one list of many chunks: a small file, a number of steps that is its square."""
    first = next(s for s in metadata.state_dict_metadata.values() if hasattr(s, "chunks"))
    first.chunks = first.chunks * 2000
    metadata.state_dict_metadata |= dict.fromkeys((f"t{n}" for n in range(2000)), first)


METADATA_OBJECTS = [
    ("planner data that run", lambda m: setattr(m, "planner_data", Evil("made")), NO_PART),
    ("shard elsewhere", lambda m: _stored(m, "../../canary"), "its shard '../../canary' is elsewhere"),
    ("shard at a path", lambda m: _stored(m, "/dev/zero"), "its shard '/dev/zero' is elsewhere"),
    ("shard that is no text", lambda m: _stored(m, 3), "its shard 3 is elsewhere"),
    ("chunks shared by many", _shared_chunks, "more chunks than are stored"),
    ("sizes that are no tuple", lambda m: _first(m).__setattr__("size", [3]), "it has no sizes"),
    ("dtype that is none", lambda m: setattr(_first(m).properties, "dtype", "x"), "a dtype that is none"),
    ("transformed shards", lambda m: _transformed(m), "its shards are transformed"),
    ("no storage data", lambda m: setattr(m, "storage_data", None), "it is no metadata"),
    ("tensors that are numbers", lambda m: m.state_dict_metadata.update(x=3), "it is no metadata"),
]


def _first(metadata):
    return next(s for s in metadata.state_dict_metadata.values() if hasattr(s, "chunks"))


def _stored(metadata, path) -> None:
    metadata.storage_data[MetadataIndex("x")] = _StorageInfo(path, 0, 1)


def _transformed(metadata) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zip"]


# ---- metadata.json --------------------------------------------------------------------------------------------------

WEIGHT = "model.embeddings.word_embeddings.weight"
LR = "optimizer.param_groups.0.lr"


def _chunk(position: int, value: Any) -> Callable[[Any], None]:
    return lambda content: content["tensors"][WEIGHT]["chunks"][0].__setitem__(position, value)


def _chunks(change: Callable[[list], Any]) -> Callable[[Any], None]:
    return put("tensors", WEIGHT, "chunks", value=change)


def _huge(content) -> None:
    content["tensors"][WEIGHT] |= {"shape": [10**12, 32]}
    content["tensors"][WEIGHT]["chunks"][0][1] = [10**12, 32]


def _shared_bytes(content) -> None:
    """A tensor many times over, each from the same bytes."""
    for n in range(100):
        content["tensors"][f"extras.{n}"] = content["tensors"][WEIGHT]


METADATA = [
    ("file outside", put("files", value=["../canary"]), "its shard '../canary' is elsewhere"),
    ("file at a path", put("files", value=["/dev/zero"]), "its shard '/dev/zero' is elsewhere"),
    ("file with a NUL", put("files", value=["a\0b"]), r"its shard 'a\\x00b' is elsewhere"),
    ("file of dots", put("files", value=[".."]), r"its shard '\.\.' is elsewhere"),
    ("file that is a list", put("files", value=[[]]), r"its shard \[\] is elsewhere"),
    ("file not in the manifest", put("files", value=["__9_0.distcp"]), "__9_0.distcp is not in the manifest"),
    ("files that are a number", put("files", value=3), "it is no metadata"),
    ("no tensors", lambda content: content.__delitem__("tensors"), "it is no metadata"),
    ("values, as in format 1", put("values", value={}), "it is no metadata"),
    ("a key more", put("code", value="x"), "it is no metadata"),
    ("a list", lambda content: [content], "it is no metadata"),
    ("file out of range", _chunk(2, 7), "is stored at"),
    ("file that is negative", _chunk(2, -1), "is stored at"),
    ("file that is true", _chunk(2, False), "is stored at"),
    ("begin that is negative", _chunk(3, -8), "is stored at"),
    ("begin that is a fraction", _chunk(3, 0.5), "is stored at"),
    ("begin beyond the end", _chunk(3, 1 << 50), "is stored beyond the end"),
    ("length beyond the end", _chunk(4, 1 << 52), "is stored beyond the end"),
    ("length beyond all numbers", _chunk(4, 1 << 70), "is stored at"),
    ("offset outside", _chunk(0, [60, 0]), "a chunk outside its shape"),
    ("offset that is negative", _chunk(0, [-1, 0]), "has the sizes"),
    ("offsets of another rank", _chunk(0, [0]), "a chunk outside its shape"),
    ("sizes that are texts", _chunk(1, ["64", "32"]), "has the sizes"),
    ("a shape of 128 TB", _huge, "larger than its bytes in the shard"),
    ("a shape that is not filled", put("tensors", WEIGHT, "shape", value=[1 << 40, 32]), "do not fill it"),
    ("no chunk", _chunks(lambda chunks: []), "do not fill it"),
    ("chunks that are a text", _chunks(lambda chunks: "x"), "is no tensor"),
    ("chunk that is short", _chunks(lambda chunks: [chunks[0][:4]]), "a chunk that is none"),
    ("chunk twice", _chunks(lambda chunks: chunks * 2), "a chunk twice"),
    ("a shape that overflows", put("tensors", WEIGHT, "shape", value=[0, 1 << 40, 1 << 40]), "too large a shape"),
    ("nine dimensions", put("tensors", WEIGHT, "shape", value=[1] * 9), "has the sizes"),
    ("bytes shared", _shared_bytes, "share bytes of"),
    ("length of half the tensor", _chunk(4, 4096), "larger than its bytes in the shard"),
    ("another dtype", put("tensors", WEIGHT, "dtype", value="float16"), "it has 4,096 bytes, stored are 8,192"),
    ("dtype of code", put("tensors", WEIGHT, "dtype", value="load"), "has the dtype 'load'"),
    ("dtype that is a list", put("tensors", WEIGHT, "dtype", value=[]), "has the dtype"),
    ("tensor that is a number", put("tensors", WEIGHT, value=3), "is no tensor"),
]
EARLIER_METADATA = [
    ("no values", lambda content: content.__delitem__("values"), "it is no metadata"),
    ("values that are a list", put("values", value=[]), "it is no metadata"),
    ("value that is a text", put("values", LR, value="x"), ""),  # values are not read
    ("another dtype", put("tensors", WEIGHT, "dtype", value="float16"), "another tensor than the metadata say"),
    ("a shape of 128 TB", _huge, "larger than its bytes in the shard"),
    ("bytes shared", _shared_bytes, "share bytes of"),
    (
        "weight that is a value",
        lambda c: c["values"].update({WEIGHT: c["tensors"].pop(WEIGHT)["chunks"][0][2:]}),
        "its weights are not those",
    ),
]
METADATA_FILES = [
    ("deep", 100_000 * b"[", "refused"),
    ("a number of 5,000 digits", b'{"files": ' + 5000 * b"9" + b"}", "refused"),
    ("not a number", b'{"files": [], "tensors": NaN}', "it is no metadata"),
    ("not text", b"\xff\xfe\xfd", "refused"),
    ("larger than the shards", 3_000_000 * b" ", "is larger than"),
]


# ---- what is in the shards of format 1 ------------------------------------------------------------------------------


def item(content: bytes, name: str = WEIGHT) -> Callable[[Path], None]:
    """A change that has a tensor's, or a value's, bytes be others."""

    def change(checkpoint: Path) -> None:
        shard = checkpoint / SHARD
        begin = shard.stat().st_size
        with open(shard, "ab") as file:
            file.write(content)
        metadata = json.loads((checkpoint / "metadata.json").read_text())
        if name in metadata["values"]:
            metadata["values"][name] = [0, begin, len(content)]
        else:
            metadata["tensors"][name]["chunks"][0][2:] = [0, begin, len(content)]
        (checkpoint / "metadata.json").write_text(json.dumps(metadata))

    return change


# ---- the manifest and the other files -------------------------------------------------------------------------------


def listed(name: str, recorded: Any = (1, 0)) -> Callable[[Path], None]:
    """A change that adds a line to the manifest."""
    return edited("manifest.json", put("files", name, value=recorded))


def _zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _linked_and_vouched(name: str, target: str) -> Callable[[Path], None]:
    """A link in a file's place; the manifest says what it leads to."""

    def change(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        (checkpoint / name).symlink_to(target)
        vouch(checkpoint)

    return change


def _unlisted(name: str) -> Callable[[Path], None]:
    return edited("manifest.json", lambda content: content["files"].__delitem__(name))


UNREADABLE = "no readable manifest.json"
MANIFESTS = [
    ("name above", listed("../canary"), "names '../canary', which is no file of the directory"),
    ("name of a path", listed("/dev/zero"), "names '/dev/zero'"),
    ("name of a directory below", listed("a/b"), "names 'a/b'"),
    ("name of dots", listed(".."), r"names '\.\.'"),
    ("name of the directory", listed("."), r"names '\.'"),
    ("name of nothing", listed(""), "names ''"),
    ("name with a NUL", listed("a\0"), "names 'a"),
    ("name with a line feed", listed("a\nb"), "names 'a"),
    ("size of 4 EiB", listed(SHARD, [1 << 62, 0]), "is damaged"),
    ("size that is negative", listed(SHARD, [-1, 0]), "gives __0_0.distcp the size"),
    ("size that is a text", listed(SHARD, ["1", 0]), "gives __0_0.distcp the size"),
    ("size that is true", listed(SHARD, [True, 0]), "gives __0_0.distcp the size"),
    ("three sizes", listed(SHARD, [1, 2, 3]), "gives __0_0.distcp the size"),
    ("files of a list", edited("manifest.json", put("files", value=[])), UNREADABLE),
    ("model of a list", edited("manifest.json", put("model", value=[])), UNREADABLE),
    ("model type of a list", edited("manifest.json", put("model", "model_type", value=[])), ""),  # config.json decides
    ("format of a list", edited("manifest.json", put("format_version", value=[])), r"format \[\]"),
    ("format that is true", edited("manifest.json", put("format_version", value=True)), "format True"),
    (
        "format to come",
        edited("manifest.json", put("format_version", value=3)),
        "format 3, this program reads 2 and ear",
    ),
    ("format 1, which it is not", edited("manifest.json", put("format_version", value=1)), "it is no metadata"),
    ("a list", edited("manifest.json", lambda content: [content]), UNREADABLE),
    ("deep", written("manifest.json", 100_000 * b"["), UNREADABLE),
    ("a number of 5,000 digits", written("manifest.json", b'{"step": ' + 5000 * b"9" + b"}"), UNREADABLE),
    ("17 MB", lambda checkpoint: os.truncate(checkpoint / "manifest.json", 17 << 20), UNREADABLE),
    ("a FIFO as manifest", replaced("manifest.json", os.mkfifo), UNREADABLE),
    ("a device as manifest", replaced("manifest.json", _zero), UNREADABLE),
    ("a FIFO as shard", replaced(SHARD, os.mkfifo), "__0_0.distcp is missing or unreadable"),
    ("a device as shard", replaced(SHARD, _zero), "__0_0.distcp is missing or unreadable"),
    ("a FIFO as metadata", replaced("metadata.json", os.mkfifo), "metadata.json is missing or unreadable"),
    ("a directory as shard", replaced(SHARD, os.mkdir), "__0_0.distcp is missing or unreadable"),
    ("a link to the outside", _linked_and_vouched("config.json", "../canary"), "config.json is missing or unreadable"),
    ("a link to the inside", _linked_and_vouched("config.json", SHARD), "config.json is missing or unreadable"),
    ("metadata that are not listed", _unlisted("metadata.json"), "metadata.json: refused: not in the manifest"),
    ("shard that is not listed", _unlisted(SHARD), "is larger than 0 bytes|not in the manifest"),
    ("state that is not listed", _unlisted("trainer_state.json"), "not in the manifest"),
    ("configuration that is not listed", _unlisted("config.json"), "without config.json"),
]


def state(*path, value: Any) -> Callable[[Path], None]:
    return edited("trainer_state.json", put(*path, value=value))


STATES = [
    ("step that is a text", state("step", value="2"), "step is '2', expected int"),
    ("step that is negative", state("step", value=-1), "a count is below 0"),
    ("step of 400 digits", state("step", value=10**400), "too large"),
    ("step that is true", state("step", value=True), "step is True, expected int"),
    ("a name that is unknown", state("__class__", value="x"), "'__class__' is unknown"),
    ("position that is a list", state("position", value=[1]), r"position is \[1\], expected dict"),
    ("position of other names", state("position", value={"epoch": 1, "self": 3}), "is none"),
    ("position of texts", state("position", value={"epoch": "0", "window": 0, "pack_in_window": 0}), "expected int"),
    ("position of streams of texts", state("position", value={"0": ["x"]}), "is none"),
    ("arguments of a list", state("arguments", value=[]), "arguments is"),
    ("argument that is a list", state("arguments", "seed", value=[1]), "arguments: seed is"),
    ("argument that rules a terminal", state("arguments", "seed", value="\x1b[2J"), "unprintable"),
    ("argument of another type", state("arguments", "max_steps", value="many"), "arguments: max_steps is 'many'"),
    ("resolved of another type", state("resolved", "total_steps", value="many"), "resolved: total_steps is 'many'"),
    ("row without a step", state("unfinished_row", value={}), "no row of metrics"),
    ("row of texts", state("unfinished_row", value={"step": 1, "loss": "x"}), "unfinished_row: loss is 'x'"),
    ("row with NaN", state("unfinished_row", value={"step": math.nan}), "unfinished_row: step is nan"),
    ("sums that are texts", state("row_sums", value={"loss": ["x", 1]}), "row_sums: 'loss' is 'x'"),
    ("sums that are numbers", state("row_sums", value={"loss": 1.0}), "row_sums: 'loss' is 1.0, expected two"),
    (
        "host that rules a terminal",
        state("row_sums", value={"slowest_host": ["\x1b[2J", 1]}),
        "row_sums: 'slowest_host'",
    ),
    ("factor that is negative", state("gradient_factor", value=-1), "a count is below 0"),
    ("skipped steps that are numbers", state("skipped_lately", value=[1]), "skipped_lately is"),
    ("a list", written("trainer_state.json", b"[]"), "refused"),
    ("deep", written("trainer_state.json", 100_000 * b"["), "nested too deeply"),
]


def config(**values) -> Callable[[Path], None]:
    return edited("config.json", lambda content: content | values)


CONFIGS = [
    ("a hidden size of 1e9", config(hidden_size=10**9, num_attention_heads=1), "hidden_size is 1000000000: no model"),
    ("a hidden size of 1e30", config(hidden_size=10**30), "too large"),
    ("a hidden size that is a fraction", config(hidden_size=32.0), "hidden_size is 32.0, expected int"),
    ("a hidden size that is a text", config(hidden_size="32"), "hidden_size is '32', expected int"),
    ("1e9 layers", config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000: no model"),
    ("300 layers", config(num_hidden_layers=300), "its weights are not those of its config.json"),
    ("no layer", config(num_hidden_layers=0), "must be above 0"),
    ("no head", config(num_attention_heads=0), "must be above 0"),
    ("1e12 positions", config(max_position_embeddings=10**12), "max_position_embeddings is 1000000000000"),
    ("1e9 positions", config(max_position_embeddings=10**9), "an export has an embedding for each"),
    ("a wide layer", config(intermediate_size=1 << 19), "its weights are not those of its config.json"),
    ("a vocabulary of 1e9", config(vocab_size=10**9), "vocab_size is 1000000000"),
    ("an epsilon that is NaN", config(layer_norm_eps=float("nan")), "layer_norm_eps is nan"),
    ("a list", written("config.json", b"[]"), "expected an object of names and values"),
    ("deep", written("config.json", 100_000 * b"["), "nested too deeply"),
    (
        "a number of 5,000 digits",
        written("config.json", b'{"hidden_size": ' + 5000 * b"9" + b"}"),
        "config.json cannot be used",
    ),
]

CASES = [
    *(Case(f"pickle: {name}", old(content), reason, earlier=True) for name, content, reason in PICKLES),
    *(Case(f"old metadata: {name}", old(change), reason, earlier=True) for name, change, reason in METADATA_OBJECTS),
    *(
        Case(f"earlier metadata: {name}", edited("metadata.json", edit), reason, earlier=True)
        for name, edit, reason in EARLIER_METADATA
    ),
    *(Case(f"item: {name}", item(content), reason, earlier=True) for name, content, reason in ITEMS),
    # A value is not read.
    Case("value: one that runs", item(VALUE_THAT_RUNS, LR), "", earlier=True),
    Case("value: nothing", item(b"", LR), "", earlier=True),
    # The old metadata are read, and are good.
    Case("earlier: metadata that are not listed", _unlisted("metadata.json"), "", vouched=False, earlier=True),
    Case(
        "earlier: format 2, which it is not",
        edited("manifest.json", put("format_version", value=2)),
        "it is no metadata",
        earlier=True,
    ),
    *(Case(f"metadata: {name}", edited("metadata.json", edit), reason) for name, edit, reason in METADATA),
    *(
        Case(f"metadata: {name}", written("metadata.json", content), reason)
        for name, content, reason in METADATA_FILES
    ),
    *(Case(f"manifest: {name}", change, reason, vouched=False) for name, change, reason in MANIFESTS),
    *(Case(f"state: {name}", change, reason) for name, change, reason in STATES),
    *(Case(f"config: {name}", change, reason) for name, change, reason in CONFIGS),
]
