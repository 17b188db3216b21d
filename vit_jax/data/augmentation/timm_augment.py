"""RandAugment and AutoAugment as timm has them, with which DeiT and most PyTorch recipes train.

Lives here: fifteen operations, what a level means for each, and the random choice among them. The
names are those of timm/data/auto_augment.py (version 1.0.31), the arithmetic is Pillow's. The
RandAugment of the TensorFlow code, and how operations are dealt to groups of a batch, are in
`randaugment.py`.

How timm's RandAugment differs from that one:

- An operation that was drawn is applied with probability 1/2, decided for each image.
- Its magnitude is drawn for each image: normal, clipped to [0, 10].
- There is no Cutout; translations are shares of the side.
- Contrast blends with the mean grey of the image; blends start from values to the nearest level.
- Geometric operations interpolate (bicubic) and fill with the mean colour.
- "Increasing": higher magnitudes mean stronger changes in all operations.

Where we differ, knowingly: an operation is drawn for a group of images (see
`randaugment.randaugment`), and Rotate is three shears with a cubic each, where Pillow has one in two
dimensions.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from vit_jax.compute import conditionals
from vit_jax.data.augmentation import geometry, randaugment
from vit_jax.data.augmentation.color import grey

Operation = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

# Pairs of (operation, probability, magnitude) for ImageNet (arXiv:1805.09501, Table 9), as the
# policy 'original' of timm.
AUTOAUGMENT = (
    (("Posterize", 0.4, 8), ("Rotate", 0.6, 9)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 5)),
    (("Equalize", 0.8, 8), ("Equalize", 0.6, 3)),
    (("Posterize", 0.6, 7), ("Posterize", 0.6, 6)),
    (("Equalize", 0.4, 7), ("Solarize", 0.2, 4)),
    (("Equalize", 0.4, 4), ("Rotate", 0.8, 8)),
    (("Solarize", 0.6, 3), ("Equalize", 0.6, 7)),
    (("Posterize", 0.8, 5), ("Equalize", 1.0, 2)),
    (("Rotate", 0.2, 3), ("Solarize", 0.6, 8)),
    (("Equalize", 0.6, 8), ("Posterize", 0.4, 6)),
    (("Rotate", 0.8, 8), ("Color", 0.4, 0)),
    (("Rotate", 0.4, 9), ("Equalize", 0.6, 2)),
    (("Equalize", 0.0, 7), ("Equalize", 0.8, 8)),
    (("Invert", 0.6, 4), ("Equalize", 1.0, 8)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Rotate", 0.8, 8), ("Color", 1.0, 2)),
    (("Color", 0.8, 8), ("Solarize", 0.8, 7)),
    (("Sharpness", 0.4, 7), ("Invert", 0.6, 8)),
    (("ShearX", 0.6, 5), ("Equalize", 1.0, 9)),
    (("Color", 0.4, 0), ("Equalize", 0.6, 3)),
    (("Equalize", 0.4, 7), ("Solarize", 0.2, 4)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 5)),
    (("Invert", 0.6, 4), ("Equalize", 1.0, 8)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Equalize", 0.8, 8), ("Equalize", 0.6, 3)),
)


def timm_randaugment(
    images: jax.Array,
    key: jax.Array,
    layers: int,
    magnitude: float,
    *,
    std: float,
    increasing: bool,
    fill: tuple[int, int, int],
    layout=geometry.WHOLE,
) -> jax.Array:
    """timm's 'rand-mMAGNITUDE-nLAYERS-mstdSTD', with '-inc1' if `increasing`.

    Args:
      images: (B, H, W, 3) uint8.
      key: random key.
      layers: operations per image; timm's default is 2.
      magnitude: mean of the magnitudes, of 10.
      std: their standard deviation, before they are clipped to [0, 10].
      increasing: see the top of this file.
      fill: RGB of what geometric operations leave where there is no image; timm's is the mean.

    Returns:
      (B, H, W, 3) uint8.
    """
    branches = functools.partial(operations, fill, increasing=increasing)
    deal_key, op_key = jax.random.split(key)
    drawn = randaugment.deal(deal_key, images.shape[0], layers, len(branches()))
    constant = jnp.full(drawn.shape, 0.5), jnp.full(drawn.shape, float(magnitude))
    drawn, scope = (drawn, *constant), conditionals.EQUALLY_LIKELY
    return _apply(branches, images, op_key, drawn, std, layout, scope=scope)


def autoaugment(
    images: jax.Array, key: jax.Array, *, fill: tuple[int, int, int], layout=geometry.WHOLE
) -> jax.Array:
    """AutoAugment for ImageNet: a pair of `AUTOAUGMENT`, drawn for a group of images; each of its
    two operations is applied with its probability, decided for each image.

    Args:
      images: (B, H, W, 3) uint8.
      key: random key.
      fill: RGB of what geometric operations leave where there is no image.
    """

    def branches(layout=geometry.WHOLE):
        # Keeps 4 to 8 bits, where RandAugment's keeps 0 to 4.
        posterized = lambda images, level, _: posterize(images, 4 + jnp.floor(4 * level))  # noqa: E731
        return operations(fill, layout, increasing=False) | {"Posterize": posterized}

    deal_key, op_key = jax.random.split(key)
    pair = randaugment.deal(deal_key, images.shape[0], 1, len(AUTOAUGMENT))[:, 0]
    names = list(branches())
    steps = [[(names.index(n), p, m) for n, p, m in pair] for pair in AUTOAUGMENT]
    # A row of a table of 25 by a matrix product with ones and zeros.
    drawn = jnp.einsum("gp,plv->vgl", jax.nn.one_hot(pair, len(steps)), jnp.array(steps, float))
    drawn = drawn[0].astype(jnp.int32), drawn[1], drawn[2]
    return _apply(branches, images, op_key, drawn, 0.0, layout, scope="by_policy")


def operations(
    fill: tuple[int, int, int], layout=geometry.WHOLE, *, increasing: bool
) -> dict[str, Operation]:
    """The fifteen operations by timm's names, less 'Increasing' and 'Rel': functions of images
    (B, H, W, 3) uint8, levels (B,) float32 in [0, 1], magnitudes divided by 10, and a key for signs.
    """
    fill = jnp.array(fill, jnp.uint8)

    def plain(function, **where):
        return lambda images, level, key: function(images, **where)

    def signed(key, amount):
        return amount * jax.random.rademacher(key, amount.shape, jnp.float32)

    def enhance(start):
        def apply(images, level, key):
            away_from_1 = jnp.maximum(0.1, 1 + signed(key, 0.9 * level))
            factor = away_from_1 if increasing else 1.8 * level + 0.1
            return randaugment.blend(start(images), images, factor[:, None, None, None])

        return apply

    def geometric(function, most):
        def apply(images, level, key):
            moved = function(images, signed(key, most * level), fill, layout=layout)
            return jnp.clip(moved, 0, 255).astype(jnp.uint8)

        return apply

    def random_posterize(images, level, _):
        bits = jnp.floor(4 * level)
        return posterize(images, 4 - bits if increasing else bits)

    def random_solarize(images, level, _):
        threshold = jnp.floor(256 * level)
        threshold = 256 - threshold if increasing else threshold
        return randaugment.solarize(images, threshold[:, None, None, None])

    def random_solarize_add(images, level, _):
        addition = jnp.floor(110 * level)
        return randaugment.solarize_add(images, addition[:, None, None, None])

    return {
        "AutoContrast": plain(randaugment.autocontrast, layout=layout),
        "Equalize": plain(randaugment.equalize, layout=layout),
        "Invert": plain(randaugment.invert),
        "Rotate": geometric(rotate, 30),
        "Posterize": random_posterize,
        "Solarize": random_solarize,
        "SolarizeAdd": random_solarize_add,
        "Color": enhance(grey),
        "Contrast": enhance(lambda images: mean_grey(images, layout)),
        "Brightness": enhance(lambda images: 0.0),
        "Sharpness": enhance(lambda images: randaugment.smooth(images, 6, layout)),
        "ShearX": geometric(shear_x, 0.3),
        "ShearY": geometric(geometry.with_columns(shear_x), 0.3),
        "TranslateX": geometric(translate_x, 0.45),
        "TranslateY": geometric(geometry.with_columns(translate_x), 0.45),
    }


def posterize(images: jax.Array, bits: jax.Array) -> jax.Array:
    """Keeps the highest `bits` (B,), 0 to 8, of the values of each image."""
    mask = (256 - 2 ** (8 - bits.astype(jnp.int32)))[:, None, None, None]
    return (images.astype(jnp.int32) & mask).astype(jnp.uint8)


def mean_grey(images: jax.Array, layout=geometry.WHOLE) -> jax.Array:
    """The mean of each image's grey to the nearest level, (B, 1, 1, 1) float32."""
    levels = grey(images).astype(jnp.float32)
    return jnp.floor(levels.mean((1, 2), keepdims=True, where=layout.inside) + 0.5)


def cubic(
    images: jax.Array, offset: jax.Array, fill: geometry.Fill, layout=geometry.WHOLE
) -> jax.Array:
    """As `geometry.nearest`, but between pixels a cubic convolution with a = -1, which is Pillow's BICUBIC
    of affine transforms.

    Beyond the border the outermost pixel continues for half a pixel; then comes `fill`.

    Returns:
      (B, H, W, C) float32, neither rounded nor clipped.
    """
    whole = jnp.floor(offset)
    d = (offset - whole)[..., None]
    weights = (-d + 2 * d**2 - d**3, 1 - 2 * d**2 + d**3, d + d**2 - d**3, -(d**2) + d**3)
    values = layout.cubic_taps(images, whole, weights)
    source = layout.places(images)[1] + offset
    inside = (source >= -0.5) & (source < layout.sides(images)[1] - 0.5)
    return jnp.where(inside[..., None], values, jnp.asarray(fill, jnp.float32))


def rotate(
    images: jax.Array, degrees: jax.Array, fill: jax.Array, layout=geometry.WHOLE
) -> jax.Array:
    """Turns each image counter-clockwise; this and what follows give float32, not clipped."""
    return layout.rotate(images, degrees, fill, cubic)


def shear_x(
    images: jax.Array, level: jax.Array, fill: jax.Array, layout=geometry.WHOLE
) -> jax.Array:
    """Moves row y of each image left by its `level` (B,) · (y + 1/2)."""
    y = layout.places(images)[0] + 0.5
    return cubic(images, level[:, None, None] * y, fill, layout)


def translate_x(
    images: jax.Array, share: jax.Array, fill: jax.Array, layout=geometry.WHOLE
) -> jax.Array:
    """Moves each image left by its `share` (B,) of the width."""
    offset = share[:, None, None] * layout.sides(images)[1]
    return cubic(images, offset, fill, layout)


def _apply(
    branches: Callable[..., dict[str, Operation]],
    images: jax.Array,
    key: jax.Array,
    drawn: tuple,
    std: float,
    layout,
    *,
    scope: str,
) -> jax.Array:
    """Of the `branches` of a layout applies what was `drawn`: indices, probabilities and magnitudes, each (groups,
    layers); `scope` names the switch.
    """

    def one_layer(group, layout, index, probability, magnitude, key):
        use_key, noise_key, op_key = jax.random.split(key, 3)
        noise = std * jax.random.normal(noise_key, group.shape[:1])
        level = jnp.clip(magnitude + noise, 0, 10) / 10
        with jax.named_scope(scope):
            changed = lax.switch(index, list(branches(layout).values()), group, level, op_key)
        use = jax.random.bernoulli(use_key, probability, (group.shape[0], 1, 1, 1))
        return jnp.where(use, changed, group)

    keys = jax.random.split(key, drawn[0].shape)
    return randaugment.by_group(one_layer, images, (*drawn, keys), layout)
