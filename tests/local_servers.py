"""HTTP and FTP servers on this machine that break off, stall and forget headers on request."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _State:
    """Of a server: what it serves, what is to go wrong in the next transfers, and what it was asked."""

    def __init__(self, content: bytes, break_after=(), statuses=(), lacking="", stall_s=0.0) -> None:
        self.content, self.etag, self.next = content, '"1"', None
        self.break_after, self.statuses = list(break_after), list(statuses)
        self.lacking, self.stall_s = lacking, stall_s
        self.ranges: list[str | None] = []
        self.starts: list[int] = []
        self.url = ""

    def then(self, content: bytes, etag: str) -> None:
        """From the second request on, serve this."""
        self.next = (content, etag)


@contextmanager
def http_server(content: bytes, **behaviour) -> Iterator[_State]:
    """`break_after`: bytes after which each transfer in turn breaks off; `statuses`: errors to answer first."""
    state = _State(content, **behaviour)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if state.statuses:
                self.send_error(state.statuses.pop(0))
                return
            wanted = self.headers.get("Range")
            state.ranges.append(wanted)
            start = 0
            if wanted and state.lacking != "no ranges" and self.headers.get("If-Range", state.etag) == state.etag:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(state.content) - 1}/{len(state.content)}")
            else:
                self.send_response(200)
            if state.lacking != "no length":
                self.send_header("Content-Length", str(len(state.content) - start))
            if state.lacking != "no validator":
                self.send_header("ETag", state.etag)
            self.end_headers()
            end = start + state.break_after.pop(0) if state.break_after else len(state.content)
            body = state.content[start:end]
            if state.next:
                state.content, state.etag = state.next
                state.next = None
            self.wfile.write(body)
            self.wfile.flush()
            if end < len(state.content) and state.stall_s:
                time.sleep(state.stall_s)
            self.close_connection = True

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False  # a stalled transfer need not be waited for
    with _serving(server):
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield state


@contextmanager
def ftp_server(content: bytes, **behaviour) -> Iterator[_State]:
    """Just enough FTP: anonymous login, SIZE, MDTM, passive RETR with REST; one file, whose name is not `absent`."""
    state = _State(content, **behaviour)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            start, passive = 0, None
            self.answer("220 ready")
            for raw in self.rfile:
                verb, _, argument = raw.decode().strip().partition(" ")
                if argument.endswith("absent"):
                    self.answer("550 no such file")
                elif verb == "SIZE":
                    self.answer(f"213 {len(state.content)}")
                elif verb == "MDTM":
                    self.answer("213 20250101000000")
                elif verb == "REST":
                    start = int(argument)
                    self.answer("350 go on")
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
                    end = start + state.break_after.pop(0) if state.break_after else len(state.content)
                    connection.sendall(state.content[start:end])
                    connection.close()
                    passive.server_close()
                    self.answer("226 done")
                else:
                    self.answer("230 ok" if verb in ("USER", "PASS") else "200 ok")

        def answer(self, line: str) -> None:
            self.wfile.write(line.encode() + b"\r\n")

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with _serving(server):
        state.url = f"ftp://127.0.0.1:{server.server_address[1]}"
        yield state


@contextmanager
def _serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
