"""Attention distance by head and depth (ViT Fig. 7 right, Fig. 11), and its spread over the heads."""

import numpy as np

from vit_jax.inspection.attention import distances
from vit_jax.inspection.contract import NEGATIVE, NO_ATTENTION, InspectionContext, Section
from vit_jax.inspection.observe import Stream
from vit_jax.pictures import style
from vit_jax.pictures.plot import Plot

TITLE = "Attention distance"
_VARIANTS = {
    "renormalised": "rows normalised over the patches",
    "with_class": "with the class token, placed in the centre",
}


def spread(distance: np.ndarray) -> np.ndarray:
    """Standard deviation over the heads of distances (L, n, H), averaged over images first: (L,)."""
    return distance.astype(np.float64).mean(1).std(-1)


def inspect(context: InspectionContext) -> Section:
    """One dot for each head: distance over depth; below, how far the heads of a layer are apart."""
    section = Section(TITLE, "")
    if not context.observed.streams:
        section.text = NO_ATTENTION
        return section
    count = context.count
    section.text = (
        f"How far a patch looks, in pixels of the input image: distances to all patches, weighted by "
        f"attention, averaged over the patches and {count} images. The class token's row and column "
        "are dropped without normalising again, and a patch's distance to itself counts as 0, as the "
        "ViT paper's authors count. A head near 0 looks around itself; looking everywhere alike would "
        "give the grey line."
    )
    for name, stream in context.observed.streams.items():
        section.numbers |= {
            f"{name}/{key}": getattr(stream, key)
            for key in ("distance", *_VARIANTS)
            if getattr(stream, key) is not None
        }
        section.figures |= _pictures(name, stream, count)
        if stream.negative.any():
            section.text += f" {NEGATIVE}"
    return section


def _pictures(name: str, stream: Stream, count: int) -> dict:
    title, excluded = name.replace("_", " "), stream.negative[:, None, None]
    distance = np.where(excluded, np.nan, stream.distance)
    mean = distance.mean(1)
    layers, heads = mean.shape
    at = np.repeat(np.arange(1, layers + 1), heads)
    plot = Plot(
        f"Distance of {title}, {count} images, a dot for each of {heads} heads",
        x="layer", whole=True, y="mean distance [pixels]", x_limits=(0.5, layers + 0.5),
        from_zero=True,
    )  # fmt: skip
    plot.dots(at, mean.ravel(), style.COLOURS[0], "a head")
    depths = np.arange(1, layers + 1)
    plot.line(depths, mean.mean(1), style.COLOURS[1], "mean of heads")
    alike = _uniform(stream)
    plot.line([0.5, layers + 0.5], [alike, alike], style.GREY, "everywhere alike", width=1)
    apart = Plot(
        f"Spread over heads of the distance of {title}",
        x="layer", whole=True, y="standard deviation [pixels]", x_limits=(0.5, layers + 0.5),
        from_zero=True,
    )  # fmt: skip
    apart.line(depths, spread(distance), style.COLOURS[0])
    apart.dots(depths, spread(distance), style.COLOURS[0])
    figures = {f"{name}_distance": plot.image(), f"{name}_distance_spread": apart.image()}
    others = {
        words: values
        for key, words in _VARIANTS.items()
        if (values := getattr(stream, key)) is not None
        # Where all tokens are patches, they give the same.
        and not np.allclose(values, stream.distance, rtol=1e-4)
    }
    if not others:
        return figures
    variants = Plot(
        f"Other ways to count the distance of {title}: mean of heads",
        x="layer", whole=True, y="mean distance [pixels]", x_limits=(0.5, layers + 0.5),
        from_zero=True,
    )  # fmt: skip
    variants.line(depths, mean.mean(1), style.COLOURS[0], "as the authors count")
    for colour, (words, values) in zip(style.COLOURS[1:], others.items(), strict=False):
        variants.line(depths, np.where(excluded, np.nan, values).mean((1, 2)), colour, words)
    return figures | {f"{name}_distance_variants": variants.image()}


def _uniform(stream: Stream) -> float:
    """The distance of attention that is the same everywhere."""
    return float(distances(stream.layout.grid, stream.layout.size).mean())
