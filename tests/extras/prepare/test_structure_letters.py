"""3Di letters beside residues: from a FASTA file, and from coordinates by mini3di."""

from __future__ import annotations

import numpy as np
import pytest

from common.cli import UserError
from extras.prepare.structure_letters import StructureLetters, of_fasta, pair
from tests.data_fixtures import write_fasta

HELIX, BONDS = (-57.0, -47.0, 180.0), (1.33, 1.46, 1.52)  # phi, psi, omega; C-N, N-CA, CA-C in angstrom
ANGLES = (116.0, 122.0, 111.0)  # at C, N, CA


def place(a, b, c, length, angle, torsion):
    """The atom behind a, b, c (natural extension reference frame)."""
    angle, torsion = np.radians([angle, torsion])
    back = (c - b) / np.linalg.norm(c - b)
    normal = np.cross(b - a, back)
    normal /= np.linalg.norm(normal)
    frame = np.stack([back, np.cross(normal, back), normal], 1)
    turned = [-np.cos(angle), np.sin(angle) * np.cos(torsion), np.sin(angle) * np.sin(torsion)]
    return c + length * frame @ turned


def helix_pdb(residues: int, confidence: list[float]) -> str:
    """An ideal helix of alanine, N, CA, C and CB, with pLDDT in the column of B-factors."""
    phi, psi, omega = HELIX
    atoms = [np.array([0.0, 0, 0]), np.array([1.46, 0, 0]), np.array([2.0, 1.4, 0])]
    while len(atoms) < 3 * residues:
        for length, angle, torsion in zip(BONDS, ANGLES, (psi, omega, phi), strict=True):
            atoms.append(place(*atoms[-3:], length, angle, torsion))
    lines = []
    for n in range(residues):
        nitrogen, alpha, carbon = atoms[3 * n : 3 * n + 3]
        beta = place(carbon, nitrogen, alpha, 1.53, 110.5, -122.6)
        for name, at in zip(("N", "CA", "C", "CB"), (nitrogen, alpha, carbon, beta), strict=True):
            x, y, z = at
            where = f"{len(lines) + 1:>5}  {name:<3} ALA A{n + 1:>4}    {x:8.3f}{y:8.3f}{z:8.3f}"
            lines.append(f"ATOM  {where}  1.00{confidence[n]:6.2f}           {name[0]}")
    return "\n".join([*lines, "TER", "END", ""])


def test_pair_puts_letters_beside_residues():
    assert pair("MeXK", "dv#p") == "MdEv##Kp"


def test_letters_of_fasta_are_by_id(tmp_path):
    letters = write_fasta(tmp_path / "3di.fasta", [("a", "DVPX"), ("b", "d#")])
    assert of_fasta(str(letters)) == {"a": "dvp#", "b": "d#"}
    twice = write_fasta(tmp_path / "twice.fasta", [("a", "DV"), ("a", "DV")])
    with pytest.raises(UserError, match="two records have the id 'a'"):
        of_fasta(str(twice))
    wrong = write_fasta(tmp_path / "wrong.fasta", [("a", "DVB")])
    with pytest.raises(UserError, match="has 'B', which is not in the alphabet 3di"):
        of_fasta(str(wrong))


def test_directory_of_structures_needs_mini3di(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mini3di", None)
    with pytest.raises(UserError, match="needs mini3di: pip install -r requirements-structures.txt"):
        StructureLetters(str(tmp_path))


def test_letters_of_a_helix_are_foldseeks(tmp_path):
    """Inside a helix Foldseek's letter is V; confidences below 70 hide it."""
    pytest.importorskip("mini3di")
    (tmp_path / "model.pdb").write_text(helix_pdb(24, [90.0] * 10 + [69.9] * 2 + [70.0] * 12))
    found = StructureLetters(str(tmp_path))._of
    assert set(found) == {"model", "model_A"}
    letters = found["model"]
    assert len(letters) == 24
    assert letters[10:12] == "##"
    assert set(letters[4:10] + letters[12:20]) == {"v"}
