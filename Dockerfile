# dschat_lora without a compiler, as a user without rights; docs/install.md shows how to run it.
# The image has CUDA's runtime and its compatibility libraries; torch's wheel brings the others.
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04
# hadolint ignore=DL3006
FROM ${BASE}

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/dschat_lora
ENV PATH=/opt/dschat_lora/.venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# torch has a layer of its own, which other code does not fetch again.
COPY constraints.txt ./
# The words that pip gets, as of the Makefile.
ARG TORCH_WHEEL=torch==2.13.0
# hadolint ignore=SC2086
RUN python3 -m venv .venv \
    && pip install --constraint constraints.txt --upgrade pip setuptools wheel \
    && pip install --constraint constraints.txt ${TORCH_WHEEL}
COPY . .
# Extras of setup.py, such as [serving,qlora].
ARG EXTRAS=
# Any user may write to the volumes: --user with an id of the host's keeps files theirs.
RUN pip install --constraint constraints.txt --editable ".${EXTRAS}" \
    && install --directory --mode 1777 /cache /work

ENV HOME=/cache XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
VOLUME ["/cache", "/work"]
WORKDIR /work
USER 1000:1000

# Versions, disks and network. It leaves the GPU alone, whose memory belongs to the run.
HEALTHCHECK --interval=30m --timeout=2m \
    CMD ["env", "DS_ACCELERATOR=cpu", "CUDA_VISIBLE_DEVICES=", "dschat-lora", "doctor", "--no_training"]
ENTRYPOINT ["dschat-lora"]
CMD ["doctor"]
