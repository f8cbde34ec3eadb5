"""A data format needs one file and one line of the registry: toy_format.py is read and trained on."""

from __future__ import annotations

import gzip
import sys

import numpy as np
import pytest

from common.cli import UserError
from extras.prepare.sources import formats, sequence_files
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.formats import documents
from tests.data_fixtures import load_script
from tests.extras.prepare.sources.toy_format import FORMAT
from tests.training_fixtures import losses, on_ranks

PROTEINS = ["".join(row) for row in np.random.default_rng(5).choice(list("LAGVSERT"), size=(40, 30))]


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    monkeypatch.setitem(formats.FORMATS, "pairs", FORMAT)
    path = tmp_path / "proteins.pairs.gz"
    path.write_bytes(gzip.compress("".join(f"p{n} {text}\n" for n, text in enumerate(PROTEINS)).encode()))
    return path


@pytest.mark.parametrize("first_row", [0, 3, 4, 39])
def test_toy_format_is_read_from_any_row(pairs, first_row):
    (file,) = open_source(str(pairs), False).splits["train"]
    assert sequence_files.column_of(file) is None
    rows = sequence_files.read_rows(sequence_files.Unit(file), first_row)
    assert [text for block in rows for text in block.to_pylist()] == PROTEINS[first_row:]


def test_toy_format_is_refused_for_documents_and_when_damaged(pairs, tmp_path):
    with pytest.raises(UserError, match=r"known suffix: expected \.parquet, .*\.txt$"):
        open_source(str(pairs), False, content=documents("text"))
    (tmp_path / "bad.pairs").write_text("p0 LAG more\n")
    (file,) = open_source(str(tmp_path / "bad.pairs"), False).splits["train"]
    with pytest.raises(UserError, match="expected an id and a protein"):
        sequence_files.check_columns((file,))


def _train(argv: list[str]) -> None:
    formats.FORMATS["pairs"] = FORMAT
    sys.argv = ["train_ddp.py", *argv]
    script = load_script("train_ddp.py")
    script.train(script.parse_run("", script.DdpFlags), script.build)


def test_toy_format_trains_with_the_bits_of_fasta(pairs, tmp_path):
    fasta = tmp_path / "proteins.fasta"
    fasta.write_text("".join(f">p{n}\n{text}\n" for n, text in enumerate(PROTEINS)))
    found = []
    for source in (pairs, fasta):
        given = {"dataset": source, "output_dir": tmp_path / source.suffix, "max_steps": 2, "max_seq_length": 16}
        given |= {"config_name": "facebook/esm2_t6_8M_UR50D", "logging_steps": 1, "save_final_model": False}
        given |= {"config_overrides": "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=32"}
        codes, output = on_ranks(1, _train, [f"--{name}={value}" for name, value in given.items()])
        assert codes == [0], output
        found.append(losses(given["output_dir"]))
    assert len(found[0]) == 2
    assert found[0] == found[1]
