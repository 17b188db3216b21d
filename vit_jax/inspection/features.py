"""The patches' features as colours: their three main directions over all images shown."""

import numpy as np

from vit_jax.inspection.components import principal_components
from vit_jax.inspection.contract import InspectionContext, Section, picture_of
from vit_jax.pictures import tiles


def colours(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first three principal components of features.

    Args:
      tokens: (n, N, D) of n images, which share the components.

    Returns:
      (n, N, 3) in 0 … 1, each component stretched between its 1st and 99th percentile, and the three
      shares of variance.
    """
    flat = tokens.reshape(-1, tokens.shape[-1]).astype(np.float64)
    flat = flat - flat.mean(0)
    directions, shares = principal_components(flat, 3)
    missing = 3 - len(shares)  # of features with fewer channels
    scores = np.pad(flat @ directions.T, ((0, 0), (0, missing)))
    low, high = np.percentile(scores, (1, 99), axis=0)
    scores = np.clip((scores - low) / np.where(high > low, high - low, 1), 0, 1)
    return scores.reshape(*tokens.shape[:2], 3), np.pad(shares, (0, missing))


def inspect(context: InspectionContext) -> Section:
    """Each image beside its patches' features."""
    tokens = context.observed.tokens
    components, shares = colours(tokens)
    pictures = (255 * components).round().astype(np.uint8).reshape(len(tokens), *context.grid, 3)
    shown = []
    for image, picture in zip(context.images, pictures, strict=False):
        shown += [picture_of(image), picture]
    text = (
        f"Red, green and blue are the first three principal components of the patches after the last "
        f"norm, over {len(tokens)} images together, with {', '.join(f'{s:.0%}' for s in shares)} of the "
        "variance. Patches of one colour are alike to the model."
    )
    labels = []
    for number in range(len(tokens)):
        labels += [context.caption(number), "features"]
    figure = tiles.draw_tiles(
        "Features of patches: principal components as red, green, blue",
        shown, names=labels, columns=6 if len(tokens) > 2 else 2, side=150,
    )  # fmt: skip
    numbers = {"components": components, "shares": shares}
    return Section("Features of patches", text, {"features": figure}, numbers)
