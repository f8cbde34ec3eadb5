"""Chains of PDB and mmCIF files: sequences with gaps and modified residues, C-beta, and skipped files."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from common.cli import UserError
from extras.after.downstream.structures import SHORTEST, chains_of, read_structures
from extras.prepare.synthetic_structures import coil_structures

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


@pytest.mark.parametrize(
    ("residues", "sequence"),
    [
        # The numbers jump, as chymotrypsin's do, and the C-alphas are those of neighbours.
        ([("ALA", "5", 0.0), ("SER", "5A", 3.8), ("LEU", "18", 7.6)], "ASL"),
        # Two are missing by the numbers, and 9 angstrom have room for them.
        ([("ALA", "5", 0.0), ("SER", "5A", 3.8), ("LEU", "8", 12.8)], "ASXXL"),
        # The numbers go on, but no single residue spans 15 angstrom: 15 / 3.8 are at least four steps.
        ([("ALA", "5", 0.0), ("SER", "6", 15.0)], "AXXXS"),
        # Numbers that jump back, or by thousands, say nothing.
        ([("ALA", "2005", 0.0), ("SER", "6", 7.0)], "AXS"),
        ([("ALA", "5", 0.0), ("SER", "4005", 7.0)], "AXS"),
    ],
)
def test_chain_without_sequence_has_x_where_alphas_are_apart(tmp_path, residues, sequence):
    path = tmp_path / "a.pdb"
    path.write_text(pdb(residues))
    chain = one(path)
    assert chain.sequence == sequence
    known = [place for place, letter in enumerate(sequence) if letter != "X"]
    assert chain.beta[known, 0].tolist() == pytest.approx([x for _, _, x in residues])
    assert chain.resolved == len(residues)


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


@pytest.mark.parametrize("end", ["\n#\n", "\n", ""], ids=["comment", "line end", "nothing"])
def test_mmcif_that_ends_with_an_atom_has_it(tmp_path, end):
    """ProDy 2.6.1 loses it without the comment, and so the last residue's C-beta."""
    items = (
        "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id label_seq_id"
    )
    items += " Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv auth_seq_id auth_asym_id pdbx_PDB_model_num"
    header = "".join(f"_atom_site.{item}\n" for item in items.split())
    atoms = [f"ATOM {n} C CB . ALA A 1 {n} {4 * n}.0 0.0 0.0 1.0 0.0 {n} A 1" for n in range(1, 6)]
    path = tmp_path / "a.cif"
    path.write_text(f"data_a\nloop_\n{header}" + "\n".join(atoms) + end)
    assert one(path).beta[:, 0].tolist() == [4, 8, 12, 16, 20]


def test_structures_left_out_are_named(tmp_path, caplog):
    (_, good), (_, other) = coil_structures(2, seed=3)
    (tmp_path / "b.pdb").write_text(good)
    (tmp_path / "c.pdb").write_text(good)
    (tmp_path / "d.pdb").write_text(other)
    (tmp_path / "short.pdb").write_text(pdb([("ALA", "1", 0.0), ("SER", "2", 4.0)]))
    (tmp_path / "broken.cif").write_bytes(b"data_x\nloop_\n\xff")
    (tmp_path / "cut.pdb.gz").write_bytes(gzip.compress(good.encode())[:50])
    for name in ("empty.cif", "empty.pdb", "empty.cif.gz"):
        (tmp_path / name).touch()
    (tmp_path / "notes.txt").write_text("no structure")
    assert [chain.name for chain in read_structures(str(tmp_path))] == ["b_A", "d_A"]
    said = caplog.text
    assert "c_A: the same protein as a chain that is kept" in said
    assert f"short_A: not of {SHORTEST} to 1,022 residues" in said
    assert "broken.cif (" in said
    assert "cut.pdb.gz (" in said
    assert "empty.cif (it is empty)" in said
    assert "empty.cif.gz (it is empty)" in said
    assert "empty.pdb: has no protein chain" in said


def test_chains_of_one_protein_that_lack_other_residues_are_one(tmp_path, caplog):
    """A homodimer's second chain without its ends and a loop, also in another file; and an unrelated protein."""
    residues = [(name, str(n), 3.8 * n) for n, name in enumerate(FULL[1:] * 7, 1)]
    (tmp_path / "whole.pdb").write_text(pdb(residues))
    (tmp_path / "lacking.pdb").write_text(pdb(residues[3:15] + residues[17:36]))
    (_, other), *_ = coil_structures(1, seed=3)
    (tmp_path / "other.pdb").write_text(other)
    assert "X" in one(tmp_path / "lacking.pdb").sequence
    assert [chain.name for chain in read_structures(str(tmp_path))] == ["other_A", "whole_A"]
    assert "lacking_A: the same protein as a chain that is kept" in caplog.text


@pytest.mark.parametrize("made", [False, True])
def test_structures_that_are_not_there_are_one_line(tmp_path, made):
    directory = tmp_path / "structures"
    if made:
        directory.mkdir()
    with pytest.raises(UserError, match="no protein chain in 0" if made else "no such directory"):
        read_structures(str(directory))


def test_ter_ends_a_chain_and_names_of_force_fields_are_residues(tmp_path):
    """Two chains of one letter; HID and CYX, as AMBER writes them."""
    path = tmp_path / "a.pdb"
    one, two = (pdb([(name, f"{n}", 3.8 * n) for n, name in enumerate(names, 1)]) for names in (FULL[:2], FULL[3:]))
    path.write_text(one.replace("END\n", "") + two)
    assert [chain.sequence for chain in chains_of(path)] == ["GA", "LSKW"]
    path.write_text(pdb([("HID", "1", 0.0), ("CYX", "2", 3.8), ("ALA", "3", 7.6)]))
    assert [chain.sequence for chain in chains_of(path)] == ["HCA"]


def test_files_that_are_no_structures_by_name_are_named(tmp_path, caplog):
    caplog.set_level("INFO")
    _, text = next(iter(coil_structures(1, 1)))
    (tmp_path / "a.pdb").write_text(text)
    (tmp_path / "b.pdb1").write_text(text)
    assert len(read_structures(str(tmp_path))) == 1
    assert "left out, neither .pdb, .ent, .cif nor .mmcif: b.pdb1" in caplog.text


def test_structures_joined_by_end_are_left_out_with_a_word(tmp_path, caplog):
    _, text = next(iter(coil_structures(1, 1)))
    (tmp_path / "a.pdb").write_text(text + text)
    (tmp_path / "b.pdb").write_text(text + "\n")
    assert [chain.name for chain in read_structures(str(tmp_path))] == ["b_A"]
    assert "a.pdb (it has atoms after END: make a file of each structure): cannot be read" in caplog.text
