"""HTTP(S) and FTP servers, and a proxy, that break off, stall, lie and forget headers on request; what to fetch."""

from __future__ import annotations

import gzip
import hashlib
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from extras.prepare.download import Expected, RetryPolicy

QUICK = RetryPolicy(timeout_s=5.0, attempts=3, first_wait_s=0.01, longest_wait_s=0.05)
CONTENT = gzip.compress("".join(f">P{i} x\nMKVLAGTYRR\n" for i in range(50_000)).encode(), mtime=0)
THIRD = len(CONTENT) * 3 // 10


def sums(content: bytes, **extra) -> Expected:
    return Expected({name: hashlib.new(name, content).hexdigest() for name in ("md5", "sha256")}, **extra)


@dataclass
class Server:
    """What it serves, what is to go wrong, and what it was asked. Lists are used up, one item a transfer."""

    content: bytes | dict[str, bytes]  # at every path, or by path
    etag: str = '"1"'
    last_modified: str = ""
    break_after: list[int] = field(default_factory=list)  # bytes, after which the connection is closed
    stall_s: float = 0.0  # silence before it is
    trickle_after: list[int] = field(default_factory=list)  # bytes, after which 1,000 a second follow
    statuses: list[int] = field(default_factory=list)  # errors to answer first
    retry_after: str = ""  # sent with them
    lacking: str = ""  # "ranges", "if-range", "validator", "length"; FTP: "mdtm"
    claims: int = 0  # bytes to add to the true Content-Length, or SIZE
    encoding: str = ""  # Content-Encoding to declare; `content` is what is sent
    redirects: dict[str, str] = field(default_factory=dict)
    tls: tuple[str, str] | None = None  # files of certificate and key
    next: tuple[bytes, str] | None = None  # content and ETag from the second request on

    url: str = ""
    ranges: list[str | None] = field(default_factory=list)  # HTTP: Range of each transfer
    starts: list[int] = field(default_factory=list)  # FTP: REST of each transfer

    def at(self, path: str) -> bytes | None:
        return self.content if isinstance(self.content, bytes) else self.content.get(path)

    def turn_over(self) -> None:
        if self.next:
            (self.content, self.etag), self.next = self.next, None

    def send(self, write: Callable[[bytes], object], content: bytes, start: int) -> None:
        end = start + self.break_after.pop(0) if self.break_after else len(content)
        fast = min(start + self.trickle_after.pop(0), end) if self.trickle_after else end
        write(content[start:fast])
        for position in range(fast, end, 10):
            write(content[position : min(position + 10, end)])
            time.sleep(0.01)
        if end < len(content):
            time.sleep(self.stall_s)


@contextmanager
def http_server(content: bytes | dict[str, bytes], **behaviour) -> Iterator[Server]:
    """Also a proxy: of an absolute address only the path counts."""
    state = Server(content, **behaviour)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            with suppress(ConnectionError):  # the client has had enough
                self.answer(urlsplit(self.path).path)
            self.close_connection = True

        def answer(self, path: str) -> None:
            if path in state.redirects:
                self.send_response(302)
                self.send_header("Location", state.redirects[path])
                self.end_headers()
                return
            content = state.at(path)
            if state.statuses or content is None:
                self.send_response(state.statuses.pop(0) if state.statuses else 404)
                if state.retry_after:
                    self.send_header("Retry-After", state.retry_after)
                self.end_headers()
                return
            wanted = self.headers.get("Range")
            state.ranges.append(wanted)
            validator = state.etag or state.last_modified
            same = state.lacking == "if-range" or self.headers.get("If-Range", validator) == validator
            start = 0
            if wanted and state.lacking != "ranges" and same:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(content):
                    self.send_response(416)
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content) + state.claims}")
            else:
                self.send_response(200)
            if state.lacking != "length":
                self.send_header("Content-Length", str(len(content) - start + state.claims))
            if state.lacking != "validator":
                if state.etag:
                    self.send_header("ETag", state.etag)
                if state.last_modified:
                    self.send_header("Last-Modified", state.last_modified)
            if state.encoding:
                self.send_header("Content-Encoding", state.encoding)
            self.end_headers()
            state.turn_over()
            state.send(self.wfile.write, content, start)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if state.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*state.tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with _serving(server):
        state.url = f"http{'s' if state.tls else ''}://127.0.0.1:{server.server_address[1]}"
        yield state


@contextmanager
def ftp_server(content: bytes | dict[str, bytes], **behaviour) -> Iterator[Server]:
    """Just enough FTP: anonymous login, SIZE, MDTM, passive RETR with REST."""
    state = Server(content, **behaviour)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            start, passive = 0, None
            self.answer("220 ready")
            for raw in self.rfile:
                verb, _, argument = raw.decode().strip().partition(" ")
                content = state.at(argument)
                if verb in ("SIZE", "MDTM", "RETR") and content is None:
                    self.answer("550 no such file")
                elif verb == "SIZE":
                    self.answer(f"213 {len(content) + state.claims}")
                elif verb == "MDTM":
                    self.answer("500 unknown command" if state.lacking == "mdtm" else "213 20250101000000")
                elif verb == "REST":
                    start = int(argument)
                    self.answer("350 ok")
                elif verb in ("PASV", "EPSV"):
                    passive = socketserver.TCPServer(("127.0.0.1", 0), None)
                    port = passive.server_address[1]
                    self.answer(
                        f"227 (127,0,0,1,{port // 256},{port % 256})" if verb == "PASV" else f"229 ok (|||{port}|)"
                    )
                elif verb == "RETR":
                    state.starts.append(start)
                    connection, _ = passive.socket.accept()
                    self.answer("150 here it comes")
                    with suppress(ConnectionError):
                        state.send(connection.sendall, content, start)
                    connection.close()
                    passive.server_close()
                    self.answer("226 done")
                else:
                    self.answer("230 ok" if verb in ("USER", "PASS") else "200 ok")

        def answer(self, line: str) -> None:
            with suppress(ConnectionError):
                self.wfile.write(line.encode() + b"\r\n")

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    with _serving(server):
        state.url = f"ftp://127.0.0.1:{server.server_address[1]}"
        yield state


@dataclass
class Proxy:
    """`break_after`: bytes of answers after which each connection in turn is closed, once `before_closing` is done."""

    break_after: list[int]
    before_closing: Callable[[], object] = lambda: None
    trickle: bool = False  # instead of closing: pass on 1,000 bytes a second
    url: str = ""
    connections: int = 0
    passed: int = 0  # bytes of answers, in all


@contextmanager
def breaking_proxy(target_url: str, break_after: list[int], **behaviour) -> Iterator[Proxy]:
    """Relays TCP connections to another server's port."""
    state = Proxy(break_after, **behaviour)
    target = urlsplit(target_url)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            state.connections += 1
            left = state.break_after.pop(0) if state.break_after else None
            with socket.create_connection((target.hostname, target.port)) as upstream, suppress(OSError):
                threading.Thread(target=self.pass_requests, args=(upstream,), daemon=True).start()
                while data := upstream.recv(4096):
                    part = data if left is None else data[:left]
                    self.request.sendall(part)
                    state.passed += len(part)
                    if left is not None and (left := left - len(part)) == 0:
                        state.before_closing()
                        rest = data[len(part) :]
                        while state.trickle and (rest := rest or upstream.recv(4096)):
                            self.request.sendall(rest[:10])
                            rest = rest[10:]
                            time.sleep(0.01)
                        break

        def pass_requests(self, upstream: socket.socket) -> None:
            with suppress(OSError):
                while data := self.request.recv(4096):
                    upstream.sendall(data)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    with _serving(server):
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield state


@contextmanager
def _serving(server: socketserver.ThreadingMixIn) -> Iterator[None]:
    server.daemon_threads = True
    server.block_on_close = False  # a stalled transfer need not be waited for
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
