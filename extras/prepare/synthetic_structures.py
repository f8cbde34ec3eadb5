"""Generated proteins whose contacts are known, for extras.prepare.sample: coils, and families of a Potts model.

A coil is a turn that repeats, with substitutions, as in solenoid proteins. A residue lies beside those of the next and
the last turn, and turns differ in length, so a model that predicts a residue from its neighbours in space knows the
contacts of chains that it has not seen. One sequence of a coil gives its contacts away.

One sequence of a Potts family does not: each of its sites takes one of two residues of its own, and which of the two
depends on the sites beside it in space alone. Only many members together show which sites those are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product

import numpy as np

RESIDUES = "ARNDCQEGHILKMFPSTWYV"

# Percent of residues in UniProtKB/Swiss-Prot: section "amino acid composition" of its release statistics
# (https://web.expasy.org/docs/relnotes/relstat.html), in the order of RESIDUES.
BACKGROUND = np.array(
    [8.25, 5.53, 4.06, 5.46, 1.38, 3.93, 6.72, 7.07, 2.27, 5.91]
    + [9.65, 5.80, 2.41, 3.86, 4.74, 6.65, 5.36, 1.10, 2.92, 6.86]
)  # fmt: skip
BACKGROUND /= BACKGROUND.sum()

STEP, RISE = 3.8, 4.8  # angstrom: residues along a chain; strands of a sheet
COIL_TURN, COIL_LENGTH = (24, 33), (90, 130)  # residues, the second excluded
COIL_DIVERGENCE = 0.05  # share of residues that are not those of the last turn
COIL_STRUCTURES = 40

# A Potts family's fold: two sheets of four strands, face to face; each strand lies anywhere along the chain, up or
# down. A row is one residue of each; the places of a row are numbered 0 to 3 on one sheet, 4 to 7 opposite.
STRAND, STRANDS = 10, 8  # residues of a strand, strands
STRANDS_APART = 3  # along the chain, at least, between strands beside each other: so contacts are 24 or more apart
STRAND_STEP, SHEETS_APART = 3.4, 7.5  # angstrom: residues along a strand; sheets
# Pairs beside each other in a row, and their couplings. Each square has a negative one, so that a site's neighbours
# say little of one another, and the strengths are such that each tells at least 0.075 nats of the site that the whole
# row without it does not. So a model has to look at each.
COUPLED = {(0, 1): 2.0, (1, 2): 1.6, (2, 3): 2.0, (4, 5): 2.0, (5, 6): 1.6, (6, 7): 2.0}
COUPLED |= {(0, 4): 2.0, (1, 5): -2.8, (2, 6): 2.8, (3, 7): -2.0}
POTTS_MEMBERS, POTTS_STRUCTURES = 16000, 5  # of each family; the second are further ones

SEQRES_NAMES = 13  # in a line of the PDB format


def letters(residues: np.ndarray) -> str:
    """residues: indices into RESIDUES."""
    return "".join(RESIDUES[residue] for residue in residues)


def pdb_text(residues: np.ndarray, beta: np.ndarray, outward: np.ndarray) -> str:
    """A PDB file of one chain: each residue's C-beta at beta [L, 3] (glycine's C-alpha), its C-alpha at
    beta + outward [L, 3]; angstrom. SEQRES says that no residue is missing, however far apart C-alphas are."""
    from gemmi import ResidueKind, expand_one_letter_sequence

    names = expand_one_letter_sequence(letters(residues), ResidueKind.AA)
    named = [names[first : first + SEQRES_NAMES] for first in range(0, len(names), SEQRES_NAMES)]
    head = [f"SEQRES {n:3d} A {len(names):4d}  {' '.join(part)}" for n, part in enumerate(named, 1)]
    lines: list[str] = []
    for i, name in enumerate(names):
        atoms = [("CA", beta[i])] if name == "GLY" else [("CA", beta[i] + outward[i]), ("CB", beta[i])]
        for atom, (x, y, z) in atoms:
            lines.append(
                f"ATOM  {len(lines) + 1:5d}  {atom:3} {name} A{i + 1:4d}    {x:8.3f}{y:8.3f}{z:8.3f}"
                "  1.00  0.00           C"
            )
    return "\n".join([*head, *lines, "TER", "END", ""])


def make_coil(generator: np.random.Generator) -> tuple[np.ndarray, int]:
    """(residue indices, residues of a turn)."""
    turn, length = generator.integers(*COIL_TURN), generator.integers(*COIL_LENGTH)
    residues = generator.choice(20, size=length, p=BACKGROUND)
    is_kept = generator.random(length) >= COIL_DIVERGENCE
    for i in range(turn, length):
        if is_kept[i]:
            residues[i] = residues[i - turn]
    return residues, int(turn)


def make_coils(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """(header, sequence) of each."""
    generator = np.random.default_rng((seed, 1))
    for number in range(count):
        residues, turn = make_coil(generator)
        yield f"SAMPLE_C{number:05d} generated turn={turn}", letters(residues)


def coil_structures(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """(name, text of a PDB file) of further coils: C-beta on a helix."""
    generator = np.random.default_rng((seed, 2))
    for number in range(count):
        residues, turn = make_coil(generator)
        along = np.arange(len(residues)) / turn
        angle = 2 * np.pi * along
        # Neighbours along the chain are `STEP` apart, those of the next turn `RISE`.
        radius = np.sqrt(STEP**2 - (RISE / turn) ** 2) / (2 * np.sin(np.pi / turn))
        around = np.stack([np.cos(angle), np.sin(angle), np.zeros_like(angle)], 1)
        beta = radius * around
        beta[:, 2] = RISE * along
        yield f"coil{number:03d}", pdb_text(residues, beta, 1.5 * around)


@cache
def folds() -> np.ndarray:
    """[folds, STRANDS]: the strand at each place of a row, in every order whose neighbours are `STRANDS_APART`."""
    orders = np.array(list(permutations(range(STRANDS))))
    first, second = np.array(list(COUPLED)).T
    return orders[(abs(orders[:, first] - orders[:, second]) >= STRANDS_APART).all(1)]


@cache
def row_states() -> tuple[np.ndarray, np.ndarray]:
    """(states [256, STRANDS] of a row's sites, 0 or 1; their probabilities): P ~ exp(sum of J_ab s_a s_b over the
    coupled pairs), s = +-1. They are few enough to be drawn as they are, without a Markov chain."""
    states = np.array(list(product((0, 1), repeat=STRANDS)))
    spins = 2 * states - 1
    weights = np.exp(sum(coupling * spins[:, a] * spins[:, b] for (a, b), coupling in COUPLED.items()))
    return states, weights / weights.sum()


@dataclass(frozen=True)
class PottsFamily:
    """sites: [L, 2], the residues that each takes; rows: [STRAND, STRANDS], the positions of each row."""

    sites: np.ndarray
    rows: np.ndarray

    @classmethod
    def make(cls, generator: np.random.Generator, strand: int = STRAND) -> PottsFamily:
        """strand: residues of a strand, and so the number of rows."""
        fold = folds()[generator.integers(len(folds()))]
        sites = np.stack([generator.permutation(20)[:2] for _ in range(STRANDS * strand)])
        up = np.arange(strand)[:, None]
        return cls(sites, strand * fold + np.where(generator.random(STRANDS) < 0.5, up, up[::-1]))

    def members(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """Residue indices [count, L]."""
        states, probabilities = row_states()
        second = np.empty((count, len(self.sites)), int)
        second[:, self.rows] = states[generator.choice(len(states), size=(count, len(self.rows)), p=probabilities)]
        return np.take_along_axis(self.sites[None], second[..., None], axis=2)[..., 0]

    def beta(self) -> np.ndarray:
        """C-beta atoms [L, 3], angstrom."""
        sheet, column = np.divmod(np.arange(STRANDS), STRANDS // 2)
        places = np.empty((len(self.sites), 3))
        for along, row in enumerate(self.rows):
            places[row] = np.stack([RISE * column, SHEETS_APART * sheet, np.full(STRANDS, STRAND_STEP * along)], 1)
        return places


def potts_families(count: int, seed: int) -> Iterator[PottsFamily]:
    generator = np.random.default_rng((seed, 3))
    return (PottsFamily.make(generator) for _ in range(count))


def make_potts(families: int, seed: int) -> Iterator[tuple[str, str]]:
    """(header, sequence) of each member."""
    for number, family in enumerate(potts_families(families, seed)):
        generator = np.random.default_rng((seed, 4, number))
        for member, residues in enumerate(family.members(POTTS_MEMBERS, generator)):
            yield f"SAMPLE_P{number:03d}_M{member:05d} generated", letters(residues)


def potts_structures(families: int, seed: int) -> Iterator[tuple[str, str]]:
    """(name, text of a PDB file) of further members."""
    for number, family in enumerate(potts_families(families, seed)):
        generator = np.random.default_rng((seed, 5, number))
        beta = family.beta()
        for member, residues in enumerate(family.members(POTTS_STRUCTURES, generator)):
            yield f"potts{number:03d}_{member}", pdb_text(residues, beta, np.broadcast_to([0, 0, 1.5], beta.shape))
