#!/usr/bin/env bash
# Build the image ${DOCKER_IMAGE_NAME}:${TAG}; a second run takes seconds.
#
#   ./build.sh                                        NVIDIA's PyTorch image as base
#   ./build.sh -f Dockerfile.cuda                     a plain CUDA image
#   ./build.sh --build-arg EFA_INSTALLER_VERSION=     any arguments of docker build
#
# Its labels org.opencontainers.image.version and .revision have the version of pyproject.toml and the commit.
# DOCKER_IMAGE_NAME (esm) and TAG (the commit) name it: see docker/env.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/docker/env.sh"

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")
docker build --build-arg VERSION="$version" --build-arg COMMIT="$(commit 40 || echo unknown)" --tag "$image" "$@" "$root" ||
  fail "docker could not build $image: see above"
echo "Built $image. Next: ./push.sh for Kubernetes, ./enroot.sh for Slurm"
