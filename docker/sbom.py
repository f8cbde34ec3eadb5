"""Write the software bill of materials of a lock: CycloneDX 1.6, as JSON.

python3 docker/sbom.py OUT.json [requirements-hyperpod.lock]       by default of requirements.lock

Each package with its version, package URL, licence (THIRD_PARTY_NOTICES.md), the sha256 of its files, and what needs
it; scope `required` is what training takes. Needs Python alone. The time in it is SOURCE_DATE_EPOCH, if that is set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import tomllib
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docker.install_requirements import closure, read_lock  # noqa: E402


def read_notices() -> dict[str, tuple[str, str]]:
    """Version and SPDX expression of each package in THIRD_PARTY_NOTICES.md."""
    text = (ROOT / "THIRD_PARTY_NOTICES.md").read_text(encoding="utf-8")
    return {
        name: (version, licence)
        for name, version, licence in re.findall(r"^\| (\S+) \| (\d\S*) \| (.+?) \|", text, re.M)
    }


def bill_of_materials(lock_file: Path) -> dict:
    """The CycloneDX document of a lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lock, notices = read_lock(lock_file), read_notices()
    versions = {name: package.pinned.split()[0].split("==")[1] for name, package in lock.items()}
    if stale := [name for name in lock if notices.get(name, ("",))[0] != versions[name]]:
        message = f"error: THIRD_PARTY_NOTICES.md has not {lock_file.name}'s {', '.join(stale)}: run docker/lock.sh"
        print(message, file=sys.stderr)
        sys.exit(2)
    urls = {name: f"pkg:pypi/{name}@{version}" for name, version in versions.items()}
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    required = closure(lock, ["requirements.txt"], set())
    components = [
        {
            "type": "library",
            "bom-ref": urls[name],
            "name": name,
            "version": versions[name],
            "scope": "required" if name in required else "optional",
            "licenses": [{"expression": notices[name][1]}],
            "purl": urls[name],
            "externalReferences": [
                {
                    "type": "distribution",
                    "url": urls[name],
                    "hashes": [
                        {"alg": "SHA-256", "content": digest}
                        for digest in re.findall(r"--hash=sha256:([0-9a-f]{64})", lock[name].pinned)
                    ],
                }
            ],
        }
        for name in lock
    ]
    needs = {
        urls[name]: [urls[other] for other, package in lock.items() if name in package.wanted_by] for name in lock
    }
    needs[own] = [
        urls[name] for name, package in lock.items() if any(by.startswith("-r ") for by in package.wanted_by)
    ]
    now = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, own + json.dumps(components)).urn,
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "licenses": [{"expression": project["license"]}],
                "purl": own,
            },
        },
        "components": components,
        "dependencies": [{"ref": one, "dependsOn": others} for one, others in needs.items()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("lock", nargs="?", default="requirements.lock")
    args = parser.parse_args()
    if not (ROOT / args.lock).is_file():
        parser.error(f"{args.lock}: no such file in {ROOT}")
    args.out.write_text(json.dumps(bill_of_materials(ROOT / args.lock), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
