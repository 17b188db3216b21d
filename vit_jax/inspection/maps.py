"""Where a model looks: rollout and last-layer attention over images (ViT Fig. 6, 14), maps of single
heads, and the mean map of every layer.
"""

import cv2
import numpy as np

from vit_jax.inspection.attention import centre_share
from vit_jax.inspection.contract import (
    NEGATIVE,
    NO_ATTENTION,
    InspectionContext,
    Section,
    picture_of,
    spread,
)
from vit_jax.inspection.observe import Stream
from vit_jax.pictures import style, tiles
from vit_jax.pictures.plot import Plot

_MOST_HEADS, _MOST_LAYERS = 16, 12


def overlay(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """An image, dark where a mask is low, as the authors make it (vision_transformer's issue 27): the
    mask is resized (Lanczos), blurred over one patch, stretched to 0 … 1, and multiplies the brightness.

    Args:
      image: (H, W, 3) uint8.
      mask: (h, w) of the patches.

    Returns:
      (H, W, 3) uint8.
    """
    return overlays([image], mask[None])[0]


def overlays(images: list[np.ndarray], masks: np.ndarray) -> list[np.ndarray]:
    """`overlay` of several images with masks (n, h, w), which share one stretch so that they compare. Of several
    the brightest 2 % of all pixels are alike: a single patch would leave the others dark.
    """
    smooth = [_smoothed(image, mask) for image, mask in zip(images, masks, strict=True)]
    low = min(mask.min() for mask in smooth)
    high = np.percentile(smooth, 98) if len(smooth) > 1 else smooth[0].max()
    return [
        (image * np.clip((mask - low) / ((high - low) or 1), 0, 1)[..., None])
        .round()
        .astype(np.uint8)
        for image, mask in zip(images, smooth, strict=True)
    ]


def _smoothed(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """A mask (h, w) of the patches in the size of its image (H, W, 3), blurred over one patch: (H, W) float32."""
    height, width = image.shape[:2]
    patch = (height / mask.shape[0], width / mask.shape[1])
    large = cv2.resize(mask.astype(np.float32), (width, height), interpolation=cv2.INTER_LANCZOS4)
    return cv2.GaussianBlur(large, (0, 0), sigmaX=patch[1], sigmaY=patch[0])


def inspect_overlays(context: InspectionContext) -> Section:
    """Rollout and last-layer attention over the images shown."""
    section = Section("Where it looks: rollout and last layer", "")
    streams = {n: s for n, s in context.observed.streams.items() if s.rollout is not None}
    if not streams:
        section.text = _without(context, "rollout needs attention among all patches")
        return section
    section.text = (
        "Bright is what reaches the output. Rollout multiplies the attention of all layers, averaged "
        "over heads, with the identity added for the residual path; the last layer's attention is "
        f"that of {_reader(next(iter(streams.values())))} alone. All images share one scale of brightness, one "
        "for rollouts and one for last layers. Below is the predicted class. Learned tokens other than the "
        "class token take part, and are not drawn."
    )
    images = [picture_of(image) for image in context.images[: context.shown]]
    for name, stream in streams.items():
        rollout, last = stream.rollout[-1], stream.read[-1].mean(1)
        section.numbers |= {f"{name}/rollout": stream.rollout, f"{name}/last_layer": last}
        by_kind = [
            overlays(images, masks.reshape(-1, *stream.layout.grid)) for masks in (rollout, last)
        ]
        shown = [picture for three in zip(images, *by_kind, strict=True) for picture in three]
        columns = 6 if len(images) > 1 else 3
        labels = []
        for number in range(len(images)):
            labels += [context.caption(number), "rollout", "last layer"]
        section.figures[f"{name}_overlays"] = tiles.draw_tiles(
            f"Rollout and last layer's {name.replace('_', ' ')}",
            shown, names=labels, columns=columns, side=150,
        )  # fmt: skip
    return section


def inspect_heads(context: InspectionContext) -> Section:
    """Every head's map of the first image: of what reads, and of the chosen patch."""
    section = Section("Maps of single heads", "")
    if not context.observed.streams:
        section.text = NO_ATTENTION
        return section
    place = ", ".join(f"{share:g}" for share in context.options.patch)
    section.text = (
        f"Each head of each layer on the first image, {_in_a_line(context)}. Colours go from nothing to "
        "the map's own largest weight, so that weak and strong maps can both be read. The chosen "
        f"patch is at ({place}) of height and width; --patch=ROW,COLUMN chooses another."
    )
    for name, stream in context.observed.streams.items():
        layers = spread(stream.read.shape[0], _MOST_LAYERS)
        heads = min(stream.read.shape[2], _MOST_HEADS)
        for key, of in (("read", _reader(stream)), ("chosen", "the chosen patch")):
            maps = getattr(stream, key)[layers, 0, :heads].astype(np.float64)
            maps = maps.reshape(-1, *stream.layout.grid)
            image = picture_of(context.images[0])
            if key == "chosen":
                image = _marked(image, stream.layout.grid, context.options.patch)
            of_image = [image, *[None] * (heads - 1)]
            shown = of_image + [weights / (weights.max() or 1) for weights in maps]
            section.figures[f"{name}_heads_{key}"] = tiles.draw_tiles(
                f"{name.replace('_', ' ').capitalize()} of {of}: {_in_a_line(context)}",
                shown, columns=heads, side=max(24, min(90, 900 // heads)), gap=3,
                bar=tiles.Bar(0, 1, "share of the map's maximum"),
                rows_named=["image", *(f"layer {layer + 1}" for layer in layers)], x="heads",
            )  # fmt: skip
            section.numbers[f"{name}/{key}"] = getattr(stream, key)
    return section


def inspect_means(context: InspectionContext) -> Section:
    """The mean map of every layer over all images: does it look at the centre?"""
    section = Section("Mean maps: does it look at the centre?", "")
    if not context.observed.streams:
        section.text = NO_ATTENTION
        return section
    count = context.count
    texts = []
    for name, stream in context.observed.streams.items():
        if min(stream.layout.grid) == 1:
            continue
        title, negative = name.replace("_", " "), stream.negative
        if negative.any():
            texts.append(NEGATIVE)
        if negative.all():
            continue
        kinds = {"attention": (stream.mean_read, negative)}
        if stream.mean_rollout is not None:  # which goes through all layers before
            kinds["rollout"] = stream.mean_rollout, np.logical_or.accumulate(negative)
        plot = Plot(
            f"The middle quarter of the image, in the mean of {count} images ({title})",
            x="layer", whole=True, y="share of attention over share of area",
        )  # fmt: skip
        depths = np.arange(1, len(stream.mean_read) + 1)
        for number, (kind, (means, excluded)) in enumerate(kinds.items()):
            if excluded.all():
                continue
            share = np.where(excluded, np.nan, centre_share(means, stream.layout.grid))
            first, last = np.flatnonzero(~excluded)[[0, -1]]
            plot.line(depths, share, style.COLOURS[number], f"{kind} of {_reader(stream)}")
            plot.dots(depths, share, style.COLOURS[number])
            section.numbers |= {f"{name}/mean_{kind}": means, f"{name}/centre_{kind}": share}
            texts.append(
                f"{(title if kind == 'attention' else kind).capitalize()}, mean over {count} images: "
                f"{share[first]:.2f} in layer {first + 1}, {share[last]:.2f} in layer {last + 1}."
            )
            layers = [layer for layer in spread(len(means), 16) if not excluded[layer]]
            maps = [means[layer].reshape(stream.layout.grid) for layer in layers]
            maps = [mean / mean.sum() * mean.size for mean in maps]
            high = max(mean.max() for mean in maps)
            section.figures[f"{name}_mean_{kind}"] = tiles.draw_tiles(
                f"Mean {title if kind == 'attention' else kind} of {_reader(stream)} over {count} images",
                maps, names=[f"layer {layer + 1}" for layer in layers],
                columns=min(6, len(maps)), bar=tiles.Bar(0, high, "times the mean"), side=110,
            )  # fmt: skip
        plot.line([1, len(depths)], [1, 1], style.GREY, "no preference", width=1)
        section.figures[f"{name}_centre"] = plot.image()
    if not texts:
        section.text = _without(context, "lines have no centre of an image")
        return section
    section.text = " ".join([
        "Does attention prefer the image centre? Share of attention on the middle quarter, relative to its area; "
        "1 means no preference.", *texts,
    ])  # fmt: skip
    return section


def _in_a_line(context: InspectionContext) -> str:
    """The caption of the first image."""
    return context.caption(0).replace("\n", ", predicted ")


def _marked(image: np.ndarray, grid: tuple[int, int], place: tuple[float, float]) -> np.ndarray:
    """The image with a frame around the patch at a place, in shares of height and width."""
    image, bounds = image.copy(), []
    for length, count, share in zip(image.shape, grid, place, strict=False):
        number = min(int(share * count), count - 1)
        bounds.append((number * length // count, (number + 1) * length // count - 1))
    (top, bottom), (left, right) = bounds
    thickness = max(image.shape[0] // 80, 1)
    return cv2.rectangle(image, (left, top), (right, bottom), (255, 0, 0), thickness)


def _reader(stream: Stream) -> str:
    return "the class token" if stream.layout.class_token else "all patches in the mean"


def _without(context: InspectionContext, reason: str) -> str:
    """Why there is nothing to see in a model without attention among all patches."""
    if context.observed.streams:
        return f"No meaning here: {reason}, and this model attends along rows and columns."
    return NO_ATTENTION


def inspect_flow(context: InspectionContext) -> Section:
    """Attention flow over the images shown."""
    section = Section("Attention flow", "")
    flows = context.details.flow
    if flows is None:
        asked = context.options.flow
        section.text = (
            "No meaning here: this model has no attention among all patches."
            if asked
            else "Not computed: it takes minutes for each image. --flow asks for it."
        )
        return section
    stream = context.observed.streams["attention"]
    images = [picture_of(image) for image in context.images[: len(flows)]]
    bright = overlays(images, flows.reshape(-1, *stream.layout.grid))
    shown = [picture for pair in zip(images, bright, strict=True) for picture in pair]
    labels = []
    for number in range(len(flows)):
        labels += [context.caption(number), "flow"]
    section.text = (
        "How much could flow from the first token of the last layer to each patch, if every layer let "
        "through what it attends to, with half for the residual path."
    )
    section.numbers["flow"] = flows
    section.figures["flow"] = tiles.draw_tiles(
        "Attention flow", shown, names=labels,
        columns=6 if len(flows) > 2 else 2, side=150,
    )  # fmt: skip
    return section
