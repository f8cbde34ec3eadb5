#!/usr/bin/env bash
# Last step of the Dockerfiles, as root: a user for whom nothing has to be writable, and scripts that he may read.
set -euo pipefail

# Some base images have a user 1000 already.
getent passwd 1000 >/dev/null || useradd --uid 1000 --create-home --shell /bin/bash trainer
# The checkout may have been private to its owner.
chmod a+rx /workspace
chmod -R a+rX /workspace
# Bytecode cannot be written later.
python3 -m compileall -q /workspace/common /workspace/extras /workspace/tests
rm -rf /tmp/build
