# shellcheck shell=bash
# The variables of build.sh, push.sh and enroot.sh, each from the environment or else computed; sourced by them.
#
# DOCKER_IMAGE_NAME   name of the image and of its repository (esm)
# TAG                 its tag (the commit; with -dirty if files differ from it)

case ${1:-} in -h | --help) sed -n '2,/^[^#]/{/^#SBATCH/d;/^#/!d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;; esac

fail() { echo "error: $*" >&2; exit 2; }

# The checkout's commit, with -dirty if its files differ from it. Fails where there is no git or no checkout.
commit() { git -C "$root" describe --always --exclude '*' --abbrev="$1" --dirty 2>/dev/null; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DOCKER_IMAGE_NAME=${DOCKER_IMAGE_NAME:-esm}
TAG=${TAG:-$(commit 12)} || fail "TAG is not set and $root is no git checkout to take it from: export TAG=..."
# shellcheck disable=SC2034  # for the scripts that source this
image=$DOCKER_IMAGE_NAME:$TAG

command -v docker >/dev/null || fail "docker is not installed, or not on PATH"
docker info >/dev/null 2>&1 || fail "no Docker engine answers: is it running, and may $(id -un) use it?"
