"""Augmentations from outside the package (`config.augment.own`): each is one class, which all layouts of images use."""

import zlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest
from vit_jax.data.options import Augment


class Augmentation:
    """A random change of training images, after the changes of colours and before normalisation.

    Attributes:
      needs_whole_images: whether it depends on where a pixel is, or on its neighbours. Then it is refused for images at
        their own sizes. These come as (B, patches, pixels of a patch, C): no axis is a row or a column of the image.
      moves_pixels: whether pixels move. Then `move` has to move masks alike, or they are refused.
    """

    needs_whole_images = True
    moves_pixels = False

    def __call__(self, images: jax.Array, key: jax.Array) -> jax.Array:
        """Changes a batch, as a pure function of its arguments.

        Args:
          images: (B, H, W, C) float32, of pixels in [0, 255].
          key: random key of this augmentation in this step.
        """
        raise NotImplementedError

    def move(self, masks: jax.Array, key: jax.Array) -> jax.Array:
        """Masks (B, H, W), moved as `__call__` with this key moves pixels."""
        return masks


AUGMENTATIONS: dict[str, Augmentation] = {}


def register(name: str, augmentation: type[Augmentation]) -> None:
    """Adds an augmentation from outside the package: a name in `config.augment.own`."""
    AUGMENTATIONS[name] = augmentation()


def change(images: jax.Array, key: jax.Array, config: Augment) -> jax.Array:
    """Images changed by all augmentations that the config names, in its order."""
    if not config.own:
        return images
    images = images.astype(jnp.float32)
    for augmentation, own_key in _with_keys(config, key):
        images = augmentation(images, own_key)
    return images


def move(masks: jax.Array, key: jax.Array, config: Augment) -> jax.Array:
    """Masks (B, H, W), moved as `change` moves pixels."""
    for augmentation, own_key in _with_keys(config, key):
        masks = augmentation.move(masks, own_key)
    return masks


def check_names(config: Augment) -> None:
    """Raises `ConfigError` for a name that is not registered."""
    for name in config.own:
        if name not in AUGMENTATIONS:
            raise ConfigError(
                f"config.augment.own: no augmentation {name!r} is registered{nearest(name, AUGMENTATIONS)}; "
                "register_augmentation of vit_jax.extend adds one"
            )


def check_patches(config: Augment, where: str) -> None:
    """Raises `ConfigError` for an augmentation of whole images; `where`: the option that has patches."""
    for name in config.own:
        if AUGMENTATIONS[name].needs_whole_images:
            raise ConfigError(
                f"{where}: config.augment.own has {name!r}, which changes whole images alone, and these are patches: "
                "leave it out, or set its needs_whole_images = False if places and neighbours do not matter to it"
            )


def check_masks(config: Augment) -> None:
    """Raises `ConfigError` for an augmentation that moves pixels and not their masks."""
    for name in config.own:
        augmentation = type(AUGMENTATIONS[name])
        if augmentation.moves_pixels and augmentation.move is Augmentation.move:
            raise ConfigError(
                f"config.augment.own has {name!r}, which moves pixels of images and not of their masks: leave it out, "
                "or give it the method `move`"
            )


def _with_keys(config: Augment, key: jax.Array) -> Iterator[tuple[Augmentation, jax.Array]]:
    """Each has a key of its name, so that another one beside it leaves its draws as they are."""
    for name in config.own:
        yield AUGMENTATIONS[name], jax.random.fold_in(key, zlib.crc32(name.encode()))
