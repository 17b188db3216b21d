"""What `vit_jax inspect` does: a model of any checkpoint, images, and a folder with a page, pictures
and numbers.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import outputs, places, sizes
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage
from vit_jax.evaluation.forward import data_of, make_exit, make_forward
from vit_jax.inspection import (
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
from vit_jax.interchange import formats, remote
from vit_jax.models import naming, registry
from vit_jax.pictures.page import Page, png
from vit_jax.prediction.images import Named, check_one_size, find_images, read_ahead
from vit_jax.prediction.overrides import load_for_images

# In the order of the page; see `register`.
QUANTITIES: list[Callable[[InspectionContext], Section]] = [
    distance.inspect,
    maps.inspect_overlays,
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
    """Writes OUT/report.html, the pictures beside it, and `numbers.npz`.

    Args:
      checkpoint: a run, or a file or folder of any format in `formats`.
      images: files, folders, and patterns such as `photos/*.jpg`.
      out: a folder, made if it is not there.
      options: see there.
      settings, model_options: see `overrides.load_for_images`.

    Returns:
      `report`, `images`, `unreadable`, and `sections`: the text of each.

    Raises:
      ConfigError: no image is found, the folder cannot be written, or it is not known how images are
        normalised; raised before the model runs.
      CheckpointError: the checkpoint cannot be read.
      UserError: no image can be read.
    """
    options = options or InspectOptions()
    named, out = list(find_images(images)), places.locate(out, "--out")
    remote.check_name(checkpoint)
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
    pixels, read, bad = _read(named, data, options.batch_size)
    weights = jax.device_get(registry.split(run.model)[1])
    context = _subject(config, weights, data, pixels, read, options, tuple(run.classes))
    sections = []
    for quantity in QUANTITIES:
        sections.append(quantity(context))
        logging.info("%s", sections[-1].title)
    page = _page(run, checkpoint, read, bad, sections)
    _write(out, page, sections)
    return {
        "report": str(out / "report.html"),
        "images": len(read),
        "unreadable": {error.name: str(error) for error in bad},
        "sections": {section.title: section.text for section in sections},
    }


def text(result: dict) -> str:
    """`inspect`'s result for a person."""
    lines = [f"{title}: {words}" for title, words in result["sections"].items()]
    return "\n".join([*lines, "", f"{result['images']} images inspected: {result['report']}"])


def _read(
    named: Sequence[Named], data: Data, batch_size: int
) -> tuple[np.ndarray, list[str], list[BadImage]]:
    """The images that can be read, their names, and what is wrong with the others."""
    pixels, names, bad = [], [], []
    read = lambda file: file.read(data)  # noqa: E731
    for item, image in itertools.chain.from_iterable(read_ahead(named, read, batch_size)):
        if isinstance(image, BadImage):
            logging.error("%s", image)
            bad.append(image)
        else:
            pixels.append(image)
            names.append(item.name)
    if not pixels:
        raise UserError(f"none of {len(named)} images can be read, see above")
    return np.stack(pixels), names, bad


def _subject(
    config, weights, data: Data, pixels: np.ndarray, names, options: InspectOptions, classes: tuple
) -> InspectionContext:
    definition = registry.abstract(config)[0]
    model = (definition, weights, config, data)
    logging.info("%d images of %s pixels", len(pixels), sizes.size_text(config.image_size))
    observed = observe.observe(
        *model, pixels, batch_size=options.batch_size, shown=options.shown, chosen=options.patch
    )
    forward = jax.jit(make_forward(definition, config, data))

    def classify(images: np.ndarray, changed=None) -> np.ndarray:
        return np.asarray(forward(changed or weights, images).logits)

    predicted = classify(pixels[: options.shown]).argmax(-1) if config.num_classes else ()
    return InspectionContext(
        config=config,
        weights=weights,
        images=pixels,
        names=names,
        observed=observed,
        details=observe.details(*model, pixels[: options.shown], with_flow=options.flow),
        classify=classify if config.num_classes else None,
        exits=_exits(model, options.batch_size)
        if config.exit_flops and config.num_classes
        else None,
        options=options,
        classes=classes,
        predicted=tuple(classes[number] for number in predicted),
    )


def _exits(model: tuple, batch_size: int) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images to the probability of the best class at each exit (E, n), and its number (E, n)."""
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

    def of_images(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        starts = range(0, len(images), batch_size)
        batches = jax.device_get([best(weights, images[i : i + batch_size]) for i in starts])
        confidences, classes = (
            np.concatenate(parts, axis=1) for parts in zip(*batches, strict=True)
        )
        return confidences, classes

    return of_images


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


def _write(out: epath.Path, page: Page, sections: Sequence[Section]) -> None:
    for section in sections:
        for name, figure in section.figures.items():
            (out / f"{name}.png").write_bytes(png(figure))
    numbers = {
        f"{section.title}/{name}": values
        for section in sections
        for name, values in section.numbers.items()
    }
    with (out / "numbers.npz").open("wb") as file:
        np.savez_compressed(file, **numbers)
    texts = {section.title: section.text for section in sections}
    places.write_whole(out / "report.json", json.dumps(texts, indent=1, ensure_ascii=False) + "\n")
    places.write_whole(out / "report.html", page.html())
