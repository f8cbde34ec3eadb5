"""A Hub of one dataset, or model, on this machine: the addresses huggingface_hub asks for, and how they can fail."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """`refuse`: how many requests for content are answered with `status`, and the Hub's `code`, before one is served;
    `kind`: datasets or models; `calls`: by kind; `sent`: bytes of content."""

    def __init__(
        self, repo: str, root: Path, refuse: int = 0, status: int = 429, code: str = "", kind: str = "datasets"
    ):
        self.repo, self.root, self.refuse, self.status, self.code, self.kind = repo, root, refuse, status, code, kind
        self.calls: Counter = Counter()
        self.sent = 0
        self.url = ""

    def files(self) -> list[str]:
        return sorted(str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_file())

    def describe(self, name: str) -> dict:
        path = self.root / name
        return {"type": "file", "path": name, "size": path.stat().st_size, "oid": f"{abs(hash(name)):040x}"[:40]}


@contextmanager
def hub_server(repo: str, root: Path, **behaviour) -> Iterator[Hub]:
    """Serve the files below `root` as `repo`; set HF_ENDPOINT to `url` of what is yielded."""
    hub = Hub(repo, root, **behaviour)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            api = f"/api/{hub.kind}/{hub.repo}"
            place = "" if hub.kind == "models" else f"/{hub.kind}"
            if content := re.fullmatch(f"{place}/{hub.repo}/resolve/[^/]+/(.+)", path):
                return self.content(content[1])
            hub.calls["api"] += 1
            if path == api or path.startswith(f"{api}/revision/"):
                siblings = [{"rfilename": n, "size": hub.describe(n)["size"]} for n in hub.files()]
                return self.answer({"id": hub.repo, "sha": COMMIT, "siblings": siblings, "private": False})
            if path.startswith(f"{api}/tree/"):
                return self.answer([hub.describe(name) for name in hub.files()])
            return self.fail(404, "RepoNotFound")

        do_HEAD = do_GET

        def do_POST(self):
            hub.calls["api"] += 1
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            asked = json.loads(body)["paths"] if body.startswith("{") else re.findall(r"paths=([^&]+)", body)
            known = [unquote(name) for name in asked if unquote(name) in hub.files()]
            self.answer([hub.describe(name) for name in known])

        def content(self, name: str) -> None:
            hub.calls[self.command] += 1
            if hub.refuse > 0:
                hub.refuse -= 1
                self.fail(hub.status, hub.code)
                return
            data = (hub.root / name).read_bytes()
            begin, end = 0, len(data) - 1
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                begin, end = int(wanted[1]), min(int(wanted[2] or end), end)
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(end + 1 - begin))
            self.send_header("Content-Range", f"bytes {begin}-{end}/{len(data)}")
            self.send_header("ETag", f'"{hub.describe(name)["oid"]}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                hub.sent += end + 1 - begin
                self.wfile.write(data[begin : end + 1])

        def answer(self, content) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def fail(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            if status == 429:
                self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
