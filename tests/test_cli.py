"""common/cli.py: flags of several rooms in one object, each looked at by the class that declares them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from common.cli import Flags, UserError, flag, parse_arguments


@dataclass
class Size(Flags):
    width: int = flag(3, "Columns.")

    def check(self) -> None:
        self.require_at_least(1, "width")


@dataclass
class Colour(Flags):
    colour: str | None = flag(None, "red or blue.")

    def check(self) -> None:
        self.require_choice("colour", (None, "red", "blue"))


@dataclass
class Drawing(Colour, Size):
    zoom: float | None = flag(None, "Times.")

    def check(self) -> None:
        self.require_above(0, "zoom")


def test_one_object_has_the_flags_of_every_class():
    (args,) = parse_arguments("", Drawing, argv=["--width=5", "--colour=red", "--zoom=0.5"])
    assert (args.width, args.colour, args.zoom) == (5, "red", 0.5)
    assert isinstance(args, Size)
    assert isinstance(args, Colour)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"width": 0}, "--width 0: must be at least 1"),
        ({"colour": "green"}, "--colour green: choose red, blue"),
        ({"zoom": 0.0}, "--zoom 0.0: must be above 0"),
        ({"width": float("nan")}, "--width nan: must be at least 1"),
    ],
)
def test_each_class_checks_its_own_flags(flags, message):
    with pytest.raises(UserError) as error:
        Drawing(**flags)
    assert str(error.value) == message
