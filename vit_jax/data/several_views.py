"""Several views of one image: what `config.data.views` says of their number, size, part and augmentation, and
`config.data.view_sizes` of other sizes by step. Runs without views do not import it.

The host decodes an image once and cuts all of its views out; the devices augment each by itself. What is
random about view number v is a function of (seed, step, v): another view more changes nothing of the
others. Of a run without views, images are as their view 0 would be.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import durations, schema, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.data import crops
from vit_jax.data.augmentation import pipeline
from vit_jax.data.options import Augment, Data
from vit_jax.data.order import BatchSpec

_CUT = ("image_size", *crops.TRAINING, "interpolation")
_MIXING = ("mixup", "cutmix", "mix_switch")
AGAIN = "_again"  # ends the names of views that are cut once more


@dataclasses.dataclass(frozen=True)
class Count:
    """What a view has beside the options of `config.data` and `config.augment`."""

    count: int = option(1, "how many there are", minimum=1)
    again: float = option(
        0.0,
        "the same parts are cut once more, this many times as large and without changes of colours, for a Gram "
        "teacher; 0: they are not",
        minimum=0,
    )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of all views, in a share of the steps: an entry of `config.data.view_sizes`."""

    share: float = option(1.0, "of the steps, relative to the other entries", above=0)
    sizes: tuple = option((), "an image_size for each of config.data.views")
    start: str = option("0 steps", "from when on", parse=durations.parse)
    again: float = option(
        0.0, "in place of that of the views that have one; 0: as theirs", minimum=0
    )


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


def find_views(config: BatchSpec) -> tuple[Views, ...]:
    """The views of each image; () where images are cut but once. What is cut `again` stands behind what it is of, and
    has its numbers.

    Raises:
      ConfigError: one of them has an unknown option, or what it says cannot be.
    """
    if config.data.views and config.data.permute != "none":
        raise ConfigError(
            f"config.data.permute = {config.data.permute!r}: images of several views (config.data.views) "
            "are not permuted"
        )
    all_views, first = [], 0
    for i, given in enumerate(config.data.views):
        where = f"config.data.views: view {i}"
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where}, {given!r}, is no {{'OPTION': VALUE, …}}")
        names = {
            Count: [field.name for field in schema.options(Count)],
            type(config.data): _CUT,
            type(config.augment): [
                f.name for f in schema.options(type(config.augment)) if f.name not in _MIXING
            ],
        }
        known = [name for of_class in names.values() for name in of_class]
        for name in given:
            if name not in known:
                raise ConfigError(f"{where} has no option {name!r}{schema.nearest(name, known)}")
        count, data, augment = (
            schema.checked_options(
                cls, {n: v for n, v in given.items() if n in own}, where, f"{where}: "
            )
            for cls, own in names.items()
        )
        options = Count(**count)
        view = Views(
            name=f"image_{i}",
            count=options.count,
            first=first,
            # No view is cut for evaluation, at whose size this might not fit.
            data=dataclasses.replace(config.data, **data, eval_crop="resize"),
            augment=dataclasses.replace(config.augment, **augment),
        )
        try:
            crops.check_crops(view.data)
            pipeline.check_augmentation(view.augment, view.data.channels)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        first += view.count
        all_views.append(view)
        if options.again:
            all_views.append(_again(view, options.again, where))
    return tuple(all_views)


def augment_views(
    batch: dict[str, jax.Array], views: Sequence[Views], key: jax.Array, **normalization
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
            return pipeline.augment(
                images, {}, jax.random.fold_in(key, number), view.augment, **normalization
            )[0]

        return jax.vmap(one, (1, 0), 1)(batch[view.name], jnp.array(view.numbers))

    return {view.name: of_views(view) for view in views}


def find_sized_views(config: BatchSpec) -> list[tuple[Data, tuple[Views, ...]]]:
    """`config.data` and the views with the sizes of each entry of `config.data.view_sizes`.

    Raises:
      ConfigError: see `find_views`; an entry has another number of sizes than there are views.
    """
    sized_views, views = [], config.data.views
    for i, entry in enumerate(find_sizes(config)):
        where = f"config.data.view_sizes: entry {i}"
        if len(entry.sizes) != len(views):
            raise ConfigError(
                f"{where} has {len(entry.sizes)} sizes, and config.data.views has {len(views)} entries: give one each"
            )
        resized = []
        for view, size in zip(views, entry.sizes, strict=True):
            factor = {"again": entry.again} if entry.again and view.get("again") else {}
            resized.append({**view, "image_size": sizes.parse(size, where), **factor})
        data = dataclasses.replace(config.data, views=tuple(resized), view_sizes=())
        sized_views.append((data, find_views(dataclasses.replace(config, data=data))))
    return sized_views


def make_choice(
    config: BatchSpec, to_steps: Callable[[str], int], draw: Callable[[int], float]
) -> Callable[[int], int]:
    """Step, from 0, -> 0, the views as they are, or i, the sizes of entry i - 1.

    Args:
      config: with `data.view_sizes`.
      to_steps: a duration in steps.
      draw: a number in [0, 1) for a step.
    """
    entries = find_sizes(config)
    starts = [to_steps(entry.start) for entry in entries]

    def choose(step: int) -> int:
        shares = [e.share * (step >= start) for e, start in zip(entries, starts, strict=True)]
        if not any(shares):
            return 0
        ends = np.cumsum(shares) / sum(shares)
        return 1 + int(np.searchsorted(ends, draw(step), side="right"))

    return choose


def find_sizes(config: BatchSpec) -> list[Sizes]:
    all_sizes = []
    for i, options in enumerate(config.data.view_sizes):
        where = f"config.data.view_sizes: entry {i}"
        if not isinstance(options, Mapping):
            raise ConfigError(f"{where}, {options!r}, is no {{'OPTION': VALUE, …}}")
        all_sizes.append(Sizes(**schema.checked_options(Sizes, dict(options), where, f"{where}: ")))
    return all_sizes


def _again(view: Views, factor: float, where: str) -> Views:
    """The same parts of the image, `factor` times as large, changed by flips alone."""
    sides = [side * factor for side in sizes.height_width(view.data.image_size)]
    if any(side != int(side) for side in sides):
        size = sizes.size_text(view.data.image_size)
        raise ConfigError(
            f"{where}: again = {factor:g} times {size} pixels is no whole number of them"
        )
    size = sizes.parse(tuple(map(int, sides)))
    data = dataclasses.replace(view.data, image_size=size)
    augment = dataclasses.replace(type(view.augment)(), flip=view.augment.flip)
    return dataclasses.replace(view, name=view.name + AGAIN, data=data, augment=augment)
