# For TPUs: pods of GKE and xpk (`vit_jax launch gke --image=IMAGE`). In a clone:
#   docker build --file=launch/docker/tpu.Dockerfile --tag=IMAGE . && docker push IMAGE
# The Python packages have the versions of tests/constraints.txt. To fix the base too: --build-arg=BASE=python@sha256:…
# The user is root: so are the folders of nodes that launch/gke/jobset.yaml mounts.
# hadolint checks this file, and a test its steps; it was not built where it was written, which has no Docker.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
WORKDIR /vit_jax
# Packages before the code, so that they are installed again only if what is asked for changes.
COPY setup.py pyproject.toml README.md ./
COPY vit_jax/__init__.py vit_jax/
COPY vit_jax/base/install.py vit_jax/base/
COPY tests/constraints.txt tests/
RUN pip install --no-cache-dir --constraint=tests/constraints.txt --editable ".[tpu,gcs]"
COPY . .
ENTRYPOINT ["python", "-m", "vit_jax"]
