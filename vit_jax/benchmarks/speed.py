"""Inference over the size of images: images a second, and the largest batch that memory has room for (ViT §D.5,
Fig. 12).
"""

import os
from collections.abc import Sequence

import jax
from absl import logging
from ml_collections import ConfigDict

from vit_jax.base import outputs
from vit_jax.base.errors import ConfigError
from vit_jax.benchmarks import step
from vit_jax.benchmarks.context import context
from vit_jax.models import registry
from vit_jax.pictures import style
from vit_jax.pictures.page import png
from vit_jax.pictures.plot import Plot


def speed(
    config: ConfigDict, *, models: Sequence[str], image_sizes: Sequence[int], steps: int, out: str
) -> dict:
    """Times models at several image sizes and draws both pictures.

    Args:
      config: what all have in common, such as `batch_size`.
      models: their names.
      image_sizes: sides of square images, in pixels; a model is not timed at those it cannot take.
      steps: timed batches of each.
      out: a folder for speed.png and largest_batch.png; '': none.

    Returns:
      `rows`: of each model and size `images_per_second` on a device, and `largest_batch`, by the compiler's
      count of memory; and where it was measured.
    """
    for name in models:
        registry.family_named(name)
    folder = outputs.make_folder(out, "--out") if out else None
    rows = [
        row for name in models for size in image_sizes if (row := _row(config, name, size, steps))
    ]
    if not rows:
        raise ConfigError(
            f"--models={','.join(models)} cannot take images of --image_sizes={','.join(map(str, image_sizes))}"
        )
    if folder:
        for key, title, words in (
            ("images_per_second", "Speed of inference", "images/s on a device"),
            ("largest_batch", "Largest batch that memory has room for", "images on a device"),
        ):
            image = _picture(rows, key, title, words)
            name = "speed" if key == "images_per_second" else key
            (folder / f"{name}.png").write_bytes(png(image))
    return {"rows": rows} | context()


def text(result: dict) -> str:
    """The rows as lines."""
    return "\n".join(
        f"{row['model']:<16} {row['image_size']:>5} px  {row['images_per_second']:>10,.1f} images/s  "
        f"largest batch {row['largest_batch']:,}"
        for row in result["rows"]
    )


def _row(config: ConfigDict, name: str, size: int, steps: int) -> dict | None:
    config = config.copy_and_resolve_references()
    config.model.name, config.data.image_size = name, size
    try:
        measured = step.inference(config, steps=steps)
    except ConfigError as error:
        logging.info("%s at %d pixels: %s", name, size, error)
        return None
    devices = jax.device_count()
    room = _memory() - measured["weights_bytes"]
    return {
        "model": name,
        "image_size": size,
        "images_per_second": measured["images_per_second"] / devices,
        "largest_batch": max(
            int(room // (measured["batch_bytes"] * devices / config.batch_size)), 0
        ),
    }


def _memory() -> int:
    """Bytes of a device's memory; of a CPU the host's."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _picture(rows: list[dict], key: str, title: str, words: str):
    plot = Plot(f"{title} over image size", x="image size [pixels]", y=words, logarithmic_y=True)
    names = dict.fromkeys(row["model"] for row in rows)
    for number, name in enumerate(names):
        colour = style.COLOURS[number % len(style.COLOURS)]
        mine = [row for row in rows if row["model"] == name]
        xs, ys = [row["image_size"] for row in mine], [row[key] for row in mine]
        plot.line(xs, ys, colour, name)
        plot.dots(xs, ys, colour)
    return plot.image()
