"""A trained model as StableHLO with the weights in it, and a description, in one file that any program with JAX
can call.
"""

import datetime
import json
import pathlib
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from vit_jax.base import places
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.base.install import pip_install
from vit_jax.export.precision import is_large, rounded_to_int8
from vit_jax.models.registry import Weights

SUFFIX = ".zip"
PROGRAM, DESCRIPTION = "model.jax", "model.json"


def how(names: Sequence[str]) -> str:
    """The line of Python that calls a file with outputs of these names."""
    answers = ", ".join(names) if len(names) > 1 else "answers"
    return (
        "import zipfile; from jax import export; "
        f"model = export.deserialize(bytearray(zipfile.ZipFile(FILE).read('{PROGRAM}'))); "
        f"{answers} = model.call(images)"
    )


def check_installed() -> None:
    """Raises `ConfigError` if what it needs is not installed."""
    try:
        import flatbuffers  # noqa: F401  what jax.export writes with
    except ImportError as error:
        raise ConfigError(f"export needs flatbuffers: {pip_install('export')}") from error


def write(
    path: pathlib.Path,
    answer: Callable[[Weights, jax.Array], jax.Array],
    weights: Weights,
    images: jax.ShapeDtypeStruct,
    description: dict[str, Any],
    precision: str,
) -> dict[str, Any]:
    """Writes `answer` with its weights; see `run.export`. It runs on this machine's kind of device.

    Returns:
      The description, with the `platforms`, what it was `written` with, and by which versions of JAX it is `readable`.
    """
    stored = _stored(weights, precision)
    program = jax.export.export(jax.jit(lambda images: answer(stored(), images)))(images)
    description = description | {"platforms": list(program.platforms)} | _lifetime(program)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(PROGRAM, bytes(program.serialize()))
        archive.writestr(DESCRIPTION, json.dumps(description, indent=2))
    return description


def _lifetime(program: jax.export.Exported) -> dict[str, Any]:
    """What wrote a program, and which versions of JAX read it: of "Compatibility guarantees" in the guide of
    `jax.export`. It counts from the release of jaxlib, whose date no package knows, and not from the export.
    """
    version = jaxlib.__version__
    return {
        "written": {
            "date": datetime.date.today().isoformat(),
            "jaxlib": version,
            "calling_convention": program.calling_convention_version,
        },
        "readable": (
            f"JAX guarantees that its releases up to 6 months after jaxlib {version} read this file, and those up to "
            f"3 weeks before it. For later ones export the model again, or keep jaxlib {version}."
        ),
    }


def load_description(path: pathlib.Path) -> dict[str, Any]:
    """The description that `write` has returned. Raises `CheckpointError` for a damaged file."""
    try:
        with places.open_bytes(path) as file, zipfile.ZipFile(file) as archive:
            return json.loads(archive.read(DESCRIPTION))
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def load_outputs(path: pathlib.Path) -> Callable[[np.ndarray], list[np.ndarray]]:
    """The program of a file: images to all its outputs."""
    with zipfile.ZipFile(path) as archive:
        program = jax.export.deserialize(bytearray(archive.read(PROGRAM)))
    call = jax.jit(program.call)
    return lambda images: [np.asarray(array) for array in jax.tree.leaves(call(images))]


def _stored(weights: Weights, precision: str) -> Callable[[], Weights]:
    """Gives weights in float32, of arrays that the program stores."""
    if precision == "float32":
        return lambda: weights
    leaves, tree = jax.tree.flatten_with_path(weights)
    stored = [_packed(x, precision, "layers" in jax.tree_util.keystr(path)) for path, x in leaves]

    def whole() -> Weights:
        arrays = [jnp.asarray(x).astype(np.float32) * scale for x, scale in stored]
        return jax.tree.unflatten(tree, arrays)

    return whole


def _packed(x: jax.Array, precision: str, stacked: bool) -> tuple[jax.Array | np.ndarray, Any]:
    """An array as it is stored, and what it is to be multiplied with. Layers of a stack are rounded each for itself."""
    if not is_large(x):
        return x, 1
    if precision == "bfloat16":
        return x.astype(jnp.bfloat16), 1
    return rounded_to_int8(np.asarray(x), {0, x.ndim - 1} if stacked else {x.ndim - 1})
