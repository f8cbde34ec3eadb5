#!/usr/bin/env bash
# Build the image ${DOCKER_IMAGE_NAME}:${TAG}; a second run takes seconds.
#
#   ./build.sh                                        NVIDIA's PyTorch image as base
#   ./build.sh -f Dockerfile.cuda                     a plain CUDA image
#   ./build.sh --build-arg EFA_INSTALLER_VERSION=     any arguments of docker build
#   ./build.sh --release --build-arg BASE_IMAGE=NAME@sha256:...    refused unless the files are the commit's and the base has
#                                                     a digest (docs/supply_chain.md)
#
# Its labels org.opencontainers.image.version, .revision and .base.name have the version of pyproject.toml, the commit and
# the base.
# DOCKER_IMAGE_NAME (esm) and TAG (the commit) name it: see docker/env.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/docker/env.sh"

if [ "${1:-}" = --release ]; then
  shift
  [[ " $* " =~ [\ =]BASE_IMAGE=[^\ ]+@sha256:[0-9a-f]{64}\  ]] ||
    fail "--release: a tag of the base can become another image: add --build-arg BASE_IMAGE=NAME@sha256:DIGEST"
  case $(commit 40 || echo -dirty) in *-dirty) fail "--release: the files are not those of a commit: see git status" ;; esac
fi

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")
docker build --build-arg VERSION="$version" --build-arg COMMIT="$(commit 40 || echo unknown)" --tag "$image" "$@" "$root" ||
  fail "docker could not build $image: see above"
echo "Built $image. Next: ./push.sh for Kubernetes, ./enroot.sh for Slurm"
