#!/usr/bin/env bash
# Make requirements.lock and requirements-hyperpod.lock anew: every package of a user or an image with the sha256 of each
# of its files; and THIRD_PARTY_NOTICES.md, with their licences. After a change of requirements*.txt or constraints.txt.
# Installed is nothing but uv, torch and a newer pip, in a folder that is removed.
#
#   docker/lock.sh        x86-64 or arm64, Python 3.11 or 3.12: the hashes of a version are those of all its files
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in -h | --help) sed -n '2,/^[^#]/{/^#/!d;s/^# \{0,1\}//;p;}' docker/lock.sh; exit 0 ;; esac
[ $# -eq 0 ] || { echo "error: docker/lock.sh takes no arguments, not $*" >&2; exit 2; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# The GPU packages come as sources, which are asked for their requirements: with torch at hand, without compiling.
"$work/venv/bin/pip" install --quiet 'pip>=25' uv==0.13.9 -r requirements-build.txt "$(grep '^torch==' requirements.txt)"
export FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE UV_NO_FIND_LINKS=1
"$work/venv/bin/uv" pip compile --quiet --python "$work/venv/bin/python" --no-build-isolation \
  --python-version 3.12 --python-platform x86_64-manylinux_2_28 --generate-hashes --annotation-style line --no-header \
  requirements.txt requirements-{build,finetune,gpu,map,onnx,structures,test,trackers}.txt \
  -c constraints.txt --output-file "$work/lock" >/dev/null
{
  echo "# Made by docker/lock.sh; docker/install_requirements.py reads it. Every package that a user or an image can"
  echo "# install, but the developers' tools, with the sha256 of its files, and what it is there for."
  cat "$work/lock"
} >requirements.lock.new
mv requirements.lock.new requirements.lock

# Dockerfile.hyperpod's, without the torch that its agent asks for.
printf '%s; sys_platform == "never"\n' torch pip >"$work/without"
"$work/venv/bin/uv" pip compile --quiet --python "$work/venv/bin/python" \
  --python-version 3.12 --python-platform x86_64-manylinux_2_28 --generate-hashes --annotation-style line --no-header \
  requirements-hyperpod.txt -c requirements.lock --override "$work/without" --output-file "$work/hyperpod" >/dev/null
{
  echo "# Made by docker/lock.sh; Dockerfile.hyperpod reads it."
  cat "$work/hyperpod"
} >requirements-hyperpod.lock

# Their metadata; of those that exist as source only they cannot be asked without compiling (docker/notices.py knows them).
grep --no-filename --only-matching --extended-regexp '^[^# ]+==[^ ]+' requirements.lock requirements-hyperpod.lock |
  grep --invert-match --extended-regexp '^(flash-attn|transformer-engine-torch|hyperpod-elastic-agent)==' |
  sort --unique >"$work/pins"
"$work/venv/bin/pip" install --quiet --dry-run --ignore-installed --no-deps --only-binary :all: \
  --report "$work/report.json" -r "$work/pins"
"$work/venv/bin/python" docker/notices.py "$work/report.json"
