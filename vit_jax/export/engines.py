"""What computes the classes of images: XLA, or onnxruntime from an export that is made once and kept. On CPUs
either may be faster: of ViT-S/16 in float32 XLA by 1.6 on an AMD EPYC, onnxruntime by 1.2 on an Intel Xeon.
"""

import hashlib
import importlib.util
import json
import math
import pathlib
import time
from collections.abc import Callable

import jax
import jaxlib
import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.compute import choices
from vit_jax.data import crops
from vit_jax.evaluation.forward import data_of
from vit_jax.export import onnx
from vit_jax.export import run as exports
from vit_jax.models import registry
from vit_jax.prediction.predict import check_head
from vit_jax.training.upkeep import provenance

AUTO, XLA, ONNXRUNTIME = "auto", "xla", "onnxruntime"
HOME = "~/.cache/vit_jax/onnx"
# Between the probabilities of the two, in float32: other orders of summation.
LARGEST_DIFFERENCE = 1e-4
_RUNS = 5
_KEPT = 8  # exports, the newest: a server that follows a run makes one of each checkpoint

Classifier = Callable[[np.ndarray], np.ndarray]


def make_classifier(run: TrainedModel, engine: str) -> Classifier | None:
    """A function from images (B, H, W, C) uint8, cut as the run does, to probabilities (B, classes) float32;
    `None` where XLA computes them.

    Args:
      run: a model with a head.
      engine: 'xla', 'onnxruntime' or 'auto': on CPUs, in float32, the one that is faster for an image here, if
        onnxruntime is installed and has all operations of the model; else XLA.

    Raises:
      ConfigError: onnxruntime is asked for and not installed, the model cannot be exported, or the two
        differ.
    """
    if engine == XLA or (engine == AUTO and not _may_pay(run)):
        return None
    try:
        classify, seconds = _onnxruntime(run)
    except ConfigError as error:
        if engine == ONNXRUNTIME:
            raise
        logging.info("engine: xla (%s)", error)
        return None
    faster = min(seconds, key=seconds.get)
    times = ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms" for name in seconds)
    chosen = ONNXRUNTIME if engine == ONNXRUNTIME else faster
    logging.info("engine: %s (an image when the export was made here: %s)", chosen, times)
    return classify if chosen == ONNXRUNTIME else None


def _may_pay(run: TrainedModel) -> bool:
    """Whether onnxruntime is there, and XLA computes in float32 too."""
    installed = all(map(importlib.util.find_spec, ("onnx", "onnxruntime")))
    on_cpu = jax.default_backend() == "cpu" and run.own is None
    return installed and on_cpu and choices.with_compute_dtype(run.model_config).dtype == "float32"


def _onnxruntime(run: TrainedModel) -> tuple[Classifier, dict[str, float]]:
    """What computes the export, and the seconds of an image by engine."""
    check_head(run)
    onnx.check_installed()
    folder = pathlib.Path(HOME).expanduser()
    file = folder / f"{_fingerprint(run)}{onnx.SUFFIX}"
    measured = file.with_suffix(".json")
    if measured.exists():
        return onnx.load(file), json.loads(measured.read_text())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    exports.export_run(run, str(file), to="onnx")
    classify = onnx.load(file)
    seconds = _compared(run, classify)
    places.write_whole(epath.Path(measured), json.dumps(seconds))
    for old in sorted(folder.glob(f"*{onnx.SUFFIX}"), key=_age)[_KEPT:]:
        old.with_suffix(".json").unlink(missing_ok=True)
        old.unlink(missing_ok=True)
    return classify, seconds


def _age(file: pathlib.Path) -> float:
    return -file.stat().st_mtime if file.exists() else math.inf


def _compared(run: TrainedModel, classify: Classifier) -> dict[str, float]:
    """Seconds of an image by engine; raises `ConfigError` if the probabilities of two differ."""
    data = data_of(run)
    images = np.random.default_rng(0).integers(0, 256, (2, *crops.shape(data)), np.uint8)
    program = exports.class_program(run, data)
    by_xla = jax.jit(program.answer)
    difference = max(
        float(np.abs(classify(image) - np.asarray(by_xla(program.weights, image))).max())
        for image in (images[:1], images[1:])
    )
    if not difference <= LARGEST_DIFFERENCE:
        raise ConfigError(
            f"the model's export for onnxruntime differs from the model by {difference:.2g} in probabilities: "
            "set --engine=xla, and report it"
        )
    logging.info("onnxruntime agrees with XLA to %.1g", difference)
    return {
        ONNXRUNTIME: _seconds(lambda: classify(images[:1])),
        XLA: _seconds(lambda: jax.block_until_ready(by_xla(program.weights, images[:1]))),
    }


def _seconds(compute: Callable[[], object]) -> float:
    """The least of some runs."""
    times = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        compute()
        times.append(time.perf_counter() - began)
    return min(times)


def _fingerprint(run: TrainedModel) -> str:
    """Of all that an export depends on."""
    about = {
        "model": repr(run.model_config),
        "data": repr(data_of(run)),
        "objective": json.dumps(run.config.objective.to_dict(), sort_keys=True, default=repr),
        "classes": list(run.classes),
        "cpus": provenance.hardware(),
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
