"""Images by the exit where they leave a model with several (Dynamic ViT, Fig. 8 there)."""

import numpy as np

from vit_jax.inspection.contract import InspectionContext, Section, picture_of
from vit_jax.inspection.leaving import Leaving, leaves_at
from vit_jax.pictures import tiles


def inspect(context: InspectionContext) -> Section:
    """Rows of images, the surest first."""
    section = Section("Images by exit", "")
    if context.exits is None:
        section.text = "No meaning here: this model has no early exits."
        return section
    thresholds = context.exits.thresholds
    confidences = context.exits.confidences
    best = context.exits.best
    left = leaves_at(confidences, thresholds)
    section.numbers |= {"confidences": confidences, "leaves_at": left}
    shown, names, rows = [], [], []
    for exit in range(len(confidences)):
        rows.append(f"exit {exit + 1}: {np.count_nonzero(left == exit)}")
        blank = np.full((*context.images.shape[1:3], 3), 255, np.uint8)
        some = [
            (picture_of(image), _caption(context, i, confidences[exit, i], best[exit, i]))
            for i, image in context.exits.surest(exit)
        ]
        some += [(blank, "")] * (Leaving.MOST - len(some))
        shown += [image for image, _ in some]
        names += [name for _, name in some]
    section.figures["exits"] = tiles.draw_tiles(
        "Images by the exit where they leave, with their predicted class and its probability",
        shown, names=names, columns=Leaving.MOST, rows_named=rows, side=150,
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
