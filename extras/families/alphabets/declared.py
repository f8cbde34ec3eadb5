"""Alphabets from what declares them: a YAML file, the record beside prepared data or in config.json, a vocab.txt.

Keys of a declaration (docs/data.md#alphabets): `name` and `tokens`; those that name the special tokens; what may be
masked, and by what; how text is read. Tokens that are not special have the same number of characters and lie together.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from common.cli import UserError, one_line
from common.data.alphabet import ESM2, LARGEST_TABLE, Alphabet
from common.files.safe_files import shorten
from common.hooks import extra

# Keys that name a special token, and its usual name, which transformers' EsmTokenizer has.
SPECIAL = {"begin": "<cls>", "pad": "<pad>", "end": "<eos>", "unknown": "<unk>", "mask": "<mask>"}
LISTS = ("tokens", "special", "maskable", "replacements", "last_only")
TABLES = ("masked_as", "amino_acids", "synonyms")
KEYS = {"name", "ambiguous", "ignore_case", *SPECIAL, *LISTS, *TABLES}
TYPES = {"list": "a list of texts", "dict": "a table of texts", "bool": "true or false", "str": "a text"}
MOST_TOKENS = 1 << 16  # ids of 16 bits
LARGEST_FILE = 4 << 20


def declare(content: dict[str, Any], declared: dict[str, Any] | None = None, where: str = "alphabet") -> Alphabet:
    """The alphabet of a declaration. declared: what stands for it in a record, by default the whole declaration.

    UserError, which begins with `where`, for an unknown key, a wrong type, or what makes no alphabet.
    """
    _check_keys(content, where)
    tokens = tuple(content["tokens"])
    ids = {token: number for number, token in enumerate(tokens)}

    def number(token: Any, key: str) -> int:
        if token not in ids:
            raise UserError(f"{where}: {key}: {shorten(token)} is not one of the tokens")
        return ids[token]

    def numbers(key: str, default: Sequence[int]) -> tuple[int, ...]:
        return tuple(number(token, key) for token in content[key]) if key in content else tuple(default)

    special = {key: number(content.get(key, usual), key) for key, usual in SPECIAL.items()}
    others = set(numbers("special", ())) | set(special.values())
    residues = [token for token in range(len(tokens)) if token not in others]
    width = _check_residues(tokens, residues, where)
    masked = {
        number(token, "masked_as"): number(to, "masked_as") for token, to in content.get("masked_as", {}).items()
    }
    letters = {number(token, "amino_acids"): letter for token, letter in content.get("amino_acids", {}).items()}
    alphabet = Alphabet(
        vocab_size=len(tokens),
        **special,
        letters=tokens,
        residues=(residues[0], residues[-1]),
        replacements=numbers("replacements", residues),
        maskable=numbers("maskable", residues),
        masked=tuple(masked.get(n, special["mask"]) for n in range(len(tokens))) if masked else None,
        name=content["name"],
        declared=json.dumps(declared or content),
        width=width,
        ignore_case=content.get("ignore_case", True),
        synonyms=tuple(content.get("synonyms", {}).items()),
        ambiguous=content.get("ambiguous", ""),
        last_only=numbers("last_only", ()),
        scored_as=tuple(letters.get(n, "") for n in range(len(tokens))) if letters else (),
    )
    _check_whole(alphabet, residues, where)
    return alphabet


def _check_keys(content: Any, where: str) -> None:
    """UserError unless these are keys of a declaration with values of their types."""
    if not isinstance(content, dict) or not {"name", "tokens"} <= content.keys():
        raise UserError(f"{where}: not an alphabet: it has no keys name and tokens")
    if unknown := sorted(map(str, content.keys() - KEYS)):
        raise UserError(f"{where}: unknown key {shorten(unknown[0])}: choose of {', '.join(sorted(KEYS))}")
    for key, value in content.items():
        kind = "list" if key in LISTS else "dict" if key in TABLES else "bool" if key == "ignore_case" else "str"
        texts = [*value, *(value.values() if kind == "dict" else ())] if isinstance(value, list | dict) else []
        wrong = next((text for text in texts if not isinstance(text, str) or not text), None)
        if type(value).__name__ != kind or (texts and wrong is not None):
            quoted = ", in quotes where YAML reads something else" if kind in ("list", "dict") else ""
            given = shorten(value if wrong is None else wrong)
            raise UserError(f"{where}: {key} is {given}: expected {TYPES[kind]}{quoted}")
    tokens = content["tokens"]
    if len(set(tokens)) < len(tokens):
        repeated = Counter(tokens).most_common(1)[0][0]
        raise UserError(f"{where}: tokens: {shorten(repeated)} is there twice")
    if bad := next((token for token in tokens if re.search("[^!-~]", token)), ""):
        raise UserError(f"{where}: tokens: {shorten(bad)}: only printable ASCII without blanks")
    if len(tokens) > MOST_TOKENS:
        raise UserError(f"{where}: {len(tokens):,} tokens: at most {MOST_TOKENS:,}")


def _check_residues(tokens: Sequence[str], residues: list[int], where: str) -> int:
    """The number of characters of each. UserError unless they have the same and lie together."""
    if not residues:
        raise UserError(f"{where}: all tokens are special: nothing stands for a text")
    if residues[-1] - residues[0] + 1 != len(residues):
        between = next(n for n in range(residues[0], residues[-1]) if n not in residues)
        raise UserError(f"{where}: the special token {tokens[between]} lies among the others: put it before or behind")
    width = len(tokens[residues[0]])
    for token in (tokens[number] for number in residues):
        if len(token) != width:
            raise UserError(
                f"{where}: {token} has {len(token)} characters and {tokens[residues[0]]} {width}: all tokens but "
                "those listed under special need the same"
            )
    return width


def _check_whole(alphabet: Alphabet, residues: list[int], where: str) -> None:
    """UserError for what fits no text: special tokens that are masked, characters that no token has."""
    special = set(range(alphabet.vocab_size)) - set(residues)
    for key in ("maskable", "replacements", "last_only"):
        if bad := special & set(getattr(alphabet, key)):
            raise UserError(f"{where}: {key}: {alphabet.letters[min(bad)]} is a special token")
    if not alphabet.maskable or not alphabet.replacements:
        raise UserError(f"{where}: maskable and replacements: at least one token each")
    if alphabet.name == ESM2:
        raise UserError(f"{where}: name: {ESM2} is ESM-2's own: choose another")
    characters = set("".join(alphabet.letters[number] for number in residues))
    if (len(characters) + 1) ** alphabet.width > LARGEST_TABLE:
        raise UserError(f"{where}: tokens of {alphabet.width} characters, each one of {len(characters)}, are too many")
    if alphabet.ignore_case and (lower := min((c for c in characters if c != c.upper()), default="")):
        raise UserError(f"{where}: {lower} is lower case: write tokens in upper case, or ignore_case: false")
    for new, old in alphabet.synonyms:
        if len(new) != 1 or old not in characters or new in characters:
            raise UserError(f"{where}: synonyms: {shorten(new)}: {shorten(old)}: one new character for one of a token")
    if bad := characters & set(alphabet.ambiguous):
        raise UserError(f"{where}: ambiguous: {min(bad)} is a character of tokens")
    for letter in filter(None, alphabet.scored_as):
        if len(letter) != 1 or not letter.isupper():
            raise UserError(f"{where}: amino_acids: {shorten(letter)}: one capital letter for each")


def open_alphabet(described: Any, where: str) -> Alphabet:
    """The alphabet of --alphabet (a text), of a record (a dict), or of the tokens of a vocab.txt (a list)."""
    if isinstance(described, list):
        return of_tokens(described, where)
    return read(described) if isinstance(described, str) else of_record(described, where)


@cache
def named(name: str) -> Alphabet:
    """An alphabet of the catalogue. UserError for any other."""
    if name not in extra().alphabets():
        known = ", ".join(extra().alphabets())
        raise UserError(f"--alphabet {name}: choose {known}, or give a YAML file (.yaml)")
    return import_module(extra().alphabets()[name]).ALPHABET


def read(name: str) -> Alphabet:
    """The alphabet of --alphabet: a name of the catalogue, or a YAML file."""
    if not name.endswith((".yaml", ".yml")):
        return named(name)
    import yaml

    where = f"--alphabet {name}"
    if not Path(name).is_file():
        raise UserError(f"{where}: no such file")
    try:
        with open(name, encoding="utf-8") as file:
            content = yaml.safe_load(file.read(LARGEST_FILE))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{where}: cannot be read: {one_line(error)[:160]}") from None
    alphabet = declare(content, where=where)
    if alphabet.name in extra().alphabets():
        raise UserError(f"{where}: name: {alphabet.name} is built in: choose another")
    return alphabet


def of_record(record: Any, where: str) -> Alphabet:
    """From `declared`, read as JSON: {"name": of the catalogue}, maybe with its tokens in another order; or whole."""
    if not isinstance(record, dict) or record.get("name") not in extra().alphabets():
        return declare(record, where=where)
    alphabet = named(record["name"])
    return in_order(alphabet, tuple(record["tokens"]), where) if "tokens" in record else alphabet


def of_tokens(tokens: Sequence[str], where: str) -> Alphabet:
    """Of a vocab.txt: one of the catalogue, in any order of its tokens; else all that is not `<...>` may be masked.

    UserError without the special tokens of `SPECIAL`, or for tokens of several lengths.
    """
    for name in extra().alphabets():
        if set(tokens) == set(named(name).letters):
            return in_order(named(name), tokens, where)
    special = [token for token in tokens if len(token) > 2 and token[0] + token[-1] in ("<>", "[]")]
    return declare({"name": "vocab.txt", "tokens": list(tokens), "special": special}, where=where)


def in_order(alphabet: Alphabet, tokens: Sequence[str], where: str) -> Alphabet:
    """The same alphabet with its tokens in another order."""
    if tuple(tokens) == alphabet.letters:
        return alphabet
    if len(tokens) != alphabet.vocab_size or set(tokens) != set(alphabet.letters):
        raise UserError(f"{where}: the tokens are not those of {alphabet.name}")
    content = declaration(alphabet) | {"tokens": list(tokens)}
    return declare(content, {"name": alphabet.name, "tokens": list(tokens)}, where)


def declaration(alphabet: Alphabet) -> dict[str, Any]:
    """All keys of an alphabet that `declare` made."""
    letters, ids = alphabet.letters, range(alphabet.vocab_size)
    first, last = alphabet.residues
    special = {key: letters[getattr(alphabet, key)] for key in SPECIAL}
    lists = {key: [letters[n] for n in getattr(alphabet, key)] for key in ("maskable", "replacements", "last_only")}
    masked = {} if alphabet.masked is None else {letters[n]: letters[alphabet.masked[n]] for n in ids}
    amino_acids = {letters[n]: letter for n, letter in enumerate(alphabet.scored_as) if letter}
    return {
        "name": alphabet.name,
        "tokens": list(letters),
        **special,
        "special": [letters[n] for n in ids if not first <= n <= last],
        **lists,
        "masked_as": {token: to for token, to in masked.items() if to != special["mask"]},
        "amino_acids": amino_acids,
        "synonyms": dict(alphabet.synonyms),
        "ambiguous": alphabet.ambiguous,
        "ignore_case": alphabet.ignore_case,
    }
