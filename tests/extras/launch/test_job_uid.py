"""Which job a pod belongs to, asked of an API as a pod asks: with its account's token, over TLS."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from extras.launch.restarts import set_job_uid

POD = {
    "metadata": {
        "ownerReferences": [
            {"kind": "Other", "uid": "0"},
            {"kind": "PyTorchJob", "name": "esm2", "uid": "1b2c", "controller": True},
        ]
    }
}


class Api(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path == f"/api/v1/namespaces/team/pods/{socket.gethostname()}"
        self.send_response(200 if known and self.headers["Authorization"] == "Bearer secret" else 403)
        self.end_headers()
        self.wfile.write(json.dumps(POD).encode())

    def log_message(self, *_) -> None: ...


def certify(directory: Path) -> ssl.SSLContext:
    """A server's context; ca.crt, for its clients, in the directory."""
    pytest.importorskip("cryptography", reason="./install.sh --dev")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "api")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(True, None), True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (directory / "ca.crt").write_bytes(certificate.public_bytes(pem))
    (directory / "key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "ca.crt", directory / "key")
    return context


@pytest.fixture
def account(tmp_path, monkeypatch):
    """The directory of a pod's account, and an API that knows it."""
    server = HTTPServer(("127.0.0.1", 0), Api)
    server.socket = certify(tmp_path).wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "namespace").write_text("team\n")
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("JOB_UID", "")  # restored afterwards, whatever is set meanwhile
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # a closed port
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
    yield tmp_path
    server.shutdown()
    server.server_close()


def test_job_uid_is_the_pods_owner(account):
    set_job_uid(account)
    assert os.environ["JOB_UID"] == "1b2c"


def test_job_uid_is_not_queried_if_known(account, monkeypatch, capsys):
    (account / "token").write_text("another")
    monkeypatch.setenv("JOB_UID", "known")
    set_job_uid(account)
    assert (os.environ["JOB_UID"], capsys.readouterr().err) == ("known", "")


def test_job_uid_warns_if_forbidden_and_needs_a_token(account, capsys):
    (account / "token").write_text("another")
    set_job_uid(account)
    said = capsys.readouterr().err
    assert said.startswith("warning: the API does not say this pod's job (kubernetes/job-uid.yaml): HTTPError: ")
    assert said.count("\n") == 1
    (account / "token").unlink()
    set_job_uid(account)
    assert (os.environ["JOB_UID"], capsys.readouterr().err) == ("", "")
