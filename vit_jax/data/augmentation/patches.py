"""The operations of `pipeline` on images at their own sizes: their pixels are arranged in patches."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.data.augmentation import augment, patch_layout
from vit_jax.data.options import Augment
from vit_jax.models import native_sizes
from vit_jax.models.contract import PatchBatch

_GROUP = 32  # images among which partners are found
_WINDOW = 4  # neighbours by aspect that are shuffled


@dataclasses.dataclass(frozen=True)
class Patches:
    """The layout of images at their own sizes, see `pipeline.PixelLayout`; all have this number of channels."""

    channels: int

    def check(self, images: PatchBatch) -> None:
        augment.check_pixels(images.patches)

    def flip(self, images: PatchBatch, key: jax.Array) -> PatchBatch:
        return flip(images, key, self.channels)

    def choose_operations(
        self, images: PatchBatch, key: jax.Array, config: Augment, mean: Sequence[float]
    ) -> PatchBatch:
        return choose_operations(images, key, config, mean)

    def change_pixels(
        self, images: PatchBatch, change: Callable[[jax.Array, jax.Array], jax.Array]
    ) -> PatchBatch:
        return change_pixels(images, self.channels, change)

    def normalize(
        self, images: PatchBatch, mean: Sequence[float], std: Sequence[float]
    ) -> PatchBatch:
        return normalize(images, mean, std, jnp.float32)

    def erase(self, images: PatchBatch, key: jax.Array, config: Augment) -> PatchBatch:
        return erase(images, key, config, self.channels)

    def mix(
        self, images: PatchBatch, targets: Any, key: jax.Array, config: Augment
    ) -> tuple[PatchBatch, Any]:
        return mix(images, targets, key, config, self.channels)

    def cast(self, images: PatchBatch, dtype: jax.typing.DTypeLike) -> PatchBatch:
        return images.replace(patches=images.patches.astype(dtype))


def normalize(
    images: PatchBatch, mean: Sequence[float], std: Sequence[float], dtype: jax.typing.DTypeLike
) -> PatchBatch:
    """`augment.normalize` of the pixels of patches; mean and std have a number for each channel."""
    shape = images.patches.shape
    pixels = images.patches.reshape(*shape[:2], -1, len(mean))
    return images.replace(patches=augment.normalize(pixels, mean, std, dtype).reshape(shape))


def flip(images: PatchBatch, key: jax.Array, channels: int) -> PatchBatch:
    """Mirrors each image left-right with probability 1/2: its columns of patches, and the pixels of each patch."""
    count, tokens, values = images.patches.shape
    chosen = jax.random.bernoulli(key, shape=(count, 1, 1, 1))[:, 0]  # drawn as `augment.flip` does
    index, columns = jnp.arange(tokens)[None], images.grids[:, 1:]
    mirrored = index // columns * columns + (columns - 1 - index % columns)
    mirrored = jnp.where(index < images.grids.prod(1, keepdims=True), mirrored, index)
    side = round((values // channels) ** 0.5)
    moved = jnp.take_along_axis(images.patches, mirrored[..., None], axis=1)
    moved = moved.reshape(count, tokens, side, side, channels)[:, :, :, ::-1]
    return images.replace(
        patches=jnp.where(chosen, moved.reshape(images.patches.shape), images.patches)
    )


def choose_operations(
    images: PatchBatch, key: jax.Array, config: Augment, mean: Sequence[float]
) -> PatchBatch:
    """`augment.choose_operations` of images (…, 3) uint8, each turned, sheared and shifted in its own frame."""
    side = _side(images, 3)
    layout = patch_layout.PatchLayout.of(images.grids, side, images.patches.shape[1])
    pixels = patch_layout.strip(images.patches, side, 3)
    changed = augment.choose_operations(pixels, key, config, mean, layout=layout)
    return images.replace(patches=patch_layout.patches_of(jnp.where(layout.inside, changed, 0)))


def change_pixels(
    images: PatchBatch, channels: int, change: Callable[[jax.Array, jax.Array], jax.Array]
) -> PatchBatch:
    """Images whose pixels are changed, and whose padding stays zero.

    Args:
      change: a function of pixels (B, patches, pixels of a patch, C), and of (B, patches, 1, 1) bool: which patches are
        no padding.
    """
    shape = images.patches.shape
    inside = _inside(images)[..., None, None]
    pixels = images.patches.reshape(*shape[:2], -1, channels)
    changed = change(pixels, inside)
    return images.replace(patches=jnp.where(inside, changed, 0).reshape(shape))


def erase(images: PatchBatch, key: jax.Array, config: Augment, channels: int) -> PatchBatch:
    """`augment.erase` with the boxes that it draws for images of such sizes; patches float, normalised."""
    shape, side = images.patches.shape, _side(images, channels)
    height, width = (side * images.grids[:, i : i + 1] for i in (0, 1))
    area, aspect = config.erasing_area, config.erasing_aspect
    drawn = augment.draw_boxes(key, shape[0], height, width, config.erasing, area, aspect)
    *bounds, noise_key = drawn
    box = _in_box(images, side, *bounds)[..., None]
    pixels = images.patches.reshape(*shape[:2], side, side, channels)
    noise = jnp.zeros(())
    if config.erasing_mode != "const":
        of_image = (shape[0], 1, 1, 1, channels)
        of_pixels = config.erasing_mode == "pixel"
        noise = jax.random.normal(noise_key, pixels.shape if of_pixels else of_image)
    return images.replace(patches=jnp.where(box, noise, pixels).reshape(shape))


def mix(
    images: PatchBatch, targets: Any, key: jax.Array, config: Augment, channels: int
) -> tuple[PatchBatch, Any]:
    """Mixes every image with one of nearly its aspect, where the two overlap when their centres do (as timm's loader
    for NaFlex does), and the targets by the share of pixels that come from either.

    mixup: a pixel in the overlap keeps a ~ Beta(p, p) of its own, or 1 - a if that is more. cutmix: a box in the
    overlap is the partner's, with sqrt(1 - a) of its sides and its centre anywhere in it, cut off at its border. Drawn
    for each image. Partners are found by `find_partners`.

    Args:
      images: patches float, normalised.
      targets: a tree of float32 (B, …).
      key: random key.
      config: the section `config.augment`.
      channels: of the images.
    """
    partner_key, switch_key, mixup_key, cutmix_key, *centre_keys = jax.random.split(key, 6)
    shape, side = images.patches.shape, _side(images, channels)
    count, group = shape[0], _group(shape[0])
    partners = find_partners(images.grids, partner_key)

    def of_partner(x: jax.Array) -> jax.Array:
        # Partners are in the same group, and a group is, as a rule, on one device.
        grouped = x.reshape(-1, group, *x.shape[1:])
        index = partners.reshape(-1, group, *[1] * (x.ndim - 1))
        return jnp.take_along_axis(grouped, index, axis=1).reshape(x.shape)

    own, other = images.grids, of_partner(images.grids)
    shared = jnp.minimum(own, other)
    first, first_of_other = (own - shared) // 2, (other - shared) // 2
    place = jnp.stack(native_sizes.places(images), axis=-1)  # (B, N, 2)
    theirs_place = place - (first - first_of_other)[:, None]
    token = theirs_place[..., 0] * other[:, 1:] + theirs_place[..., 1]
    token = jnp.clip(token, 0, shape[1] - 1)
    theirs = jnp.take_along_axis(of_partner(images.patches), token[..., None], axis=1)

    bounds = [x * side for i in (0, 1) for x in (first[:, i], first[:, i] + shared[:, i])]
    pixels = (own[:, 0] * own[:, 1] * side * side).astype(jnp.float32)
    kept, taken = jnp.ones(count), jnp.zeros(count)
    if config.mixup:
        a = jax.random.beta(mixup_key, config.mixup, config.mixup, (count,))
        kept = jnp.maximum(a, 1 - a)
        taken = (1 - kept) * (shared[:, 0] * shared[:, 1] * side * side)
    if config.cutmix:
        reach = jnp.sqrt(1 - jax.random.beta(cutmix_key, config.cutmix, config.cutmix, (count,)))
        cut = []
        for i, centre_key in enumerate(centre_keys):
            low, high = bounds[2 * i : 2 * i + 2]
            centre = jax.random.randint(centre_key, (count,), low, high)
            half = (reach * (high - low)).astype(jnp.int32) // 2
            cut += [jnp.maximum(centre - half, low), jnp.minimum(centre + half, high)]
        cuts = jax.random.bernoulli(
            switch_key, config.mix_switch if config.mixup else 1.0, (count,)
        )
        bounds = [jnp.where(cuts, *pair) for pair in zip(cut, bounds, strict=True)]
        kept = jnp.where(cuts, 0, kept)
        taken = jnp.where(cuts, (cut[1] - cut[0]) * (cut[3] - cut[2]), taken)

    def blend(values: jax.Array, others: jax.Array, own_share: jax.Array) -> jax.Array:
        own_share = own_share.reshape(count, *[1] * (values.ndim - 1))
        return own_share * values + (1 - own_share) * others

    in_pixels = (*shape[:2], side, side, channels)
    mine, theirs = images.patches.reshape(in_pixels), theirs.reshape(in_pixels)
    box = _in_box(images, side, *bounds)[..., None]
    mixed = jnp.where(box, blend(mine, theirs, kept), mine).reshape(shape)
    share = 1 - taken / pixels
    mixed_targets = jax.tree.map(lambda x: blend(x, of_partner(x), share), targets)
    return images.replace(patches=mixed), mixed_targets


def find_partners(grids: jax.Array, key: jax.Array) -> jax.Array:
    """(B,) int32, the partner of each image by its place in its group: images are sorted by aspect, shuffled among
    four neighbours, and paired. Groups are 32 images of the batch in its order, or as many as divide it.
    """
    group = _group(len(grids))
    aspects = jnp.log(grids[:, 1] / grids[:, 0]).reshape(-1, group)
    rank = jnp.argsort(jnp.argsort(aspects, axis=1), axis=1)
    order = jnp.argsort(rank // _WINDOW + jax.random.uniform(key, rank.shape), axis=1)
    place = jnp.arange(group)
    partner_place = jnp.where(place ^ 1 < group, place ^ 1, place - (group > 1))
    inverse = jnp.argsort(order, axis=1)
    return jnp.take_along_axis(order, partner_place[inverse], axis=1).reshape(-1)


def _group(count: int) -> int:
    """Images in a group of `find_partners`."""
    group = math.gcd(count, _GROUP)
    return group if group >= _WINDOW else count


def _side(images: PatchBatch, channels: int) -> int:
    """Of a patch, in pixels."""
    return round((images.patches.shape[2] // channels) ** 0.5)


def _inside(images: PatchBatch) -> jax.Array:
    """(B, N) bool: what is no padding."""
    tokens = images.patches.shape[1]
    return jnp.arange(tokens) < images.lengths(tokens)[:, None]


def _in_box(images: PatchBatch, side: int, top, bottom, left, right) -> jax.Array:
    """(B, N, P, P) bool: the pixels in the box of each image, whose bounds are (B,) each; padding is in none."""

    def between(axis: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
        pixels = axis[..., None] * side + jnp.arange(side)
        return (pixels >= low[:, None, None]) & (pixels < high[:, None, None])

    rows, columns = native_sizes.places(images)
    inside = between(rows, top, bottom)[..., None] & between(columns, left, right)[..., None, :]
    return inside & _inside(images)[..., None, None]
