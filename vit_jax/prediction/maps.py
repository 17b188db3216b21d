"""The class of every pixel of images, from a checkpoint that segments: masks, overlays and a list of what was
found. Which images these are is in `images.py`; classes by words are in `words.py`.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath
from PIL import Image

from vit_jax.base import lock, logs, outputs, places, stopping
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import fingerprints
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.data.decoding.decode import decode
from vit_jax.data.labels import segments
from vit_jax.data.record import BadImage
from vit_jax.evaluation import maps, panoptic
from vit_jax.evaluation.forward import data_of
from vit_jax.models import registry
from vit_jax.pictures import masks
from vit_jax.prediction import finite, output_names
from vit_jax.prediction.images import Named
from vit_jax.prediction.json_lines import JsonLines, checksum_of, content_mark

TABLE = "maps.json"
PANOPTIC = "panoptic.json"
LOG = "maps.jsonl"
_LISTS = (TABLE, PANOPTIC, LOG)


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
      run: the model.
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
        if run.objective_modules is None:
            raise ConfigError(
                f"{run.directory} gives no maps: pass a run that was trained with "
                "config.objective.name='segmentation'"
            )
        objective = run.objective_modules.networks.objective
        self.table = objective.table
        self.things = objective.table.things if objective.panoptic else ()
        self._options = maps.options_of(
            run.config.eval.evaluators, "segmentation", maps.MaskOptions
        )
        self._windows, self._grain = windows or self._options.windows, maps.grain(run.model_config)
        maps.check_windows(self._windows, self.things)
        self.data, self.classes = data_of(run), run.classes
        self.answers = jax.jit(maps.make_answers(run.objective_modules.networks, self.data))
        self.run = run

    @property
    def weights(self) -> tuple[registry.Weights, registry.Weights]:
        """Of the model as it is now, and of what the objective owns: the first two arguments of `answers`."""
        return registry.split(self.run.model)[1], self.run.objective_modules.weights

    def made_by(self) -> dict[str, Any]:
        """What maps depend on, for those that are continued: they have to be of the same."""
        weights = [fingerprints.digest(part) for part in self.weights]
        settings = checksum_of(self.data, self._windows, self._options, self.black)
        return {"weights": weights, "classes": list(self.classes), "settings": settings}

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

    Raises:
      CheckpointError: an answer of the model is not finite.
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
                for answer in own:
                    finite.check_answers(segmenter.run, [file.name], [x[None] for x in answer])
                yield segmenter.join(file.name, image, cut, own)


def write_maps(
    segmenter: Segmenter, files: Iterable[Named], out: epath.PathLike, *, batch_size: int
) -> dict[str, Any]:
    """Writes for each image its mask, OUT/NAME.png, whose values are class numbers, and OUT/NAME_overlay.png, and
    for all of them OUT/maps.json: files, and the share of pixels of each class. Of a model that finds single things
    also OUT/NAME_panoptic.png and for all of them OUT/panoptic.json, in COCO's form. NAME follows the image's path in
    the folder that was asked about, see `output_names`; all names are read before the first image.

    OUT/maps.jsonl has what is done, image by image. Images that an earlier run with this model and these settings
    wrote, and that have not changed since, are not computed again; those of earlier runs stay in the lists.

    Args:
      segmenter: the model.
      files: images, see `images.find_images`.
      out: a folder, made if it is not there.
      batch_size: see `segment`.

    Returns:
      Of how many `images` there are maps and how many are `unreadable`, and the `classes`.

    Raises:
      ConfigError: a file that is not ours would be replaced, OUT lies in a folder of images, or it has maps of another
        model or other settings; raised before an image is computed.
      Locked: another process writes there.
      Interrupted: SIGINT or SIGTERM came.
    """
    folder = places.locate(out, "--out")
    files = list({file.name: file for file in files}.values())
    output_names.check_folder(files, folder)
    folder = outputs.make_folder(out, "--out")
    busy = "another process writes maps to {folder} ({holder}): wait until it has ended"
    with lock.Lock(folder, name=".maps.lock", patience=0.0, busy=busy):
        work = _MapWork(segmenter, files, folder)
        with work.log, stopping.keeping(work.how_to_continue):
            work.run(batch_size)
    return work.result()


class _MapWork:
    """The maps of some images in a folder: those that are there, and those that are to be written.

    Attributes:
      log: the file OUT/maps.jsonl. An image has a row when its files are named, and another one when they are written.
    """

    def __init__(self, segmenter: Segmenter, files: Sequence[Named], folder: epath.Path):
        """Names all files, before any of them is written.

        Raises:
          ConfigError: see `write_maps`.
        """
        self._segmenter = segmenter
        self._files = files
        self._folder = folder
        self._endings = [".png", "_overlay.png"]
        if segmenter.things:
            self._endings.append("_panoptic.png")
        flag = f"--out={folder}"
        self.log = JsonLines(folder / LOG, segmenter.made_by(), f"{flag}: name another folder")
        self._rows = {row["file"]: row for row in self.log.rows}  # the last row of each image
        known = {name: row["stem"] for name, row in self._rows.items()}
        self._stems = output_names.name_outputs(files, self._endings, known=known, reserved=_LISTS)
        self._is_there = output_names.existing(folder)
        if not self.log.exists:
            for name in _LISTS:
                output_names.check_not_there(os.path.join(folder, name), flag, self._is_there)
        output_names.check_outputs(files, self._stems, self._endings, folder, known=known)
        # The marks are made before the images are read: an image that changes later is computed by the next run.
        self._marks = {file.name: content_mark(file) for file in files}
        self._new = [file for file in files if file.name not in known]
        self._remaining = [file for file in files if not self._is_done(file)]
        self._left = len(self._remaining)

    def run(self, batch_size: int) -> None:
        """Writes the maps that are missing, and the lists of all."""
        done = len(self._files) - self._left
        if done:
            logging.info("%d of %d images have their maps", done, len(self._files))
        self._make_folders()
        claims = ({"file": file.name, "stem": self._stems[file.name]} for file in self._new)
        self.log.add(claims, now=True)
        results = segment(self._segmenter, self._remaining, batch_size=batch_size)
        for file, result in zip(self._remaining, results, strict=True):
            row = {"file": file.name, "stem": self._stems[file.name]}
            if isinstance(result, BadImage):
                logging.error("%s", result)
            else:
                row["content"] = self._marks[file.name]
                row |= _write_pictures(result, self._folder, row["stem"])
            self.log.add([row])
            self._rows[file.name] = row
            self._left -= 1
        names = [file.name for file in self._files]
        earlier = [name for name in self._rows if name not in self._marks]
        rows = [self._rows[name] for name in (*names, *earlier)]
        written = [row for row in rows if "mask" in row]
        _write_lists(written, self._segmenter, self._folder)

    def how_to_continue(self) -> str:
        """The message after a signal."""
        done = len(self._files) - self._left
        return (
            f"stopped; {done} of {len(self._files)} images have their maps in {self._folder}: start the same command "
            "again for the others"
        )

    def result(self) -> dict[str, Any]:
        """What `write_maps` returns."""
        good = sum("mask" in self._rows[file.name] for file in self._files)
        unreadable = len(self._files) - good
        return {
            "images": good,
            "unreadable": unreadable,
            "classes": list(self._segmenter.classes),
        }

    def _is_done(self, file: Named) -> bool:
        """Whether all files of an image are there, and it has not changed since."""
        row = self._rows.get(file.name, {})
        if row.get("content") != self._marks[file.name]:
            return False
        stem = os.path.join(self._folder, self._stems[file.name])
        return all(self._is_there(stem + ending) for ending in self._endings)

    def _make_folders(self) -> None:
        """Makes the folders of outputs, and removes the files there that killed processes left half written."""
        if places.in_bucket(self._folder):
            return
        for part in sorted({os.path.dirname(stem) for stem in self._stems.values()}):
            folder = self._folder / part
            folder.mkdir(parents=True, exist_ok=True)
            outputs.remove_left_overs(folder)


def _write_pictures(result: Segmented, folder: epath.Path, stem: str) -> dict[str, Any]:
    """Writes the files of an image. Returns the part of its row that the lists are made of."""
    files = {"mask": f"{stem}.png", "overlay": f"{stem}_overlay.png"}
    pictures = {"mask": result.mask(), "overlay": result.overlay()}
    row = {"classes": result.shares()}
    if result.segments is not None:
        files["panoptic"] = f"{stem}_panoptic.png"
        colors, infos = segments.colored(result.segments)
        pictures["panoptic"] = Image.fromarray(colors)
        row |= {"size": result.labels.shape, "segments": infos}
    for name, picture in pictures.items():
        with outputs.writing(folder / files[name], swept=True) as partial:
            picture.save(partial, format="PNG")
    return files | row


def _write_lists(rows: Sequence[dict[str, Any]], segmenter: Segmenter, folder: epath.Path) -> None:
    """Writes maps.json, and of single things panoptic.json, from the rows of the log."""
    public = ("mask", "overlay", "panoptic", "classes")
    coco = {"images": [], "annotations": [], "categories": segments.categories(segmenter.table)}
    images = []
    for row in rows:
        name = logs.printable(row["file"])
        images.append({"file": name} | {key: row[key] for key in public if key in row})
        if "segments" in row:
            number = len(coco["images"]) + 1
            size = dict(zip(("height", "width"), row["size"], strict=True))
            coco["images"].append({"id": number, "file_name": name} | size)
            annotation = {"file_name": row["panoptic"], "segments_info": row["segments"]}
            coco["annotations"].append({"image_id": number} | annotation)
    if coco["images"]:
        with outputs.writing(folder / PANOPTIC) as partial:
            partial.write_text(json.dumps(coco))
    numbers = {name: i for i, name in enumerate(segmenter.classes)}
    with outputs.writing(folder / TABLE) as partial:
        partial.write_text(json.dumps({"classes": numbers, "images": images}, indent=1))
