#!/usr/bin/env bash
# flash-attn 2.8.3.post2 and flash-attn-4 4.0.0b36 own twenty files of the same names, flash_attn/cute/*.py. Whichever is
# installed last wins, without a word of pip: FlashAttention-4 then runs an old interface.py out of flash-attn's source beside
# files of its own. Uninstalling flash-attn takes flash-attn-4's twenty along, which still counts as installed.
# Seen 2026-11-28, Python 3.11, torch 2.13.0:
#   of 56 files of flash-attn-4, after flash-attn: changed 20, missing 0; after flash-attn is uninstalled: changed 0, missing 20
# Fails if a number is another. What helps: pip install --force-reinstall --no-deps flash-attn-4==4.0.0b36 as the last step.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
pip="$directory/venv/bin/pip"
"$pip" install --quiet torch==2.13.0 setuptools==80.9.0 wheel==0.45.1 psutil==7.1.0 ninja==1.13.0 packaging==25.0
"$pip" install --no-deps --quiet flash-attn-4==4.0.0b36
export FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE # its Python alone
"$pip" install --no-deps --no-build-isolation --quiet flash-attn==2.8.3.post2
PIP_DISABLE_PIP_VERSION_CHECK=1 "$directory/venv/bin/python" - <<'END'
import base64
import hashlib
import subprocess
import sys
from importlib.metadata import distribution

files = [each for each in distribution("flash-attn-4").files if each.suffix == ".py"]


def count():
    """(changed, missing) by the hashes of the package's own record."""
    there = [each for each in files if each.locate().exists()]
    hashes = [base64.urlsafe_b64encode(hashlib.sha256(each.read_binary()).digest()).decode().rstrip("=") for each in there]
    return sum(found != each.hash.value for found, each in zip(hashes, there)), len(files) - len(there)


beside = count()
subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", "flash-attn"], check=True)
after = count()
said = [f"changed {changed}, missing {missing}" for changed, missing in (beside, after)]
print(f"of {len(files)} files of flash-attn-4, after flash-attn: {said[0]}; after flash-attn is uninstalled: {said[1]}")
assert (beside, after) == ((20, 0), (0, 20))
END
