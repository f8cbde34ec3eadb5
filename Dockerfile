# Everything the training scripts need, on NVIDIA's PyTorch image: it brings torch, Transformer Engine, flash-attn and
# NCCL built for each other. ./build.sh builds it; docs/containers.md has the versions and what has run where.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.07-py3
FROM ${BASE_IMAGE}

# AWS' network. Empty EFA_INSTALLER_VERSION: leave the base's network libraries as they are.
# Empty AWS_OFI_NCCL_VERSION: the NCCL plugin that comes with the EFA installer.
ARG EFA_INSTALLER_VERSION=1.49.0
ARG EFA_INSTALLER_SHA256=cf2e9281a2328a243c76f911a490faed43ca0fecfe4733c25e34b2e92a32c309
ARG AWS_OFI_NCCL_VERSION=
ARG AWS_OFI_NCCL_SHA256=
COPY docker/install_efa.sh /tmp/build/
RUN /bin/bash /tmp/build/install_efa.sh

ARG REQUIREMENTS="requirements.txt requirements-gpu.txt requirements-trackers.txt requirements-test.txt"
COPY docker/install_requirements.py requirements.lock /tmp/build/
WORKDIR /tmp/build
# hadolint ignore=SC2086
RUN python3 install_requirements.py ${REQUIREMENTS}

WORKDIR /workspace
COPY common common/
COPY extras extras/
COPY configs configs/
COPY benchmarks benchmarks/
COPY tests tests/
COPY *.py LICENSE pyproject.toml fp8_debugging_stats.yaml ./
COPY docker/finish_image.sh /tmp/build/
RUN /bin/bash /tmp/build/finish_image.sh

USER 1000:1000
ENV PYTHONUNBUFFERED=1
ARG VERSION=unknown
ARG COMMIT=unknown
ARG BASE_IMAGE
LABEL org.opencontainers.image.title="ESM-2 pretraining" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${COMMIT}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
