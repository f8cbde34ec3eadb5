"""A base image made of this machine's own files, in the place of NVIDIA's: Debian's essentials, Python, torch.

Nothing is downloaded. Like NVIDIA's it brings torch and a /etc/pip/constraint.txt. One package of the requirements is
left to be installed (tqdm), from a wheel that only the base's constraints allow, and pip has no index to ask. Of the
largest packages the image has only what pip reads; `docker run` is to be given the rest, which need not be copied so.
"""

from __future__ import annotations

import email
import functools
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

PYTHON = "/opt/python"
VENV = "/opt/venv"
BASE_TQDM = "4.99.0"  # in no index, so whoever has it has it from the base's constraints
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
SITE_PACKAGES = f"{VENV}/lib/{VERSION}/site-packages"
LARGE_BYTES = 4 << 20
# Left out for their size, and what the build is to install.
UNWANTED = {"test", "idlelib", "include", "tqdm"}
UNWANTED |= {"awscli", "cryptography", "flask", "jsonschema", "kubernetes_validate", "moto", "peft"}  # in no image
SETTINGS = f"ENV PATH={VENV}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
SETTINGS += f" LD_LIBRARY_PATH={PYTHON}/lib PIP_NO_INDEX=1 PIP_FIND_LINKS=/opt/wheels"


def import_base_image(name: str, environment: dict[str, str]) -> None:
    """Make the image in the engine that `environment` is for."""
    command = ["docker", "import", "--change", SETTINGS, "-", name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
    with tarfile.open(fileobj=process.stdin, mode="w|") as archive:
        _add_debian(archive)
        _add_python(archive)
        _add_text(archive, "/etc/pip/constraint.txt", f"# versions this base was tested with\ntqdm=={BASE_TQDM}\n")
        _add_bytes(archive, f"/opt/wheels/tqdm-{BASE_TQDM}-py3-none-any.whl", _tqdm_wheel())
    process.stdin.close()
    assert process.wait() == 0


def mounts() -> list[str]:
    """Options of `docker run` that bring the packages which are not in the image."""
    return [f"--volume={path}:{SITE_PACKAGES}/{path.name}:ro" for path in _large_packages()]


@functools.cache
def _large_packages() -> list[Path]:
    """Those that whoever a container runs as can read here; pip itself runs in the build."""
    candidates = [p for p in _site_packages().iterdir() if p.is_dir() and p.name not in UNWANTED | {"pip"}]
    candidates = [p for p in candidates if all(parent.stat().st_mode & 0o5 == 0o5 for parent in (p, *p.glob("*/")))]
    sizes = {p: sum(file.lstat().st_size for file in p.rglob("*")) for p in candidates}
    return [p for p, size in sizes.items() if size > LARGE_BYTES]


def _add_debian(archive: tarfile.TarFile) -> None:
    """Files of the packages every Debian has, and the libraries that Python and its packages are linked with."""
    listing = _lines("dpkg-query", "--show", "--showformat", "${Package} ${Priority} ${Essential}\n")
    packages = [line.split()[0] for line in listing if {"required", "yes"} & set(line.split()[1:])]
    files = _lines("dpkg-query", "--listfiles", *packages)
    paths = {Path(file) for file in files if file.startswith("/") and not file.startswith("/usr/share/")}
    paths |= {Path(name) for name in ("/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache")}
    paths -= {Path("/etc/passwd"), Path("/etc/group"), Path("/etc/shadow")}
    programs = [path for path in paths if path.parent.name in ("bin", "sbin") and path.is_file()]
    for library in _libraries(programs):
        paths |= {library, library.resolve()}
    # /bin and the like may be links to the folders below /usr, for all paths through them.
    paths = {path.parent.resolve() / path.name for path in paths}
    paths |= {parent for path in paths for parent in path.parents}
    for path in sorted(paths - {Path("/"), Path("/tmp")}):
        if path.exists() or path.is_symlink():
            archive.add(path, arcname=str(path).lstrip("/"), recursive=False)
    _add_directory(archive, "/tmp", 0o1777)
    _add_text(archive, "/etc/passwd", "root:x:0:0:root:/root:/bin/bash\n")
    _add_text(archive, "/etc/group", "root:x:0:\n")
    _add_text(archive, "/etc/shadow", "root:*:19000:0:99999:7:::\n", mode=0o600)


def _libraries(programs: list[Path]) -> Iterator[Path]:
    """Shared libraries of the machine that these, Python and torch are linked with."""
    modules = [*_stdlib().rglob("*.so"), *(_site_packages() / "torch" / "lib").glob("*.so")]
    for line in _lines("ldd", *map(str, programs), sys.executable, *map(str, modules)):
        if match := re.search(r"=> (/(?:usr/)?lib\S+)|^\s+(/lib\S+)", line):
            yield Path(match[1] or match[2])


def _add_python(archive: tarfile.TarFile) -> None:
    """The interpreter and its library in /opt/python, and the packages beside these tests in a venv."""
    large = {f"{SITE_PACKAGES[1:]}/{path.name}" for path in _large_packages()}

    def keep(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.mode |= 0o444 | (0o111 if entry.isdir() else 0)
        entry.uid = entry.gid = 0
        parts = Path(entry.name).parts
        if entry.name in large or UNWANTED & set(parts) or any(part.startswith("tqdm-") for part in parts):
            return None
        return entry

    _add_directory(archive, PYTHON, 0o755)
    archive.add(Path(sys.executable).resolve(), f"{PYTHON[1:]}/bin/{VERSION}")
    stdlib = f"{PYTHON[1:]}/lib/{VERSION}"
    archive.add(_stdlib(), stdlib, filter=lambda entry: None if "site-packages" in entry.name else keep(entry))
    for library in (Path(sys.base_prefix) / "lib").glob("libpython*.so*"):
        archive.add(library, f"{PYTHON[1:]}/lib/{library.name}")
    _add_text(archive, f"{VENV}/pyvenv.cfg", f"home = {PYTHON}/bin\n")
    for name in ("python", "python3"):
        link = tarfile.TarInfo(f"{VENV[1:]}/bin/{name}")
        link.type, link.linkname = tarfile.SYMTYPE, f"{PYTHON}/bin/{VERSION}"
        archive.addfile(link)
    torchrun = f"#!{VENV}/bin/python\nfrom torch.distributed.run import main\nmain()\n"
    _add_text(archive, f"{VENV}/bin/torchrun", torchrun, mode=0o755)
    archive.add(_site_packages(), SITE_PACKAGES[1:], filter=keep)


def _tqdm_wheel() -> bytes:
    """The installed tqdm, as a wheel of another version."""
    distribution = metadata.distribution("tqdm")
    described = email.message_from_string(distribution.read_text("METADATA"))
    described.replace_header("Version", BASE_TQDM)
    info = f"tqdm-{BASE_TQDM}.dist-info"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as wheel:
        for file in distribution.files:
            if file.parts[0] == "tqdm" and file.suffix == ".py":
                wheel.writestr(str(file), file.read_text())
        wheel.writestr(f"{info}/METADATA", described.as_string())
        wheel.writestr(f"{info}/WHEEL", distribution.read_text("WHEEL"))
        wheel.writestr(f"{info}/RECORD", "")
    return content.getvalue()


def _stdlib() -> Path:
    return Path(sys.base_prefix) / "lib" / VERSION


def _site_packages() -> Path:
    return Path(metadata.distribution("torch").locate_file(""))


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def _add_directory(archive: tarfile.TarFile, path: str, mode: int) -> None:
    entry = tarfile.TarInfo(path.lstrip("/"))
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    archive.addfile(entry)


def _add_text(archive: tarfile.TarFile, path: str, text: str, mode: int = 0o644) -> None:
    _add_bytes(archive, path, text.encode(), mode)


def _add_bytes(archive: tarfile.TarFile, path: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(path.lstrip("/"))
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))
