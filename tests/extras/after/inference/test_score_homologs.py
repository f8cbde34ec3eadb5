"""score.py and embed.py with homologs, beside whole sets without a cache in float64 with explicit masks."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import score as script
from common.cli import UserError
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.after.downstream.set_contacts import SetFeatures
from extras.after.inference.contexts import ContextFlags, Contexts, Sources, draw
from extras.after.inference.encoder import Encoder, EncoderFlags, embed
from extras.after.inference.homologs import read_homologs
from extras.after.inference.mutation_scores import parse_variant, score
from extras.families.e1.alphabet import TOKENS
from extras.families.e1.config import e1_config
from extras.families.e1.convert import ADAPTER
from extras.families.esm2_sets.convert import ADAPTER as ESM2_SETS
from tests.data_fixtures import call, write_fasta
from tests.extras.after.inference.embed_fixtures import call_embed, make_model
from tests.extras.families.e1.reference import Reference
from tests.extras.families.esm2_sets.test_model import CONFIG as ESM2_CONFIG
from tests.extras.families.esm2_sets.test_model import trained as trained_esm2

CONFIG = replace(e1_config(3, 32, 4, 48), max_num_sequences=6, max_num_positions_global=300)
QUERY = "MKVLAGWERTYHDN"
OTHER = "GHIKLMN"
BUDGETS, SIMILARITIES = (60, 100), (1.0, 0.7, 0.4)
FLAGS = ("--contexts", 4, "--context_tokens", *BUDGETS, "--max_similarity", *SIMILARITIES, "--max_seq_length", 100)


def family(query: str, count: int = 9) -> list[tuple[str, str]]:
    """Aligned rows, the query third: copies with more and more letters replaced, or deleted."""
    random = np.random.default_rng(len(query))
    rows = []
    for number in range(count):
        letters = list(query)
        for place in random.choice(len(query), 1 + number * len(query) // 14, replace=False):
            letters[place] = random.choice([letter for letter in "ACDEFGHIKLMNPQRSTVWY-" if letter != query[place]])
        rows.append((f"row{number}", "".join(letters[:5]) + "aa" * (number % 2) + "".join(letters[5:])))
    return [*rows[:2], ("query", query), *rows[2:]]


@pytest.fixture(scope="module")
def reference():
    return Reference(CONFIG)


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("e1") / "final_model"
    ADAPTER.save(iter(reference.state_dict().items()), CONFIG, directory)
    return directory


@pytest.fixture
def job(model, tmp_path, monkeypatch):
    """Runs score.py on the query with its family; `mutants` is the CSV's text, None for all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_fasta(tmp_path / "my.fasta", [("one", QUERY)])
    write_fasta(tmp_path / "my.a3m", family(QUERY))

    def run(mutants: str | None, *flags, output: str = "scored", homologs: str = "my.a3m", model: Path = model):
        given = ["--model_name_or_path", model, "--fasta", tmp_path / "my.fasta", "--output", tmp_path / output]
        if mutants is not None:
            (tmp_path / "mutants.csv").write_text(mutants)
        given += ["--all_single_mutants"] if mutants is None else ["--mutations", tmp_path / "mutants.csv"]
        call(script, *given, "--homologs", tmp_path / homologs, "--use_cpu", *flags)
        return tmp_path / output

    return run


def rows_of(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def tokens_of(text: str, masked: int | None = None) -> torch.Tensor:
    letters = [*text]
    if masked is not None:
        letters[masked] = "?"
    return torch.tensor([TOKENS.index(token) for token in ("<bos>", "1", *letters, "2", "<eos>")])


def drawn(path: Path, query: str, seed: int = 0) -> list[list[str]]:
    """The contexts of 4, from the rules: budgets and similarities take turns."""
    homologs = read_homologs(path, query.encode())
    tokens = np.array([len(text) + 4 for text in homologs.residues])
    settings = ContextFlags(contexts=4, context_tokens=[*BUDGETS], max_similarity=[*SIMILARITIES]).settings()
    numbers = [draw(homologs, tokens, each, (seed, n), 5) for n, each in enumerate(settings)]
    return [[homologs.residues[n].decode() for n in each] for each in numbers]


@torch.no_grad()
def expected_scores(reference, contexts: list[list[str]], query: str, variant: str, masked: bool) -> list[float]:
    """Of each context: log-softmax of the last sequence of the whole set."""
    found = []
    for context in contexts:
        total = 0.0
        for word in variant.split(":"):
            old, at, new = word[0], int(word[1:-1]) - 1, word[-1]
            ids = [*map(tokens_of, context), tokens_of(query, at if masked else None)]
            log_p = reference.logits(ids)[-len(ids[-1]) :].log_softmax(-1)[2 + at]
            total += float(log_p[TOKENS.index(new)] - log_p[TOKENS.index(old)])
        found.append(total)
    return found


def test_scores_are_means_over_whole_sets(reference, job, tmp_path):
    variants = ["M1W", "A5G:N14P", "W7F"]
    scored = rows_of(job("mutant\n" + "\n".join(variants), *FLAGS))
    contexts = drawn(tmp_path / "my.a3m", QUERY)
    sizes = [len(each) for each in contexts]
    assert min(sizes) >= 1
    assert len(set(map(tuple, contexts))) == 4
    for variant, row in zip(variants, scored, strict=True):
        for name, masked in (("masked_marginal", True), ("wild_type_marginal", False)):
            each = expected_scores(reference, contexts, QUERY, variant, masked)
            assert float(row[name]) == pytest.approx(np.mean(each), abs=2e-5)
            assert float(row[f"{name}_error"]) == pytest.approx(np.std(each, ddof=1) / 2, abs=2e-5)
    assert max(float(row["masked_marginal_error"]) for row in scored) > 1e-3
    record = json.loads((tmp_path / "scored.json").read_text())["made_from"]
    assert record["contexts"] == 4
    assert record["context_tokens"] == [*BUDGETS]
    assert len(record["homologs_hash"]) == 64


@torch.no_grad()
def test_an_insertion_is_read_with_its_proteins_homologs(reference, job, tmp_path):
    """The pseudo-log-likelihood beside whole sets, the wild type's contexts before the variant too."""
    mutant = QUERY[:4] + "CC" + QUERY[4:]
    (row,) = rows_of(job(f"mutated_sequence\n{mutant}\n", *FLAGS))

    def sums(context: list[str], query: str) -> float:
        total = 0.0
        for at, letter in enumerate(query):
            ids = [*map(tokens_of, context), tokens_of(query, at)]
            total += float(reference.logits(ids)[-len(ids[-1]) :].log_softmax(-1)[2 + at, TOKENS.index(letter)])
        return total

    each = [sums(context, mutant) - sums(context, QUERY) for context in drawn(tmp_path / "my.a3m", QUERY)]
    assert float(row["pseudo_log_likelihood"]) == pytest.approx(np.mean(each), abs=1e-4)
    assert float(row["pseudo_log_likelihood_error"]) == pytest.approx(np.std(each, ddof=1) / 2, abs=1e-4)
    assert "one_pass_log_likelihood_mean_error" in row


def test_one_context_has_no_error_and_seeds_differ(job, tmp_path):
    flags = ("--contexts", 1, "--context_tokens", 60, "--max_seq_length", 100)
    first = rows_of(job("mutant\nM1W\n", *flags, output="first.csv"))
    assert list(first[0]) == ["mutant", "masked_marginal", "wild_type_marginal"]
    assert rows_of(job("mutant\nM1W\n", *flags, output="again.csv")) == first
    assert rows_of(job("mutant\nM1W\n", *flags, "--seed", 1, output="other.csv")) != first
    with pytest.raises(UserError, match="was made from other input or arguments"):
        job("mutant\nM1W\n", *flags, "--seed", 2, output="first.csv")
    write_fasta(tmp_path / "my.a3m", family(QUERY, 8))
    with pytest.raises(UserError, match="was made from other input or arguments"):
        job("mutant\nM1W\n", *flags, output="first.csv")


def test_all_single_mutants_have_means_and_errors(job, tmp_path):
    directory = job(None, *FLAGS, "--wild_type_marginal_only", output="matrices")
    scored = rows_of(job("mutant\nM1W\nN14P\n", *FLAGS, output="table.csv"))
    for ending in ("", "_error"):
        matrix = rows_of(directory / f"one.wild_type_marginal{ending}.csv")
        for at, new, row in ((0, "W", scored[0]), (13, "P", scored[1])):
            assert float(matrix[at][new]) == pytest.approx(float(row[f"wild_type_marginal{ending}"]), abs=1e-5)
    assert list(json.loads((directory / "scores.json").read_text())["variance"]) == ["one.wild_type_marginal"]


def test_several_proteins_have_files_in_a_directory(reference, job, tmp_path):
    write_fasta(tmp_path / "my.fasta", [("one", QUERY), ("two", OTHER), ("unused", "MKK")])
    (tmp_path / "family").mkdir()
    write_fasta(tmp_path / "family" / "one.a3m", family(QUERY))
    write_fasta(tmp_path / "family" / "two.a2m", family(OTHER))
    table = "protein,mutant\none,M1W\ntwo,G1W\n"
    scored = rows_of(job(table, *FLAGS, homologs="family"))
    for row, query, name in ((scored[0], QUERY, "one.a3m"), (scored[1], OTHER, "two.a2m")):
        contexts = drawn(tmp_path / "family" / name, query)
        each = expected_scores(reference, contexts, query, row["mutant"], True)
        assert float(row["masked_marginal"]) == pytest.approx(np.mean(each), abs=2e-5)
    with pytest.raises(UserError, match="no unused.a3m: add it"):
        job(table + "unused,K2A\n", *FLAGS, homologs="family", output="other.csv")
    with pytest.raises(UserError, match="of one protein, and --fasta has 2"):
        job(table, *FLAGS, output="other.csv")


def test_without_homologs_a_protein_is_alone(reference, job, tmp_path, caplog):
    """A family of the query alone, and contexts that only closer homologs could fill."""
    write_fasta(tmp_path / "my.a3m", [("query", QUERY)])
    alone = expected_scores(reference, [[]], QUERY, "M1W", True)
    (row,) = rows_of(job("mutant\nM1W\n", *FLAGS))
    assert float(row["masked_marginal"]) == pytest.approx(alone[0], abs=2e-5)
    assert float(row["masked_marginal_error"]) == 0
    assert "one has no homologs: it is read alone" in caplog.text
    write_fasta(tmp_path / "my.a3m", family(QUERY)[:3])
    job("mutant\nM1W\n", *FLAGS, output="other.csv")
    assert "2 of 4 contexts have no homolog, as all are more similar or longer: it is read alone in" in caplog.text


def test_hits_and_their_database(job, tmp_path, reference):
    rows = [(name, text.replace("-", "").upper()) for name, text in family(QUERY)]
    write_fasta(tmp_path / "db.fasta", rows)
    lines = [f"one\t{name}\t{1 - n / 20}\t{len(text)}\t0\t0\t1\t1\t1\t1\t0\t9" for n, (name, text) in enumerate(rows)]
    (tmp_path / "my.m8").write_text("\n".join(lines) + "\n")
    flags = ("--contexts", 1, "--context_tokens", 250, "--max_seq_length", 50)
    (row,) = rows_of(job("mutant\nM1W\n", *flags, "--homologs_fasta", tmp_path / "db.fasta", homologs="my.m8"))
    assert float(row["masked_marginal"]) != pytest.approx(
        expected_scores(reference, [[]], QUERY, "M1W", True)[0], abs=1e-3
    )


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        (family(OTHER), FLAGS, "no row is the query"),
        (
            family(QUERY),
            (*FLAGS, "--context_tokens", 250),
            r"--context_tokens 250: the model reads 300 tokens, 200 of",
        ),
        (family(QUERY), (*FLAGS, "--homologs_fasta", "db.fasta"), "only of an .m8 file: drop it"),
    ],
)
def test_bad_homologs_leave_no_output(job, tmp_path, rows, flags, message):
    write_fasta(tmp_path / "my.a3m", rows)
    with pytest.raises(UserError, match=message) as caught:
        job("mutant\nM1W\n", *flags)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("scored*"))


def test_a_family_of_single_proteins_is_refused(job, tmp_path):
    with pytest.raises(UserError, match=r"--homologs: ESM-2 reads single proteins: give a model that reads sets"):
        job("mutant\nM1W\n", *FLAGS, model=make_model(tmp_path / "esm2"))
    with pytest.raises(UserError, match=r"--homologs: ESM-2 reads single proteins: give a model that reads sets"):
        call_embed(
            *(tmp_path / "esm2", tmp_path / "my.fasta", tmp_path / "out", "--homologs", tmp_path / "my.a3m"),
            "--use_cpu",
        )


def test_a_budget_that_no_homolog_fits_is_warned_of(job, caplog):
    job("mutant\nM1W\n", "--contexts", 2, "--context_tokens", 10, "--max_seq_length", 100)
    assert "2 of 2 contexts have no homolog, as all are more similar or longer" in caplog.text


def test_homologs_that_hold_the_protein_or_are_too_long_are_left_out(model, tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [*family(QUERY), ("copy", QUERY), ("holds", "aa" + QUERY + "aa"), ("long", QUERY[:-1] + "a" * 150 + "C")]
    write_fasta(tmp_path / "my.a3m", rows)
    encoder = Encoder(EncoderFlags(str(model), max_seq_length=50), torch.device("cpu"))
    flags = ContextFlags(str(tmp_path / "my.a3m"), context_tokens=[120])
    contexts = Contexts(flags, encoder, Sources(flags, ["one"]).of)
    found = {text for each in contexts.of("one", QUERY.encode()) for text in each}
    assert found
    assert not any(QUERY.encode() in text or len(text) > 116 for text in found)
    assert "left out: 3 rows that are, contain or are a part of the query" in caplog.text
    assert "one: 1 homologs are longer than a context: left out" in caplog.text


def test_windows_of_a_long_protein_follow_the_context(reference, model):
    """Each window stands behind the homologs."""
    encoder = Encoder(EncoderFlags(str(model), max_seq_length=12), torch.device("cpu"))
    context = ["MKVLAG", "GWERTA"]
    read = encoder.read([text.encode() for text in context])
    variant = parse_variant("N14P", QUERY.encode(), "here")
    found = score(encoder, [variant], True, context_of=lambda protein: read)
    expected = expected_scores(reference, [context], QUERY[-8:], "N8P", True)
    assert found == pytest.approx(expected, abs=2e-5)


def test_embeddings_are_means_over_contexts(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fasta = write_fasta(tmp_path / "my.fasta", [("one", QUERY), ("two", OTHER.lower())])
    (tmp_path / "family").mkdir()
    for name, query in (("one", QUERY), ("two", OTHER)):
        write_fasta(tmp_path / "family" / f"{name}.a3m", family(query))
    call_embed(model, fasta, tmp_path / "out", "--use_cpu", "--homologs", tmp_path / "family", *FLAGS)
    table = pq.read_table(tmp_path / "out" / "embeddings")
    found = {row["id"]: row["embedding"] for row in table.to_pylist()}
    encoder = Encoder(EncoderFlags(str(model)), torch.device("cpu"))
    for name, query in (("one", QUERY), ("two", OTHER)):
        each = []
        for context in drawn(tmp_path / "family" / f"{name}.a3m", query):
            parts = [*map(tokens_of, context), tokens_of(query)]
            bounds = np.cumsum([0, *map(len, parts)]).astype(np.int32)
            sets = torch.zeros(2, len(bounds), dtype=torch.int32)
            sets[0], sets[1, 1:] = torch.from_numpy(bounds), len(parts)
            with torch.no_grad():
                ids, ends = torch.cat(parts), torch.from_numpy(bounds)
                hidden = encoder.model(ids, cu_seqlens=ends, max_seqlen=30, sets=sets, output_hidden=True).hidden
            each.append(hidden[-len(query) - 2 : -2].mean(0))
        np.testing.assert_allclose(found[name], torch.stack(each).mean(0), atol=1e-5)
    alone = embed(encoder, [("one", QUERY.encode())], pooling="mean")[0]
    assert np.abs(np.array(found["one"]) - alone.numpy()).max() > 1e-3
    settings = json.loads(table.schema.metadata[b"settings"])
    assert (settings["contexts"], settings["seed"]) == (4, 0)
    write_fasta(fasta, [("one", QUERY), ("three", OTHER)])
    with pytest.raises(UserError, match="no three.a3m: add it"):
        call_embed(model, fasta, tmp_path / "new", "--use_cpu", "--homologs", tmp_path / "family", *FLAGS)


@torch.no_grad()
def test_esm2_with_sets_scores_and_maps_are_of_whole_sets(tmp_path):
    """The family whose sequences have ESM-2's two special tokens, and token dropout."""
    network = trained_esm2()
    ESM2_SETS.save(ESM2_SETS.to_hf(network.state_dict().__getitem__, ESM2_CONFIG), ESM2_CONFIG, tmp_path / "model")
    encoder = Encoder(EncoderFlags(str(tmp_path / "model")), torch.device("cpu"))
    context = [b"MKVLAG", b"GWERTAAA"]
    read = encoder.read(context)
    found = score(encoder, [parse_variant("W7F", QUERY.encode(), "here")], True, context_of=lambda protein: read)
    parts = [torch.from_numpy(ESM2_TOKENS.encode(text)).long() for text in (*context, QUERY.encode())]
    parts[-1][7] = ESM2_TOKENS.mask
    ends = torch.tensor(np.cumsum([0, *map(len, parts)]), dtype=torch.int32)
    sets = torch.stack((ends, torch.tensor([0, 3, 3, 3], dtype=torch.int32)))
    logits = network(torch.cat(parts), cu_seqlens=ends, max_seqlen=30, sets=sets).logits
    log_p = logits[-len(QUERY) - 2 :].double().log_softmax(-1)[7]
    wild, mutant = (int(ESM2_TOKENS.byte_to_id[ord(letter)]) for letter in "WF")
    assert found == pytest.approx([float(log_p[mutant] - log_p[wild])], abs=2e-5)
    maps = SetFeatures(encoder).maps(QUERY, read)
    assert maps.shape == ((4 + 2) * 4, len(QUERY), len(QUERY))  # those over the set besides the layers'
    assert not torch.allclose(maps[12:], SetFeatures(encoder).maps(QUERY)[12:])
