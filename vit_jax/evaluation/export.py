"""A trained model in one file that runs without this package: StableHLO with the weights in it, and a
description, which any program with JAX can call.
"""

import dataclasses
import json
import os
import pathlib
import zipfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax import objectives
from vit_jax.base import paths
from vit_jax.base.errors import ConfigError
from vit_jax.data import crops
from vit_jax.evaluation.forward import data_of, make_forward
from vit_jax.evaluation.overrides import load_for_images
from vit_jax.interchange.formats import describe
from vit_jax.models import registry

PROGRAM, DESCRIPTION = "model.jax", "model.json"
_HOW = (
    "import zipfile; from jax import export; "
    f"model = export.deserialize(bytearray(zipfile.ZipFile(FILE).read('{PROGRAM}'))); "
    "probabilities = model.call(images)"
)


def export(
    path: epath.PathLike,
    out: str,
    *,
    batch_size: int = 0,
    settings: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Writes FILE.zip, with the program and what there is to know to use it.

    The program takes images (B, H, W, C) uint8, cut as the description says, and gives probabilities (B, classes)
    float32, or features (B, D) of a model without head. It computes as the model does on this machine's kind of
    device, and runs on that kind.

    Args:
      path: of a run or checkpoint.
      batch_size: how many images it takes at a time; 0: any number.
      settings: of the run's config, see `overrides.of_images`.

    Returns:
      The description.

    Raises:
      ConfigError: the file cannot be written, or it is not known how images are normalised.
    """
    target = pathlib.Path(out)
    if target.suffix != ".zip":
        raise ConfigError(f"--out={out}: name it .zip")
    paths.check_folder_of(out, "--out")
    try:
        import flatbuffers  # noqa: F401  what jax.export writes with
    except ImportError as error:
        raise ConfigError("export needs flatbuffers: pip install flatbuffers") from error
    run = load_for_images(path, settings, "export")
    data = data_of(run)
    config, weights = run.model_config, registry.split(run.model)[1]
    if hasattr(config, "attention"):  # kernels written for one kind of chip cannot be handed on
        config = dataclasses.replace(config, attention="xla")
    forward = make_forward(registry.abstract(config)[0], config, data)
    kind = objectives.probabilities(run.config.objective)

    def answer(images: jax.Array) -> jax.Array:
        output = forward(weights, images)
        if output.logits is None:
            return output.features.astype(np.float32)
        return objectives.ACTIVATIONS[kind](output.logits)

    batch = batch_size or jax.export.symbolic_shape("batch")[0]
    images = jax.ShapeDtypeStruct((batch, *crops.shape(data)), np.uint8)
    program = jax.export.export(jax.jit(answer))(images)
    description = {
        "model": describe(run.model_config),
        "input": {"images": [batch_size or "batch", *crops.shape(data)], "dtype": "uint8"},
        "output": "probabilities" if run.model_config.num_classes else "features",
        "probabilities": kind,
        "classes": list(run.classes) if run.model_config.num_classes else [],
        "preprocessing": {
            "color": "RGB" if len(data.mean) == 3 else f"{len(data.mean)} channels",
            "resize_and_crop": data.eval_crop,
            "eval_resize": data.eval_resize,
            "interpolation": data.interpolation,
            "normalization": "in the program",
        },
        "platforms": list(program.platforms),
        "how": _HOW,
    }  # fmt: skip
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(PROGRAM, bytes(program.serialize()))
            archive.writestr(DESCRIPTION, json.dumps(description, indent=2))
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    return description
