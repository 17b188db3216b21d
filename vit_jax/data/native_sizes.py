"""Images at sizes of their own: the size that a number of patches allows (SigLIP 2's NaFlex, arXiv 2502.14786 §2.4.2),
a padded batch of their patches, and what a config may ask of them. Which positions they have is the model's.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.settings import named_entries
from vit_jax.data import crops
from vit_jax.data.augmentation import pipeline
from vit_jax.data.decoding import decode
from vit_jax.data.native_batches import batch_sizes, find_lengths
from vit_jax.data.options import Data
from vit_jax.data.order import BatchSpec
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.contract import GRID, PatchBatch
from vit_jax.models.embeddings import cut_patches

_SCALES = 1e-6, 100.0
_PRECISION = 1e-5


def choose_grid(height: int, width: int, *, patch: int, tokens: int) -> tuple[int, int]:
    """Rows and columns of the patches of an image of (height, width) pixels: the largest scale at which they are
    `tokens` at most, found by bisection, sides rounded up to whole patches. That is all that its aspect changes by. A
    small image is enlarged. The arithmetic is float64's of big_vision, timm and transformers, which decides where
    sizes are a tie.
    """

    def grid(scale: float) -> tuple[int, int]:
        rows, columns = (math.ceil(side * scale / patch) for side in (height, width))
        return max(rows, 1), max(columns, 1)

    low, high = _SCALES
    while high - low >= _PRECISION:
        middle = (low + high) / 2
        fits = math.prod(grid(middle)) <= tokens
        low, high = (middle, high) if fits else (low, middle)
    return grid(low)


def read_image(
    image: bytes | np.ndarray,
    data: Data,
    *,
    patch: int,
    tokens: int,
    name: str,
    draws: Sequence[float] | None = None,
) -> np.ndarray:
    """A whole image, or a crop for training, at the size that `choose_grid` gives it, (H, W, C) uint8.

    A crop is that of `crops.train_part` with the image's own aspect as the target's: the aspect ratio of an inception
    crop is `crop_aspect` times the image's (timm's RandomResizedCropToSequence).

    Args:
      image: the file's bytes, or its pixels.
      data: the section `config.data`, whose `image_size` and `eval_crop` do not count.
      name: what to call the image in errors.
      draws: `crops.DRAWS` numbers, random in [0, 1), which decide on the crop; `None`: the whole image.

    Raises:
      BadImage: see `decode.decode`.
    """

    def place_of(height: int, width: int):
        part = (0, 0, height, width), False
        if draws is not None:
            own = dataclasses.replace(data, image_size=(height, width))
            part = crops.train_part(height, width, own, draws)
        top, left, bottom, right = part[0]
        rows, columns = choose_grid(bottom - top, right - left, patch=patch, tokens=tokens)
        return part, (rows * patch, columns * patch)

    return decode.cut(image, name, place_of, data)


def fill_row(
    outs: dict[str, np.ndarray],
    image: bytes | np.ndarray,
    data: Data,
    *,
    name: str,
    draws: Sequence[float] | None = None,
) -> None:
    """Puts an image into its row of a batch: its patches into `image` (N, P * P * C), its rows and columns into `grid`
    (2,). Arguments and errors are those of `read_image`; patch and tokens are those of `data`.
    """
    size = {"patch": data.native_patch, "tokens": data.native_tokens}
    pixels = read_image(image, data, name=name, draws=draws, **size)
    outs[GRID][:] = _split(pixels, data.native_patch, outs["image"])


def pad_batch(
    pixels: Sequence[np.ndarray], *, patch: int, tokens: int, rows: int, channels: int
) -> PatchBatch:
    """Images (H, W, C) uint8 whose sides are multiples of `patch` as `rows` rows of `tokens` patches; further rows
    are images of one black patch.
    """
    patches = np.zeros((rows, tokens, patch * patch * channels), np.uint8)
    grids = np.ones((rows, 2), np.int32)
    for i, image in enumerate(pixels):
        grids[i] = _split(image, patch, patches[i])
    return PatchBatch(patches, grids)


def _split(pixels: np.ndarray, patch: int, out: np.ndarray) -> tuple[int, int]:
    """Puts the patches of an image into `out`, black ones after them; returns their rows and columns."""
    grid = pixels.shape[0] // patch, pixels.shape[1] // patch
    patches = cut_patches(pixels[None], grid)[0]
    out[: len(patches)] = patches
    out[len(patches) :] = 0
    return grid


def for_model(data: Data, model: ClassifierConfig) -> Data:
    """`data`, of which `native_tokens` is not 0, with `native_patch` as the model has it.

    Raises:
      ConfigError: the model takes images of one size alone, has another patch, or a row of its own grid has more
        patches than the images would.
    """
    field = f"config.data.native_tokens = {data.native_tokens}"
    if reason := model.fixed_size_reason:
        raise ConfigError(
            f"{field}: the model takes images of {sizes.size_text(model.image_size)} pixels alone, for {reason}; set "
            "it to 0"
        )
    if data.native_patch not in (0, model.patch):
        raise ConfigError(
            f"config.data.native_patch = {data.native_patch}, but the model's patch is {model.patch}: leave it out"
        )
    columns = model.grid[1]
    for tokens in (data.native_tokens, *(length for length, _ in find_lengths(data))):
        if tokens < columns:
            name = "native_tokens" if tokens == data.native_tokens else "native_lengths"
            raise ConfigError(
                f"config.data.{name}: {tokens} is less than a row of patches of the model's own images, {columns}: "
                f"set it to about {model.grid[0] * columns}, as many as these have"
            )
    if data.permute != "none":
        raise ConfigError(
            f"{field}: config.data.permute = {data.permute!r} permutes images of one size alone"
        )
    return dataclasses.replace(data, native_patch=model.patch)


def for_training(config: BatchSpec, takes_native: bool, model: ClassifierConfig) -> BatchSpec:
    """The config of a run whose images have sizes of their own, with `data` as `for_model` has it.

    Args:
      config: the run's.
      takes_native: whether its objective can learn from such images.
      model: the family's config.

    Raises:
      ConfigError: something of it works on images of one size alone.
    """
    data, where = config.data, f"config.data.native_tokens = {config.data.native_tokens}"
    if not takes_native:
        raise ConfigError(
            f"{where}: the objective {config.objective.name!r} learns from images of one size alone; set it to 0"
        )
    for field in ("views", "size_schedule"):
        if getattr(data, field):
            raise ConfigError(f"{where} gives images their sizes: set config.data.{field}=()")
    if data.train_crop not in ("inception", "resize"):
        raise ConfigError(
            f"{where}: config.data.train_crop = {data.train_crop!r} cuts images of one size; set it to 'inception', "
            "crops that keep the image's aspect, or to 'resize', the whole image"
        )
    if config.pseudo.teacher:
        raise ConfigError(
            f"{where}: the teacher of config.pseudo sees images of one size; set config.pseudo.teacher=''"
        )
    if "loss" in dict(named_entries("eval.evaluators", config.eval.evaluators)):
        raise ConfigError(
            f"{where}: the evaluator 'loss' of config.eval.evaluators measures images of one size; name accuracy"
        )
    pipeline.check_native_sizes(config.augment, where)
    for size in batch_sizes(config):
        if size % config.accumulate:
            raise ConfigError(
                f"{where}: a batch of {size} images is not divisible by config.accumulate = {config.accumulate}: set "
                "config.data.native_multiple to a multiple of it"
            )
    if data.native_rate != "none" and config.optim.name == "schedule_free":
        raise ConfigError(
            f"config.data.native_rate = {data.native_rate!r} has no use with schedule_free, whose average has the rate "
            "in it: set it to 'none'"
        )
    return dataclasses.replace(config, data=for_model(data, model))
