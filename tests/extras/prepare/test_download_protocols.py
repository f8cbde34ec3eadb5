"""Downloads: what HTTP, TLS and FTP do to a file on its way."""

import datetime
import ipaddress
from pathlib import Path

import pytest

from extras.prepare.download import RetryPolicy, download
from extras.prepare.sources.fasta import read_fasta_lines
from extras.prepare.transfers import FetchError
from tests.extras.prepare.local_servers import CONTENT, QUICK, THIRD, ftp_server, http_server, sums

# --- encodings and redirects


def test_http_keeps_content_encoding_gzip(tmp_path):
    """Readers detect gzip by content, whatever the name."""
    with http_server(CONTENT, encoding="gzip", break_after=[THIRD]) as server:
        path = download(f"{server.url}/u.fasta", tmp_path, sums(CONTENT), QUICK)
    assert sum(map(len, read_fasta_lines(path))) == 50_000
    assert server.ranges == [None, f"bytes={THIRD}-"]


def test_http_refuses_other_content_encodings(tmp_path):
    with (
        http_server(CONTENT, encoding="br") as server,
        pytest.raises(FetchError, match="Content-Encoding br unrequested"),
    ):
        download(f"{server.url}/a", tmp_path / "d", retries=QUICK)
    assert not list(tmp_path.iterdir())


def test_http_follows_redirects_also_when_resuming(tmp_path):
    with http_server(CONTENT, break_after=[THIRD], redirects={"/moved": "/u.fasta.gz"}) as server:
        assert download(f"{server.url}/moved", tmp_path, sums(CONTENT), QUICK).read_bytes() == CONTENT
        assert server.ranges == [None, f"bytes={THIRD}-"]
        server.redirects["/loop"] = "/loop"
        with pytest.raises(FetchError, match="HTTP 302"):
            download(f"{server.url}/loop", tmp_path, retries=QUICK)
    with (
        ftp_server(CONTENT) as ftp,
        http_server(CONTENT, redirects={"/moved": f"{ftp.url}/u.fasta.gz"}) as server,
        pytest.raises(FetchError, match=rf"redirects to {ftp.url}/u.fasta.gz: give that address"),
    ):
        download(f"{server.url}/moved", tmp_path, retries=QUICK)


def test_http_quotes_spaces(tmp_path):
    with http_server({"/my%20proteins.fasta": CONTENT}) as server:
        assert download(f"{server.url}/my proteins.fasta", tmp_path, retries=QUICK).read_bytes() == CONTENT


# --- TLS


def certificate(directory: Path) -> tuple[str, str]:
    """Files of a self-signed certificate for 127.0.0.1 and of its key."""
    pytest.importorskip("cryptography", reason="./install.sh --dev")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (directory / "cert.pem").write_bytes(signed.public_bytes(pem))
    plain = serialization.NoEncryption()
    (directory / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return str(directory / "cert.pem"), str(directory / "key.pem")


def test_https_refuses_bad_certificates_and_redirects_to_http(tmp_path, monkeypatch):
    tls = certificate(tmp_path)
    with http_server(CONTENT, tls=tls) as server:
        with pytest.raises(FetchError, match="bad TLS certificate: self-signed certificate: .*set SSL_CERT_FILE"):
            download(f"{server.url}/a", tmp_path / "d", retries=RetryPolicy(first_wait_s=60))
        assert not (tmp_path / "d").exists()
        monkeypatch.setenv("SSL_CERT_FILE", tls[0])
        assert download(f"{server.url}/a", tmp_path / "d", retries=QUICK).read_bytes() == CONTENT
        with http_server(CONTENT) as plain:
            server.redirects["/moved"] = f"{plain.url}/a"
            with pytest.raises(FetchError, match=f"redirects to {plain.url}/a, which is not encrypted"):
                download(f"{server.url}/moved", tmp_path / "f", retries=RetryPolicy(first_wait_s=60))
            assert plain.ranges == []
    with http_server(CONTENT) as server, pytest.raises(FetchError, match="does not speak TLS"):
        download(server.url.replace("http:", "https:") + "/a", tmp_path / "e", retries=RetryPolicy(first_wait_s=60))


# --- FTP


def test_ftp_resumes(tmp_path):
    with ftp_server({"/pub/u.fasta.gz": CONTENT}, break_after=[THIRD]) as server:
        path = download(f"{server.url}/pub/u.fasta.gz", tmp_path, sums(CONTENT), QUICK)
        assert path.read_bytes() == CONTENT
        assert server.starts == [0, THIRD]
        with pytest.raises(FetchError, match="FTP 550"):
            download(f"{server.url}/absent", tmp_path / "d", retries=QUICK)
    assert not (tmp_path / "d").exists()


def test_ftp_without_dates_restarts(tmp_path):
    with ftp_server(CONTENT, break_after=[THIRD], lacking="mdtm") as server:
        assert download(f"{server.url}/u.fasta.gz", tmp_path, sums(CONTENT), QUICK).read_bytes() == CONTENT
        assert server.starts == [0, 0]


def test_ftp_removes_a_part_that_is_too_long(tmp_path):
    with (
        ftp_server(CONTENT, claims=-100) as server,
        pytest.raises(FetchError, match=rf"{len(CONTENT):,} of {len(CONTENT) - 100:,} bytes arrived \(3 attempts\)"),
    ):
        download(f"{server.url}/a", tmp_path / "d", retries=QUICK)
    assert server.starts == [0, 0, 0]
    assert not list(tmp_path.iterdir())
