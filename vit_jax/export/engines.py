"""What computes the classes of images: XLA, or onnxruntime, which is faster on CPUs that do not multiply
bfloat16, from an export that is made once and kept.
"""

import hashlib
import importlib.util
import json
import pathlib
from collections.abc import Callable

import jax
import jaxlib
import numpy as np
from absl import logging
from etils import epath

from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.compute import choices
from vit_jax.data import crops
from vit_jax.evaluation.forward import data_of
from vit_jax.export import onnx
from vit_jax.export import run as exports
from vit_jax.models import registry
from vit_jax.prediction.predict import check_head

AUTO, XLA, ONNXRUNTIME = "auto", "xla", "onnxruntime"
HOME = "~/.cache/vit_jax/onnx"
# Between the probabilities of the two, in float32: other orders of summation.
LARGEST_DIFFERENCE = 1e-4

Classifier = Callable[[np.ndarray], np.ndarray]


def make_classifier(run: TrainedModel, engine: str) -> Classifier | None:
    """A function from images (B, H, W, C) uint8, cut as the run does, to probabilities (B, classes) float32;
    `None` where XLA computes them.

    Args:
      run: a model with a head.
      engine: 'xla', 'onnxruntime' or 'auto', which is onnxruntime on CPUs where it is installed and has all operations
        of the model, else XLA.

    Raises:
      ConfigError: onnxruntime is asked for and not installed, the model cannot be exported, or the two
        differ.
    """
    if engine == XLA or (engine == AUTO and not _pays(run)):
        return None
    try:
        return _onnxruntime(run)
    except ConfigError as error:
        if engine == ONNXRUNTIME:
            raise
        logging.info("engine: xla (%s)", error)
        return None


def _pays(run: TrainedModel) -> bool:
    """Whether onnxruntime is there and computes the model faster."""
    installed = all(map(importlib.util.find_spec, ("onnx", "onnxruntime")))
    on_cpu = jax.default_backend() == "cpu" and run.own is None
    return installed and on_cpu and choices.with_compute_dtype(run.model_config).dtype == "float32"


def _onnxruntime(run: TrainedModel) -> Classifier:
    check_head(run)
    onnx.check_installed()
    file = pathlib.Path(HOME).expanduser() / f"{_fingerprint(run)}{onnx.SUFFIX}"
    if file.exists():
        logging.info("engine: onnxruntime, with %s", file)
        return onnx.load(file)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Written under another name until it is known to agree.
    partial = epath.Path(f"{file.with_suffix('')}-new{onnx.SUFFIX}")
    exports.export_run(run, str(partial), to="onnx")
    classify = onnx.load(pathlib.Path(partial))
    difference = _difference(run, classify)
    if not difference <= LARGEST_DIFFERENCE:
        partial.unlink()
        raise ConfigError(
            f"the model's export for onnxruntime differs from the model by {difference:.2g} in probabilities: "
            "set --engine=xla, and report it"
        )
    partial.rename(file)
    logging.info("engine: onnxruntime, with %s: agrees with XLA to %.1g", file, difference)
    return classify


def _difference(run: TrainedModel, classify: Classifier) -> float:
    """The largest between the probabilities of two random images."""
    data = data_of(run)
    images = np.random.default_rng(0).integers(0, 256, (2, *crops.shape(data)), np.uint8)
    program = exports.class_program(run, data)
    expected = jax.jit(program.answer)(program.weights, images)
    return float(np.abs(classify(images) - np.asarray(expected)).max())


def _fingerprint(run: TrainedModel) -> str:
    """Of all that an export depends on."""
    about = {
        "model": repr(run.model_config),
        "data": repr(data_of(run)),
        "objective": json.dumps(run.config.objective.to_dict(), sort_keys=True, default=repr),
        "classes": list(run.classes),
        "jax": [jax.__version__, jaxlib.__version__],
        "writer": hashlib.sha256(
            b"".join(
                path.read_bytes() for path in sorted(pathlib.Path(__file__).parent.glob("*.py"))
            )
        ).hexdigest(),
    }
    marks = hashlib.sha256(json.dumps(about).encode())
    for leaf in jax.tree.leaves(registry.split(run.model)[1]):
        marks.update(np.ascontiguousarray(leaf))
    return marks.hexdigest()[:32]
