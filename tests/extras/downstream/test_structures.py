"""Chains of PDB and mmCIF files: sequences with gaps and modified residues, C-beta, and skipped files."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from common.cli import UserError
from extras.downstream.structures import SHORTEST, chains_of, read_structures
from extras.prepare.planted import coil_structures

FULL = ["GLY", "ALA", "MSE", "LEU", "SER", "LYS", "TRP"]


def atom(number: int, name: str, residue: str, place: str, x: float, altloc: str = " ", record: str = "ATOM  ") -> str:
    line = f"{record}{number:5d}  {name:3}{altloc}{residue} A{place:>5}   {x:8.3f}{0:8.3f}{0:8.3f}  1.00  0.00"
    return f"{line}           {name[0]}"


def pdb(residues: list[tuple[str, str, float]], seqres: list[str] = ()) -> str:
    """residues: (name, number with insertion code, x of C-beta)."""
    lines = [f"SEQRES   1 A {len(seqres):4d}  {' '.join(seqres)}"] if seqres else []
    for name, place, x in residues:
        record = "HETATM" if name == "MSE" else "ATOM  "
        place = place if place[-1].isalpha() else f"{place} "
        lines.append(atom(len(lines), "CA", name, place, x + 1, record=record))
        if name != "GLY":
            lines.append(atom(len(lines), "CB", name, place, x, record=record))
    return "\n".join([*lines, "TER", "END", ""])


def one(path):
    (chain,) = chains_of(path)
    return chain


def test_chain_has_unresolved_residues_of_the_whole_sequence(tmp_path):
    resolved = [("GLY", "1", 0.0), ("ALA", "2", 5.0), ("MSE", "3", 10.0), ("LYS", "6", 20.0), ("TRP", "7", 25.0)]
    path = tmp_path / "a.pdb"
    path.write_text(pdb(resolved, FULL))
    chain = one(path)
    assert chain.sequence == "GAMLSKW"
    assert np.isnan(chain.beta[3:5]).all()
    # Glycine's C-alpha, else C-beta.
    assert chain.beta[[0, 1, 2, 5, 6], 0].tolist() == [1, 5, 10, 20, 25]
    contacts, known = chain.contacts()
    assert known.sum() == 25
    assert contacts[0, 1]
    assert not contacts[0, 2]


def test_chain_without_sequence_has_x_where_the_numbering_jumps(tmp_path):
    path = tmp_path / "a.pdb"
    path.write_text(pdb([("ALA", "5", 0.0), ("SER", "5A", 4.0), ("LEU", "8", 8.0)]))
    chain = one(path)
    assert chain.sequence == "ASXXL"
    assert chain.beta[:, 0].tolist() == pytest.approx([0, 4, np.nan, np.nan, 8], nan_ok=True)


def test_chain_takes_the_first_of_alternative_locations(tmp_path):
    path = tmp_path / "a.pdb"
    lines = [
        atom(1, "CB", "ALA", "1 ", 1.0, "A"),
        atom(2, "CB", "ALA", "1 ", 9.0, "B"),
        atom(3, "CB", "SER", "2 ", 4.0),
    ]
    path.write_text("\n".join([*lines, "END", ""]))
    assert one(path).beta[:, 0].tolist() == [1, 4]


def test_mmcif_and_gzip_give_the_chain_of_the_pdb_file(tmp_path):
    import gemmi

    (name, text), *_ = coil_structures(1, seed=3)
    structure = gemmi.read_pdb_string(text)
    structure.setup_entities()
    cif = structure.make_mmcif_document().as_string()
    for ending, content in ((".pdb", text.encode()), (".cif", cif.encode()), (".cif.gz", gzip.compress(cif.encode()))):
        (tmp_path / f"{name}{ending}").write_bytes(content)
    plain, *others = (one(tmp_path / f"{name}{ending}") for ending in (".pdb", ".cif", ".cif.gz"))
    for other in others:
        assert other.sequence == plain.sequence
        np.testing.assert_allclose(other.beta, plain.beta, atol=1e-3)


def test_structures_left_out_are_named(tmp_path, caplog):
    (_, good), (_, other) = coil_structures(2, seed=3)
    (tmp_path / "b.pdb").write_text(good)
    (tmp_path / "c.pdb").write_text(good)
    (tmp_path / "d.pdb").write_text(other)
    (tmp_path / "short.pdb").write_text(pdb([("ALA", "1", 0.0), ("SER", "2", 4.0)]))
    (tmp_path / "broken.cif").write_bytes(b"data_x\nloop_\n\xff")
    (tmp_path / "cut.pdb.gz").write_bytes(gzip.compress(good.encode())[:50])
    (tmp_path / "notes.txt").write_text("no structure")
    assert [chain.name for chain in read_structures(str(tmp_path))] == ["b_A", "d_A"]
    said = caplog.text
    assert "c_A: sequence seen already" in said
    assert f"short_A: not of {SHORTEST} to 1,022 residues" in said
    assert "broken.cif (" in said
    assert "cut.pdb.gz (" in said


@pytest.mark.parametrize("made", [False, True])
def test_structures_that_are_not_there_are_one_line(tmp_path, made):
    directory = tmp_path / "structures"
    if made:
        directory.mkdir()
    with pytest.raises(UserError, match="no protein chain in 0" if made else "no such directory"):
        read_structures(str(directory))
