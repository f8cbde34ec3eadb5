"""--metrics_port: the figures of metrics.jsonl, to whoever asks, whatever he sends; the run goes on as without it."""

from __future__ import annotations

import math
import re
import shutil
import socket
import time
from contextlib import closing, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest

from common.cli import UserError
from common.files.runs import METRICS
from common.training.run_logger import LogFlags
from extras.publish import live_page
from extras.publish.live_page import LivePage, Sample, exposition
from tests.live_runs import TIMES, LiveRun
from tests.patience import run, wait_until
from tests.training_fixtures import free_port, rows, run_forked

VALUE = re.compile(r'^esm2_(\w+)\{run="out"\} (\S+)$', re.M)
FLAGS = {"max_steps": 100_000, "save_steps": 4, "do_eval": True, "eval_steps": 5}


def page_at(port: int, host: str = "127.0.0.1", path: str = "metrics") -> str:
    """What is there; "" where nobody listens."""
    with suppress(URLError, ConnectionError):
        return urlopen(f"http://{host}:{port}/{path}", timeout=30).read().decode()
    return ""


def values(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in VALUE.findall(text)}


def opened(output_dir: Path, port: int, anew: bool = True, host: str = "127.0.0.1") -> LivePage:
    return LivePage(LogFlags(metrics_port=port, metrics_host=host), output_dir, anew)


def numbers(row: dict) -> dict[str, float]:
    return {key: value for key, value in row.items() if isinstance(value, int | float)}


def test_page_has_the_newest_row_of_a_run(dataset, tmp_path):
    """Of two ranks, while they train and evaluate."""
    port, out = free_port(), tmp_path / "out"
    with LiveRun(dataset, out, tmp_path, nproc=2, metrics_port=port, **FLAGS) as live:
        live.until_step(6)
        live.until(lambda: values(page_at(port)).get("checkpoint_step", 0) >= 4)
        shown = values(page_at(port))
        assert f"Figures for Prometheus: http://127.0.0.1:{port}/metrics" in live.said()
    (row,) = [row for row in rows(out) if row["step"] == shown["step"]]
    newest = {}
    for each in rows(out):
        newest |= numbers(each) if each["step"] <= row["step"] else {}
    assert {key: shown[key] for key in newest} == newest
    assert "eval_loss" in newest
    assert shown["step"] >= 6
    assert 0 <= time.time() - shown["start_timestamp_seconds"] < 600
    assert shown["start_timestamp_seconds"] < shown["checkpoint_timestamp_seconds"] < time.time()
    assert shown["start_timestamp_seconds"] < shown["row_timestamp_seconds"] < time.time()
    assert shown["restarts"] == 0


def test_page_changes_no_bit_of_a_run(dataset, tmp_path):
    kept = []
    for name, more in (("with", {"metrics_port": free_port()}), ("without", {})):
        assert run_forked(dataset, tmp_path / name, max_steps=3, save_final_model=False, **more).returncode == 0
        kept.append([{k: v for k, v in row.items() if k not in TIMES} for row in rows(tmp_path / name)])
    assert kept[0] == kept[1] != []


def test_page_has_what_earlier_rows_said_of_a_resumed_run(tmp_path):
    (tmp_path / METRICS).write_text(
        '{"step": 10, "eval_loss": 2.5}\n{"step": 20, "loss": 3.0, "slowest_host": "n1"}\n'
    )
    page = opened(tmp_path, free_port(), anew=False)
    page.resume(tmp_path / METRICS)
    text = page.text()
    assert 'eval_loss{run="' in text
    assert re.search(r'esm2_slowest_host\{run="[^"]+",value="n1"\} 1\.0\n', text)
    page.write({"step": 30, "loss": 2.9, "slowest_host": "n2", "quant_stats/layer.0/mse": 0.5, "flag": True})
    text = page.text()
    assert re.search(r"^esm2_loss\{.*\} 2\.9$", text, re.M)
    assert re.search(r"^esm2_eval_loss\{.*\} 2\.5$", text, re.M)
    assert "n1" not in text
    assert "quant_stats" not in text
    assert "esm2_flag" not in text


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (prometheus) is not installed")
def test_page_is_prometheus_text(tmp_path):
    """By Prometheus' own reader, of values and names that need care."""
    hostile = 'a "b" \\ c\nd \N{GREEK SMALL LETTER ALPHA}'
    samples = [
        *(Sample(f"value_{n}", value, {}) for n, value in enumerate((0, -1.5e-300, math.nan, math.inf, -math.inf))),
        Sample("eval_my-set_loss", np.float64(0.1), {}),
        Sample("host", 1, {"value": hostile}),
        *(Sample(field, 1.0, {}) for field in live_page.HELP),
    ]
    text = exposition(hostile, iter(samples))
    checked = run(["promtool", "check", "metrics"], text=text)
    assert "error" not in checked.stderr.lower(), checked.stderr
    assert checked.returncode in (0, 3)  # 3: remarks on style, such as abbreviated units
    broken = run(["promtool", "check", "metrics"], text=text.replace("\\n", "\n"))
    assert broken.returncode == 1


def test_page_is_on_loopback_unless_another_address_is_asked_for(tmp_path, caplog):
    closed, open_to_all = free_port(), free_port()
    opened(tmp_path, closed)
    assert page_at(closed)
    assert not caplog.messages or "reaches" not in caplog.text
    assert not page_at(closed, "127.0.0.2")  # an address of this machine that the server is not bound to
    opened(tmp_path, open_to_all, host="0.0.0.0")
    assert page_at(open_to_all, "127.0.0.2")
    assert f"--metrics_host 0.0.0.0: whoever reaches port {open_to_all} reads them" in caplog.text


def test_page_of_a_taken_port_ends_a_new_run_and_no_resumed_one(tmp_path, caplog):
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"--metrics_port {port} of 127.0.0.1: .*in use: choose another port"):
            opened(tmp_path, port)
        page = opened(tmp_path, port, anew=False)
        assert "trying again at each row" in caplog.text
        page.write({"step": 1})
    page.write({"step": 2})
    assert re.search(r"^esm2_step\{.*\} 2\.0$", page_at(port), re.M)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"metrics_port": 80}, "--metrics_port 80: must be at least 1024"),
        ({"metrics_port": 70000}, "--metrics_port 70000: at most 65535"),
        ({"metrics_port": 20000, "metrics_host": "192.0.2.1"}, "--metrics_port 20000 of 192.0.2.1: "),
    ],
)
def test_page_that_cannot_be_is_one_line(dataset, tmp_path, flags, line):
    """192.0.2.1: an address for documentation, no machine's."""
    done = run_forked(dataset, tmp_path / "out", **flags)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {line}")
    assert not (tmp_path / "out").exists()


HOSTILE = [
    b"\x80\x04\x95garbage\r\n\r\n",
    b"GET /metrics HTTP/9.9\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nabcde",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n",
    b"",
]


def test_page_answers_after_clients_that_send_anything(tmp_path, monkeypatch, capfd):
    """None reads a file, none is heard of in the log, and one that says nothing delays others for its patience."""
    monkeypatch.setattr(live_page._Handler, "timeout", 0.2)
    port = free_port()
    page = opened(tmp_path, port)
    page.write({"step": 1})
    for request in HOSTILE:
        with closing(socket.create_connection(("127.0.0.1", port), timeout=30)) as client:
            answer = b""
            with suppress(ConnectionError):
                client.sendall(request)
                while more := client.recv(1 << 16):
                    answer += more
        assert b"root:" not in answer
        assert b"Python" not in answer
        assert b"esm2_step{" not in answer
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    page.write({"step": 2})
    assert wait_until(lambda: "esm2_step{" in page_at(port))
    for each in silent:
        each.close()
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out
    assert "GET" not in said.err + said.out
