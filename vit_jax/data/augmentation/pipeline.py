"""Random changes of training images, made on the devices inside the compiled step: one list for all layouts of pixels.

A batch has whole images, several views of each, or images at their own sizes as patches. An augmentation is written
once for all of them, by the operations of `PixelLayout`, or it is refused by name. Another augmentation of the package
is one entry of `ON_PIXELS` or `ON_NORMALIZED`; users add theirs by `register_augmentation`, see `own`.

Everything is a pure function of its arguments, works on the whole batch, and gives the same result however the batch is
sharded. Cutting images out of files is the host's work, see `decode`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from vit_jax.base.errors import ConfigError
from vit_jax.data.augmentation import augment as whole_images
from vit_jax.data.augmentation import color, own
from vit_jax.data.options import Augment

Images = Any  # of a layout: (B, H, W, C), or a `PatchBatch`
WHOLE = whole_images.WholeImages()


class PixelLayout(Protocol):
    """How the pixels of a batch are arranged, and the operations that depend on it."""

    def check(self, images: Images) -> None:
        """Raises `ValueError` unless pixels are uint8."""

    def flip(self, images: Images, key: jax.Array) -> Images:
        """Mirrors each image left-right with probability 1/2."""

    def choose_operations(
        self, images: Images, key: jax.Array, config: Augment, mean: Sequence[float]
    ) -> Images:
        """RandAugment and AutoAugment; empty corners are filled with `mean`."""

    def change_pixels(
        self, images: Images, change: Callable[[jax.Array, jax.Array | None], jax.Array]
    ) -> Images:
        """Images with changed pixels; none of them moves.

        Args:
          change: a function of pixels (B, …, C), with two axes between, and of a mask (B, …) bool, false at padding;
            `None` without padding.
        """

    def normalize(self, images: Images, mean: Sequence[float], std: Sequence[float]) -> Images:
        """Images with (pixels / 255 - mean) / std, float32."""

    def erase(self, images: Images, key: jax.Array, config: Augment) -> Images:
        """Random Erasing."""

    def mix(
        self, images: Images, targets: Any, key: jax.Array, config: Augment
    ) -> tuple[Images, Any]:
        """Mixup and cutmix, of the targets as of the images."""

    def cast(self, images: Images, dtype: jax.typing.DTypeLike) -> Images:
        """Images of this dtype."""


class TrainingImages(NamedTuple):
    """The images of a batch and their targets, which augmentations change.

    Attributes:
      images: of the layout.
      targets: a tree of (B, …), which are mixed as the images are.
      layout: of the images.
      mean: of pixels in [0, 1], by channel.
    """

    images: Images
    targets: Any
    layout: PixelLayout
    mean: Sequence[float]


class Augmentation(NamedTuple):
    """One augmentation of the package.

    Attributes:
      fields: of `config.augment`; each one switches it on.
      apply: from a batch, a random key and the section to the batch, changed.
      key: number of its key among the five of a step; `None`: it derives a key from that of the step.
      is_of_colors: whether images must be RGB.
      needs_whole_images: whether it depends on where a pixel is or on its neighbours, and patches are refused.
      moves_pixels: whether pixels move; then masks follow by `move`, or are refused.
      move: from maps (B, H, W), its key and the section to the maps, moved as pixels are.
    """

    fields: tuple[str, ...]
    apply: Callable[[TrainingImages, jax.Array, Augment], TrainingImages]
    key: int | None
    is_of_colors: bool = False
    needs_whole_images: bool = False
    moves_pixels: bool = False
    move: Callable[[jax.Array, jax.Array, Augment], jax.Array] | None = None

    def fields_on(self, config: Augment) -> list[str]:
        """The fields that switch it on."""
        return [field for field in self.fields if getattr(config, field)]


def _flip(batch: TrainingImages, key: jax.Array, config: Augment) -> TrainingImages:
    return batch._replace(images=batch.layout.flip(batch.images, key))


def _flip_map(maps: jax.Array, key: jax.Array, config: Augment) -> jax.Array:
    return whole_images.flip(maps[..., None], key)[..., 0]


def _choose_operations(batch: TrainingImages, key: jax.Array, config: Augment) -> TrainingImages:
    images = batch.layout.choose_operations(batch.images, key, config, batch.mean)
    return batch._replace(images=images)


def _three_augment(batch: TrainingImages, key: jax.Array, config: Augment) -> TrainingImages:
    policy = whole_images.POLICIES["three_augment"]
    return batch._replace(images=policy(batch.images, jax.random.fold_in(key, 2)))


def _change_colors(batch: TrainingImages, key: jax.Array, config: Augment) -> TrainingImages:
    def change(pixels: jax.Array, inside: jax.Array | None) -> jax.Array:
        return color.change_colors(pixels, key, config, inside)

    return batch._replace(images=batch.layout.change_pixels(batch.images, change))


def _change_by_registered(batch: TrainingImages, key: jax.Array, config: Augment) -> TrainingImages:
    def change(pixels: jax.Array, inside: jax.Array | None) -> jax.Array:
        return own.change(pixels, key, config)

    return batch._replace(images=batch.layout.change_pixels(batch.images, change))


def _erase(batch: TrainingImages, key: jax.Array, config: Augment) -> TrainingImages:
    return batch._replace(images=batch.layout.erase(batch.images, key, config))


def _mix(batch: TrainingImages, key: jax.Array, config: Augment) -> TrainingImages:
    images, targets = batch.layout.mix(batch.images, batch.targets, key, config)
    return batch._replace(images=images, targets=targets)


# The field's usual order. The number of a key is part of the draws: a new augmentation takes the step's key
# (`key=None`) and folds its name in, as `own` does, so that all other draws stay as they are.
#
# On pixels in [0, 255]: geometry first, so that corners which a policy fills are changed in colour as the image is;
# registered augmentations last, for they may give floats of any kind.
ON_PIXELS = (
    Augmentation(("flip",), _flip, key=0, moves_pixels=True, move=_flip_map),
    Augmentation(
        ("randaugment_layers", "autoaugment"), _choose_operations, key=1, is_of_colors=True,
        moves_pixels=True,
    ),
    Augmentation(
        ("three_augment",), _three_augment, key=1, is_of_colors=True, needs_whole_images=True
    ),
    Augmentation(color.FIELDS, _change_colors, key=2, is_of_colors=True),
    Augmentation(("own",), _change_by_registered, key=None, moves_pixels=True, move=own.move),
)  # fmt: skip
# On normalised images: the noise of random erasing is standard normal, and mixing takes finished examples.
ON_NORMALIZED = (
    Augmentation(("erasing",), _erase, key=3),
    Augmentation(("mixup", "cutmix"), _mix, key=4),
)


def augment(
    images: Images,
    targets: Any,
    key: jax.Array,
    config: Augment,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: jax.typing.DTypeLike = jnp.float32,
    layout: PixelLayout = WHOLE,
) -> tuple[Images, Any]:
    """Augments and normalises images for training, as `config` says, in the order of `ON_PIXELS` and `ON_NORMALIZED`.

    Args:
      images: (B, H, W, C) uint8, or images of another layout.
      targets: a tree of float32 (B, …), such as one-hot or multi-hot labels (B, K).
      key: random key; each operation has a sub-key, so that switching one off leaves all other draws as they are.
      config: the section `config.augment`; its fields are explained in `vit_jax.config.Augment`.
      mean, std: (C,), of pixels in [0, 1].
      dtype: of the images returned; all arithmetic is float32.
      layout: of the images.

    Returns:
      The images, of `dtype`, and the targets, mixed as the images are.
    """
    layout.check(images)
    batch = TrainingImages(images, targets, layout, mean)
    keys = _Keys.of_step(key)
    batch = _apply(ON_PIXELS, batch, keys, config)
    batch = batch._replace(images=layout.normalize(batch.images, mean, std))
    batch = _apply(ON_NORMALIZED, batch, keys, config)
    return layout.cast(batch.images, dtype), batch.targets


class _Keys(NamedTuple):
    """The random keys of one step's augmentation."""

    step: jax.Array
    numbered: tuple[jax.Array, ...]

    @classmethod
    def of_step(cls, key: jax.Array) -> "_Keys":
        return cls(key, tuple(jax.random.split(key, 5)))

    def of_augmentation(self, augmentation: Augmentation) -> jax.Array:
        return self.step if augmentation.key is None else self.numbered[augmentation.key]


def _apply(
    augmentations: Sequence[Augmentation], batch: TrainingImages, keys: _Keys, config: Augment
) -> TrainingImages:
    """The batch after the augmentations that the config switches on."""
    for augmentation in augmentations:
        if augmentation.fields_on(config):
            batch = augmentation.apply(batch, keys.of_augmentation(augmentation), config)
    return batch


def move(maps: Any, key: jax.Array, config: Augment) -> Any:
    """Maps of images as `augment` with this key and config moves the pixels of these.

    Args:
      maps: a tree of (B, H, W), such as the classes of pixels.
    """
    keys = _Keys.of_step(key)
    for augmentation in ON_PIXELS:
        if augmentation.move is not None and augmentation.fields_on(config):
            own_key = keys.of_augmentation(augmentation)
            maps = _move_leaves(augmentation.move, maps, own_key, config)
    return maps


def _move_leaves(
    move_map: Callable[[jax.Array, jax.Array, Augment], jax.Array],
    maps: Any,
    key: jax.Array,
    config: Augment,
) -> Any:
    return jax.tree.map(lambda leaf: move_map(leaf, key, config), maps)


def check_augmentation(config: Augment, channels: int) -> None:
    """Raises `ConfigError` if the section `config.augment` contradicts itself, or does not suit images with this
    number of channels.
    """
    for augmentation in ON_PIXELS:
        if augmentation.is_of_colors and channels != 3:
            for name in augmentation.fields_on(config):
                raise ConfigError(
                    f"config.augment.{name} changes the colours of RGB images, and config.data.channels is "
                    f"{channels}: set it to {_off(config, name)}"
                )
    own.check_names(config)
    whole_images.check_strengths(config)


def check_masks(config: Augment) -> None:
    """Raises `ConfigError` for random changes that move pixels of images and not of their masks."""
    for augmentation in ON_PIXELS:
        if augmentation.moves_pixels and augmentation.move is None:
            for name in augmentation.fields_on(config):
                raise ConfigError(
                    f"config.augment.{name} = {getattr(config, name)} would move pixels of images and not of their "
                    f"masks: set it to {_off(config, name)}"
                )
    own.check_masks(config)


def check_native_sizes(config: Augment, where: str) -> None:
    """Raises `ConfigError` for random changes of whole images alone; `where`: the option that has patches."""
    for name in _of_whole_images(config):
        raise ConfigError(
            f"{where}: config.augment.{name} = {getattr(config, name)} changes whole images alone, and these are "
            f"patches; set it to {_off(config, name)}"
        )
    own.check_patches(config, where)


def _of_whole_images(config: Augment) -> Iterator[str]:
    """The fields that switch on a change of whole images alone."""
    for name, change in color.CHANGES.items():
        if change.needs_whole_images and getattr(config, name):
            yield name
    for augmentation in ON_PIXELS:
        if augmentation.needs_whole_images:
            yield from augmentation.fields_on(config)


def _off(config: Augment, name: str) -> Any:
    """The value of a field that switches it off."""
    return type(getattr(config, name))()
