"""What computes the classes of images: XLA, or onnxruntime or OpenVINO from an export that is made once and kept. On
CPUs each may be the fastest: of ViT-S/16 in float32 XLA on an AMD EPYC, OpenVINO on an Intel Xeon.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jaxlib
import numpy as np
from absl import logging
from etils import epath

from vit_jax import objectives
from vit_jax.base import outputs, places
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.compute import choices
from vit_jax.data import crops
from vit_jax.data.options import Data
from vit_jax.evaluation.forward import data_of, normalized_as
from vit_jax.export import onnx, openvino
from vit_jax.export.programs import FEATURES, LOGITS, make_program
from vit_jax.models import registry
from vit_jax.prediction.images import check_one_size
from vit_jax.prediction.predict import check_head
from vit_jax.training.upkeep import provenance

AUTO, XLA, ONNXRUNTIME, OPENVINO = "auto", "xla", "onnxruntime", "openvino"
HOME = "~/.cache/vit_jax/onnx"
# Between the probabilities of engines that compute in float32: other orders of summation.
LARGEST_DIFFERENCE = 1e-4
_IMAGES = 8  # to compare on
_RUNS = 5
_KEPT = 8  # exports, the newest: a server that follows a run makes one of each checkpoint

Answers = Callable[[np.ndarray], list[np.ndarray]]


class Classifier(NamedTuple):
    """A model computed by another engine than XLA.

    Attributes:
      engine, precision: see `make_classifier`.
      answers: images (B, H, W, C) uint8, cut as the run does, to logits (B, classes) and features (B, D), float32.
    """

    engine: str
    precision: str
    answers: Answers

    def logits(self, images: np.ndarray) -> np.ndarray:
        """The logits (B, classes) float32 of images (B, H, W, C) uint8."""
        return self.answers(images)[0]


class _Engine(NamedTuple):
    """A library that computes exports.

    Attributes:
      load: a file and a precision to its program.
      precisions: those it computes in.
    """

    load: Callable[[pathlib.Path, str], Answers]
    precisions: tuple[str, ...]


def _load_onnxruntime(file: pathlib.Path, precision: str) -> Answers:
    return onnx.load_outputs(onnx.with_int8_products(file) if precision == "int8" else file)


ENGINES = {
    ONNXRUNTIME: _Engine(_load_onnxruntime, ("float32", "int8")),
    OPENVINO: _Engine(openvino.load_outputs, ("float32", "bfloat16")),
}


def make_classifier(
    run: TrainedModel, engine: str, precision: str = "float32", data: Data | None = None
) -> Classifier | None:
    """What computes the logits of images; `None` if XLA does.

    Args:
      run: a model with a head.
      engine: 'xla', 'onnxruntime', 'openvino' or 'auto': on CPUs the fastest for an image here, of those that are
        installed and have all operations of the model.
      precision: what the products are computed in; other than float32 by the engine that has it, and the difference
        from XLA is logged.
      data: how images are normalised, where not as in the run.

    Raises:
      ConfigError: the engine that is asked for is not installed or has not this precision, the model cannot be
        exported, or the engine differs in float32.
    """
    data = data_of(run) if data is None else normalized_as(data, run.directory)
    engine = _engine_for(engine, precision)
    if engine != XLA:
        check_one_size(data, f"--engine={engine}")
    if engine == XLA or (engine == AUTO and not _may_pay(run)):
        return None
    if jax.process_count() > 1:
        raise ConfigError(f"--engine={engine} computes in one process: set --engine=xla")
    if engine != AUTO:
        return _Export(run, data).classifier(engine, precision)
    try:
        export = _Export(run, data)
        seconds = export.seconds()
    except ConfigError as error:
        logging.info("engine: xla (%s)", error)
        return None
    fastest = min(seconds, key=seconds.get)
    times = ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms" for name in seconds)
    logging.info("engine: %s (an image when it was measured here: %s)", fastest, times)
    return None if fastest == XLA else export.classifier(fastest)


def _engine_for(engine: str, precision: str) -> str:
    """The engine that computes in a precision."""
    able = [name for name, known in ENGINES.items() if precision in known.precisions]
    if precision == "float32" or engine in able:
        return engine
    if engine == AUTO:
        return able[0]
    raise ConfigError(
        f"--precision={precision} with --engine={engine}: set --engine={able[0]}, which computes in it"
    )


def _may_pay(run: TrainedModel) -> bool:
    """Whether others than XLA are there, and XLA computes in float32 too."""
    on_cpu = (
        jax.default_backend() == "cpu"
        and jax.process_count() == 1
        and run.objective_modules is None
    )
    in_float32 = choices.with_compute_dtype(run.model_config).dtype == "float32"
    return bool(_installed()) and on_cpu and in_float32


def _installed() -> list[str]:
    """The engines that are installed, with what writes their file."""
    has = importlib.util.find_spec
    return [name for name in ENGINES if has("onnx") and has(name)]


class _Export:
    """The file of a model, and what is known of engines that compute it, which is kept beside it."""

    def __init__(self, run: TrainedModel, data: Data):
        check_head(run)
        onnx.check_installed()
        self._run, self._data = run, data
        self._program = make_program(run, data, outputs=(LOGITS, FEATURES))
        folder = pathlib.Path(places.expanded(HOME, "the folder of exports, "))
        self._file = folder / f"{_fingerprint(run, data)}{onnx.SUFFIX}"
        self._notes = self._file.with_suffix(".json")
        if not self._file.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write()
            _remove_oldest(folder)

    def classifier(self, engine: str, precision: str = "float32") -> Classifier:
        """The program of an engine; logs how it differs from XLA, which is measured once."""
        answers = ENGINES[engine].load(self._file, precision)
        name = f"{engine} {precision}"
        notes = self._read()
        if name not in notes:
            notes[name] = self._compare(answers)
            if precision == "float32" and not notes[name]["difference"] <= LARGEST_DIFFERENCE:
                raise ConfigError(
                    f"the model's export for {engine} differs from the model by {notes[name]['difference']:.2g} in "
                    "probabilities: set --engine=xla, and report it"
                )
            self._keep(notes)
        logging.info(
            "%s in %s: probabilities differ from XLA's by %.1g at most, and %.0f%% of images keep their best class",
            engine, precision, notes[name]["difference"], 100 * notes[name]["same_best_class"],
        )  # fmt: skip
        return Classifier(engine, precision, answers)

    def seconds(self) -> dict[str, float]:
        """Of an image, by engine: the least of some runs, in turn."""
        installed, notes = _installed(), self._read()
        if notes.get("seconds", {}).keys() == {XLA, *installed}:
            return notes["seconds"]
        image = _photos(self._data)[:1]
        programs = {XLA: self._by_xla()}
        for engine in installed:
            programs[engine] = self.classifier(engine).answers
        times = {name: [] for name in programs}
        for _ in range(1 + _RUNS):  # the first compiles
            for name, program in programs.items():
                began = time.perf_counter()
                program(image)
                times[name].append(time.perf_counter() - began)
        seconds = {name: min(all_times[1:]) for name, all_times in times.items()}
        self._keep(self._read() | {"seconds": seconds})
        return seconds

    def _write(self) -> None:
        shape = (jax.export.symbolic_shape("batch")[0], *crops.shape(self._data))
        images = jax.ShapeDtypeStruct(shape, np.uint8)
        description = {"outputs": {name: [] for name in self._program.outputs}}
        with outputs.writing(epath.Path(self._file)) as partial:
            onnx.write(
                partial, self._program.answer, self._program.weights, images, description, "float32"
            )

    def _compare(self, answers: Answers) -> dict[str, float]:
        photos = _photos(self._data)
        activation = objectives.activation(self._run.config.objective)
        ours = np.asarray(activation(self._by_xla()(photos)[0]))
        theirs = np.asarray(activation(answers(photos)[0]))
        alone = np.asarray(
            activation(answers(photos[:1])[0])
        )  # which engines may compute otherwise
        differences = [np.abs(theirs - ours).max(), np.abs(alone - ours[:1]).max()]
        same = ours.argmax(-1) == theirs.argmax(-1)
        return {
            "difference": float(np.max(differences)),
            "same_best_class": float(same.mean()),
        }

    def _by_xla(self) -> Answers:
        compiled = jax.jit(self._program.answer)
        return lambda images: jax.device_get(compiled(self._program.weights, images))

    def _read(self) -> dict:
        return json.loads(self._notes.read_text()) if self._notes.exists() else {}

    def _keep(self, notes: Mapping) -> None:
        places.write_whole(epath.Path(self._notes), json.dumps(notes))


def _photos(data: Data) -> np.ndarray:
    """Parts of two photographs, (`_IMAGES`, H, W, C) uint8; noise where images have other channels than these."""
    height, width, channels = crops.shape(data)
    if channels != 3:
        shape = (_IMAGES, height, width, channels)
        return np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    halves = [(i % 4 * 128, i // 4 * 128) for i in range(_IMAGES)]
    parts = [
        photos[i % 2].resize((width, height), box=(left, top, left + 256, top + 256))
        for i, (left, top) in enumerate(halves)
    ]
    return np.stack([np.asarray(part) for part in parts])


def _remove_oldest(folder: pathlib.Path) -> None:
    files = [file for file in folder.glob(f"*{onnx.SUFFIX}") if "_" not in file.stem]
    for old in sorted(files, key=_age)[_KEPT:]:
        for file in folder.glob(f"{old.stem}*"):
            file.unlink(missing_ok=True)


def _age(file: pathlib.Path) -> float:
    return -file.stat().st_mtime if file.exists() else math.inf


def _fingerprint(run: TrainedModel, data: Data) -> str:
    """Of all that an export and what is known of it depend on."""
    about = {
        "model": repr(run.model_config),
        "data": repr((data.mean, data.std, data.permute, crops.shape(data))),
        "objective": json.dumps(run.config.objective.to_dict(), sort_keys=True, default=repr),
        "classes": list(run.classes),
        "cpus": provenance.hardware(),
        "jax": [jax.__version__, jaxlib.__version__],
        "engines": [importlib.metadata.version(name) for name in _installed()],
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
