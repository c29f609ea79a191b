# An image of jaxpar for NVIDIA GPUs, from Debian and PyPI:
#
#     docker build --tag jaxpar .
#     docker run --gpus all --shm-size 16g --volume "$PWD:/workspace" jaxpar train quickstart
#
# The GPU's libraries are JAX's wheels; the driver comes from the host. For a host without GPUs:
# --build-arg EXTRAS=hf,stores. BASE is any Debian with Python 3.12 or newer, venv and pip.
ARG BASE=docker.io/library/python:3.13-slim-trixie

# ------------------------------------------------------------ the environment, /opt/jaxpar
# hadolint ignore=DL3006
FROM ${BASE} AS environment
ARG EXTRAS=cuda13,hf,parquet,stores,prometheus
WORKDIR /build
RUN python3 -m venv /opt/jaxpar
# What changes seldom comes first: the dependencies stay in Docker's cache while the code changes.
COPY pyproject.toml scripts/deploy/requirements.py ./
RUN /opt/jaxpar/bin/python requirements.py "${EXTRAS}" > requirements.txt \
 && /opt/jaxpar/bin/pip install --no-cache-dir -r requirements.txt
COPY LICENSE README.md ./
COPY configs configs
COPY jaxpar jaxpar
RUN /opt/jaxpar/bin/pip install --no-cache-dir --no-deps .

# ------------------------------------------------------------ the image
# hadolint ignore=DL3006
FROM ${BASE}
LABEL org.opencontainers.image.title="jaxpar" \
      org.opencontainers.image.licenses="Apache-2.0"
# NCCL opens these libraries for InfiniBand and RoCE; without them it uses TCP. tini ends zombies.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ibverbs-providers libibverbs1 tini \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --create-home jaxpar \
 && install --directory --owner jaxpar --group jaxpar /workspace
COPY --from=environment /opt/jaxpar /opt/jaxpar
# NVIDIA's container toolkit brings the driver's libraries and nvidia-smi.
ENV PATH=/opt/jaxpar/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /workspace
ENTRYPOINT ["/usr/bin/tini", "--", "jaxpar"]
CMD ["--help"]
