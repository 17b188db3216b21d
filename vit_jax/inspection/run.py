"""What `vit_jax inspect` does: a model of any checkpoint, images, and a folder with a page, pictures
and numbers.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import outputs, places, sizes
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.base.schema import nearest
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage
from vit_jax.evaluation.forward import data_of, make_exit, make_forward
from vit_jax.inspection import (
    class_maps,
    collapse,
    distance,
    exits,
    features,
    filters,
    health_pictures,
    maps,
    mixing,
    observe,
    positions,
)
from vit_jax.inspection.contract import InspectionContext, InspectOptions, Section
from vit_jax.inspection.leaving import Leaving
from vit_jax.interchange import formats, remote
from vit_jax.models import naming, registry
from vit_jax.pictures.page import Page, png
from vit_jax.prediction import output_names
from vit_jax.prediction.images import Named, check_one_size, find_images, read_ahead
from vit_jax.prediction.overrides import load_for_images

# The files of a report beside its pictures.
_PAGE = "report.html"
_NUMBERS = "numbers.npz"
_TEXTS = "report.json"
_ARGUMENTS = "inspect.json"  # of the command that wrote the report
_THRESHOLD = 0.8  # at each exit but the last, unless options say it
# In the order of the page; see `register`.
QUANTITIES: list[Callable[[InspectionContext], Section]] = [
    distance.inspect,
    maps.inspect_overlays,
    class_maps.inspect,
    maps.inspect_heads,
    maps.inspect_means,
    collapse.inspect,
    features.inspect,
    filters.inspect,
    positions.inspect,
    health_pictures.inspect,
    mixing.inspect,
    exits.inspect,
    maps.inspect_flow,
]


def register(quantity: Callable[[InspectionContext], Section]) -> None:
    """Adds a quantity from outside the package, at the end of the page."""
    QUANTITIES.append(quantity)


def inspect(
    checkpoint: epath.PathLike,
    images: Sequence[str],
    out: epath.PathLike,
    *,
    options: InspectOptions | None = None,
    settings: Sequence[tuple[str, str]] = (),
    model_options: Mapping[str, Any] | None = None,
) -> dict:
    """Writes OUT/report.html, the pictures beside it, and `numbers.npz`. A report that is there is replaced by the same
    command alone.

    Args:
      checkpoint: a run, or a file or folder of any format in `formats`.
      images: files, folders, and patterns such as `photos/*.jpg`.
      out: a folder, made if it is not there.
      options: see there.
      settings, model_options: see `overrides.load_for_images`.

    Returns:
      `report`, `images`, `unreadable`, and `sections`: the text of each.

    Raises:
      ConfigError: no image is found, the folder cannot be written or has the report of another command, or it is not
        known how images are normalised; raised before the model runs.
      CheckpointError: the checkpoint cannot be read.
      UserError: no image can be read.
    """
    options = options or InspectOptions()
    named, out = list(find_images(images)), places.locate(out, "--out")
    remote.check_name(checkpoint)
    outputs.check_no_file(out, "--out")
    output_names.check_report_folder(named, out, "--out")
    made_by = output_names.command_arguments(
        checkpoint,
        images=[places.absolute(pattern) for pattern in images],
        options=dataclasses.asdict(options),
        settings=list(settings),
        model=dict(model_options or {}),
    )
    _check_same_report(out, made_by)
    out = outputs.make_folder(out, "--out")
    run = load_for_images(checkpoint, settings, "inspect", model_options)
    data = data_of(run)
    check_one_size(data, "inspect")
    config = observe.for_inspection(run.model_config)
    if options.thresholds and len(options.thresholds) != len(config.exit_flops) - 1:
        raise ConfigError(
            f"--threshold has {len(options.thresholds)} numbers, but the model has "
            f"{len(config.exit_flops) or 1} exits: give one for each but the last"
        )
    unknown = [name for name in options.map_classes if name not in run.classes]
    if unknown:
        raise ConfigError(
            f"--map_classes: the model has no class {unknown[0]!r}{nearest(unknown[0], run.classes)}"
        )
    images_read = _Images(named, data, options)
    weights = jax.device_get(registry.split(run.model)[1])
    context = _subject(config, weights, data, images_read, options, tuple(run.classes))
    read = images_read.names
    bad = images_read.bad
    sections = []
    for quantity in QUANTITIES:
        sections.append(quantity(context))
        logging.info("%s", sections[-1].title)
    page = _page(run, checkpoint, read, bad, sections)
    places.write_whole(out / _ARGUMENTS, json.dumps(made_by, indent=1) + "\n")
    _write(out, page, sections, context, bad)
    return {
        "report": str(out / _PAGE),
        "images": len(read),
        "unreadable": {error.name: str(error) for error in bad},
        "sections": {section.title: section.text for section in sections},
    }


def text(result: dict) -> str:
    """`inspect`'s result for a person."""
    lines = [f"{title}: {words}" for title, words in result["sections"].items()]
    return "\n".join([*lines, "", f"{result['images']} images inspected: {result['report']}"])


def _check_same_report(out: epath.Path, made_by: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if a report could replace a file in a folder, unless the same command wrote that file."""
    before = places.read_json(out / _ARGUMENTS)
    is_there = output_names.existing(out)
    names = {_PAGE, _NUMBERS, _TEXTS, _ARGUMENTS}
    if is_there(str(out)):
        names |= {name for name in places.names_in(out) if name.endswith(".png")}
    for name in sorted(names):
        path = os.path.join(out, name)
        output_names.check_same_work(path, f"--out={out}", is_there, before, made_by)


class _Images:
    """The images, batch by batch; few of them are held.

    Attributes:
      names: of the images that could be read so far.
      bad: the errors of the images that cannot be read.
      first: the first images that could be read, as many as are shown or fill a batch.
    """

    def __init__(self, named: Sequence[Named], data: Data, options: InspectOptions):
        self._named = named
        self._data = data
        self._size = options.batch_size
        self._most = max(options.shown, options.batch_size)
        self.names: list[str] = []
        self.bad: list[BadImage] = []
        self.first: list[np.ndarray] = []

    def __iter__(self) -> Iterator[np.ndarray]:
        """(B, H, W, C) uint8, all but the last of one size. Raises `UserError` in the end if none could be read."""
        batch = []
        batches = read_ahead(self._named, self._read, self._size)
        for item, image in itertools.chain.from_iterable(batches):
            if isinstance(image, BadImage):
                logging.error("%s", image)
                self.bad.append(image)
                continue
            self.names.append(item.name)
            batch.append(image)
            if len(self.first) < self._most:
                self.first.append(image)
            if len(batch) == self._size:
                yield np.stack(batch)
                batch = []
        if batch:
            yield np.stack(batch)
        if not self.names:
            raise UserError(f"none of {len(self._named)} images can be read, see above")

    def _read(self, file: Named) -> np.ndarray:
        return file.read(self._data)


def _subject(
    config, weights, data: Data, images: _Images, options: InspectOptions, classes: tuple
) -> InspectionContext:
    definition = registry.abstract(config)[0]
    model = (definition, weights, config, data)
    leaving = None
    if config.exit_flops and config.num_classes:
        thresholds = options.thresholds or (_THRESHOLD,) * (len(config.exit_flops) - 1)
        leaving = Leaving(_exits(model), thresholds)

    def batches() -> Iterator[np.ndarray]:
        for batch in images:
            if leaving:
                leaving.add(batch)
            yield batch

    observed = observe.observe(*model, batches(), shown=options.shown, chosen=options.patch)
    size = sizes.size_text(config.image_size)
    logging.info("%d images of %s pixels", len(images.names), size)
    first = np.stack(images.first)
    forward = jax.jit(make_forward(definition, config, data))

    def classify(images: np.ndarray, changed=None) -> np.ndarray:
        return np.asarray(forward(changed or weights, images).logits)

    predicted = classify(first[: options.shown]).argmax(-1) if config.num_classes else ()
    return InspectionContext(
        config=config,
        weights=weights,
        images=first,
        names=images.names,
        observed=observed,
        details=observe.details(*model, first[: options.shown], with_flow=options.flow),
        classify=classify if config.num_classes else None,
        exits=leaving,
        options=options,
        classes=classes,
        predicted=tuple(classes[number] for number in predicted),
        class_maps=class_maps.make_class_maps(config, weights, data),
    )


def _exits(model: tuple) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images to the probability of the best class at each exit (E, B), and its number (E, B)."""
    definition, weights, config, data = model
    leave, count = make_exit(definition, config, data), len(config.exit_flops)

    @jax.jit
    def best(weights, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        carried, softmaxes = None, []
        for index in range(count):
            logits, carried = leave(index, weights, images, carried)
            softmaxes.append(jax.nn.softmax(logits))
        probabilities = jnp.stack(softmaxes)
        return probabilities.max(-1), probabilities.argmax(-1)

    return lambda images: jax.device_get(best(weights, images))


def _page(run, checkpoint, names, bad: Sequence[BadImage], sections: Sequence[Section]) -> Page:
    model, called = run.model_config, run.config.model.name
    page = Page(f"What {naming.full_name(model, called)} has learned")
    page.text(
        f"{checkpoint}: {formats.describe_model(model, called)}. {len(names)} images, of which the first are shown."
    )
    if bad:
        page.text(f"{len(bad)} images cannot be read: " + "; ".join(map(str, bad)))
    for section in sections:
        page.heading(section.title)
        page.text(section.text, absent=not section.figures)
        for name, figure in section.figures.items():
            page.picture(figure, f"{section.title}: {name.replace('_', ' ')}")
    return page


def _write(
    out: epath.Path,
    page: Page,
    sections: Sequence[Section],
    context: InspectionContext,
    bad: Sequence[BadImage],
) -> None:
    for section in sections:
        for name, figure in section.figures.items():
            (out / f"{name}.png").write_bytes(png(figure))
    numbers = {
        f"{section.title}/{name}": values
        for section in sections
        for name, values in section.numbers.items()
    }
    # An array with an axis of images has a row for each of these names.
    numbers |= {
        "images": np.array(context.names),
        "unreadable": np.array([x.name for x in bad], str),
    }
    if context.observed.logits is not None:
        numbers |= {"classes": np.array(context.classes), "logits": context.observed.logits}
    with (out / _NUMBERS).open("wb") as file:
        np.savez_compressed(file, **numbers)
    texts = {section.title: section.text for section in sections}
    places.write_whole(out / _TEXTS, json.dumps(texts, indent=1, ensure_ascii=False) + "\n")
    places.write_whole(out / _PAGE, page.html())
