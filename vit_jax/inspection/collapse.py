"""Attention collapse (DeepViT, arXiv 2103.11886): layers that attend as others do."""

import numpy as np

from vit_jax.inspection.contract import NO_ATTENTION, InspectionContext, Section
from vit_jax.pictures import tiles

ALIKE = 0.9  # the cosine from which a layer's attention is that of the layer before


def alike(similarity: np.ndarray) -> int:
    """How many layers attend as the previous one does: of (L, L) similarities."""
    return int((np.diagonal(similarity, offset=1) > ALIKE).sum())


def inspect(context: InspectionContext) -> Section:
    """Similarity of attention between layers."""
    section = Section("Collapse: do layers attend alike?", "")
    similarities = context.details.similarity
    if not similarities:
        section.text = NO_ATTENTION
        return section
    texts = [
        f"The cosine between what a query attends to in two layers, averaged over queries, heads and "
        f"{context.shown} images (DeepViT). Layers count as alike here above {ALIKE:g}."
    ]
    for name, similarity in similarities.items():
        title, count = name.replace("_", " "), alike(similarity)
        section.numbers |= {f"{name}/similarity": similarity, f"{name}/alike": np.array(count)}
        texts.append(f"{title}: {count} of {len(similarity) - 1} layers are like the previous one.")
        section.figures[f"{name}_similarity"] = tiles.matrix(
            f"Similarity between layers ({title})",
            similarity, tiles.Bar(min(0.0, float(similarity.min())), 1, "cosine"), x="layer", y="layer",
        )  # fmt: skip
    section.text = " ".join(texts)
    return section
