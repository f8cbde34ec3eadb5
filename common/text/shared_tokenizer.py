"""The tokenizer of a run, opened by all ranks together."""

from __future__ import annotations

from common.ranks.world import World
from common.text.tokenizers import Tokenizer, load_tokenizer


def open_tokenizer(name: str, world: World) -> Tokenizer:
    """The tokenizer of that name (see `load_tokenizer`), the same on every rank; all of them call together.

    One rank asks the Hub, which counts its requests; the others open the commit that it found.
    """
    found, revision = None, None
    with world.main_does() as mine:
        if mine:
            found, revision = load_tokenizer(name)
    revision = world.share(revision)
    with world.together():
        tokenizer = found or load_tokenizer(name, revision)[0]
    world.agree({"tokenizer": tokenizer.identity})
    return tokenizer
