"""What the first layer looks for: principal components of the patch embedding (ViT Fig. 7 left), and
the filters of convolutional stems as they are.
"""

import numpy as np

from vit_jax.base import patterns
from vit_jax.inspection.components import principal_components
from vit_jax.inspection.contract import InspectionContext, Section
from vit_jax.pictures import tiles

COMPONENTS = 28  # ViT Fig. 7
_OF_A_STEM = {"root", "conv1"}  # what kernels are called that are no patch embedding
_UNNAMED = _OF_A_STEM | {"backbone", "conv", "embedding", "layers"}  # in titles
_MOST_FILTERS = 64


def components_of_filters(
    kernel: np.ndarray, count: int = COMPONENTS
) -> tuple[np.ndarray, np.ndarray]:
    """The directions in which the filters of a patch embedding differ most.

    Args:
      kernel: (P, Q, C, D): D filters.
      count: how many, at most.

    Returns:
      components (count, P, Q, C) and their shares of the filters' variance (count,), see
      `principal_components`.
    """
    filters = kernel.reshape(-1, kernel.shape[-1]).T.astype(np.float64)
    directions, shares = principal_components(filters - filters.mean(0), count)
    return directions.reshape(-1, *kernel.shape[:-1]), shares


def inspect(context: InspectionContext) -> Section:
    """Of every kernel that meets the image."""
    section = Section("Filters of the first layer", "")
    params = patterns.named(context.weights.params)
    kernels = {name: params[name] for name in context.config.image_kernels if name in params}
    texts = []
    for name, kernel in kernels.items():
        key = name.replace("/", "_").removesuffix("_kernel")
        if not _OF_A_STEM & set(name.split("/")):
            components, shares = components_of_filters(kernel)
            section.numbers |= {f"{key}/components": components, f"{key}/shares": shares}
            texts.append(
                f"The first {len(shares)} principal components of the {_in_words(name)} hold {shares.sum():.1%} of "
                "the filters' variance; a trained one has bases for smooth structure within a patch."
            )
            section.figures[f"{key}_components"] = tiles.draw_tiles(
                f"Principal components of the {_in_words(name)}, with their share of variance",
                [_stretched(component) for component in components],
                names=[f"{share:.1%}" for share in shares], columns=7, side=72,
            )  # fmt: skip
        else:
            shown = np.moveaxis(kernel, -1, 0)[:_MOST_FILTERS]
            section.numbers[f"{key}/filters"] = shown
            texts.append(
                f"{_in_words(name).capitalize()}: {len(shown)} of {kernel.shape[-1]} filters."
            )
            section.figures[f"{key}_filters"] = tiles.draw_tiles(
                f"Filters of the {_in_words(name)}",
                [_stretched(kernel) for kernel in shown],
                columns=8,
                side=48,
                gap=4,
            )
    section.text = " ".join(texts) or (
        "No picture here: the first layer of this family is no kernel over the pixels of an image "
        "(its windows are normalised or unfolded first)."
    )
    return section


def _in_words(name: str) -> str:
    """What a kernel that meets the image is called in a title."""
    *places, _ = name.split("/")
    first = [place for place in places if place not in _UNNAMED]
    kind = "stem's first convolution" if _OF_A_STEM & set(places) else "patch embedding"
    return " of ".join([kind, *(place.replace("_", " ") for place in first)])


def _stretched(kernel: np.ndarray) -> np.ndarray:
    """(P, Q, C) numbers as RGB, 0 grey; of other channels than three their mean."""
    kernel = kernel if kernel.shape[-1] == 3 else kernel.mean(-1, keepdims=True).repeat(3, axis=-1)
    return (127.5 + 127.5 * kernel / (np.abs(kernel).max() or 1)).round().astype(np.uint8)
