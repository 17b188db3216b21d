"""What a Mixer does in place of attention: the weights of its token mixing as pictures, and how it
takes images whose patches and pixels are permuted (Mixer §4.4 and Fig. 5).
"""

import numpy as np

from vit_jax.base import patterns
from vit_jax.data.augmentation.permute import KINDS, orders, permuted
from vit_jax.inspection.contract import InspectionContext, Section, picture_of
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.layout import grid
from vit_jax.models.registry import Weights
from vit_jax.pictures import tiles

_UNITS, _MOST_LAYERS = 36, 3
_MIXING = "token_mlp/up/kernel"


def permuted_weights(weights: Weights, patch: int, kind: str, seed: int = 0) -> Weights:
    """A Mixer's weights that take images permuted by `permuted` as its own take them unpermuted: what
    permutes patches and pixels is linear, and can be learned as well.
    """

    def move(name: str, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        if name == "embedding/kernel":
            pixels = x.reshape(-1, *x.shape[2:])
            return pixels[orders(1, patch, kind, seed)[1]].reshape(x.shape)
        # Stacked: (L, tokens, hidden) and back.
        if name.endswith(_MIXING):
            return x[:, orders(x.shape[1], patch, kind, seed)[0]]
        if name.endswith("token_mlp/down/kernel"):
            return x[:, :, orders(x.shape[2], patch, kind, seed)[0]]
        if name.endswith("token_mlp/down/bias"):
            return x[:, orders(x.shape[1], patch, kind, seed)[0]]
        return x

    return weights._replace(params=patterns.map_named(move, weights.params))


def patch_in_pixels(config: ClassifierConfig) -> int | None:
    """The side of a patch; a hybrid cuts its patches from maps. `None` of a family without patches."""
    return config.height_width[0] // grid(config)[0] if hasattr(config, "patch") else None


def inspect(context: InspectionContext) -> Section:
    """Pictures of the weights, and the permutation test."""
    section, params = Section("Mixing of tokens, and permutations", ""), context.weights.params
    kernels = [x for name, x in patterns.named(params).items() if name.endswith(_MIXING)]
    patch, texts = patch_in_pixels(context.config), []
    if kernels:
        (kernel,) = kernels
        layers = list(range(min(_MOST_LAYERS, len(kernel))))
        rows, columns = context.grid
        for layer in layers:
            units = kernel[layer].T[:_UNITS, -rows * columns :].reshape(-1, rows, columns)
            section.figures[f"mixing_layer_{layer + 1}"] = tiles.draw_tiles(
                f"Token mixing of layer {layer + 1}: what its first {len(units)} hidden units take",
                [unit / (np.abs(unit).max() or 1) for unit in units], columns=min(9, len(units)), side=64, gap=4,
                bar=tiles.Bar(-1, 1, "weight over its largest", "diverging"),
            )  # fmt: skip
        section.numbers["token_mixing"] = kernel[layers]
        texts.append(
            "Each map is one unit's weights over the patches; some look at all, some around one."
        )
    else:
        texts.append(
            "Pictures of token mixing have no meaning here: this model mixes by no fixed weights."
        )
    logits = context.observed.logits
    divisible = patch and not any(side % patch for side in context.images.shape[1:3])
    if logits is None or not divisible:
        why = (
            "it has no head"
            if logits is None
            else "its images are not split into one grid of patches"
        )
        section.text = " ".join([*texts, f"The permutation test has no meaning here: {why}."])
        return section
    few = context.images[: context.options.batch_size]
    before = logits[: len(few)].argmax(-1)
    rows, shown = {}, []
    for kind in KINDS:
        moved = permuted(few, patch, kind)
        shown.append(picture_of(moved[0]))
        rows[kind] = float((context.classify(moved).argmax(-1) == before).mean())
        section.numbers[f"same_class/{kind}"] = np.array(rows[kind])
    section.figures["permutations"] = tiles.draw_tiles(
        "One image, permuted, and how many of the images keep their class",
        [picture_of(few[0]), *shown],
        names=["image", *(f"{kind}: {share:.0%}" for kind, share in rows.items())], columns=5, side=160,
    )  # fmt: skip
    texts.append(
        f"Of {len(few)} images, permuted now and not in training, keep their class: "
        + ", ".join(f"{kind} {share:.0%}" for kind, share in rows.items())
        + "."
    )
    if kernels and not {"position", "class_token"} & params.keys():
        changed = context.classify(
            permuted(few, patch, "both"), permuted_weights(context.weights, patch, "both")
        )
        apart = float(np.abs(changed - logits[: len(few)]).max())
        section.numbers["logits_with_permuted_weights"] = np.array(apart)
        texts.append(
            "With its weights permuted alike, patches and pixels in patches may be in any order: logits "
            f"differ by at most {apart:.1g}. So a Mixer that is trained on permuted images is the same "
            "Mixer; a convolutional network is not."
        )
    section.text = " ".join(texts)
    return section
