"""--metrics_port: the newest figures of a run, for Prometheus, at http://HOST:PORT/metrics of rank 0.

A thread answers with what the rows of metrics.jsonl last said. It shares nothing with the loop but a dictionary that
each row replaces, and one client is served at a time: a slow one delays others, never a step.

The text is Prometheus' exposition format 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats. All
values are gauges, for a run that resumes goes back to its checkpoint. Names are the keys of metrics.jsonl behind
`esm2_`, in their units. A key that the last row lacks has its latest value.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer
from threading import Thread
from typing import NamedTuple

from common.cli import UserError, one_line
from common.files.runs import MANIFEST, list_checkpoints, read_run_info
from common.files.safe_files import read_json_lines
from common.training.log_row import FIELDS
from common.training.run_logger import LogFlags, Tracker

logger = logging.getLogger(__name__)

CONTENT = "text/plain; version=0.0.4; charset=utf-8"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
PATIENCE_S = 10  # for a client's next byte
HELP = {field.name: f"{field.unit}: {field.meaning}" if field.unit else field.meaning for field in FIELDS}
MORE = {
    "row_timestamp_seconds": "when the last row was written, or this process began",
    "start_timestamp_seconds": "when this process began",
    "restarts": "by the launcher, of this job",
    "checkpoint_timestamp_seconds": "when the newest checkpoint was complete",
    "checkpoint_step": "of the newest checkpoint",
    "run_info": "what is trained, and on what",
}


class Sample(NamedTuple):
    """A value and, beside the run's name, its labels."""

    key: str
    value: float
    labels: dict[str, str]


class LivePage(Tracker):
    """The page of one run, served from the first row on that this process knows.

    anew: whether this start resumes nothing. Then a port that is taken is a UserError; a run that resumes goes on,
    and tries again at each row.
    """

    def __init__(self, flags: LogFlags, output_dir: Path, anew: bool):
        assert flags.metrics_port is not None
        self.host, self.port = flags.metrics_host, flags.metrics_port
        self.run, self.output_dir = flags.run_name or output_dir.resolve().name, output_dir
        self.values: dict = {}
        self.about: dict[str, str] = {}
        self.row_at = self.started_at = time.time()
        self.server: _Server | None = None
        try:
            self._serve()
        except (OSError, OverflowError) as error:  # no number of a port
            if anew:
                raise UserError(f"{self._where}: {one_line(error)}: choose another port or address") from error
            logger.warning("%s: %s: trying again at each row", self._where, one_line(error))

    @property
    def _where(self) -> str:
        return f"--metrics_port {self.port} of {self.host}"

    def _serve(self) -> None:
        self.server = _Server(self)
        logger.info("Figures for Prometheus: http://%s:%d/metrics", self.host, self.port)
        if self.host not in LOOPBACK:
            logger.warning("--metrics_host %s: whoever reaches port %d reads them", self.host, self.port)

    def write(self, row: dict) -> None:
        self.row_at, self.values = time.time(), self.values | row
        if self.server is None:
            with suppress(OSError):
                self._serve()

    def resume(self, metrics: Path) -> None:
        for row in read_json_lines(metrics):
            self.values = self.values | row
        info = read_run_info(metrics.parent)
        self.about = {key: str(info[key]) for key in ("model", "device", "software") if key in info}

    def text(self) -> str:
        """The page, as of now."""
        return exposition(self.run, self._samples())

    def _samples(self) -> Iterator[Sample]:
        for key, value in self.values.items():
            if "/" in key or isinstance(value, bool):  # of a tensor: quant_stats.jsonl has thousands of them
                continue
            if isinstance(value, int | float):
                yield Sample(key, value, {})
            elif isinstance(value, str):
                yield Sample(key, 1, {"value": value})
        yield Sample("row_timestamp_seconds", self.row_at, {})
        yield Sample("start_timestamp_seconds", self.started_at, {})
        yield Sample("restarts", int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), {})
        yield Sample("run_info", 1, self.about)
        with suppress(OSError):
            for step, directory in list_checkpoints(self.output_dir)[:1]:
                yield Sample("checkpoint_timestamp_seconds", (directory / MANIFEST).stat().st_mtime, {})
                yield Sample("checkpoint_step", step, {})


def exposition(run: str, samples: Iterator[Sample]) -> str:
    """The samples, one of a key, as Prometheus reads them. run: a label of each."""
    lines = []
    for key, value, labels in samples:
        name = f"esm2_{re.sub(r'[^a-zA-Z0-9_]', '_', key)}"
        if text := HELP.get(key) or MORE.get(key):
            lines.append(f"# HELP {name} {_escaped(text)}")
        shown = ",".join(f'{label}="{_quoted(text)}"' for label, text in {"run": run, **labels}.items())
        lines += [f"# TYPE {name} gauge", f"{name}{{{shown}}} {float(value)!r}"]
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")


class _Server(TCPServer):
    """Listens from its making on, in a thread that ends with the process."""

    allow_reuse_address = True  # after a restart, beside closed connections of the process before

    def __init__(self, page: LivePage):
        self.page = page
        self.address_family = socket.getaddrinfo(page.host, None)[0][0]
        super().__init__((page.host, page.port), _Handler)
        Thread(target=self.serve_forever, name="live page", daemon=True).start()

    def handle_error(self, request, client_address) -> None:
        """A client that went away or sent nothing is no matter of the run's log."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = PATIENCE_S
    server_version, sys_version = "esm2", ""  # of what else answers, a client learns nothing

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404)
            return
        body = self.server.page.text().encode(errors="replace")
        self.send_response(200)
        self.send_header("Content-Type", CONTENT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values) -> None:
        """Requests are no lines of the run's log."""
