"""The class of every pixel of images, from a checkpoint that segments: masks, overlays and a list of what was
found. Which images these are is in `images.py`; classes by words are in `words.py`.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath
from PIL import Image

from vit_jax.base import outputs
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.data.decoding.decode import decode
from vit_jax.data.labels import segments
from vit_jax.data.record import BadImage
from vit_jax.evaluation import maps, panoptic
from vit_jax.evaluation.forward import data_of
from vit_jax.models import registry
from vit_jax.pictures import masks
from vit_jax.prediction.images import Named

TABLE, PANOPTIC = "maps.json", "panoptic.json"


@dataclasses.dataclass(frozen=True)
class Segmented:
    """An image and the class of each of its pixels.

    Attributes:
      file: its name, as `images.Named` has it.
      labels: (H, W) uint8, numbers of `classes`.
      classes: names, in the order of these numbers.
      image: (H, W, C) uint8.
      segments: (H, W) int32, single things too, see `data.labels.segments`; `None` of a model that does not find any.
      black: whether the first class is drawn black.
    """

    file: str
    labels: np.ndarray = dataclasses.field(repr=False)
    classes: tuple[str, ...]
    image: np.ndarray = dataclasses.field(repr=False)
    segments: np.ndarray | None = dataclasses.field(default=None, repr=False)
    black: bool = True

    def shares(self) -> dict[str, float]:
        """The share of the pixels of every class that occurs, the largest first."""
        counts = np.bincount(self.labels.reshape(-1), minlength=len(self.classes))
        order = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i]]
        return {self.classes[i]: float(counts[i] / self.labels.size) for i in order}

    def mask(self) -> Image.Image:
        """The mask as a PNG keeps it, see `masks.mask_picture`."""
        return masks.mask_picture(self.labels, self._colors())

    def layer(self) -> Image.Image:
        """The classes' colours to lay over the image, and white borders between segments; see `masks.layer`."""
        lines = None if self.segments is None else segments.borders(self.segments)
        return masks.layer(self.labels, self._colors(), lines)

    def overlay(self) -> Image.Image:
        """The image with its `layer`, and beside it which colour is which class."""
        colors, shares = self._colors(), self.shares()
        rows = [
            (f"{share:.1%}  {name}", tuple(colors[self.classes.index(name)].tolist()))
            for name, share in shares.items()
        ]
        return masks.side_by_side([masks.overlay(self.image, self.layer()), masks.legend(rows)])

    def _colors(self) -> np.ndarray:
        return masks.palette(len(self.classes), black=self.black)


class Segmenter:
    """A model that segments, for images of any size.

    Attributes:
      data: how images are normalised, the section `config.data`.
      classes: their names.
      answers: the forward pass, jitted, see `maps.make_answers`.
      things: of each class, whether single ones are found; () for a model that finds none.
      table: what panoptic masks mean; `None` where it was trained with none.
      black: whether the first class is drawn black.
    """

    black = True

    def __init__(self, run: TrainedModel, windows: str | None = None):
        """
        Args:
          run: from `loading.load_run`.
          windows: one of `maps.WINDOWS`; by default as the run is evaluated.

        Raises:
          ConfigError: the model does not segment, or it is not known how images are normalised.
        """
        if run.own is None:
            raise ConfigError(
                f"{run.directory} gives no maps: pass a run that was trained with "
                "config.objective.name='segmentation'"
            )
        objective = run.own.networks.objective
        self.table = objective.table
        self.things = objective.table.things if objective.panoptic else ()
        self._options = maps.options_of(
            run.config.eval.evaluators, "segmentation", maps.MaskOptions
        )
        self._windows, self._grain = windows or self._options.windows, maps.grain(run.model_config)
        maps.check_windows(self._windows, self.things)
        self.data, self.classes = data_of(run), run.classes
        self.answers, self._run = jax.jit(maps.make_answers(run.own.networks, self.data)), run

    @property
    def weights(self) -> tuple[registry.Weights, registry.Weights]:
        """Of the model as it is now, and of what the objective owns: the first two arguments of `answers`."""
        return registry.split(self._run.model)[1], self._run.own.weights

    def cut(self, pixels: np.ndarray, name: str) -> maps.Windows:
        """What the model sees of an image (H, W, C) uint8. Raises `TooLarge` if that is too much."""
        return maps.cut(pixels, self.data, self._windows, self._grain, name=name)

    def join(
        self, name: str, image: np.ndarray, cut: maps.Windows, answers: Sequence[tuple]
    ) -> Segmented:
        """An image with its classes, by what the model answered to each of its windows."""
        labels = cut.labels([scores for scores, *_ in answers])
        parts = None
        if self.things:
            parts = panoptic.segments_of(answers[0], labels.shape, self.things, self._options)
        return Segmented(name, labels, self.classes, image, parts, self.black)


def segment(
    segmenter: Segmenter, files: Iterable[Named], *, batch_size: int
) -> Iterator[Segmented | BadImage]:
    """The class of every pixel of images, in their order; what cannot be read comes back as its `BadImage`.

    Args:
      segmenter: the model.
      files: images of any size, see `images.find_images`.
      batch_size: images at a time, and windows at most.
    """
    data, weights = segmenter.data, segmenter.weights

    def read(file: Named) -> tuple[Named, np.ndarray | BadImage, maps.Windows | None]:
        try:
            pixels = decode(
                file.read_content(),
                name=file.name,
                channels=data.channels,
                max_pixels=data.max_pixels,
                max_value=data.max_value,
            )
            return file, pixels, segmenter.cut(pixels, file.name)
        except BadImage as error:
            return file, error, None

    rows, remaining = None, iter(files)
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        while files_of_batch := list(itertools.islice(remaining, batch_size)):
            decoded = list(pool.map(read, files_of_batch))
            pixels = [window for _, _, cut in decoded if cut for window in cut.pixels]
            rows = rows or min(batch_size, max(len(pixels), 1))  # one shape, one compilation
            answers = collections.deque()
            for first in range(0, len(pixels), rows):
                batch = np.zeros((rows, *pixels[0].shape), np.uint8)
                part = pixels[first : first + rows]
                batch[: len(part)] = part
                given = jax.device_get(segmenter.answers(*weights, batch))
                answers.extend(list(zip(*given, strict=True))[: len(part)])
            for file, image, cut in decoded:
                if cut is None:
                    yield image
                    continue
                own = [answers.popleft() for _ in cut.pixels]
                yield segmenter.join(file.name, image, cut, own)


def write_maps(
    segmenter: Segmenter, files: Iterable[Named], out: epath.PathLike, *, batch_size: int
) -> dict[str, Any]:
    """Writes for each image its mask, OUT/NAME.png, whose values are class numbers, and OUT/NAME_overlay.png, and
    for all of them OUT/maps.json: files, and the share of pixels of each class. Of a model that finds single things
    also OUT/NAME_panoptic.png and for all of them OUT/panoptic.json, in COCO's form.

    Args:
      segmenter: the model.
      files: images, see `images.find_images`.
      out: a folder, made if it is not there.
      batch_size: see `segment`.

    Returns:
      How many `images` were segmented and how many are `unreadable`, and the `classes`.
    """
    folder = outputs.make_folder(out, "--out")
    rows, bad, names = [], 0, collections.Counter()
    coco = {"images": [], "annotations": [], "categories": segments.categories(segmenter.table)}
    for result in segment(segmenter, files, batch_size=batch_size):
        if isinstance(result, BadImage):
            bad += 1
            logging.error("%s", result)
            continue
        stem = pathlib.PurePath(result.file).stem or "image"
        names[stem] += 1
        stem += f"_{names[stem]}" if names[stem] > 1 else ""
        files_of = {"mask": f"{stem}.png", "overlay": f"{stem}_overlay.png"}
        pictures = {"mask": result.mask(), "overlay": result.overlay()}
        if result.segments is not None:
            files_of["panoptic"] = f"{stem}_panoptic.png"
            colors, infos = segments.colored(result.segments)
            pictures["panoptic"] = Image.fromarray(colors)
            (height, width), number = result.labels.shape, len(coco["images"]) + 1
            size = {"height": height, "width": width}
            coco["images"].append({"id": number, "file_name": result.file} | size)
            annotation = {"file_name": files_of["panoptic"], "segments_info": infos}
            coco["annotations"].append({"image_id": number} | annotation)
        for name, picture in pictures.items():
            with outputs.writing(folder / files_of[name]) as partial:
                picture.save(partial, format="PNG")
        rows.append({"file": result.file, **files_of, "classes": result.shares()})
    if coco["images"]:
        with outputs.writing(folder / PANOPTIC) as partial:
            partial.write_text(json.dumps(coco))
    numbers = {name: i for i, name in enumerate(segmenter.classes)}
    with outputs.writing(folder / TABLE) as partial:
        partial.write_text(json.dumps({"classes": numbers, "images": rows}, indent=1))
    return {"images": len(rows), "unreadable": bad, "classes": list(segmenter.classes)}
