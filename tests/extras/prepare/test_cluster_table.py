"""Tables of clusters made of UniProt's files, whose layout is written out here, and read by step 1."""

from __future__ import annotations

import gzip

import pyarrow.parquet
import pytest

from common.cli import UserError
from extras.prepare import cluster_table
from extras.prepare.cluster_splits import read_table
from extras.prepare.cluster_table import Arguments, Counted, Rows, read_idmapping, write_table
from tests.data_fixtures import call

# The columns of UniProt's README: accession, name, 5 others, UniRef100, UniRef90, UniRef50, UniParc, 11 others.
ROW = "{0}\t{0}_FRG3G\t2947773\tYP_031579.1\t81941549; 49237298\t\tGO:0046782\tUniRef100_{0}\t{1}\t{2}\t"
ROW += "UPI00003B0FD4\t\t654924\t\t\t15165820\tAY548484\tAAT09660.1\t\t\t\t\n"
MAPPING = [
    ("Q6GZX4", "UniRef90_Q6GZX4", "UniRef50_Q6GZX4"),
    ("Q6GZX3", "UniRef90_Q6GZX3", "UniRef50_Q6GZX3"),
    ("A0A0F6NZX8", "UniRef90_Q6GZX4", "UniRef50_Q6GZX4"),
    ("P12345", "UniRef90_P12345", "UniRef50_Q6GZX3"),
    ("P0C9F0", "", "UniRef50_P0C9F0"),
    ("P0C9F1", "UniRef90_P0C9F1", ""),
    ("Q9ZZZ9", "UniRef90_Q6GZX4", "UniRef50_OTHER"),
]
TABLE = [("UniRef50_Q6GZX4", "UniRef90_Q6GZX4"), ("UniRef50_Q6GZX3", "UniRef90_Q6GZX3")]
TABLE += [("UniRef50_Q6GZX3", "UniRef90_P12345")]

ENTRY = """<entry id="UniRef90_Q6GZX4" updated="2022-01-19">
<name>Cluster: Putative transcription factor 001R</name>
<property type="member count" value="2"/>
<property type="common taxon" value="Ranavirus &lt;A&gt;"/>
<property type="common taxon ID" value="10492"/>
<representativeMember>
<dbReference type="UniProtKB ID" id="001R_FRG3G">
<property type="UniProtKB accession" value="Q6GZX4"/>
<property type="UniParc ID" value="UPI00003B0FD4"/>
<property type="UniRef100 ID" value="UniRef100_Q6GZX4"/>
<property type="UniRef50 ID" value="UniRef50_Q6GZX4"/>
<property type="protein name" value="Putative transcription factor 001R"/>
<property type="length" value="256"/>
<property type="isSeed" value="true"/>
</dbReference>
<sequence length="256" checksum="B4840739BF7D4121">MAFSAEDVLKEYDRRRRMEALLLSLYYPNDRKLLDYKEWSPPRVQVECPKAPVEWNNPPS
EKGLIVGHFSGIKYKGEKAQASEVDVNKMCCWVSKFKDAMRRYQGIQTCKIPGKVLSDLD</sequence>
</representativeMember>
<member>
<dbReference type="UniParc ID" id="UPI0001B9EB11">
<property type="UniRef100 ID" value="UniRef100_UPI0001B9EB11"/>
<property type="UniRef50 ID" value="UniRef50_Q6GZX4"/>
</dbReference>
</member>
</entry>
"""
HEAD = """<?xml version="1.0" encoding="ISO-8859-1" ?>
<UniRef{0} xmlns="http://uniprot.org/uniref" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
xsi:schemaLocation="http://uniprot.org/uniref http://www.uniprot.org/support/docs/uniref.xsd"
releaseDate="2024-01-24" version="2024_01">
"""
# Members of an entry of UniRef50 or UniRef100 name the UniRef90 cluster.
MEMBER = """<dbReference type="UniProtKB ID" id="{0}_X">
<property type="UniRef90 ID" value="UniRef90_{0}"/>
</dbReference>
"""


def xml(level: int, *entries: str) -> bytes:
    return (HEAD.format(level) + "".join(entries) + f"</UniRef{level}>\n").encode()


def make(directory, flag: str, content: bytes, *more) -> list[tuple[str, str]]:
    """The rows of the table that the command makes."""
    (directory / "input").write_bytes(content)
    call(cluster_table, directory / "table.parquet", flag, directory / "input", *more)
    assert {path.name for path in directory.iterdir()} == {"input", "table.parquet"}
    table = pyarrow.parquet.read_table(directory / "table.parquet")
    assert table.column_names == ["ur50_id", "ur90_id"]
    read = list(read_table(directory / "table.parquet"))  # as --cluster_table reads it
    assert sum(len(members) for _, members in read) == len(table)
    return list(zip(*table.to_pydict().values(), strict=True))


def test_table_of_the_mapping_of_ids(tmp_path, caplog):
    content = "".join(ROW.format(*row) for row in MAPPING).encode()
    with caplog.at_level("INFO"):
        assert make(tmp_path, "--idmapping", gzip.compress(content)) == TABLE
    assert (
        "7 rows; 2 without a UniRef50 and a UniRef90 cluster; 3 members in 2 clusters; 1 members in two" in caplog.text
    )


def test_table_of_uniref90_xml(tmp_path, caplog):
    unnamed = ENTRY.replace("Q6GZX4", "P00001").replace('type="UniRef50 ID"', 'type="Other ID"')
    entries = ENTRY, ENTRY.replace("Q6GZX4", "UPI0001B9EB12"), unnamed
    with caplog.at_level("INFO"):
        rows = make(tmp_path, "--uniref_xml", gzip.compress(xml(90, *entries)))
    assert rows == [(f"UniRef50_{name}", f"UniRef90_{name}") for name in ("Q6GZX4", "UPI0001B9EB12")]
    assert "6 rows; 2 without" in caplog.text
    assert "2 members in 2 clusters; 0 members in two" in caplog.text


@pytest.mark.parametrize("level", [50, 100])
def test_table_of_the_other_levels_of_uniref(tmp_path, level):
    members = [MEMBER.format(name) for name in ("Q6GZX4", "A0A1", "A0A2-2")]
    if level == 100:
        members = [
            m.replace("<property", '<property type="UniRef50 ID" value="UniRef50_Q6GZX4"/>\n<property')
            for m in members
        ]
    entry = f'<entry id="UniRef{level}_Q6GZX4" updated="2022-01-19">\n{"".join(members)}</entry>\n'
    rows = make(tmp_path, "--uniref_xml", xml(level, entry))
    assert rows == [("UniRef50_Q6GZX4", f"UniRef90_{name}") for name in ("Q6GZX4", "A0A1", "A0A2-2")]


def test_table_read_in_small_blocks_is_the_same(tmp_path, monkeypatch):
    entries = [ENTRY.replace("Q6GZX4", f"A0A{number}") for number in range(50)]
    rows = make(tmp_path, "--uniref_xml", xml(90, *entries))
    monkeypatch.setattr("extras.prepare.cluster_table.XML_BYTES", 150)
    assert make(tmp_path, "--uniref_xml", xml(90, *entries), "--overwrite") == rows
    assert len(rows) == 50


def test_rows_keep_the_first_of_each_member_as_brute_force(tmp_path):
    numbers = [(n * 7919) % 613 for n in range(3000)]
    named = [
        (str(n), f"UniRef90_{number}", f"UniRef50_{number % 97 + (n % 211 == 0)}") for n, number in enumerate(numbers)
    ]
    (tmp_path / "input").write_text("".join(ROW.format(*row) for row in named))
    rows = Rows(tmp_path)
    rows.write(read_idmapping(tmp_path / "input", Counted()))
    kept, in_two, clusters = rows.first_of_members()
    first, all_of = {}, {}
    for _, member, cluster in named:
        first.setdefault(member, cluster)
        all_of.setdefault(member, set()).add(cluster)
    found = [tuple(row.values()) for batch in rows.filtered(kept) for row in batch.to_pylist()]
    assert found == [(cluster, member) for member, cluster in first.items()]
    assert in_two == sum(len(names) > 1 for names in all_of.values()) > 0
    assert clusters == len(set(first.values()))


@pytest.mark.parametrize(
    ("flag", "content", "message"),
    [
        ("--idmapping", b"Q6GZX4\tUniRef90\tUniRef90_Q6GZX4\n", "first line has 3 columns"),
        (
            "--idmapping",
            ROW.format("P1", "UniRef90_P1", "UniRef50_P1").encode() * 2 + b"P2\t\n",
            "Expected 22 columns, got 2",
        ),
        (
            "--idmapping",
            ROW.format("P1", "UniRef50_P1", "UniRef90_P1").encode(),
            "row 1: 'UniRef90_P1': expected UniRef50_",
        ),
        (
            "--idmapping",
            gzip.compress(ROW.format("P1", "UniRef90_P1", "UniRef50_P1").encode() * 999)[:-20],
            "is cut short",
        ),
        ("--idmapping", ROW.format("P1", "", "").encode(), "none of its 1 rows names"),
        ("--uniref_xml", xml(90, ENTRY)[:-12], "no whole XML file of UniRef: unclosed token|no element found"),
        (
            "--uniref_xml",
            b">UniRef90_P1 x n=1 Tax=y TaxID=1 RepID=P1_X\nMKV\n",
            "no whole XML file of UniRef: syntax error",
        ),
        ("--uniref_xml", b"<uniprot><entry/></uniprot>", "its root is <uniprot>"),
        ("--uniref_xml", xml(90, ENTRY.replace("UniRef90_", "Cluster_")), "an entry is called"),
        ("--uniref_xml", xml(100, ENTRY.replace("UniRef90_", "UniRef100_")), "none of its 2 rows"),
    ],
)
def test_what_is_no_file_of_uniprot_is_refused_and_leaves_nothing(tmp_path, flag, content, message):
    (tmp_path / "input").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        call(cluster_table, tmp_path / "table.parquet", flag, tmp_path / "input")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["input"]


def test_a_table_that_is_there_is_kept(tmp_path):
    (tmp_path / "table.parquet").write_text("mine")
    (tmp_path / "input").write_bytes(xml(90, ENTRY))
    with pytest.raises(UserError, match="--overwrite to replace it"):
        call(cluster_table, tmp_path / "table.parquet", "--uniref_xml", tmp_path / "input")
    with pytest.raises(UserError, match="give one of them"):
        call(cluster_table, tmp_path / "other.parquet")
    assert (tmp_path / "table.parquet").read_text() == "mine"


def test_a_killed_runs_work_is_removed(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "input").write_bytes(xml(90, ENTRY))
    write_table(tmp_path / "table.parquet", Arguments(uniref_xml=str(tmp_path / "input")), tmp_path / "scratch")
    left = tmp_path / ".again.parquet.building" / "work" / "members"
    left.mkdir(parents=True)
    (left / "3").write_bytes(bytes(64))
    call(cluster_table, tmp_path / "again.parquet", "--uniref_xml", tmp_path / "input")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "table.parquet").read_bytes()
    assert not list(tmp_path.glob(".again*"))
