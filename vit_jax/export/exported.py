"""A file that `vit_jax export` wrote, read again: its program, and from its description the classes and how images are
prepared.
"""

import dataclasses
import os
import pathlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.base.sizes import parse
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage
from vit_jax.evaluation import measures
from vit_jax.export import onnx, openvino, stablehlo
from vit_jax.export.engines import ONNXRUNTIME, OPENVINO, XLA
from vit_jax.export.programs import LOGITS, PROBABILITIES
from vit_jax.prediction.finite import all_finite
from vit_jax.prediction.images import Compiled, Named
from vit_jax.prediction.predict import Prediction, Rank, rank_files

# The engines that compute a file, by its ending; the first one is the default.
_LOADERS: dict[str, dict[str, Callable]] = {
    onnx.SUFFIX: {ONNXRUNTIME: onnx.load_outputs, OPENVINO: openvino.load_outputs},
    stablehlo.SUFFIX: {XLA: stablehlo.load_outputs},
}
_READERS = {
    onnx.SUFFIX: onnx.load_description,
    stablehlo.SUFFIX: stablehlo.load_description,
}


@dataclasses.dataclass(frozen=True)
class ExportedClassifier:
    """A file's program that gives classes.

    Attributes:
      path: of the file.
      data: how images are cut, the section `config.data`.
      classes: label names.
      batch_size: images that the program takes at a time; 0: any number.
      probabilities: images (B, H, W, C) uint8 to (B, classes) float32.
      cuts: the thresholds of the classes, (classes,); `None` if none were chosen.
    """

    path: str
    data: Data
    classes: tuple[str, ...]
    batch_size: int
    probabilities: Callable[[np.ndarray], np.ndarray]
    cuts: np.ndarray | None = None


def is_export(path: epath.PathLike) -> bool:
    """Whether a path is that of a local file which `vit_jax export` may have written."""
    name = os.path.expanduser(os.fspath(path))
    suffix = os.path.splitext(name)[1]
    if suffix == onnx.SUFFIX:
        return os.path.isfile(name)
    if suffix != stablehlo.SUFFIX or not zipfile.is_zipfile(name):
        return False
    with zipfile.ZipFile(name) as archive:
        return stablehlo.PROGRAM in archive.namelist()


def read_classifier(path: epath.PathLike, engine: str = "") -> ExportedClassifier:
    """The program of a file, and what its description says.

    Args:
      path: FILE.onnx, or FILE.zip of StableHLO.
      engine: 'onnxruntime' or 'openvino' for ONNX; '' for the usual one.

    Raises:
      ConfigError: no classes can be had of the file, another program wrote it, or the engine cannot compute it.
      CheckpointError: the file is damaged.
    """
    file = pathlib.Path(places.locate(path, "--checkpoint"))
    loaders = _LOADERS[file.suffix]
    engine = engine or next(iter(loaders))
    if engine not in loaders:
        raise ConfigError(
            f"{file}: --engine={engine} cannot compute it: set {' or '.join(loaders)}"
        )
    description = _READERS[file.suffix](file)
    missing = {"input", "outputs", "probabilities", "preprocessing", "classes"} - description.keys()
    if missing:
        raise ConfigError(
            f"{file} has no description of its {', '.join(sorted(missing))}: 'vit_jax predict' takes files that "
            "'vit_jax export' wrote"
        )
    outputs = list(description["outputs"])
    answers = [name for name in (PROBABILITIES, LOGITS) if name in outputs]
    if not answers:
        raise ConfigError(
            f"{file} gives {', '.join(outputs)}, which are no classes of images: 'vit_jax predict' takes files that "
            "give probabilities or logits (export --outputs)"
        )
    batch_size = description["input"]["images"][0]
    cuts = description.get("thresholds")  # Files of earlier versions lack it.
    program = _whole_batches(loaders[engine](file), batch_size)
    normalize = _normalization(description["preprocessing"])

    def probabilities(images: np.ndarray) -> np.ndarray:
        answer = program(normalize(images))[outputs.index(answers[0])]
        if answers[0] == LOGITS:
            answer = measures.probabilities(answer, description["probabilities"])
        return np.asarray(answer, np.float32)

    return ExportedClassifier(
        path=str(file),
        data=_data_of(description),
        classes=tuple(description["classes"]),
        batch_size=batch_size if isinstance(batch_size, int) else 0,
        probabilities=probabilities,
        cuts=np.array(cuts) if cuts else None,
    )


def predict_with(
    classifier: ExportedClassifier, files: Iterable[Named], *, topk: int, batch_size: int
) -> Iterator[Prediction | BadImage]:
    """Classifies images in batches, as `predict.predict` does.

    Raises:
      CheckpointError: an answer is not finite.
    """

    def make_ranking(_: int, count: int) -> Rank:
        def rank(batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple]:
            for images, _ in batches:
                probabilities = classifier.probabilities(images)
                ranked = np.nan_to_num(probabilities, nan=np.inf)  # first, where `check` sees it
                best = np.argsort(-ranked, axis=-1, kind="stable")[:, :count]
                yield np.take_along_axis(probabilities, best, -1), best

        return rank

    def check(file: str, probabilities: np.ndarray) -> None:
        if not all_finite(probabilities):
            raise CheckpointError(
                f"{file}: what {classifier.path} answers is not finite (NaN or infinity): numbers become too large "
                "for this image, or the file is damaged"
            )

    compiled = Compiled(classifier.data, classifier.probabilities)
    return rank_files(
        files,
        compiled,
        make_ranking,
        classifier.classes,
        batch_size=batch_size,
        check=check,
        topk=topk,
        cuts=classifier.cuts,
    )


def _data_of(description: Mapping[str, Any]) -> Data:
    """The section `config.data` of the images that a program takes."""
    preprocessing = description["preprocessing"]
    _, height, width, channels = description["input"]["images"]
    return dataclasses.replace(
        Data(),
        image_size=parse((height, width)),
        channels=channels,
        eval_crop=preprocessing["resize_and_crop"],
        eval_resize=preprocessing["eval_resize"],
        interpolation=preprocessing["interpolation"],
        max_value=preprocessing.get("max_value", 0),  # Files of earlier versions lack it.
    )


def _normalization(preprocessing: Mapping[str, Any]) -> Callable[[np.ndarray], np.ndarray]:
    """Images (B, H, W, C) uint8 to what the program takes."""
    stated = preprocessing["normalization"]
    if isinstance(stated, str):  # The program does it.
        return lambda images: images
    mean = np.float32(stated["mean"])
    std = np.float32(stated["std"])
    return lambda images: (images.astype(np.float32) / 255 - mean) / std


def _whole_batches(
    program: Callable[[np.ndarray], list[np.ndarray]], batch_size: int | str
) -> Callable[[np.ndarray], list[np.ndarray]]:
    """A program for any number of images, of one that may take a fixed number, which it is given with zeros."""
    if isinstance(batch_size, str):
        return program

    def answer(images: np.ndarray) -> list[np.ndarray]:
        count = len(images)
        padded = np.zeros((-(-count // batch_size) * batch_size, *images.shape[1:]), images.dtype)
        padded[:count] = images
        answers = [
            program(padded[start : start + batch_size])
            for start in range(0, len(padded), batch_size)
        ]
        return [np.concatenate(arrays)[:count] for arrays in zip(*answers, strict=True)]

    return answer
