#!/usr/bin/env bash
# Make the image a file for enroot and pyxis: ${TARGET_PATH}/${DOCKER_IMAGE_NAME}.sqsh
#
# TARGET_PATH          a folder on the filesystem that the cluster's nodes share
# DOCKER_IMAGE_NAME (esm), TAG (the commit): see docker/env.sh
#
# The file appears complete or not at all: an earlier one stays in use until then, and if anything fails.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/docker/env.sh"

[ -n "${TARGET_PATH:-}" ] || fail "TARGET_PATH is not set: export TARGET_PATH=/a/folder/on/the/shared/filesystem"
command -v enroot >/dev/null || fail "enroot is not installed, or not on PATH (https://github.com/NVIDIA/enroot)"
docker image inspect "$image" >/dev/null 2>&1 ||
  fail "there is no image $image here: run ./build.sh with the same DOCKER_IMAGE_NAME and TAG first"

file=$TARGET_PATH/$DOCKER_IMAGE_NAME.sqsh
mkdir -p "$(dirname "$file")" || fail "cannot make the folder of $file"
# On the same filesystem, so that the renaming is one step.
unfinished=$file.$(hostname).$$
trap 'rm -f "$unfinished"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

enroot import --output "$unfinished" "dockerd://$image" || fail "enroot could not import $image: see above; $file is as it was"
[ -s "$unfinished" ] || fail "enroot left no file for $image; $file is as it was"
mv -f "$unfinished" "$file" || fail "cannot rename $unfinished to $file"
echo "Wrote $file"
