"""Several views of one image: what `config.data.views` says of their number, size, part and augmentation.

The host decodes an image once and cuts all of its views out; the devices augment each by itself. What is
random about view number v is a function of (seed, step, v): another view more changes nothing of the
others. Of a run without views, images are as their view 0 would be.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.data import crops
from vit_jax.data.augmentation import augment as augmentation
from vit_jax.data.options import Augment, BatchSpec, Data

_CUT = ("image_size", "train_crop", "crop_area", "crop_aspect", "resize", "pad", "interpolation")
_MIXING = ("mixup", "cutmix", "mix_switch")


@dataclasses.dataclass(frozen=True)
class Count:
    """What a view has beside the options of `config.data` and `config.augment`."""

    count: int = option(1, "how many there are", minimum=1)


@dataclasses.dataclass(frozen=True)
class Views:
    """Views that are alike.

    Attributes:
      name: of their array in a batch, (B, count, H, W, C) uint8.
      count: how many there are.
      first: the number of the first of them among all views.
      data, augment: the sections of the config as they are for these views.
    """

    name: str
    count: int
    first: int
    data: Data
    augment: Augment

    @property
    def numbers(self) -> range:
        """Of these views among all."""
        return range(self.first, self.first + self.count)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(count, H, W, C) of an example."""
        return (self.count, *crops.shape(self.data))


def of(config: BatchSpec) -> tuple[Views, ...]:
    """The views of each image; () where images are cut but once.

    Raises:
      ConfigError: one of them has an unknown option, or what it says cannot be.
    """
    if config.data.views and config.data.permute != "none":
        raise ConfigError(
            f"config.data.permute = {config.data.permute!r}: images of several views (config.data.views) "
            "are not permuted"
        )
    found, first = [], 0
    for i, said in enumerate(config.data.views):
        where = f"config.data.views: view {i}"
        if not isinstance(said, Mapping):
            raise ConfigError(f"{where}, {said!r}, is no {{'OPTION': VALUE, …}}")
        names = {
            Count: [field.name for field in schema.options(Count)],
            type(config.data): _CUT,
            type(config.augment): [
                f.name for f in schema.options(type(config.augment)) if f.name not in _MIXING
            ],
        }
        known = [name for of_class in names.values() for name in of_class]
        for name in said:
            if name not in known:
                raise ConfigError(f"{where} has no option {name!r}{schema.nearest(name, known)}")
        count, data, augment = (
            schema.checked_options(
                cls, {n: v for n, v in said.items() if n in own}, where, f"{where}: "
            )
            for cls, own in names.items()
        )
        view = Views(
            name=f"image_{i}",
            count=Count(**count).count,
            first=first,
            data=dataclasses.replace(config.data, **data),
            augment=dataclasses.replace(config.augment, **augment),
        )
        try:
            crops.check(view.data)
            augmentation.check(view.augment, view.data.channels)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        first += view.count
        found.append(view)
    return tuple(found)


def augment_views(
    batch: dict[str, jax.Array], views: Sequence[Views], key: jax.Array, **how
) -> dict[str, jax.Array]:
    """Augments and normalises views, (B, count, H, W, C) uint8 each, every view with a key of its own.

    Args:
      batch: has an array for each of `views`.
      **how: `mean`, `std` and `dtype` of `augment`.

    Returns:
      The same arrays, of `dtype`.
    """

    def of_views(view: Views) -> jax.Array:
        def one(images, number):
            return augmentation.augment(
                images, {}, jax.random.fold_in(key, number), view.augment, **how
            )[0]

        return jax.vmap(one, (1, 0), 1)(batch[view.name], jnp.array(view.numbers))

    return {view.name: of_views(view) for view in views}
