"""The class of every pixel of images, from a checkpoint that segments: masks, overlays and a list of what was
found. Which images these are is in `images.py`.
"""

import collections
import colorsys
import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath
from PIL import Image, ImageDraw, ImageFont

from vit_jax.base import outputs
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import reading
from vit_jax.data import segments
from vit_jax.data.decode import decode
from vit_jax.data.record import BadImage
from vit_jax.evaluation import maps
from vit_jax.evaluation.forward import data_of
from vit_jax.evaluation.segmentation import check_windows, grain, options_of, segments_of
from vit_jax.models import registry
from vit_jax.prediction.images import Named, find_images
from vit_jax.prediction.overrides import load_for_images

TABLE, PANOPTIC = "maps.json", "panoptic.json"
_SHOWN = 0.5  # of the classes' colours in an overlay
_LINE, _SWATCH, _LEGEND = 18, 12, 180  # pixels


@dataclasses.dataclass(frozen=True)
class Segmented:
    """An image and the class of each of its pixels.

    Attributes:
      file: its name, as `images.Named` has it.
      labels: (H, W) uint8, numbers of `classes`.
      classes: names, in the order of these numbers.
      image: (H, W, C) uint8.
      segments: (H, W) uint16, single things too, see `data.segments`; `None` of a model that does not find any.
    """

    file: str
    labels: np.ndarray = dataclasses.field(repr=False)
    classes: tuple[str, ...]
    image: np.ndarray = dataclasses.field(repr=False)
    segments: np.ndarray | None = dataclasses.field(default=None, repr=False)

    def shares(self) -> dict[str, float]:
        """The share of the pixels of every class that occurs, the largest first."""
        counts = np.bincount(self.labels.reshape(-1), minlength=len(self.classes))
        order = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i]]
        return {self.classes[i]: float(counts[i] / self.labels.size) for i in order}


def segment(
    run: reading.Run, files: Iterable[Named], *, batch_size: int, windows: str | None = None
) -> Iterator[Segmented | BadImage]:
    """The class of every pixel of images, in their order; what cannot be read comes back as its `BadImage`.

    Args:
      run: from `loading.load_run`.
      files: images of any size, see `images.find_images`.
      batch_size: images at a time, and windows at most.
      windows: one of `maps.WINDOWS`; by default as the run is evaluated.

    Raises:
      ConfigError: the model does not segment, or it is not known how images are normalised.
    """
    if run.own is None:
        raise ConfigError(
            f"{run.directory} gives no maps: pass a run that was trained with config.objective.name='segmentation'"
        )
    options = options_of(run.config.eval.evaluators)
    windows, table = windows or options.windows, run.own.networks.objective.table
    things = table.things if run.own.networks.objective.panoptic else ()
    check_windows(windows, things)
    data, weights = data_of(run), registry.split(run.model)[1]
    answer = jax.jit(maps.make_answers(run.own.networks, data))

    def read(file: Named) -> tuple[Named, np.ndarray | BadImage]:
        try:
            limits = dict(channels=data.channels, max_pixels=data.max_pixels)
            return file, decode(file.read_content(), name=file.name, **limits)
        except BadImage as error:
            return file, error

    rows, remaining = None, iter(files)
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        while several := list(itertools.islice(remaining, batch_size)):
            found = list(pool.map(read, several))
            seen = [
                None if isinstance(pixels, BadImage)
                else maps.cut(pixels, data, windows, grain(run.model_config))
                for _, pixels in found
            ]  # fmt: skip
            pixels = [one for cut in seen if cut for one in cut.pixels]
            rows = rows or min(batch_size, max(len(pixels), 1))  # one shape, one compilation
            answers = collections.deque()
            for first in range(0, len(pixels), rows):
                batch = np.zeros((rows, *pixels[0].shape), np.uint8)
                part = pixels[first : first + rows]
                batch[: len(part)] = part
                given = jax.device_get(answer(weights, run.own.weights, batch))
                answers.extend(list(zip(*given, strict=True))[: len(part)])
            for (file, image), cut in zip(found, seen, strict=True):
                if cut is None:
                    yield image
                    continue
                own = [answers.popleft() for _ in cut.pixels]
                labels = cut.labels([scores for scores, *_ in own])
                parts = segments_of(own[0], labels.shape, things, options) if things else None
                yield Segmented(file.name, labels, run.classes, image, parts)


def write_maps(
    path: epath.PathLike,
    sources: Sequence[str],
    out: epath.PathLike,
    *,
    batch_size: int,
    windows: str | None = None,
    settings: Sequence[tuple[str, str]] = (),
    model_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes for each image its mask, OUT/NAME.png, whose values are class numbers, and OUT/NAME_overlay.png, and
    for all of them OUT/maps.json: files, and the share of pixels of each class. Of a model that finds single things
    also OUT/NAME_panoptic.png and for all of them OUT/panoptic.json, in COCO's form.

    Args:
      path: of a run that segments.
      sources: of images, see `images.find_images`.
      out: a folder, made if it is not there.
      batch_size, windows: see `segment`.
      settings, model_options: see `overrides.load_for_images`.

    Returns:
      How many `images` were segmented and how many are `unreadable`, and the `classes`.
    """
    files = find_images(sources)
    run = load_for_images(path, settings, "predict", model_options)
    folder = outputs.make_folder(out, "--out")
    rows, bad, names = [], 0, collections.Counter()
    table = run.own and run.own.networks.objective.table
    coco = {"images": [], "annotations": [], "categories": segments.categories(table)}
    for result in segment(run, files, batch_size=batch_size, windows=windows):
        if isinstance(result, BadImage):
            bad += 1
            logging.error("%s", result)
            continue
        stem = pathlib.PurePath(result.file).stem or "image"
        names[stem] += 1
        stem += f"_{names[stem]}" if names[stem] > 1 else ""
        files_of = {"mask": f"{stem}.png", "overlay": f"{stem}_overlay.png"}
        pictures = {"mask": mask_picture(result), "overlay": overlay(result)}
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
    numbers = {name: i for i, name in enumerate(run.classes)}
    with outputs.writing(folder / TABLE) as partial:
        partial.write_text(json.dumps({"classes": numbers, "images": rows}, indent=1))
    return {"images": len(rows), "unreadable": bad, "classes": list(run.classes)}


def mask_picture(result: Segmented) -> Image.Image:
    """The mask as a PNG keeps it: class numbers, with a palette to look at."""
    picture = Image.fromarray(result.labels, mode="P")
    picture.putpalette(palette(len(result.classes)).reshape(-1).tolist())
    return picture


def overlay(result: Segmented) -> Image.Image:
    """The image with the classes' colours on it, borders of segments in white, and which is which beside it."""
    colors, classes = palette(len(result.classes)), result.classes
    image = result.image if result.image.shape[2] == 3 else result.image[..., :1].repeat(3, 2)
    mixed = (1 - _SHOWN) * image + _SHOWN * colors[result.labels]
    if result.segments is not None:
        mixed[segments.borders(result.segments)] = 255
    shares = result.shares()
    height, width = result.labels.shape
    sheet = Image.new("RGB", (width + _LEGEND, max(height, _LINE * len(shares))), "white")
    sheet.paste(Image.fromarray(mixed.astype(np.uint8)))
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    for row, (name, share) in enumerate(shares.items()):
        left, top = width + 6, row * _LINE + 3
        color = tuple(colors[classes.index(name)].tolist())
        pen.rectangle((left, top, left + _SWATCH, top + _SWATCH), fill=color)
        pen.text((left + _SWATCH + 6, top - 2), f"{name} {share:.1%}", fill="black", font=font)
    return sheet


def palette(count: int) -> np.ndarray:
    """(count, 3) uint8: black for the first class, and hues that differ as much as they can for the others."""
    golden = 0.618034
    hues = ((i * golden) % 1 for i in range(count - 1))
    found = [colorsys.hsv_to_rgb(h, 0.6 + 0.4 * (i % 2), 0.95) for i, h in enumerate(hues)]
    return np.round(255 * np.array([(0, 0, 0), *found])).astype(np.uint8)
