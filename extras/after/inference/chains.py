"""Records of several chains, A:B, after training: what belongs to which chain.

Chains are named A, B, ... in the order of the record, after Z come AA, AB, .... A mutation names its chain between
wild type and number, as FoldX and SKEMPI do: LB38G is L38G of chain B.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from common.cli import UserError

CHAIN_END = b":"
OF_CHAIN = re.compile(r"([A-Za-z])([A-Z]{1,2})(-?[0-9]{1,9}(?:[A-Za-z]|=))")


def letters_of(number: int) -> str:
    """The name of a chain, from 0."""
    first, last = divmod(number, 26)
    return (letters_of(first - 1) if first else "") + chr(ord("A") + last)


def named_chains(name: str, text: bytes) -> list[tuple[str, bytes]]:
    """(id, residues) of each chain of a record: ID_A, ID_B, ...; a record of one chain as it is."""
    chains = text.split(CHAIN_END)
    return [(name, text)] if len(chains) == 1 else [(f"{name}_{letters_of(n)}", each) for n, each in enumerate(chains)]


def of_chains(text: bytes, values: Any) -> list[Any]:
    """What there is of each character of a record, [len(text), ...], by chain, without the chains' ends."""
    ends = [n for n, letter in enumerate(text) if letter == CHAIN_END[0]]
    return [values[begin:end] for begin, end in zip([0, *(n + 1 for n in ends)], [*ends, len(text)], strict=True)]


def of_all_chains(texts: Iterable[bytes], values: Iterable[Any]) -> list[Any]:
    """`of_chains` of several records, one after another."""
    return [chain for text, of_text in zip(texts, values, strict=True) for chain in of_chains(text, of_text)]


def numbers_of(text: bytes) -> np.ndarray:
    """The number of each residue's chain, from 0: int64 [residues]."""
    return np.repeat(np.arange(text.count(CHAIN_END) + 1), [len(chain) for chain in text.split(CHAIN_END)])


def in_chain(word: str, protein: bytes, where: str) -> tuple[str, bytes, int]:
    """(the mutation without its chain, that chain's residues, where these begin in the record). UserError, which
    begins with `where`, if it names none of a record of several."""
    if CHAIN_END not in protein:
        return word, protein, 0
    chains = protein.split(CHAIN_END)
    names = [letters_of(n) for n in range(len(chains))]
    match = OF_CHAIN.fullmatch(word)
    if match is None or match[2] not in names:
        raise UserError(
            f"{where}: {word[:40]!r} names no chain of the protein, which has {names[0]} to {names[-1]}: write the "
            "chain behind the wild type, LB38G for L38G of chain B"
        )
    number = names.index(match[2])
    return match[1] + match[3], chains[number], sum(len(chain) + 1 for chain in chains[:number])
