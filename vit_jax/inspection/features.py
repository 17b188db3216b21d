"""The patches' features as colours: in each image by itself, the three main directions in which they differ."""

import numpy as np

from vit_jax.inspection.components import principal_components
from vit_jax.inspection.contract import InspectionContext, Section, picture_of
from vit_jax.pictures import tiles


def colours(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first three principal components of the features of one image (DINOv3, arXiv 2508.10104, Fig. 1). Components
    of all images together would mostly tell the images apart, and give each a colour of its own.

    Args:
      tokens: (N, D).

    Returns:
      (N, 3) in 0 … 1, each component stretched between its 1st and 99th percentile, and the three
      shares of variance.
    """
    flat = tokens.astype(np.float64)
    flat = flat - flat.mean(0)
    directions, shares = principal_components(flat, 3)
    missing = 3 - len(shares)  # of features with fewer channels
    scores = np.pad(flat @ directions.T, ((0, 0), (0, missing)))
    low, high = np.percentile(scores, (1, 99), axis=0)
    scores = np.clip((scores - low) / np.where(high > low, high - low, 1), 0, 1)
    return scores, np.pad(shares, (0, missing))


def share_within(tokens: np.ndarray) -> float:
    """How much of the variance of patches (n, N, D) is between those of one image; the rest is between images."""
    tokens = tokens.astype(np.float64)
    return float(tokens.var(1).sum(-1).mean() / (tokens.var((0, 1)).sum() or 1))


def inspect(context: InspectionContext) -> Section:
    """Each image beside its patches' features."""
    tokens = context.observed.tokens
    components, shares = map(np.stack, zip(*map(colours, tokens), strict=True))
    pictures = (255 * components).round().astype(np.uint8).reshape(len(tokens), *context.grid, 3)
    shown = []
    for image, picture in zip(context.images, pictures, strict=False):
        shown += [picture_of(image), picture]
    within, mean = share_within(tokens), shares.mean(0)
    text = (
        "Red, green and blue are the first three principal components of an image's patches after the last "
        f"norm, of each image by itself, with {', '.join(f'{s:.0%}' for s in mean)} of its variance in the mean. "
        "Patches of one colour are alike to the model; colours of two images cannot be compared. Between the patches "
        f"of one image is {within:.0%} of the variance, between images the rest: where that is little, patches are "
        "nearly alike, and their colours show what little is left."
    )
    labels = []
    for number in range(len(tokens)):
        labels += [context.caption(number), "features"]
    figure = tiles.draw_tiles(
        "Features of patches: principal components of each image as red, green, blue",
        shown, names=labels, columns=6 if len(tokens) > 2 else 2, side=150,
    )  # fmt: skip
    numbers = {"components": components, "shares": shares, "within": np.array(within)}
    return Section("Features of patches", text, {"features": figure}, numbers)
