"""Write THIRD_PARTY_NOTICES.md: the licence of each package of the locks. docker/lock.sh calls it.

python3 docker/notices.py REPORT        REPORT: what `pip install --dry-run --report` says of the packages

docs/supply_chain.md says which licences are allowed; tests/test_supply_chain.py compares all three.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docker.install_requirements import Locked, closure, name_of, read_lock  # noqa: E402

LOCKS = ("requirements.lock", "requirements-hyperpod.lock")
NOTICES = "THIRD_PARTY_NOTICES.md"
# What metadata say in other words than SPDX's.
SPDX = {
    "apache": "Apache-2.0",
    "apache2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "3-clause bsd license": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "bsd": "LicenseRef-BSD",
    "bsd license": "LicenseRef-BSD",
    "isc license": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "nvidia proprietary software": "LicenseRef-NVIDIA-Proprietary",
    "python software foundation license": "PSF-2.0",
}
# By the files in them: packages whose metadata name no licence, or two without AND or OR; and those that exist as
# source only, which pip cannot ask without compiling.
READ_BY_HAND = {
    "cuda-toolkit": "LicenseRef-NVIDIA-Proprietary",  # no file: it only names packages of NVIDIA's
    "flash-attn": "BSD-3-Clause",
    "hyperpod-elastic-agent": "LicenseRef-AWS-Customer-Agreement",
    "nvidia-cutlass-dsl": "LicenseRef-NVIDIA-Proprietary",
    "nvidia-cutlass-dsl-libs-base": "LicenseRef-NVIDIA-Proprietary",
    "nvidia-cutlass-dsl-libs-core": "LicenseRef-NVIDIA-Proprietary",
    "nvidia-cutlass-dsl-libs-cu12": "LicenseRef-NVIDIA-Proprietary",
    "nvidia-cutlass-dsl-libs-cu13": "LicenseRef-NVIDIA-Proprietary",
    "python-dateutil": "Apache-2.0 OR BSD-3-Clause",
    "quack-kernels": "Apache-2.0",
    "transformer-engine": "Apache-2.0",
    "transformer-engine-cu13": "Apache-2.0",
    "transformer-engine-torch": "Apache-2.0",
}
HEAD = """\
# Third-party notices

Made by `docker/lock.sh`: the packages that a user of this project can install (`requirements.lock` and
`requirements-hyperpod.lock`), with the licence that each states of itself, as an [SPDX](https://spdx.org/licenses/)
expression; those that state none were read in the package. `for` names what a package comes with: `training` is
`requirements.txt`, `gpu` is `requirements-gpu.txt`, and so on. This project's wheel contains none of them. Where they
are installed, in an image too, the texts that they come with lie in their `*.dist-info`.

Which licences are allowed: [docs/supply_chain.md](docs/supply_chain.md#licences). In this repository itself lies
`docs/iframe-worker.js`, iframe-worker 1.0.4, MIT; its notice is in the file.

| package | version | licence | for |
|---|---|---|---|
"""


def spdx(text: str) -> str | None:
    """The SPDX expression that a licence's words in a package's metadata mean; None of other words."""
    try:
        return SPDX.get(text.lower()) or canonicalize_license_expression(text)
    except InvalidLicenseExpression:
        return None


def licence_of(name: str, metadata: dict) -> str | None:
    """A package's licence by its metadata, in the words of pip's report; None if they do not say one."""
    kinds = [one.split(" :: ")[-1] for one in metadata.get("classifier", []) if one.startswith("License ::")]
    stated = [metadata.get("license_expression"), (metadata.get("license") or "").strip(), *kinds[:1]]
    return READ_BY_HAND.get(name) or next(filter(None, map(spdx, filter(None, stated))), None)


def groups(lock: dict[str, Locked]) -> dict[str, list[str]]:
    """What each package of a lock comes with: `training` alone, or else the extras."""
    files = sorted({wish for package in lock.values() for wish in package.wanted_by if wish.startswith("-r ")})
    found = {name: [] for name in lock}
    for file in (file.removeprefix("-r ") for file in files):
        group = re.sub(r"requirements-?|\.txt", "", file) or "training"
        for name in closure(lock, [file], set()):
            found[name].append(group)
    return {name: ["training"] if "training" in of else of for name, of in found.items()}


def main(report: Path) -> int:
    """0; 1 if a package's licence is not known."""
    metadata = {name_of(one["metadata"]["name"]): one["metadata"] for one in json.loads(report.read_text())["install"]}
    rows, unknown = {}, set()
    for lock in (read_lock(ROOT / file) for file in LOCKS):
        for name, of in groups(lock).items():
            licence, version = licence_of(name, metadata.get(name, {})), lock[name].pinned.split()[0].split("==")[1]
            unknown |= set() if licence else {name}
            version, licence, earlier = rows.get(name, (version, licence, []))
            rows[name] = version, licence, earlier + of
    for name in sorted(unknown):
        print(
            f"error: {name}: its metadata say no licence: read it in the package, into READ_BY_HAND", file=sys.stderr
        )
    if unknown:
        return 1
    lines = [f"| {name} | {row[0]} | {row[1]} | {', '.join(row[2])} |\n" for name, row in sorted(rows.items())]
    (ROOT / NOTICES).write_text(HEAD + "".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
