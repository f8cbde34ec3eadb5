"""What earlier versions recorded about data is still recognised as what it is of."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pyarrow as pa
import pytest

from common.data.token_store import TokenStore
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.earlier_identity import fingerprint, recorded_form
from extras.prepare.dataset_writer import TOKEN_FEATURES, DatasetWriter
from extras.prepare.output_directory import building


def write_split(path, ids: np.ndarray):
    """A split of records of 100 token ids each."""
    writer = DatasetWriter(path, TOKEN_FEATURES)
    lists = pa.ListArray.from_arrays(pa.array(np.arange(0, len(ids) + 1, 100), pa.int32()), pa.array(ids, pa.uint8()))
    names = pa.array([f"P{number}" for number in range(len(lists))])
    writer.write(pa.RecordBatch.from_arrays([names, lists], schema=writer.schema))
    writer.close()
    return path


def earlier_fingerprint(path, rows: int) -> str:
    """As it was written to state.json."""
    (file,) = path.glob("*.arrow")
    digest = hashlib.sha256(json.dumps([TOKEN_FEATURES, rows, file.stat().st_size]).encode())
    digest.update(file.read_bytes()[: 1 << 20])
    return digest.hexdigest()[:16]


def test_fingerprint_of_a_split_follows_from_all_of_its_content(tmp_path):
    ids = np.full(3 << 20, 5, np.uint8)[: 30_000 * 100]
    first = TokenStore(write_split(tmp_path / "a", ids), ESM2_TOKENS)
    assert TokenStore(write_split(tmp_path / "b", ids), ESM2_TOKENS).fingerprint == first.fingerprint
    assert first.earlier_fingerprint == f"{earlier_fingerprint(tmp_path / 'a', 30_000)}-30000"
    ids[-1] = 6  # beyond what earlier versions looked at
    other = TokenStore(write_split(tmp_path / "c", ids), ESM2_TOKENS)
    assert other.fingerprint != first.fingerprint
    assert other.earlier_fingerprint == first.earlier_fingerprint


def test_fingerprint_of_another_tool_is_empty(tmp_path):
    assert fingerprint(tmp_path, 1) == ""


@pytest.mark.parametrize("overwrite", [False, True])
def test_recorded_form_is_that_of_what_is_complete(tmp_path, overwrite):
    now, earlier, other = ({"seed": 1, "text": text} for text in ("content", ["name", 1], ["name", 2]))
    with building(tmp_path, ["csv"], earlier, overwrite=False):
        pass
    assert recorded_form(tmp_path, ["csv"], now, earlier, overwrite) == (now if overwrite else earlier)
    assert recorded_form(tmp_path, ["csv"], now, other, overwrite) == now
    assert recorded_form(tmp_path / "none", ["csv"], now, earlier, overwrite) == now


def test_recorded_form_is_that_of_what_a_killed_run_left(tmp_path):
    now, earlier = {"text": "content"}, {"text": ["name", 1]}

    def stopped() -> None:
        with building(tmp_path, ["csv"], earlier, overwrite=False) as build:
            build.note("file 0", True)
            raise KeyboardInterrupt

    pytest.raises(KeyboardInterrupt, stopped)
    for overwrite in (False, True):
        assert recorded_form(tmp_path, ["csv"], now, earlier, overwrite) == earlier
