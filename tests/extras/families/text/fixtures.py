"""Files of documents in the layout of a data set with configurations, and what streams of them hold."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

from extras.families.text.streams import plan_text_streams
from extras.families.text.tokenizers import ByteTokenizer
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.formats import documents

BYTES = ByteTokenizer()
CONTEXT = {"seed": 3, "context": 64, "contexts_per_pack": 2, "tokenizer": BYTES}


def texts(count: int, seed: int = 1, name: str = "doc") -> list[str]:
    """Documents of up to 200 letters, no two of them equal; some with more than ASCII or over several lines."""
    generator = np.random.default_rng(seed)
    words = ["Übung", "macht", "den\nMeister", "and", "so", "on", "…", "x" * 40]
    return [
        f"{name} {seed} {number} " + " ".join(words[w] for w in generator.integers(8, size=generator.integers(12)))
        for number in range(count)
    ]


def write_jsonl(path: Path, some: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text, "timestamp": "2019-04-25", "url": "u"}) + "\n" for text in some)
    path.write_bytes(gzip.compress(lines.encode()) if path.name.endswith(".gz") else lines.encode())
    return path


def write_c4(root: Path, files: int = 3, each: int = 40) -> list[str]:
    """C4's layout: configurations as directories, gzipped JSON lines, splits in the names. Returns English training
    documents."""
    english = []
    for number in range(files):
        some = texts(each, seed=number, name="english")
        write_jsonl(root / "en" / f"c4-train.{number:05d}-of-{files:05d}.json.gz", some)
        english += some
    write_jsonl(root / "en" / "c4-validation.00000-of-00001.json.gz", texts(30, seed=99, name="held out"))
    write_jsonl(root / "en.noblocklist" / "c4-train.00000-of-00001.json.gz", texts(5, name="other"))
    write_jsonl(root / "multilingual" / "c4-de.tfrecord-00000.json.gz", texts(5, name="deutsch"))
    return english


def plan_of(path: Path, packs_per_step: int, configuration: str | None = None, **packing):
    source = open_source(str(path), True, content=documents("text"), configuration=configuration)
    return plan_text_streams(source.splits["train"], packs_per_step, **(CONTEXT | packing))


def flow(packs) -> list[tuple[int, list[int]]]:
    """(record, its tokens) of the documents in (pack, ids, ...), one after the other; the last one may not be whole.

    Asserts that each goes on where it stopped, through contexts and packs, and that the next one begins at 0.
    """
    found: list[tuple[int, list[int]]] = []
    for pack, ids, *_ in packs:
        assert len(ids) == pack.lengths.sum()
        pieces = zip(pack.records, pack.starts, np.split(ids, np.cumsum(pack.lengths)[:-1]), strict=True)
        for record, start, tokens in pieces:
            if start == 0:
                assert not found or found[-1][1][-1] == BYTES.eos_id
                found.append((int(record), []))
            assert found[-1][0] == record
            assert len(found[-1][1]) == start
            found[-1][1].extend(tokens.tolist())
    return found


def decoded(tokens: list[int]) -> str:
    """The text of a whole document."""
    assert tokens[-1] == BYTES.eos_id
    return bytes(tokens[:-1]).decode()
