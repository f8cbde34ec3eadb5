#!/usr/bin/env bash
# Push ${DOCKER_IMAGE_NAME}:${TAG} to Amazon ECR. The last line, alone on standard output, is the reference by digest:
# the image to put into manifests, whatever happens to the tag later.
#
#   IMAGE_URI=$(./push.sh)
#
# REGISTRY             where to (${ACCOUNT}.dkr.ecr.${AWS_REGION}.amazonaws.com/); a registry that is not ECR must
#                      have been logged into and have the repository
# ACCOUNT, AWS_REGION  of the registry (those of the aws command's credentials and configuration)
# ECR_TAG_MUTABILITY   MUTABLE (default) or IMMUTABLE: of the repository, if it has to be made
# DOCKER_IMAGE_NAME (esm), TAG (the commit): see docker/env.sh
#
# A tag that has this very image already is left as it is, so a second run pushes nothing.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/docker/env.sh"

say() { echo "$*" >&2; }
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
need_aws() { command -v aws >/dev/null || fail "the aws command is not installed, or not on PATH"; }
# What aws says on standard error stays out of its answers: it warns there of Python's age, proxies, certificates.
ecr() { aws ecr "$1" --region "$AWS_REGION" --registry-id "$ACCOUNT" "${@:2}" 2>"$errors"; }
# The last line that a failed command had to say.
last_line() { grep -v '^ *$' "$errors" | tail -n 1; }

local_id=$(docker image inspect --format '{{.Id}}' "$image" 2>/dev/null) ||
  fail "there is no image $image here: run ./build.sh with the same DOCKER_IMAGE_NAME and TAG first"

if [ -z "${REGISTRY:-}" ]; then
  need_aws
  AWS_REGION=${AWS_REGION:-$(aws configure get region 2>/dev/null || true)}
  [ -n "$AWS_REGION" ] || fail "AWS_REGION is not set and the aws command has no default region: export AWS_REGION=..."
  if [ -z "${ACCOUNT:-}" ]; then
    answer=$(aws sts get-caller-identity --region "$AWS_REGION" --query Account --output text 2>"$errors") ||
      fail "ACCOUNT is not set and the aws command cannot tell it: $(last_line)"
    ACCOUNT=$answer
  fi
  [[ $ACCOUNT =~ ^[0-9]{12}$ ]] || fail "ACCOUNT=$ACCOUNT is no account of AWS: twelve digits"
  [[ $AWS_REGION =~ ^[a-z]+(-[a-z]+)+-[0-9]+$ ]] || fail "AWS_REGION=$AWS_REGION is no region of AWS: us-east-1, say"
  case $AWS_REGION in cn-*) suffix=amazonaws.com.cn ;; *) suffix=amazonaws.com ;; esac
  REGISTRY=$ACCOUNT.dkr.ecr.$AWS_REGION.$suffix
fi
REGISTRY=${REGISTRY%/}
case $REGISTRY in [./:]* | "") fail "REGISTRY=$REGISTRY has no host: unset it, or export REGISTRY=HOST/" ;; esac
remote=$REGISTRY/$DOCKER_IMAGE_NAME

# What the tag has in the repository: sets `there` to its digest if that is this very image, to nothing if there is no
# such tag, and to "another" if it is another image. An image is known by its configuration, which its manifest names,
# or, by engines with containerd's image store, by its manifest.
look_up_tag() {
  local answer digest manifest
  answer=$(ecr batch-get-image --repository-name "$DOCKER_IMAGE_NAME" --image-ids "imageTag=$TAG" --output text \
    --query 'images[0].[imageId.imageDigest,imageManifest]') || fail "cannot read $remote: $(last_line)"
  { read -r digest manifest; } <<<"$(tr -s '\n\t ' ' ' <<<"$answer")"
  there=""
  case "$digest $manifest" in
    None*) ;;
    *"$local_id"*) there=$digest ;;
    *) there=another ;;
  esac
}

there="" is_ecr=""
if [[ $REGISTRY =~ ^([0-9]+)\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com ]]; then
  need_aws
  ACCOUNT=${BASH_REMATCH[1]} AWS_REGION=${BASH_REMATCH[2]} is_ecr=yes

  if ! answer=$(ecr describe-repositories --repository-names "$DOCKER_IMAGE_NAME" --output text \
    --query 'repositories[0].imageTagMutability'); then
    grep -q RepositoryNotFoundException "$errors" ||
      fail "cannot look up the repository $DOCKER_IMAGE_NAME in $REGISTRY: $(last_line)"
    say "Making the repository $remote, scanned on push"
    answer=$(ecr create-repository --repository-name "$DOCKER_IMAGE_NAME" --output text \
      --image-scanning-configuration scanOnPush=true --image-tag-mutability "${ECR_TAG_MUTABILITY:-MUTABLE}" \
      --query 'repository.imageTagMutability') || fail "cannot make the repository $remote: $(last_line)"
  fi
  mutability=$answer
  look_up_tag
  if [ "$there" = another ] && [[ $mutability == IMMUTABLE* ]]; then
    fail "$remote:$TAG is another image, and tags of this repository are immutable: export TAG=... to a new one, and build"
  fi
fi

if [ -z "$there" ] || [ "$there" = another ]; then
  if [ -n "$is_ecr" ]; then
    password=$(aws ecr get-login-password --region "$AWS_REGION" 2>"$errors") || fail "no password for $REGISTRY: $(last_line)"
    docker login --username AWS --password-stdin "$REGISTRY" <<<"$password" >"$errors" 2>&1 ||
      fail "$REGISTRY refuses the login: $(last_line)"
  fi
  docker tag "$image" "$remote:$TAG"
  say "Pushing $remote:$TAG"
  output=$(docker push "$remote:$TAG" | tee >(cat >&2)) || fail "could not push $remote:$TAG: see above"
  there=$(sed -n 's/.*digest: \(sha256:[0-9a-f]*\) .*/\1/p' <<<"$output")
  [ -n "$there" ] || fail "docker did not say the digest of $remote:$TAG: see above"
else
  say "$remote:$TAG is this very image already"
fi
echo "$remote@$there"
