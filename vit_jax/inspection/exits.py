"""Images by the exit where they leave a model with several (Dynamic ViT, Fig. 8 there)."""

import numpy as np

from vit_jax.inspection.contract import InspectionContext, Section, picture_of
from vit_jax.pictures import tiles

_MOST = 8  # images of an exit


def leaves_at(confidences: np.ndarray, thresholds: tuple[float, ...]) -> np.ndarray:
    """The exit, from 0, at which each image leaves.

    Args:
      confidences: (E, n) probability of the best class.
      thresholds: how large it has to be at each exit but the last.

    Returns:
      (n,) integers.
    """
    enough = confidences >= np.array([*thresholds, -np.inf])[:, None]
    return enough.argmax(0)


def inspect(context: InspectionContext) -> Section:
    """Rows of images, the surest first."""
    section = Section("Images by exit", "")
    if context.exits is None:
        section.text = "No meaning here: this model has no early exits."
        return section
    confidences, best = context.exits(context.images)
    thresholds = context.options.thresholds or (0.8,) * (len(confidences) - 1)
    left = leaves_at(confidences, thresholds)
    section.numbers |= {"confidences": confidences, "leaves_at": left}
    shown, names, rows = [], [], []
    for number in range(len(confidences)):
        mine = np.flatnonzero(left == number)
        mine = mine[np.argsort(-confidences[number, mine], kind="stable")]
        rows.append(f"exit {number + 1}: {len(mine)}")
        blank = np.full((*context.images.shape[1:3], 3), 255, np.uint8)
        some = [
            (
                picture_of(context.images[i]),
                _caption(context, i, confidences[number, i], best[number, i]),
            )
            for i in mine[:_MOST]
        ]
        some += [(blank, "")] * (_MOST - len(some))
        shown += [image for image, _ in some]
        names += [name for _, name in some]
    section.figures["exits"] = tiles.draw_tiles(
        "Images by the exit where they leave, with their predicted class and its probability",
        shown, names=names, columns=_MOST, rows_named=rows, side=150,
    )  # fmt: skip
    listed = ", ".join(f"{threshold:g}" for threshold in thresholds)
    section.text = (
        f"An image leaves at the first exit whose best class has at least the probability {listed} "
        "(--threshold), else at the last. Attention and health above are those of the last exit."
    )
    return section


def _caption(context: InspectionContext, number: int, confidence: float, best: int) -> str:
    predicted = f"{context.classes[best]} {confidence:.0%}"
    return context.caption(number, predicted=predicted)
