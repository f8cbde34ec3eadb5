"""What a person sees at a terminal of 80 and of 120 columns; a log without one has none of it."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import sys
import termios
import threading
from pathlib import Path

import pytest

from common import console
from common.cli_help import help_text
from common.training.log_row import terminal_line
from tests.training_fixtures import _main, flags_of, on_ranks

ROW = {"step": 1200, "total_steps": 10_000, "loss": 2.55123, "grad_norm": 1.2344, "learning_rate": 4e-4, "mfu": 0.413}
ROW |= {"tokens_per_second": 95_900.4, "step_seconds": 0.5, "data_wait_seconds": 0.01}


@pytest.mark.parametrize(
    ("columns", "picture"),
    [
        (60, "step 1,200/10,000  loss 2.5512  95.9k tok/s  ETA 1:13:20"),
        (80, "step 1,200/10,000  loss 2.5512  held-out 2.6123  95.9k tok/s  ETA 1:13:20"),
        (
            100,
            "step 1,200/10,000  loss 2.5512  held-out 2.6123  95.9k tok/s  MFU 41.3%  ETA 1:13:20  lr 4.0e-04",
        ),
    ],
)
def test_step_line_has_what_fits(columns, picture):
    assert terminal_line(ROW, 2.6123, columns) == picture
    assert len(picture) <= columns


def test_step_line_shows_stalls_and_skipped_steps_only_if_any():
    assert "data wait 12%" in terminal_line(ROW | {"data_wait_seconds": 0.06}, None, 100)
    assert "skipped 3" in terminal_line(ROW | {"skipped_steps": 3}, None, 60)
    assert "ETA 49.7 days" in terminal_line(ROW | {"step_seconds": 488.0}, None, 80)
    assert "ETA" not in terminal_line(ROW | {"step": 10_000}, None, 80)


def test_short_numbers_have_three_digits():
    numbers = (7, 999.4, 999.6, 1234, 12_345, 99_960, 999_600, 4.56e6, 1.2e9)
    assert [*map(console.short, numbers)] == ["7", "999", "1.00k", "1.23k", "12.3k", "100k", "1.00M", "4.56M", "1.20G"]


@pytest.mark.parametrize(("seconds", "text"), [(59.6, "0:01:00"), (3 * 86400, "3.0 days"), (86399, "23:59:59")])
def test_duration_is_for_people(seconds, text):
    assert console.duration(seconds) == text


@pytest.mark.parametrize("no_color", ["", "1"])
def test_terminal_log_colours_warnings_unless_no_color(monkeypatch, no_color):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    formatter = console.TerminalFormatter()
    text = "the model is worse than the frequencies of its residues"
    lines = formatter.format(logging.LogRecord("x", logging.WARNING, "", 0, text, None, None)).splitlines()
    assert ("\033[33mWARNING" in lines[0]) == (not no_color)
    plain = [re.sub(r"\033\[\d*m", "", line) for line in lines]
    assert " ".join(line.strip() for line in plain)[9:] == f"WARNING {text}"
    assert len(plain) == 2
    assert plain[1].startswith(" " * 9)
    assert max(map(len, plain)) <= 40
    said = formatter.format(logging.LogRecord("x", logging.INFO, "", 0, "short", None, None))
    assert re.fullmatch(r"\d\d:\d\d:\d\d short", said)


ABOUT = """Pretrain ESM-2 with DistributedDataParallel: every GPU (or process) holds the whole model.

torchrun --nproc_per_node=8 train_ddp.py --config_name facebook/esm2_t12_35M_UR50D \\
    --dataset_dir processed/arrow --output_dir out --bf16 --do_eval
python train_ddp.py            a short run on generated proteins, or something else
"""
HELP = {
    80: r"""
Pretrain ESM-2 with DistributedDataParallel: every GPU (or process) holds the
whole model.

torchrun --nproc_per_node=8 train_ddp.py \
    --config_name facebook/esm2_t12_35M_UR50D --dataset_dir processed/arrow \
    --output_dir out --bf16 --do_eval
# a short run on generated proteins, or something else
python train_ddp.py
""",
    120: f"\n{ABOUT}",
}


@pytest.mark.parametrize("columns", HELP)
def test_help_wraps_commands_so_that_they_still_run(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_text("train_ddp.py", ABOUT, [], {}, False)
    assert text.partition("\n")[2].partition("\nA file of flags")[0] == HELP[columns]


def screen(text: str) -> list[str]:
    """What stands on a terminal after `text`: carriage returns, lines up, and what is written over."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\033\[A|\r|\n|[^\r\n\033]+|\033\[\d*m", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\033[A":
            row -= 1
        elif not part.startswith("\033"):
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


def _at_a_terminal(columns: int, typescript: Path, argv: list[str]) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    written = bytearray()

    def read() -> None:
        try:
            while data := os.read(ours, 1 << 16):
                written.extend(data)
        except OSError:  # how Linux tells that the other end is closed
            pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for variable in ("COLUMNS", "LINES"):
        os.environ.pop(variable, None)
    os.dup2(theirs, 1)
    os.dup2(theirs, 2)
    os.close(theirs)
    try:
        _main(argv)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        reader.join(timeout=10)
        typescript.write_bytes(written)


PICTURE = """\
N ***** Running training *****
N   Model: facebook/esm2_t6_8M_UR50D (19,361 parameters)
N   Data: DATA, content IDENTITY, 240 records
N   Step: 1 x 512 tokens: at most 512 tokens
N   Schedule: esm2, peak 0.001, warm-up 0 of 6 steps; adamw_torch_fused
N   Strategy: train_ddp
N   Weights: random, seed 42
N   Backend: torch BACKEND
N   Device = cpu x 1, computing in fp32
N ***** Running Evaluation *****
N Held-out loss HELD_OUT
N Sampling proteins, uniformly: 240 proteins
N step 1/6  loss L  held-out L  S tok/s
N step 3/6  loss L  held-out L  S tok/s
N step 6/6  loss L  held-out L  S tok/s
"""


@pytest.mark.parametrize("columns", [80, 120])
def test_run_at_a_terminal(dataset, tmp_path, columns):
    flags = {"max_steps": 6, "logging_steps": 3, "do_eval": True, "eval_on_start": True, "save_steps": 100}
    argv = flags_of(dataset, tmp_path / "out", **flags, disable_tqdm=False, save_final_model=False)
    codes, said = on_ranks(1, _at_a_terminal, columns, tmp_path / "typescript", argv)
    assert codes == [0], said
    text = (tmp_path / "typescript").read_bytes().decode()
    assert re.search(r"Evaluation: +\d+%.*/40 \[.* sequences/s\]", text)
    shown = screen(text)
    steps = [line for line in shown if re.match(r"[\d:]{8} step ", line)]
    assert max(map(len, steps)) <= min(columns, 100)
    bars = [line for line in shown if re.search(r"\d+%\|", line)]
    assert len(bars) == 1, "bars that have gone are left"
    assert "6/6 [" in bars[0]
    unwrapped = "\n".join(line for line in shown if line not in bars).replace("\n         ", " ")
    for pattern, mark in (
        (r"^\d\d:\d\d:\d\d", "N"),
        (re.escape(str(dataset)), "DATA"),
        (r"\b[0-9a-f]{12}\b", "IDENTITY"),
        (r"(Backend: torch) .*", r"\1 BACKEND"),
        (r"(Held-out loss) .*", r"\1 HELD_OUT"),
        (r"(loss|held-out) \d\.\d{4}", r"\1 L"),
        (r"[\d.]+k? tok/s.*", "S tok/s"),
    ):
        unwrapped = re.sub(pattern, mark, unwrapped, flags=re.MULTILINE)
    assert PICTURE in unwrapped
