"""Which proteins show another's residues, and may not stand before it where these are asked."""

from __future__ import annotations

import re


def shows(shown: bytes, asked: bytes, unknown: bytes = b"X") -> bool:
    """Whether one of two proteins is a stretch of the other: an equal one, a fragment, or what it is a fragment of.

    A letter a byte; unknown: the letter that stands for any residue.
    """
    part, whole = sorted((shown, asked), key=len)
    if unknown not in part and unknown not in whole:
        return part in whole
    letters = (bytes([letter]) for letter in part)
    pattern = (b"." if letter == unknown else b"[%s]" % re.escape(letter + unknown) for letter in letters)
    return re.search(b"".join(pattern), whole, re.DOTALL) is not None
