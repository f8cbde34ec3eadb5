#!/usr/bin/env python3
r"""Contacts of residues that a model predicts: fitted to structures, evaluated and drawn; of your own or any ESM-2.

python contacts.py --model_name_or_path out/final_model --structures pdb --output_dir contacts
python contacts.py --model_name_or_path out/final_model --structures pdb --fasta protein.fasta --output_dir contacts

With structures (PDB or mmCIF): OUTPUT_DIR/contacts.csv has the precision of each chain, results.json the means with
standard errors over chains, and NAME.png the predicted contacts beside the true ones. With a FASTA file: NAME.csv has
each protein's likeliest contacts, NAME.png their map. A model without a contact head gets one that is fitted to the
structures.
docs/after.md has more.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import csv
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common import console
from common.cli import UserError, run
from common.figures import FigureFlags
from common.files.content_hash import content_hash, content_hashes
from common.files.safe_files import file_name
from common.flags import Flags, Missing, flag, parse_arguments
from common.models.family import encoder_family
from common.models.layers.hf_directory import model_hash
from extras.after.downstream.complexes import (
    complex_features,
    evaluate_complexes,
    likeliest,
    mean_row,
    proteins_and_complexes,
    read_complexes,
)
from extras.after.downstream.contact_picture import draw
from extras.after.downstream.contacts import (
    LEAST,
    Features,
    Head,
    attention_features,
    chain_features,
    fit,
    head_of,
    mean_precisions,
    precisions,
    split,
    standard_errors,
    summary,
)
from extras.after.downstream.outputs import Manifest, claimed
from extras.after.downstream.results import RESULTS, to_open
from extras.after.downstream.structures import LONGEST, Chain, read_structures, structure_files
from extras.after.inference.contexts import ContextFlags, Contexts, Sources, check_family
from extras.after.inference.encoder import INT8, Encoder, EncoderFlags, alphabet_of
from extras.after.inference.exported import exported
from extras.after.inference.int8 import check_int8, first, fit_linears
from extras.prepare.sources.proteins import ProteinFlags, read_proteins

logger = logging.getLogger(__name__)
TABLE, COMPLEXES = "contacts.csv", "complexes.csv"
MOST_SPECIAL = 4  # tokens around a chain's residues


@dataclass
class Arguments(Flags):
    required = ("model_name_or_path", "structures", "fasta", "output_dir")

    model_name_or_path: str | None = flag(
        None, "A run's output directory, a checkpoint, or any directory or Hub name of an EsmForMaskedLM or an E1."
    )
    structures: str | None = flag(None, "A directory of PDB or mmCIF files, plain or gzipped.")
    fasta: str | None = flag(None, "Proteins to predict contacts of; the structures are then only fitted to.")
    output_dir: str | None = flag(None, "A directory for the results, which is made.")
    fit: bool | None = flag(None, "Fit a head to the structures. Default: if the model has none.")
    maps: int = flag(10, "Draw at most so many maps.")
    overwrite: bool = flag(False, "Replace an earlier output there; other files in OUTPUT_DIR stay.")
    use_cpu: bool = flag(False, "Compute on the CPU even where there is a GPU.")
    int8: bool = flag(False, INT8)
    context: ContextFlags = field(default_factory=ContextFlags)
    proteins: ProteinFlags = field(default_factory=ProteinFlags)
    figures: FigureFlags = field(default_factory=FigureFlags)

    def missing(self) -> Iterator[Missing]:
        if not self.model_name_or_path:
            yield Missing("--model_name_or_path", "the model", "out/final_model")
        if not self.structures and not self.fasta:
            yield Missing("--structures", "a directory of PDB or mmCIF files; or --fasta", "pdb")
        if not self.output_dir:
            yield Missing("--output_dir", "where the results go", "contacts")

    def check(self) -> None:
        self.require_at_least(0, "maps")
        if self.fit and not self.structures:
            raise UserError("--fit: needs --structures to fit to")
        if self.fasta and not Path(self.fasta).is_file():
            raise UserError(f"--fasta {self.fasta}: no such file")
        if self.int8:
            check_int8(self.device)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu")


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def choose_head(
    args: Arguments, own: Head | None, features_of: Features, chains: list[Chain]
) -> tuple[Head, list[Chain], str]:
    """(the head, the chains to evaluate it on, where the head is from). own: the model's."""
    if own is not None and not args.fit:
        return own, unseen(own, chains, str(args.structures)), "the model's own"
    if args.fit is False:
        raise UserError("--fit False: the model has no fitted contact head: leave the flag out, to fit one")
    fitted_on, evaluated_on = split(chains)
    head = fit(features_of, fitted_on)
    return head, evaluated_on, f"fitted on {len(fitted_on)} chains, C {head.strength:g}"


def unseen(head: Head, chains: list[Chain], where: str) -> list[Chain]:
    """The chains that a model's own head was not fitted on. UserError if it was fitted on all."""
    if not head.fitted_on:
        logger.warning("The model does not say what its head was fitted on: the chains below may be among these")
        # Those that a run with the same --eval_contacts fits it on are left out.
        return split(chains)[1] if len(chains) >= LEAST else chains
    found = [chain for chain in chains if chain.identity not in head.fitted_on]
    if not found:
        raise UserError(f"{where}: the model's head was fitted on all {len(chains)} chains: give others, or --fit")
    logger.info("%d of %d chains left out: the model's head was fitted on them", len(chains) - len(found), len(chains))
    return found


def evaluate(
    args: Arguments, own: Head | None, features_of: Features, chains: list[Chain], directory: Path
) -> dict[str, Any]:
    """Tables and maps of --structures; returns the content of results.json."""
    head, chains, source = choose_head(args, own, features_of, chains)
    taken: set[str] = set()
    rows, found, drawn = [], [], []
    for chain in console.each(chains, "chains"):
        probabilities = head.probabilities(features_of(chain))
        found.append(precisions(chain, probabilities))
        counts = {"residues": len(chain.sequence), "resolved": chain.resolved}
        rows.append({"chain": chain.name} | counts | found[-1])
        if len(drawn) < args.maps:
            drawn.append((chain, probabilities, directory / file_name(chain.name, taken)))
    write_table(directory / TABLE, rows)
    for each in drawn:
        draw(*each, args.figures)
    logger.info("%d chains, head %s: %s", len(chains), source, summary(found))
    means = mean_precisions(found) | standard_errors(found)
    results = {"chains": len(chains), "head": source, "stderr_over": "chains"} | means
    return results | of_complexes(args, head, features_of, directory)


def of_complexes(args: Arguments, head: Head, features_of: Features, directory: Path) -> dict[str, Any]:
    """The table of structures of several chains, and its means: of a model that reads such."""
    name = str(args.model_name_or_path)
    if encoder_family(name).reads_sets or not alphabet_of(name).chains:
        return {}
    seen = set(head.fitted_on)
    complexes = [
        each for each in read_complexes(str(args.structures)) if seen.isdisjoint(c.identity for c in each.chains)
    ]
    if not complexes:
        logger.info("No complex of two chains or more, none of which the head was fitted on")
        return {}
    rows = evaluate_complexes(head, features_of, console.each(complexes, "complexes"))
    write_table(directory / COMPLEXES, rows)
    means = mean_row(rows)
    if "between_p_at_l" in means:
        logger.info(
            "%d complexes: of the L likeliest pairs between chains %.1f %% touch (L of the shorter; chance %.1f %%)",
            *(len(rows), 100 * means["between_p_at_l"], 100 * means["between_chance"]),
        )
    return {"of_complexes": means}


def predict(
    args: Arguments, own: Head | None, features_of: Features, chains: list[Chain], directory: Path
) -> dict[str, Any]:
    """Tables and maps of --fasta; returns the content of results.json."""
    head, source = own, "the model's own"
    if head is not None and not args.fit:
        if args.structures:
            logger.warning("--structures %s: not read, as the model has a head: --fit fits another", args.structures)
    elif args.structures:
        head, _, source = choose_head(args, own, features_of, read_structures(args.structures))
    else:
        raise UserError(
            f"{args.model_name_or_path}: no fitted contact head: give --structures DIR too, to fit one; or train with "
            "--eval_contacts"
        )
    taken: set[str] = set()
    for number, chain in enumerate(console.each(chains, "proteins")):
        probabilities = head.probabilities(features_of(chain))
        name = file_name(chain.name, taken)
        write_table(directory / f"{name}.csv", likeliest(chain, probabilities))
        if number < args.maps:
            draw(chain, probabilities, directory / name, args.figures)
    logger.info("Proteins: %d, head %s", len(chains), source)
    return {"proteins": len(chains), "head": source}


def identity(args: Arguments, model: str, chains: list[Chain]) -> dict[str, Any]:
    """What decides the result: the flags, and the content of model, structures, FASTA file and homologs."""
    made_from: dict[str, Any] = {"script": "contacts.py", "fit": args.fit, "maps": args.maps} | args.proteins.given
    made_from |= args.figures.given | ({"int8": True} if args.int8 else {})
    made_from["model_hash"] = model_hash(model)
    if args.structures:
        paths = structure_files(args.structures)
        hashes = content_hashes(paths)
        made_from["structures"] = {path.name: digest for path, digest in zip(paths, hashes, strict=True)}
    made_from |= args.context.given | args.context.hashes(chain.name for chain in chains)
    return made_from | ({"fasta": content_hash(args.fasta)} if args.fasta else {})


def check_model(args: Arguments, name: str) -> None:
    """UserError for a model whose attention maps are not read, and for homologs with a model of single proteins."""
    if args.context.homologs:
        check_family(name)
    if not encoder_family(name).reads_sets:
        from extras.after.downstream.stock_model import check_esm2

        check_esm2(name)


def load(args: Arguments, name: str, device: torch.device, chains: list[Chain]) -> tuple[Head | None, Features]:
    """(the model's own head, the features of a chain): of these chains with their homologs."""
    if not encoder_family(name).reads_sets:
        from extras.after.downstream.stock_model import read_stock_model

        model = read_stock_model(name, device)
        if args.int8:
            sample = list(first(chain.ids for chain in chains))
            fit_linears(model.esm.encoder, lambda: [attention_features(model, ids) for ids in sample])
        if (alphabet := alphabet_of(name)).chains:
            return head_of(model), partial(complex_features, model, alphabet)
        return head_of(model), partial(chain_features, model)
    from extras.after.downstream.set_contacts import SetFeatures

    flags = EncoderFlags(name, max_seq_length=LONGEST + MOST_SPECIAL, use_cpu=args.use_cpu, int8=args.int8)
    encoder = Encoder(flags, device)
    encoder.fit_int8(chain.sequence.encode() for chain in chains)
    if not args.context.homologs:
        return None, SetFeatures(encoder)
    sources = Sources(args.context, [chain.name for chain in chains])
    return None, SetFeatures(encoder, Contexts(args.context, encoder, sources.of), chains)


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    directory = Path(str(args.output_dir))
    inputs = {f"--{name}": getattr(args, name) for name in ("model_name_or_path", "structures", "fasta")}
    inputs |= {"--homologs": args.context.homologs, "--homologs_fasta": args.context.homologs_fasta}
    earlier = Manifest.of_earlier(directory, "head", TABLE)
    with ExitStack() as stack:
        name = exported(str(args.model_name_or_path), stack)
        check_model(args, name)
        alphabet = alphabet_of(name)
        if args.fasta:
            proteins = read_proteins(args.fasta, flags=args.proteins, alphabet=alphabet)
            chains = proteins_and_complexes(proteins, f"--fasta {args.fasta}")
        else:
            chains = read_structures(str(args.structures))
        made_from = identity(args, name, chains)
        output = stack.enter_context(claimed(directory, inputs, made_from, args.overwrite, earlier))
        if output is None:
            return
        head, features_of = load(args, name, args.device, chains)
        with output.replaced() as temporary:
            results = (predict if args.fasta else evaluate)(args, head, features_of, chains, temporary)
            about = {"arguments": asdict(args), "model_hash": made_from["model_hash"]}
            (temporary / RESULTS).write_text(json.dumps(results | about, indent=2) + "\n")
    logger.info("Written: %s", to_open(directory))


if __name__ == "__main__":
    run(main)
