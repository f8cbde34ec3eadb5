"""score.py on a table of MaveDB's columns: rows without a score are left out, counted, and named by their lines."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from scipy.stats import spearmanr

import score as script
from common.cli import UserError
from tests.data_fixtures import call, write_fasta
from tests.extras.after.inference.embed_fixtures import make_model

MAVEDB = """accession,hgvs_nt,hgvs_pro,score
urn:1,NA,p.Lys2Arg,0.5
urn:2,NA,p.Lys2Ter,-3
urn:3,NA,p.Val3Ile,0.9
urn:4,NA,p.Val3=,1
urn:5,NA,_wt,1.1
urn:6,NA,_sy,1.0
urn:7,NA,p.Leu4Trp,-0.7
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_rows_of_mavedb_are_left_out_and_counted(model, tmp_path):
    fasta, table, output = (
        write_fasta(tmp_path / "my.fasta", [("one", "MKVLAG")]),
        tmp_path / "m.csv",
        tmp_path / "o.csv",
    )
    table.write_text(MAVEDB)
    columns = ("--mutation_column", "hgvs_pro", "--measured_column", "score")
    given = ("--model_name_or_path", model, "--fasta", fasta, "--mutations", table, "--output", output, *columns)
    with pytest.raises(UserError, match="m.csv, row 3: 'p.Lys2Ter' is a stop or .*: give --leave_out stops"):
        call(script, *given)
    with pytest.raises(UserError, match="--leave_out stop: choose of stops, synonymous, wild_type"):
        call(script, *given, "--leave_out", "stop")
    assert not output.exists()
    call(script, *given, "--leave_out", "stops", "synonymous", "wild_type")
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["accession"] for row in rows] == ["urn:1", "urn:3", "urn:7"]
    record = json.loads(output.with_name("o.csv.json").read_text())
    assert record["left_out"] == {"stops": 1, "synonymous": 2, "wild_type": 1}
    found = record["correlations"]["proteins"]["one"]
    expected = spearmanr([float(row["masked_marginal"]) for row in rows], [0.5, 0.9, -0.7]).statistic
    assert (found["variants"], found["masked_marginal"]["spearman"]) == (3, pytest.approx(expected))
    # Lines are the file's, whatever is left out before them.
    table.write_text(MAVEDB.replace("Leu4Trp", "Ala4Trp").replace(",-0.7", ",high"))
    with pytest.raises(UserError, match="row 8: Ala4Trp: residue 4 of the protein is L, not A"):
        call(script, *given, "--overwrite", "--leave_out", "stops", "synonymous", "wild_type")
    table.write_text(MAVEDB.replace(",-0.7", ",high"))
    with pytest.raises(UserError, match="row 8: score 'high' is not a number"):
        call(script, *given, "--overwrite", "--leave_out", "stops", "synonymous", "wild_type")
    table.write_text("sequence\nMKVLAW\n")
    with pytest.raises(UserError, match="--leave_out: is of mutations, and .* has whole sequences: drop it"):
        call(script, *given[:-4], "--overwrite", "--leave_out", "stops")
