"""Mutated mutations and mutated tables, seeded: each is read, or refused in one line."""

from __future__ import annotations

import random

import score as script
from common.cli import UserError
from extras.after.inference.mutation_scores import parse_variant


def outcome(function, *arguments):
    """What it returns, or its error's one line."""
    try:
        return function(*arguments)
    except UserError as error:
        line = str(error)
    assert line.isprintable()
    assert len(line) < 600
    return line


def mutated(draw: random.Random, valid, pieces: list):
    """`valid` with up to three of the pieces put in or in the place of something."""
    for _ in range(draw.randint(0, 3)):
        at = draw.randint(0, len(valid))
        valid = valid[:at] + draw.choice(pieces) + valid[at + draw.randint(0, 2) :]
    return valid


def test_parse_variant_of_any_text_is_a_variant_or_one_line():
    """Texts mutated from valid ones, seeded."""
    draw, protein = random.Random(32), b"MKVLAGTYRRxu-*1\x1b"
    pieces = [*"MXZJ*-.:;,/ 019", "é", "٣", "Ａ", "\0", "\n", "\r", "\x1b[2J", "9" * 5000, "wt", "'", ":M1A", "K2"]
    variants = 0
    for _ in range(10_000):
        text = mutated(draw, draw.choice(("", "M1A", "K2R:v3w", "U12C;A5G", "WT")), pieces)
        found = outcome(parse_variant, text, protein, "table, row 2", draw.choice((1, 1, -3, 10**6)))
        if isinstance(found, str):
            assert found.startswith("table, row 2: ")
        else:
            variants += bool(found.mutations)
            assert all(0 <= each.position < len(protein) and 4 <= each.mutant < 24 for each in found.mutations)
    assert 500 < variants < 9500


def read_table(args: script.Arguments, proteins: dict[str, bytes]) -> None:
    names, rows = script.read_rows(args.mutations, f"--mutations {args.mutations}")
    columns = script.columns_of(args, names, ["masked_marginal"], proteins)
    variants = script.variants_of(columns, rows, proteins, str(args.mutations), str(args.fasta))
    assert len(variants) == len(rows)


def test_score_of_any_table_is_rows_or_one_line(tmp_path):
    """Random bytes as the CSV, seeded: it is read, or refused in one line."""
    draw = random.Random(33)
    pieces = [
        b"protein",
        b"one",
        b"A5G",
        b",",
        b"\n",
        b'"',
        b'""',
        b"\r",
        b"\0",
        b"\xff",
        b"\xef\xbb\xbf",
        b"x" * 140_000,
    ]
    pieces += ["é٣".encode(), b"'", b";", b"\x1b[2J", b"masked_marginal", b"\none,M1K", b"-", b"8" * 5000]
    valid = [
        b"protein,mutant\none,A5G\ntwo,M1A\n",
        b"note,mutant,protein\n,,one\n",
        b'protein,mutant\n"one","A5G:K2R"\n',
    ]
    path, read = tmp_path / "table.csv", 0
    args = script.Arguments("model", fasta=__file__, mutations=__file__, output=str(tmp_path / "out.csv"))
    args.mutations = str(path)
    for _ in range(1000):
        path.write_bytes(mutated(draw, draw.choice(valid), pieces))
        read += not isinstance(outcome(read_table, args, {"one": b"MKVLAG", "two": b"MKV"}), str)
    assert 200 < read < 800
