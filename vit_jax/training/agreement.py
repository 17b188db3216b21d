"""The facts that all processes of a training run must share: program, environment, config, data, devices and workdir.

It is compared before a step is compiled and before any file is written, except the one that shows that all hosts see
the same workdir. `MAY_DIFFER` and `VARIABLES_THAT_MAY_DIFFER` list the exceptions, each with its reason.
"""

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import buckets, places, schema
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import reading
from vit_jax.config import Config
from vit_jax.data.record import Source, read_records
from vit_jax.devices import agreement, processes
from vit_jax.evaluation import Suite
from vit_jax.evaluation.contract import held_out
from vit_jax.recipes import user_files
from vit_jax.training import normal_forms
from vit_jax.training.assembly import Assembly

# Config fields that hosts may set differently.
MAY_DIFFER = {
    "compilation_cache": "a cache folder",
    "data.cache": "a cache folder",
    "data.cache_gib": "the size of a cache folder",
    "data.path": "the path of a copy of the data; the data themselves are compared",
    "data.read_ahead": "memory of one process for reading",
    "data.threads": "a number of threads",
}
# Packages with an influence on the computation, or on the pixels of an image.
PACKAGES = (
    "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy", "ml_collections", "simplejpeg",
    "opencv-python-headless", "pillow",
)  # fmt: skip
# Environment variables of the programs below JAX, which keeps its own in `jax.config`.
VARIABLES = (
    "XLA_FLAGS", "LIBTPU_INIT_ARGS", "TF_XLA_FLAGS", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO",
    "NCCL_PROTO",
)  # fmt: skip
# Flags of XLA for dumps and reports, which do not change a program.
_XLA_OUTPUT = ("--xla_dump", "--xla_gpu_dump", "--xla_hlo_profile")
# Names of `jax.config` that hosts may set differently begin with one of these.
VARIABLES_THAT_MAY_DIFFER = {
    "jax_compilation_cache": "a cache folder, and what is kept there",
    "jax_persistent_cache": "what a cache folder keeps",
    "jax_enable_compilation_cache": "whether a cache folder is used",
    "jax_cuda_visible_devices": "which of a node's GPUs belong to a process",
    "jax_rocm_visible_devices": "which of a node's GPUs belong to a process",
    "jax_log": "verbosity",
    "jax_debug_log": "verbosity",
    "jax_explain": "verbosity",
    "jax_traceback": "verbosity",
    "jax_coordinat": "an address",
    "jax_dump": "a folder of logs",
}
_MOST_CLASSES = 1_000  # that are compared by name; more are compared by their digest
_BLOCK = 1 << 20
_BLOCKS = 64  # of a file, evenly spread
_SAMPLED = 8  # examples of a data set whose contents are compared
_MOST_FILES = 100  # of a folder
_POLL_SECONDS = 0.2
_MOST_SECONDS = 60.0  # a network file system may keep the names in a folder for so long


def check_run_agrees(assembly: Assembly, source: Source, suite: Suite) -> None:
    """Ends the run unless all its processes have the same program, environment, config and data.

    Args:
      assembly: the parts of the run.
      source: the examples to train on.
      suite: the evaluators of the run, with their examples.

    Raises:
      ConfigError: a process differs; see `devices.agreement`.
    """
    if processes.count() == 1:
        return
    fields = describe_program()
    fields |= describe_config(assembly.config)
    fields |= describe_data("the training images", source)
    for prefix, evaluator in suite.evaluators:
        examples = held_out(evaluator)
        if examples is not None:
            name = prefix or type(evaluator).__name__
            fields |= describe_data(f"the images of the evaluator {name}", examples)
    agreement.check_agreement("what the run is", fields, assembly.config.hosts.wait_minutes)


def check_devices_agree(config: Config) -> None:
    """Ends the run unless all its processes compute with as many devices of the same kind.

    Raises:
      ConfigError: a process has other devices.
    """
    if processes.count() == 1:
        return
    devices = jax.local_devices()
    kinds = sorted({device.device_kind for device in devices})
    fields = {"the kind of local devices": kinds, "the number of local devices": len(devices)}
    agreement.check_agreement("devices", fields, config.hosts.wait_minutes)


def check_workdir_is_shared(
    workdir: epath.Path, wait_minutes: float, most_seconds: float = _MOST_SECONDS
) -> None:
    """Ends the run unless every process can read a file that process 0 writes into the workdir.

    Args:
      workdir: the folder, as this process names it.
      wait_minutes: how long processes wait for each other.
      most_seconds: how long a process looks for the file.

    Raises:
      ConfigError: a process does not see the file.
    """
    if processes.count() == 1:
        return
    nonce = processes.broadcast_from_first("workdir", uuid.uuid4().hex, wait_minutes)
    file = workdir / f".shared-{nonce}"
    failure = ""
    if processes.index() == 0:
        failure = _write_nonce(file, nonce)
    failed = processes.failures("write to the workdir", failure, wait_minutes)
    if not failed:
        seconds = min(most_seconds, 60 * wait_minutes)
        if not _can_read(file, nonce, seconds):
            failure = (
                f"process {processes.index()} does not see in --workdir={workdir} what process 0 has written there "
                f"({seconds:g} s)"
            )
        failed = processes.failures("read the workdir", failure, wait_minutes + seconds / 60)
        if processes.index() == 0:
            file.unlink(missing_ok=True)
    if failed:
        raise ConfigError(
            f"{failed[min(failed)]}: all hosts of a run must see one folder. Set --workdir to a network file system "
            "or to a bucket, gs://BUCKET/NAME"
        )


def describe_program() -> dict[str, Any]:
    """The fields of versions, files of code and environment of this process."""
    package = sys.modules["vit_jax"]
    fields = {
        "the version of vit_jax": package.__version__,
        "the files of the package vit_jax": _digest_of_package(
            pathlib.Path(package.__file__).parent
        ),
        "the version of Python": ".".join(map(str, sys.version_info[:2])),
    }
    for name in PACKAGES:
        fields[f"the version of {name}"] = _version(name)
    for name in VARIABLES:
        fields[name] = os.environ.get(name, "")
    flags = fields["XLA_FLAGS"].split()
    compared = [flag for flag in flags if not flag.startswith(_XLA_OUTPUT)]
    fields["XLA_FLAGS"] = sorted(compared)
    for name, value in sorted(jax.config.values.items()):
        if not name.startswith(tuple(VARIABLES_THAT_MAY_DIFFER)):
            fields[name.upper()] = str(value)
    for file in user_files.loaded_files():
        checksum = hashlib.sha256(file.read_bytes()).hexdigest()
        fields[f"the file {file.name}"] = checksum[:16]
    return fields


def describe_config(config: Config) -> dict[str, Any]:
    """Every field of a config but `MAY_DIFFER`, by its name. The path of a checkpoint or of another file becomes a
    digest of the contents, so that hosts may have copies.
    """
    fields = {}
    normal = normal_forms.forms(type(config))
    for name, value in schema.flat(dataclasses.asdict(config)).items():
        if name in MAY_DIFFER:
            continue
        if name == "checkpoint.local":
            value = bool(value)  # whether there is one; its folder is each host's own
        elif name == "data.mixture":
            value = [weight for _, weight in value]  # the data sets are compared by their examples
        elif isinstance(value, str) and _is_local_path(value):
            value = f"a path with the contents {digest_of_path(pathlib.Path(value))}"
        fields[f"config.{name}"] = normal_forms.normal_value(value, normal.get(name))
    return fields


def describe_data(name: str, source: Source) -> dict[str, Any]:
    """The fields of a data set: number of examples, classes in their order, fingerprint, and a sample of the contents,
    since files that were exchanged may have equal names and sizes.
    """
    contents = hashlib.sha256()
    for record in read_records(source, sampled(len(source))):
        image = record.image
        contents.update(image if isinstance(image, bytes) else np.ascontiguousarray(image))
    classes = list(source.classes)
    if len(classes) > _MOST_CLASSES:
        classes = hashlib.sha256(repr(classes).encode()).hexdigest()[:16]
    return {
        f"the number of {name}": len(source),
        f"the classes of {name}": classes,
        f"the names, sizes, labels or order of {name} (fingerprint)": source.fingerprint(),
        f"the contents of some of {name}": contents.hexdigest()[:16],
    }


def sampled(count: int) -> list[int]:
    """The examples, among so many, that hosts compare by their contents: evenly spread, with the first and the last."""
    evenly_spread = np.linspace(0, count - 1, _SAMPLED).astype(int)
    return np.unique(evenly_spread).tolist()


def digest_of_path(path: pathlib.Path) -> str:
    """A digest of a file or folder, in bounded time: it reads up to 64 MiB of a file, and up to 100 files of a folder.
    A run is known by the description of its newest checkpoint, with the checksums of the weights; its logs may grow.
    """
    hasher = hashlib.sha256()
    if path.is_file():
        _add_file(hasher, path)
        return hasher.hexdigest()[:16]
    description = reading.newest_description(path)
    if description is not None:
        hasher.update(json.dumps(description, sort_keys=True).encode())
        return hasher.hexdigest()[:16]
    for file in itertools.islice(_files_below(path), _MOST_FILES):
        hasher.update(f"{file.relative_to(path)}\n".encode())
        _add_file(hasher, file)
    return hasher.hexdigest()[:16]


def _files_below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """All files below a folder in one order, found as they are asked for."""
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            yield pathlib.Path(parent, name)


def _add_file(hasher: Any, path: pathlib.Path) -> None:
    """Adds the size of a file and its contents, of a large one evenly spread blocks."""
    size = path.stat().st_size
    hasher.update(b"%d\n" % size)
    with path.open("rb") as file:
        if size <= _BLOCKS * _BLOCK:
            hasher.update(file.read())
            return
        for number in range(_BLOCKS):
            file.seek((size - _BLOCK) * number // (_BLOCKS - 1))
            hasher.update(file.read(_BLOCK))


def _digest_of_package(folder: pathlib.Path) -> str:
    hasher = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        hasher.update(f"{file.relative_to(folder)}\n".encode())
        hasher.update(file.read_bytes())
    return hasher.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # libtpu on CPUs and GPUs
        return "not installed"


def _is_local_path(value: str) -> bool:
    return "/" in value and not places.is_address(value) and os.path.exists(value)


def _write_nonce(file: epath.Path, nonce: str) -> str:
    """Writes the file; returns the reason if that fails."""
    try:
        places.write_whole(file, nonce)
    except Exception as error:
        if not buckets.is_failure(error):
            raise
        return f"process 0 cannot write to {file.parent}: {buckets.reason(error)}"
    return ""


def _can_read(file: epath.Path, nonce: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if places.read_bytes(file).decode() == nonce:
                return True
        except OSError as error:  # It is not there, or not yet.
            logging.log_first_n(logging.INFO, "waiting for %s: %s", 1, file, error)
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
