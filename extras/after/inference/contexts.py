"""Contexts of homologs that a protein is read with: drawn by weight up to a budget of tokens, several a protein.

As the authors of E1 and PoET do: budgets of tokens times maxima of similarity to the query give a context each, and
results are means over contexts. A draw is a function of the seed and the context's number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.cli import UserError
from common.files.content_hash import combined_hash
from common.files.safe_files import file_name
from common.flags import Flags, flag
from common.models.family import encoder_family, encoders, family_of
from common.models.layers.config_base import TRAINED_SETS
from extras.after.inference.encoder import Encoder
from extras.after.inference.homologs import Homologs, hits_of, is_table, of_hits, read_homologs, read_targets
from extras.prepare.sources.compression import strip_compression
from extras.prepare.sources.hits import accession

logger = logging.getLogger(__name__)
ENDINGS = (".a3m", ".a2m", ".fasta", ".fa", ".fas")  # of files ID.a3m in a directory
HomologsOf = Callable[[str, bytes], Homologs]
# Of E1's authors: 15 contexts are all pairs of a third, two thirds and all of these tokens, and the similarities.
CONTEXT_TOKENS = 21504
MAX_SIMILARITY = (1.0, 0.95, 0.9, 0.7, 0.5)
MOST_CONTEXTS = 1000


class Setting(NamedTuple):
    """Of a context: its most tokens, and its homologs' most similarity to the query."""

    tokens: int
    similarity: float


@dataclass
class ContextFlags(Flags):
    """Homologs, for models that read sets of sequences."""

    group = "homologs"
    advanced = ("max_similarity", "seed")

    homologs: str | None = flag(
        None,
        "Homologs, for models that read sets: an alignment with the protein (.a3m, aligned FASTA), FASTA, or a "
        "search's .m8; of several proteins a directory with ID.a3m of each, or an .m8.",
    )
    homologs_fasta: str | None = flag(None, "The database of an .m8: FASTA, plain or compressed.")
    contexts: int = flag(
        5, "Results are means over so many contexts; 15 have all pairs of the default budgets and similarities."
    )
    context_tokens: list[int] | None = flag(
        None,
        "Most tokens of homologs in a context; several take turns. Default: 7168 14336 21504, or a third, two thirds "
        "and all of the longest sets that the model was trained on.",
    )
    max_similarity: list[float] | None = flag(
        None, "Most similarity of a homolog to the protein; several take turns. Default: 1 .95 .9 .7 .5."
    )
    seed: int = flag(0, "Seed of the draws of homologs.")

    def check(self) -> None:
        if not 1 <= self.contexts <= MOST_CONTEXTS:
            raise UserError(f"--contexts {self.contexts}: 1 to {MOST_CONTEXTS:,}")
        self.require_at_least(0, "seed")
        for tokens in self.context_tokens or ():
            if tokens < 1:
                raise UserError(f"--context_tokens {tokens}: must be at least 1")
        for similarity in self.max_similarity or ():
            if not 0 < similarity <= 1:
                raise UserError(f"--max_similarity {similarity}: above 0, at most 1")
        if self.homologs is None:
            for name in ("homologs_fasta", "contexts", "context_tokens", "max_similarity", "seed"):
                if getattr(self, name) != getattr(ContextFlags, name):
                    raise UserError(f"--{name}: is of contexts of homologs: give --homologs too")
            return
        path = Path(self.homologs)
        if not path.exists():
            raise UserError(f"--homologs {path}: no such file or directory")
        if is_table(path) != bool(self.homologs_fasta):
            raise UserError(
                f"--homologs {path}: an .m8 file names proteins of a database: give it by --homologs_fasta"
                if is_table(path)
                else f"--homologs_fasta {self.homologs_fasta}: only of an .m8 file: drop it"
            )
        if self.homologs_fasta and not Path(self.homologs_fasta).is_file():
            raise UserError(f"--homologs_fasta {self.homologs_fasta}: no such file")

    @property
    def given(self) -> dict[str, Any]:
        """{flag: value} that decide a result with homologs; {} without."""
        if self.homologs is None:
            return {}
        lists = {"context_tokens": self.context_tokens, "max_similarity": self.max_similarity}
        return {"contexts": self.contexts, "seed": self.seed} | {k: v for k, v in lists.items() if v}

    def settings(self, most: int = CONTEXT_TOKENS) -> list[Setting]:
        """Of each context: budgets and similarities take turns, and all pairs come before one is repeated.
        most: tokens of the largest budget, where none is given."""
        budgets = self.context_tokens or [most // 3, 2 * most // 3, most]
        similarities = self.max_similarity or MAX_SIMILARITY
        turns = math.lcm(len(budgets), len(similarities))
        return [
            Setting(budgets[n % len(budgets)], similarities[(n + n // turns) % len(similarities)])
            for n in range(self.contexts)
        ]

    def files(self, names: Iterable[str]) -> dict[str, Path]:
        """{protein's id: its file}. UserError for a protein without one, and for one alignment of several proteins."""
        names, path = list(names), Path(str(self.homologs))
        if path.is_dir():
            listed: dict[str, list[Path]] = {}
            for each in sorted(path.iterdir()):
                stem, ending = split_name(each.name)
                if ending in ENDINGS:
                    listed.setdefault(stem, []).append(each)
            return {name: _only(path, name, listed) for name in names}
        if len(names) > 1 and not is_table(path):
            raise UserError(
                f"--homologs {path}: of one protein, and --fasta has {len(names)}: give a directory of ID.a3m files"
            )
        return dict.fromkeys(names, path)

    def hashes(self, names: Iterable[str]) -> dict[str, str]:
        """{name: SHA-256} of what is read of these proteins' homologs; {} without --homologs. UserError as `files`."""
        if self.homologs is None:
            return {}
        paths = list(dict.fromkeys(self.files(names).values()))
        return {"homologs_hash": combined_hash([*paths, *([self.homologs_fasta] if self.homologs_fasta else [])])}


def split_name(name: str) -> tuple[str, str]:
    """(stem, ending in lower case) of a file's name, plain or compressed."""
    path = Path(strip_compression(name))
    return path.stem, path.suffix.lower()


def _only(directory: Path, name: str, listed: Mapping[str, list[Path]]) -> Path:
    names = (name, accession(name), file_name(name, set()))  # accession: as MMseqs2 names the files that it unpacks
    found = next((listed[each] for each in names if each in listed), [])
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"--homologs {directory}: {found[0].name} and {found[1].name} are of {name[:40]}: remove one")
    raise UserError(
        f"--homologs {directory}: no {name[:40]}.a3m: add it, with the protein alone if it has no homologs"
    )


def check_family(model: str) -> None:
    """UserError for a model that is not there, or does not read sets, which names the families that do."""
    family = encoder_family(model)
    family.load_config(model)
    if not family.reads_sets:
        readers = ", ".join(each.title for name in encoders() if (each := family_of(name)).reads_sets)
        raise UserError(f"--homologs: {family.title} reads single proteins: give a model that reads sets ({readers})")


class Sources:
    """The homologs of proteins by name, read when they are asked for; a table of hits is read once.

    names: of all proteins.
    """

    def __init__(self, flags: ContextFlags, names: Iterable[str]):
        self.files = flags.files(names)
        self.where = f"--homologs {flags.homologs}"
        self.hits: dict[str, dict[str, float]] | None = None
        if is_table(Path(str(flags.homologs))):
            self.hits = hits_of(Path(str(flags.homologs)))
            self.hits = {name: self.hits.get(accession(name), {}) for name in self.files}
            targets = {target for of_query in self.hits.values() for target in of_query}
            self.targets = read_targets(str(flags.homologs_fasta), targets)

    def of(self, name: str, protein: bytes) -> Homologs:
        if self.hits is None:
            found = read_homologs(self.files[name], protein)
        else:
            found = of_hits(f"{self.where}: {name[:40]}", self.hits[name], self.targets, protein)
        if not found.residues:
            logger.warning("%s: %s has no homologs: it is read alone", self.where, name[:40])
        return found


def draw(homologs: Homologs, tokens: np.ndarray, setting: Setting, seed: Sequence[int], most: int) -> list[int]:
    """Numbers of the homologs of a context, in the order of their draw.

    Without replacement, with probabilities in proportion to the weights (Efraimidis & Spirakis 2006), among those that
    are not too similar and fit in the budget alone; the draw ends before the first that does not fit any more.
    tokens: int [N], of each homolog; seed: two draws of one seed are the same; most: homologs.
    """
    times = np.random.default_rng(seed).standard_exponential(len(tokens), method="inv") / homologs.weights
    may = np.flatnonzero(~(homologs.similarity > setting.similarity) & (tokens <= setting.tokens))
    drawn = may[np.argsort(times[may], kind="stable")]
    return drawn[np.cumsum(tokens[drawn]) <= setting.tokens][:most].tolist()


class Contexts:
    """Draws and reads contexts for an encoder's proteins. UserError for a budget that the model has no positions for.

    homologs_of: of a protein's name and residues, as `Sources.of`.
    """

    def __init__(self, flags: ContextFlags, encoder: Encoder, homologs_of: HomologsOf):
        self.encoder, self.seed = encoder, flags.seed
        config = encoder.model.config
        trained = config.others.get(TRAINED_SETS)
        self.settings = flags.settings(min(CONTEXT_TOKENS, trained) if type(trained) is int else CONTEXT_TOKENS)
        self.most, self.longest = config.max_num_sequences - 1, config.max_position_embeddings
        whole = config.max_num_positions_global
        left = whole - encoder.flags.max_seq_length
        if (budget := max(each.tokens for each in self.settings)) > left:
            raise UserError(
                f"--context_tokens {budget}: the model reads {whole:,} tokens, {left:,} of them beside the protein "
                f"(--max_seq_length {encoder.flags.max_seq_length}): lower one"
            )
        self.homologs_of = homologs_of

    def __len__(self) -> int:
        return len(self.settings)

    def of(self, name: str, protein: bytes) -> list[list[bytes]]:
        """The homologs' residues of each context of a protein, some perhaps empty. Says what is left out."""
        homologs = self.homologs_of(name, protein)
        found = len(homologs.residues)
        tokens = np.array([len(text) + self.encoder.alphabet.num_special for text in homologs.residues], np.int64)
        fits = tokens <= min(self.longest, max(each.tokens for each in self.settings))
        if not fits.all():
            logger.info("%s: %d homologs are longer than a context: left out", name[:40], np.count_nonzero(~fits))
        residues = [homologs.residues[n] for n in np.flatnonzero(fits)]
        homologs = Homologs(residues, homologs.weights[fits], homologs.similarity[fits])
        contexts = [
            [residues[n] for n in draw(homologs, tokens[fits], setting, (self.seed, number), self.most)]
            for number, setting in enumerate(self.settings)
        ]
        sizes = [len(context) for context in contexts]
        empty = sizes.count(0)
        logger.info("%s: %d contexts of %d to %d homologs", name[:40], len(contexts), min(sizes), max(sizes))
        if found and empty:
            logger.warning(
                "%s: %d of %d contexts have no homolog, as all are more similar or longer: it is read alone in these",
                *(name[:40], empty, len(contexts)),
            )
        return contexts

    def readers(self, proteins: Mapping[str, bytes]) -> list[Callable[[bytes], Any]]:
        """Of each context's number a function of a protein's residues, which reads its context.

        UserError for two proteins of the same residues, whose homologs could not be told apart.
        """
        drawn: dict[bytes, list[list[bytes]]] = {}
        for name, protein in proteins.items():
            if protein in drawn:
                raise UserError(f"{name[:40]}: another protein has the same residues: with --homologs give it once")
            drawn[protein] = self.of(name, protein)
        return [lambda protein, n=number: self.encoder.read(drawn[protein][n]) for number in range(len(self))]


def mean_over(results: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    """(mean, its standard error) of the results of each context; no error of one context."""
    values = np.stack(list(results))
    return values.mean(0), values.std(0, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else None
