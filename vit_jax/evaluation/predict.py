"""Class names and probabilities of image files, from a checkpoint directory alone."""

import csv
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import logging
from etils import epath

from vit_jax import objectives
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.checkpoints import reading
from vit_jax.data import crops
from vit_jax.data.decode import eval_crop
from vit_jax.data.record import BadImage
from vit_jax.evaluation.forward import make_forward
from vit_jax.models import registry


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The most probable classes of an image, best first.

    Attributes:
      file: as it was given.
      classes: label names.
      probabilities: in [0, 1]; softmax, or independent sigmoids for a model trained with sigmoid
        loss.
      image: (H, W, C) uint8 as the model saw it.
    """

    file: str
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]
    image: np.ndarray


def predict(
    run: reading.Run, files: Sequence[str], *, topk: int, batch_size: int
) -> Iterator[Prediction | BadImage]:
    """Classifies images in batches; what cannot be read comes back as its `BadImage`, in place.

    Args:
      run: from `reading.load_run`.
      files: paths of images.
      topk: how many classes of each.
      batch_size: images at a time.
    """
    definition, weights = registry.split(run.model)
    forward = make_forward(definition, run.model_config, run.config.data)
    data, topk = run.config.data, min(topk, len(run.classes))
    kind = objectives.probabilities(run.config.objective)
    activation = {"sigmoid": jax.nn.sigmoid, "softmax": jax.nn.softmax}[kind]

    @jax.jit
    def best(weights, images):
        return jax.lax.top_k(activation(forward(weights, images).logits), topk)

    for first in range(0, len(files), batch_size):
        names = files[first : first + batch_size]
        images = [_read(name, data) for name in names]
        good = [image for image in images if not isinstance(image, BadImage)]
        # One shape, one compilation: the rest of the last batch stays empty.
        batch = np.zeros((min(batch_size, len(files)), *crops.shape(data)), np.uint8)
        batch[: len(good)] = good or 0
        rows = zip(*jax.device_get(best(weights, batch)), strict=True)
        for name, image in zip(names, images, strict=True):
            if isinstance(image, BadImage):
                yield image
            else:
                probabilities, classes = next(rows)
                yield Prediction(
                    name,
                    tuple(run.classes[c] for c in classes),
                    tuple(map(float, probabilities)),
                    image,
                )


def predict_files(
    path, files: Sequence[str], *, topk: int, batch_size: int, form: str, picture: str | None
) -> None:
    """Prints predictions as `text`, `csv` or `json` (one list, on the last line).

    Args:
      path: of a run or checkpoint.
      picture: a PNG file to draw the images and their classes into.

    Raises:
      ConfigError: the picture cannot be written; said before any work.
      UserError: some image could not be read; said after all others were predicted.
    """
    if picture:
        _check_folder(picture)
    run = reading.load_run(path)
    results = list(predict(run, files, topk=topk, batch_size=batch_size))
    good = [result for result in results if isinstance(result, Prediction)]
    for result in results:
        if isinstance(result, BadImage):
            logging.error("%s", result)
    {"text": _print_text, "csv": _print_csv, "json": _print_json}[form](good)
    if picture and good:
        from vit_jax.evaluation.picture import draw

        draw([(p.image, f"{p.classes[0]} {p.probabilities[0]:.0%}") for p in good], picture)
        logging.info("picture: %s", picture)
    if len(good) < len(files):
        raise UserError(
            f"{len(files) - len(good)} of {len(files)} images cannot be read, see above"
        )


def _check_folder(picture: str) -> None:
    folder = pathlib.Path(picture).parent
    if not folder.is_dir():
        raise ConfigError(f"--picture={picture}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--picture={picture}: {folder} cannot be written to")


def _read(name: str, data) -> np.ndarray | BadImage:
    try:
        return eval_crop(epath.Path(name).read_bytes(), data, name=name)
    except BadImage as error:
        return error
    except OSError as error:
        return BadImage(name, error.strerror)


def _print_text(predictions: list[Prediction]) -> None:
    for p in predictions:
        print(p.file)
        for name, probability in zip(p.classes, p.probabilities, strict=True):
            print(f"  {probability:7.2%}  {name}")


def _print_csv(predictions: list[Prediction]) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(("file", "rank", "class", "probability"))
    for p in predictions:
        for rank, (name, probability) in enumerate(zip(p.classes, p.probabilities, strict=True), 1):
            writer.writerow((p.file, rank, name, f"{probability:.6f}"))


def _print_json(predictions: list[Prediction]) -> None:
    rows = []
    for p in predictions:
        classes = [
            {"class": c, "probability": q} for c, q in zip(p.classes, p.probabilities, strict=True)
        ]
        rows.append({"file": p.file, "predictions": classes})
    print(json.dumps(rows))
