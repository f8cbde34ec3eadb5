"""common/flags.py and common/cli.py: nested flags from a flat command line, each checked by its own class."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.cli import UserError, user_errors
from common.flags import Flags, Missing, checked, flag, flat, parse_arguments, with_flags
from tests.conftest import ROOT


@dataclass
class Size(Flags):
    width: int = flag(3, "Columns.")

    def check(self) -> None:
        self.require_at_least(1, "width")


@dataclass
class Colour(Flags):
    colour: str | None = flag(None, "Of the lines.", choices=("red", "blue"))


@dataclass
class Drawing(Flags):
    size: Size = field(default_factory=Size)
    colours: Colour = field(default_factory=Colour)
    zoom: float | None = flag(None, "Times.")

    def check(self) -> None:
        self.require_above(0, "zoom")


@dataclass
class Paper(Flags):
    paper: str | None = flag(None, "A file.")
    inks: list[str] = field(default_factory=list, metadata={"help": "Some."})
    speed: float = flag(1.0, "Any.")
    dry: bool = flag(True, "Wait.")

    overrides = {"paper": ("colour",), "speed": ("zoom",), "zoom": ("speed",)}
    last_wins = ("speed", "zoom")

    def missing(self) -> Iterator[Missing]:
        if not self.paper:
            yield Missing("--paper", "to draw on", "a4")
        if not self.inks:
            yield Missing("--inks", "to draw with", "black")


@dataclass
class Printed(Flags):
    drawing: Drawing = field(default_factory=Drawing)
    on: Paper = field(default_factory=Paper)
    copies: int | None = flag(None, "So many.", "prints")

    changed = {"speed": flag(2.0, "")}
    idle = {"duplex": "there is one side."}

    def missing(self) -> Iterator[Missing]:
        if self.copies is None:
            yield Missing("--copies", "how many", "3")
        yield from () if self.on.inks else [Missing("--inks", "said by another class, too")]


def test_flags_fill_nested_dataclasses_from_flat_words():
    args = parse_arguments("", Drawing, argv=["--width=5", "--colour=red", "--zoom=0.5"])
    assert (args.size.width, args.colours.colour, args.zoom) == (5, "red", 0.5)
    assert flat(args) == {"width": 5, "colour": "red", "zoom": 0.5}
    assert flat(with_flags(args, width=7, zoom=None)) == {"width": 7, "colour": "red", "zoom": None}
    with pytest.raises(TypeError, match="unknown flags: height"):
        with_flags(args, height=1)


def test_flags_nested_elsewhere_may_have_another_default_and_alias():
    args = printed("--paper=a4", "--inks=red", "--prints=2")
    assert (args.on.speed, args.copies) == (2.0, 2)


def test_idle_flag_is_accepted_and_logged(caplog):
    with caplog.at_level(logging.INFO):
        printed("--paper=a4", "--inks=red", "--copies=2", "--duplex", "long")
    assert caplog.messages == ["--duplex long does nothing: there is one side."]


@pytest.mark.parametrize(
    ("words", "dry", "speed"),
    [
        (["--no_dry"], False, 2.0),
        (["--no-dry"], False, 2.0),
        (["--dry", "False", "--speed=1e-3"], False, 1e-3),
        (["--dry=no", "--dry"], True, 2.0),
    ],
)
def test_switches_take_a_value_their_bare_name_or_no(words, dry, speed):
    args = printed("--paper=a4", "--inks=red", "--copies=2", *words)
    assert (args.on.dry, args.on.speed) == (dry, speed)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"width": 0}, "--width 0: must be at least 1"),
        ({"colour": "green"}, "--colour green: choose red, blue"),
        ({"zoom": 0.0}, "--zoom 0.0: must be above 0"),
        ({"width": float("nan")}, "--width nan: must be at least 1"),
    ],
)
def test_parse_arguments_checks_the_flags_of_each_class(flags, message):
    with pytest.raises(UserError) as error:
        checked(with_flags(Drawing(), **flags))
    assert str(error.value) == message


def printed(*argv) -> Printed:
    return parse_arguments("", Printed, argv=[str(word) for word in argv])


def refused(*argv) -> str:
    with pytest.raises(UserError) as error:
        printed(*argv)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_parse_arguments_lists_all_missing_flags():
    assert refused("--width=0") == (
        "missing: --paper (to draw on), --inks (to draw with), --copies (how many): "
        "add, say, --paper a4 --inks black --copies 3"
    )
    assert refused("--paper=a4", "--inks=red") == "missing: --copies (how many): add, say, --copies 3"
    assert refused("--width=0", "--paper=a4", "--inks=black", "--copies=3") == "--width 0: must be at least 1"


COMPLETE = "paper: a4\ninks: [red, blue]\ncopies: 2\n"


def written(tmp_path: Path, text: str, name: str = "flags.yaml") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_flags_override_the_file(tmp_path):
    file = written(tmp_path, COMPLETE + "speed: 4e-4\ndry: false\nzoom: null\nwidth: 1_000\n")
    args = printed(file)
    on, drawing = args.on, args.drawing
    assert (on.paper, on.inks, args.copies) == ("a4", ["red", "blue"], 2)
    assert (on.speed, on.dry, drawing.zoom, drawing.size.width) == (
        4e-4,
        False,
        None,
        1000,
    )  # YAML reads 4e-4 as a text
    args = printed(file, "--copies", 5, "--inks", "green", "--dry")
    assert (args.copies, args.on.inks, args.on.dry, args.on.speed) == (5, ["green"], True, 4e-4)
    as_json = written(tmp_path, '{"paper": "a5", "inks": ["red"], "copies": 1, "dry": true}', "flags.json")
    assert printed(as_json, "--paper=a3").on.paper == "a3"


def test_flag_removes_the_flags_it_replaces(tmp_path):
    file = written(tmp_path, COMPLETE + "colour: red\n")
    assert printed(file).drawing.colours.colour == "red"
    assert printed(file, "--paper=a5").drawing.colours.colour is None
    assert printed(file, "--paper=a5", "--colour=blue").drawing.colours.colour == "blue"


def test_last_of_two_exclusive_flags_wins(tmp_path, caplog):
    file = written(tmp_path, COMPLETE)
    with caplog.at_level(logging.INFO):
        args = printed(file, "--zoom", 2, "--colour=red", "--speed=3", "--paper=a5")
    assert (args.drawing.zoom, args.on.speed) == (None, 3.0)
    assert (args.on.paper, args.drawing.colours.colour) == ("a5", "red"), "overrides alone concerns the file"
    assert caplog.messages == ["--speed=3 replaces what was given before it: --zoom 2"]
    assert printed(file, "--speed=3", "--zoom=2", "--speed=4").drawing.zoom is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("widht: 3", "unknown flag --widht: did you mean --width?"),
        ("width: wide", "argument --width: invalid int value: 'wide'"),
        ("width: {columns: 3}", "width: expected one value, not an object"),
        ("paper: [a4, a5]", "paper: expected one value, not a list"),
        ("width: 0", "--width 0: must be at least 1"),
        ("- width", "expected names of flags and their values"),
        ("width: [", "cannot be read: "),
        ("width: " + "[" * 3000, "cannot be read: nested too deeply"),
        ("", "expected names of flags and their values"),
    ],
)
def test_file_error_names_file_and_key(tmp_path, text, message):
    file = written(tmp_path, text)
    rest = ["--paper=a4", "--inks=red", "--copies=1"]
    assert refused(file, *rest).startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("word", "guess"),
    [
        ("--widht", "--width"),
        ("--wdith", "--width"),
        ("--colours", "--colour"),
        ("--colo", "--colour"),  # abbreviated
        ("--zom", "--zoom"),
        ("--use_width", ""),
        ("--weight", ""),
        ("--height", ""),
        ("--zone", ""),
        ("--fsdp", ""),
    ],
)
def test_unknown_flag_gets_a_guess_only_if_one_is_close(word, guess):
    hint = f": did you mean {guess}?" if guess else ""
    assert refused(f"{word}=1") == f"unknown flag {word}=1{hint} (see {Path(sys.argv[0]).name} --help)"


def test_unknown_words_each_have_their_hint():
    with pytest.raises(UserError) as error:
        parse_arguments(
            None, Printed, ["--a", "1", "b.c=2", "d", "--widht=3"], lambda word: "ours" * (word == "b.c=2")
        )
    message = "unknown flag --a 1; b.c=2 d: ours; --widht=3: did you mean --width?"
    assert str(error.value).startswith(message)


def test_command_line_error_does_not_name_the_file(tmp_path):
    file = written(tmp_path, COMPLETE + "width: 3\n")
    assert refused(file, "--width=0") == "--width 0: must be at least 1"
    assert refused(file, "--widht=1").startswith("unknown flag --widht=1: did you mean --width?")
    assert refused("--width=1", file).startswith(f"{file}: a file of flags comes first")
    assert refused(tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'}: no such file of flags"


@dataclass
class Open(Flags):
    compiled: bool | None = flag(None, "left open unless said")


@pytest.mark.parametrize(
    ("words", "value"),
    [([], None), (["--compiled"], True), (["--compiled", "False"], False), (["--compiled=True"], True)],
)
def test_optional_switch_accepts_its_bare_name(words, value):
    found = parse_arguments("", Open, argv=words)
    assert found.compiled is value


STOPPED_IN_A_DESTRUCTOR = """
import os, signal, time
from common.cli import run

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):  # the handler runs in here
            pass

def main():
    dropped = Dropped()
    del dropped
    time.sleep(60)

run(main, resumable=True)
"""


def test_sigterm_in_a_destructor_still_stops():
    done = subprocess.run([sys.executable, "-c", STOPPED_IN_A_DESTRUCTOR], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (143, 1), done.stderr


SIGNALLED_AT_EXIT = """
import atexit, os, signal
from common.cli import run

@atexit.register
def stop():
    os.kill(os.getpid(), signal.{signal})
    for _ in range(100):  # a handler would run in here
        pass

run(lambda: print("done"), resumable={resumable})
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("resumable", [True, False])
def test_signal_after_the_work_leaves_its_status(name, resumable):
    program = SIGNALLED_AT_EXIT.format(signal=name, resumable=resumable)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("in_container", [True, False])
def test_denied_file_names_its_owner_and_the_user_to_run_as(tmp_path, monkeypatch, capsys, in_container):
    """A folder that docker run -v mounts often belongs to another user than the image's."""
    monkeypatch.setattr("common.cli.CONTAINER_MARKS", [str(tmp_path)] * in_container)
    there, owner, me = Path("/"), 0, os.geteuid()
    if me == 0:
        there, owner = tmp_path / "data", 4321
        there.mkdir()
        os.chown(there, owner, owner)
    with pytest.raises(SystemExit) as end, user_errors():
        raise PermissionError(errno.EACCES, "Permission denied", str(there / "csv" / "x000.csv"))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    said = f"Permission denied: {there} belongs to user {owner}, and this is user {me}"
    assert line.startswith(f"error: {there / 'csv' / 'x000.csv'}: {said}")
    assert ("add --user $(id -u):$(id -g) to docker run" in line) == in_container


def test_run_draws_in_the_cell_of_a_notebook():
    """Its environment names a backend that only the notebook's Python may have."""
    drawing = "from common.cli import run; run(lambda: __import__('matplotlib.figure'))"
    environment = os.environ | {"MPLBACKEND": "only_there"}
    done = subprocess.run([sys.executable, "-c", drawing], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
