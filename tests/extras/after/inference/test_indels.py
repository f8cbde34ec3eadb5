"""Insertions and deletions in a table: HGVS's words and whole sequences, what they make of the protein."""

from __future__ import annotations

import pytest

from common.cli import UserError
from extras.after.inference.indels import edited, has_indel, of_sequence
from extras.after.inference.mutation_scores import parse_variant

PROTEIN = b"MKVLAG"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("K2del", "MVLAG"),
        ("K2_L4del", "MAG"),
        ("K2_V3insQS", "MKQSVLAG"),
        ("K2_L4delinsW", "MWAG"),
        ("A5delinsCDE", "MKVLCDEG"),
        ("A5dup", "MKVLAAG"),
        ("K2_V3dup", "MKVKVLAG"),
        ("p.Lys2_Val3insGlnSer", "MKQSVLAG"),
        ("p.(Lys2_Leu4del)", "MAG"),
        ("p.[Lys2del;Ala5Gly]", "MVLGG"),
        ("A5_G6insKK:K2del:M1G", "GVLAKKG"),
        ("M1_G6delinsW", "W"),
    ],
)
def test_edited_makes_the_sequence(text, expected):
    assert has_indel(text)
    assert edited(text, PROTEIN, "here").sequence == expected.encode()


def test_edited_numbers_residues_from_the_first():
    assert edited("V14_L15insD", PROTEIN, "here", first_residue=12).sequence == b"MKVDLAG"
    assert edited("K-1del", PROTEIN, "here", first_residue=-2).sequence == b"MVLAG"


def test_a_change_of_the_same_length_is_substitutions():
    assert edited("K2_V3delinsRI", PROTEIN, "here") == parse_variant("K2R:V3I", PROTEIN, "here")
    assert of_sequence("mrvlgg", PROTEIN, "here") == parse_variant("K2R:A5G", PROTEIN, "here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("R2del", "residue 2 of the protein is K, not R"),
        ("K2_L3del", "residue 3 of the protein is V, not L"),
        ("K2_V9del", "the protein has residues 1 to 6"),
        ("V3_K2del", "expected first and last residue"),
        ("K2_L4insA", "expected two neighbours"),
        ("K2insA", "expected two neighbours"),
        ("K2_V3ins", "expected, for example, A24_K27del"),
        ("K2delK", "expected, for example, A24_K27del"),
        ("K2dupK", "expected, for example, A24_K27del"),
        ("p.Lys2_Val3insTer", "no amino acid"),
        ("p.Xyz2del", "no amino acid"),
        ("K2_V3insAZ", "Z is not an amino acid"),
        ("M1_G6del", "no residues"),
        ("K2del:K2R", "overlap"),
        ("K2_V3insA:K2_V3insC", "overlap"),
        ("K2_L4del:V3_L4insC", "overlap"),
        ("K2del:A5*", "'A5.' is not a mutation"),
        ("K2del:A5fs", "'A5fs' is not a mutation"),
    ],
)
def test_edited_refuses(text, message):
    with pytest.raises(UserError, match=f"^row 7: .*{message}"):
        edited(text, PROTEIN, "row 7")


@pytest.mark.parametrize("text", ["A5fs", "p.Ala5GlyfsTer9", "K2_V3insA*", "K2DEL", "G6ext", "M1?", "A5G", "WT", ""])
def test_what_is_no_plain_indel_is_left_to_others(text):
    assert not has_indel(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no residues"),
        ("MKVL*", r"\* is not an amino acid"),
        ("MK-LAGG", "- is not an amino acid"),
        ("MKVLA1G", "1 is not an amino acid"),
        ("MKVX", "X is not an amino acid"),
        ("MKVé", "É is not an amino acid"),
        ("MKVLA*", "not one of the 20"),
    ],
)
def test_of_sequence_refuses_what_is_no_protein(text, message):
    with pytest.raises(UserError, match=f"^row 7: .*{message}"):
        of_sequence(text, PROTEIN, "row 7")


def test_of_sequence_keeps_an_unknown_residue_of_the_wild_type():
    assert of_sequence("MXLA", b"MXVLA", "here").sequence == b"MXLA"
