#!/usr/bin/env bash
# Debian packages for the tests of containers, Slurm and Kubernetes: real daemons on this machine, no stand-ins.
#
#   tests/ops/install_packages.sh     root on Debian or Ubuntu; a second run is instant
#
# Without them those tests are skipped, and say what they miss.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

# command:package. A machine may have the command from elsewhere.
wanted=(
  slurmctld:slurm-wlm sbatch:slurm-wlm munged:munge ip:iproute2
  dockerd:docker.io docker:docker.io docker-registry:docker-registry debootstrap:debootstrap
  openssl:openssl htpasswd:apache2-utils
  faketime:faketime mmseqs:mmseqs2 jackhmmer:hmmer hhmake:hhsuite
  prometheus:prometheus promtool:prometheus
  envsubst:gettext-base kubectl:kubernetes-client etcd:etcd-server
)

missing=()
for pair in "${wanted[@]}"; do
  command -v "${pair%:*}" >/dev/null || missing+=("${pair#*:}")
done
[ "${#missing[@]}" -gt 0 ] || exit 0
[ "$(id -u)" = 0 ] || { echo "error: installing ${missing[*]} needs root" >&2; exit 2; }

echo "Installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# Their daemons are started by the tests, in folders of their own, never by the installation.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
apt-get -qq update
apt-get -qq install --yes --no-install-recommends "${missing[@]}" >/dev/null
