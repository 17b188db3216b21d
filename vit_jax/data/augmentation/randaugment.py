"""RandAugment on the device: sixteen operations on batches of uint8 images, and the random choice among them.

Lives here: the operations, what a magnitude means for each, `randaugment`, and how operations are
dealt to a batch. timm's variant, with its own operations and magnitudes, is in `timm_augment.py`; the rest of
augmentation is in `augment.py`.

The operations are those of the TensorFlow implementation with which AugReg and big_vision trained their models
(RandAugment, arXiv:1909.13719; Cutout, arXiv:1708.04552), oddities included, as published numbers depend on them:

- Magnitude 0 is not nothing: Solarize inverts; Posterize to 0 bits, which was left to the device, is black here (a
  shift by 8); Color, Contrast, Brightness and Sharpness leave a tenth of the image.
- Magnitudes above 10 extrapolate: Solarize does nothing from 10 on, Posterize from 20 on.
- Contrast blends with the grey level (number of pixels) / 256, at most 255, which is 196 at 224 px, and not with the
  image's mean (to which big_vision has changed since).

Where we differ, knowingly:

- An operation is drawn for a group of images, not for each (see `randaugment`); signs and places are drawn for each.
- Lengths of Translate and Cutout, fixed in pixels there, grow with the side of the image; at 224 px they agree.
- Rotate is three shears, see `geometry.rotate`; a pixel may come from one beside the nearest.
- AutoContrast and the blur of Sharpness round exact quotients down; in float32, whole numbers may fall one short.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from vit_jax.compute import conditionals
from vit_jax.data.augmentation import geometry

FILL = 128  # what geometric operations and Cutout leave where there is no image
GREY = (0.2989, 0.587, 0.114)  # luma of RGB (ITU-R BT.601)
MAX_GROUPS = 16


def randaugment(
    images: jax.Array, key: jax.Array, layers: int, magnitude: float, layout=geometry.WHOLE
) -> jax.Array:
    """Applies `layers` random operations of strength `magnitude`, one after the other, to every image.

    To run only what was drawn, the batch is split into groups that share their operations: image i is
    in group i mod G, with G the largest divisor of B up to 16. Each layer deals a random permutation of the
    operations to the groups, so each image's operation is uniform over the sixteen and, with 16 groups, a batch holds
    each of them equally often. The groups are worked through in sequence, which bounds memory. As each group spans
    the whole batch, a batch that is sharded over devices stays where it is if the number of devices divides B / G, as
    it does when every device has a multiple of 16 images. Otherwise the result is the same, but devices exchange
    their images to compute it.

    Args:
      images: (B, H, W, 3) uint8.
      key: random key.
      layers: operations per image, N in the paper.
      magnitude: strength of all operations, M in the paper, of 10; may exceed 10.

    Returns:
      (B, H, W, 3) uint8.
    """
    deal_key, op_key = jax.random.split(key)
    drawn = deal(deal_key, images.shape[0], layers, len(operations(magnitude)))
    keys = jax.random.split(op_key, drawn.shape)

    def one_layer(group, layout, index, key):
        branches = list(operations(magnitude, layout).values())
        with jax.named_scope(conditionals.EQUALLY_LIKELY):
            return lax.switch(index, branches, group, key)

    return by_group(one_layer, images, (drawn, keys), layout)


def deal(key: jax.Array, batch: int, layers: int, choices: int) -> jax.Array:
    """What each group of a batch does in each layer: (G, layers) int32 in [0, `choices`), in every layer a random
    permutation of all choices, cut off or repeated from the start at G.
    """
    groups = max(g for g in range(1, MAX_GROUPS + 1) if batch % g == 0)

    def one_layer(key):
        return jax.random.permutation(key, choices)[jnp.arange(groups) % choices]

    return jax.vmap(one_layer)(jax.random.split(key, layers)).T


def by_group(one_layer: Callable, images: jax.Array, drawn: tuple, layout) -> jax.Array:
    """`one_layer(images of a group, their layout, *what was drawn for it) -> images`, for each of the layers, for
    each of the groups, one after the other.

    Args:
      images: (B, H, W, 3) uint8; image i is in group i mod G.
      drawn: arrays (G, layers, …).
    """
    groups = jax.tree.leaves(drawn)[0].shape[0]

    def all_layers(args):
        (group, layout), drawn = args
        return lax.scan(lambda group, d: (one_layer(group, layout, *d), None), group, drawn)[0]

    pair = (images, layout)
    grouped = jax.tree.map(lambda x: x.reshape(-1, groups, *x.shape[1:]).swapaxes(0, 1), pair)
    return lax.map(all_layers, (grouped, drawn)).swapaxes(0, 1).reshape(images.shape)


def operations(
    magnitude: float, layout=geometry.WHOLE
) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """The sixteen operations at a magnitude, by name: functions of images (B, H, W, 3) uint8 and a key for draws."""
    level = magnitude / 10
    factor = 1.8 * level + 0.1

    def fixed(function, *args, **where):
        return lambda images, key: function(images, *args, **where)

    def signed(function, amount):
        def apply(images, key):
            signs = jax.random.rademacher(key, images.shape[:1], dtype=jnp.float32)
            return function(images, amount * signs, layout=layout)

        return apply

    def random_cutout(images, key):
        sides, pad = layout.sides(images), int(40 * level)
        draws = zip(jax.random.split(key), sides, strict=True)
        centre = [jax.random.randint(k, (len(images), 1, 1), 0, side) for k, side in draws]
        return cutout(images, *centre, [pad * side // 224 for side in sides], layout)

    return {
        "AutoContrast": fixed(autocontrast, layout=layout),
        "Equalize": fixed(equalize, layout=layout),
        "Invert": fixed(invert),
        "Rotate": signed(rotate, 30 * level),
        "Posterize": fixed(posterize, min(int(4 * level), 8)),
        "Solarize": fixed(solarize, int(256 * level)),
        "Color": fixed(color, factor),
        "Contrast": fixed(contrast, factor, layout=layout),
        "Brightness": fixed(brightness, factor),
        "Sharpness": fixed(sharpness, factor, layout=layout),
        "ShearX": signed(shear_x, 0.3 * level),
        "ShearY": signed(shear_y, 0.3 * level),
        "TranslateX": signed(translate_x, 100 * level / 224),
        "TranslateY": signed(translate_y, 100 * level / 224),
        "Cutout": random_cutout,
        "SolarizeAdd": fixed(solarize_add, int(110 * level)),
    }


def autocontrast(images: jax.Array, layout=geometry.WHOLE) -> jax.Array:
    """Stretches every channel of every image to [0, 255]; a constant channel stays as it is."""
    values = images.astype(jnp.int32)
    among = {"axis": (1, 2), "keepdims": True, "where": layout.inside}
    low, high = values.min(**among, initial=255), values.max(**among, initial=0)
    stretched = 255 * (values - low) // jnp.maximum(high - low, 1)
    return jnp.where(high > low, stretched, values).astype(jnp.uint8)


def equalize(images: jax.Array, layout=geometry.WHOLE) -> jax.Array:
    """Makes the histogram of every channel of every image as flat as a table of 256 values can.

    Histogram and lookup are matrix products of one-hot halves (the high and the low four bits of a value): exact, and
    fast on devices that scatter and gather slowly.
    """
    values = jnp.moveaxis(images, -1, 1).reshape(images.shape[0], 3, -1)  # (B, 3, pixels)
    inside = True if layout.inside is None else layout.inside
    inside = jnp.broadcast_to(inside, images[..., :1].shape).reshape(len(images), 1, -1)
    halves = jnp.where(inside, values >> 4, 16), values & 15
    high, low = (jax.nn.one_hot(half, 16, dtype=jnp.bfloat16) for half in halves)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    count = product("bcnh,bcnl->bchl", high, low).astype(jnp.int32).reshape(*values.shape[:2], 256)
    brightest = jnp.sum((values == values.max(-1, keepdims=True)) & inside, -1, keepdims=True)
    step = (math.prod(layout.sides(images)) - brightest) // 255
    darker = jnp.cumsum(count, -1) - count
    table = jnp.minimum((darker + step // 2) // jnp.maximum(step, 1), 255)
    rows = product(
        "bcnl,bchl->bcnh", low, table.reshape(*table.shape[:2], 16, 16).astype(jnp.bfloat16)
    )
    flat = jnp.where(step > 0, jnp.sum(rows * high, -1).astype(jnp.uint8), values)
    return jnp.moveaxis(flat.reshape(-1, 3, *images.shape[1:3]), 1, -1)


def invert(images: jax.Array) -> jax.Array:
    """The negative."""
    return 255 - images


def posterize(images: jax.Array, bits: int) -> jax.Array:
    """Keeps the highest `bits` bits, 0 to 8, of every value; 0 leaves black."""
    return images & jnp.uint8(256 - 2 ** (8 - bits))


def solarize(images: jax.Array, threshold: int | jax.Array) -> jax.Array:
    """Inverts the values that are not below `threshold`, one number or one per image (B, 1, 1, 1)."""
    return jnp.where(images.astype(jnp.int32) < threshold, images, 255 - images)


def solarize_add(images: jax.Array, addition: int | jax.Array) -> jax.Array:
    """Adds `addition`, one number or one per image (B, 1, 1, 1), to the values below 128, up to 255."""
    brighter = jnp.clip(images.astype(jnp.int32) + addition, 0, 255).astype(jnp.uint8)
    return jnp.where(images < 128, brighter, images)


def color(images: jax.Array, factor: float) -> jax.Array:
    """Blends from grey: 0 is grey, 1 the image, above 1 more colourful."""
    # TensorFlow's rounding: grey in [0, 1] times 255.5, cut to an integer.
    grey = jnp.floor(
        jnp.sum(images * jnp.array(GREY, jnp.float32), -1, keepdims=True) * (255.5 / 255)
    )
    return blend(grey, images, factor)


def contrast(images: jax.Array, factor: float, layout=geometry.WHOLE) -> jax.Array:
    """Blends from a constant grey level: pixels / 256, see the top of this file."""
    level = jnp.minimum(jnp.asarray(math.prod(layout.sides(images)) // 256), 255)
    return blend(level[..., None].astype(jnp.float32), images, factor)


def brightness(images: jax.Array, factor: float) -> jax.Array:
    """Blends from black."""
    return blend(0.0, images, factor)


def sharpness(images: jax.Array, factor: float, layout=geometry.WHOLE) -> jax.Array:
    """Blends from a 3×3 blur (weights 1, centre 5); the border keeps the image's values."""
    return blend(smooth(images, 0, layout), images, factor)


def smooth(images: jax.Array, addition: int, layout=geometry.WHOLE) -> jax.Array:
    """(B, H, W, C) uint8 -> int32: the 3×3 blur of Pillow's SMOOTH, (sum + addition) // 13, where the border stays as
    it is.
    """
    values = images.astype(jnp.int32)
    inner = (layout.box_sums(values) + 4 * values + addition) // 13
    (y, x), (height, width) = layout.places(images), layout.sides(images)
    within = (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
    return jnp.where(within[..., None], inner, values)


def rotate(images: jax.Array, degrees: jax.Array, layout=geometry.WHOLE) -> jax.Array:
    """Rotates each image about its centre, counter-clockwise, by its `degrees` (B,)."""
    return layout.rotate(images, degrees, FILL, geometry.nearest)


def shear_x(images: jax.Array, level: jax.Array, layout=geometry.WHOLE) -> jax.Array:
    """Moves row y of each image left by its `level` (B,) · y; nearest neighbour."""
    offset = level[:, None, None] * layout.places(images)[0]
    return geometry.nearest(images, offset, FILL, layout)


def translate_x(images: jax.Array, share: jax.Array, layout=geometry.WHOLE) -> jax.Array:
    """Moves each image left by its `share` (B,) of the width, to the nearest pixel."""
    offset = share[:, None, None] * layout.sides(images)[1]
    return geometry.nearest(images, offset, FILL, layout)


# Of columns and up, in place of rows and left.
shear_y, translate_y = geometry.with_columns(shear_x), geometry.with_columns(translate_x)


def cutout(images: jax.Array, y: jax.Array, x: jax.Array, pad, layout=geometry.WHOLE) -> jax.Array:
    """Fills the box that reaches `pad` (rows, columns) each way from each image's centre `y`, `x`: int32, (B,) or (B,
    1, 1).
    """
    rows, columns = layout.places(images)
    rows, columns = rows - y.reshape(-1, 1, 1), columns - x.reshape(-1, 1, 1)
    in_rows = (rows >= -pad[0]) & (rows < pad[0])
    in_columns = (columns >= -pad[1]) & (columns < pad[1])
    return jnp.where((in_rows & in_columns)[..., None], jnp.uint8(FILL), images)


def blend(start: jax.Array | float, images: jax.Array, factor: jax.Array | float) -> jax.Array:
    """`start` + `factor` · (`images` - `start`), cut to integers in [0, 255]."""
    return jnp.clip(start + factor * (images.astype(jnp.float32) - start), 0, 255).astype(jnp.uint8)
