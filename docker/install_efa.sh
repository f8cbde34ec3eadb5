#!/usr/bin/env bash
# Install AWS' EFA libraries and the aws-ofi-nccl plugin into an image being built; run by the Dockerfiles as root.
#
# EFA_INSTALLER_VERSION   such as 1.49.0; empty: do nothing
# EFA_INSTALLER_SHA256    of its archive; empty: not checked
# AWS_OFI_NCCL_VERSION    such as 1.19.0: built from source; empty: the plugin in the installer
# AWS_OFI_NCCL_SHA256     of that source, which is needed then
#
# The kernel module belongs to the host. Not tried on a machine with EFA: see docs/containers.md.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }

if [ -z "${EFA_INSTALLER_VERSION:-}" ]; then
  echo "EFA: not installed (EFA_INSTALLER_VERSION is empty)"
  exit 0
fi
[ -z "${AWS_OFI_NCCL_VERSION:-}" ] || [ -n "${AWS_OFI_NCCL_SHA256:-}" ] ||
  fail "AWS_OFI_NCCL_VERSION=$AWS_OFI_NCCL_VERSION without its checksum: --build-arg AWS_OFI_NCCL_SHA256=..."
export DEBIAN_FRONTEND=noninteractive
work=$(mktemp -d)
trap 'rm -rf "$work" /var/lib/apt/lists/*' EXIT
cd "$work"

fetch() {
  curl --fail --silent --show-error --location --proto '=https' --connect-timeout 30 --max-time 1800 --retry 5 \
    --output "$2" "$1" || fail "cannot download $1"
}

# verify FILE SHA256 ARGUMENT: of which build argument the checksum is
verify() {
  echo "$2  $1" | sha256sum --check --quiet || fail "$1 is not the file of $3: give its version and its checksum together"
}

apt-get -qq update
archive=aws-efa-installer-$EFA_INSTALLER_VERSION.tar.gz
fetch "https://efa-installer.amazonaws.com/$archive" "$archive"
if [ -n "${EFA_INSTALLER_SHA256:-}" ]; then
  verify "$archive" "$EFA_INSTALLER_SHA256" EFA_INSTALLER_SHA256
fi
tar -xf "$archive"
# What an older installer left in the base image would go first on the linker's path.
rm -f /etc/ld.so.conf.d/aws-ofi-nccl.conf
options=(-y --skip-kmod --skip-limit-conf --no-verify)
[ -z "${AWS_OFI_NCCL_VERSION:-}" ] || options+=(--skip-plugin)
(cd aws-efa-installer && ./efa_installer.sh "${options[@]}")

if [ -n "${AWS_OFI_NCCL_VERSION:-}" ]; then
  apt-get -qq install --yes --no-install-recommends build-essential libhwloc-dev >/dev/null
  source=aws-ofi-nccl-$AWS_OFI_NCCL_VERSION
  fetch "https://github.com/aws/aws-ofi-nccl/releases/download/v$AWS_OFI_NCCL_VERSION/$source.tar.gz" "$source.tar.gz"
  verify "$source.tar.gz" "$AWS_OFI_NCCL_SHA256" AWS_OFI_NCCL_SHA256
  tar -xf "$source.tar.gz"
  (
    cd "$source"
    ./configure --prefix=/opt/amazon/ofi-nccl --with-libfabric=/opt/amazon/efa --with-cuda=/usr/local/cuda --disable-tests
    make -j "$(nproc)" install
  )
fi

# NCCL looks for libnccl-net.so unless configured otherwise, and without its plugin falls back to TCP without an error.
# In some images the installer leaves only libnccl-net-ofi.so, which is the name NCCL_NET_PLUGIN=ofi stands for.
plugin=$(find /opt/amazon -name 'libnccl-net*.so' -print -quit 2>/dev/null || true)
[ -n "$plugin" ] || fail "the EFA installer $EFA_INSTALLER_VERSION left no NCCL plugin below /opt/amazon"
directory=$(dirname "$plugin")
[ -e "$directory/libnccl-net-ofi.so" ] || ln -s "$(basename "$plugin")" "$directory/libnccl-net-ofi.so"
printf '%s\n' /opt/amazon/efa/lib "$directory" >/etc/ld.so.conf.d/000-efa.conf
ldconfig
echo NCCL_NET_PLUGIN=ofi >>/etc/nccl.conf  # a default: the environment variable goes first
echo "EFA installer $EFA_INSTALLER_VERSION, NCCL plugin $directory/libnccl-net-ofi.so"
