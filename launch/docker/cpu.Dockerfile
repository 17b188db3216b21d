# For CPUs. In a clone, with a folder runs/ that uid 1000 may write:
#   docker build --file=launch/docker/cpu.Dockerfile --tag=vit_jax:cpu .
#   docker run --rm --volume="$PWD/runs:/runs" vit_jax:cpu train --config=digits --workdir=/runs/digits
# The Python packages have the versions of tests/constraints.txt. To fix the base too: --build-arg=BASE=python@sha256:…
# hadolint checks this file, and a test its steps; it was not built where it was written, which has no Docker.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
WORKDIR /vit_jax
# Packages before the code, so that they are installed again only if what is asked for changes.
COPY setup.py pyproject.toml README.md ./
COPY vit_jax/__init__.py vit_jax/
COPY vit_jax/base/install.py vit_jax/base/
COPY tests/constraints.txt tests/
RUN pip install --no-cache-dir --constraint=tests/constraints.txt --editable . && useradd --create-home --uid=1000 vit_jax
COPY . .
USER 1000
ENTRYPOINT ["python", "-m", "vit_jax"]
