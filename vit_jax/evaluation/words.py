"""Names of classes as texts, and images or patches by them (CLIP, arXiv 2103.00020 §3.1; text is made canonical as in
big_vision's evaluators/proj/image_text/prompt_engineering; maps as of dino.txt, arXiv 2412.16334).
"""

import dataclasses
import itertools
import re
import string
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh

from vit_jax.base.schema import option
from vit_jax.data.augmentation.augment import prepared
from vit_jax.data.options import Data
from vit_jax.data.texts import TextRows
from vit_jax.evaluation import contract, maps
from vit_jax.evaluation.both_towers import TextProgram, text_term
from vit_jax.evaluation.templates import TEMPLATES
from vit_jax.models import registry
from vit_jax.models.registry import Weights
from vit_jax.objectives.image_text import patches
from vit_jax.objectives.networks import Networks

ANY = -1.0  # a threshold that all cosines reach
_SHOWN = 5  # groups or names in a warning


@dataclasses.dataclass(frozen=True)
class WordMapsOptions(contract.EvaluatorOptions):
    """What the evaluator `word_maps` takes."""

    windows: str = option(
        "whole",
        "what the model sees: the whole image squeezed to its size, or windows that cover it",
        choices=maps.WINDOWS,
    )
    templates: tuple = option(TEMPLATES, "texts of a class, whose name stands for {}")
    names: tuple = option((), "of the classes, in their order; (): as the data set calls them")
    threshold: float = option(
        ANY,
        "cosine below which a pixel has none of these words, but the first class, which is not named then; -1: each "
        "pixel has a word",
        minimum=-1,
        maximum=1,
    )


def prompts(names: Sequence[str], templates: Sequence[str], text: str) -> list[str]:
    """The texts of classes: of each name all templates.

    Args:
      names: of the classes.
      templates: see `templates`.
      text: the kind of the text tower. SigLIP's authors make prompts canonical, and CLIP's do not.
    """
    pairs = itertools.product(names, templates)
    if text == "clip":
        return [template.replace("{}", name) for name, template in pairs]
    return [prompt(name, template) for name, template in pairs]


def warn_of_names(names: Sequence[str], template: str, rows: TextRows, text: str) -> None:
    """Warns of classes that have the same text for a model, and of names that leave no tokens.

    Args:
      names: of the classes.
      template: a text, in which a name stands for {}.
      rows: makes the tokens of texts.
      text: see `prompts`.
    """
    alike: dict[bytes, list[str]] = {}
    nameless = []
    for name in names:
        in_template, alone = prompts([name], (template, "{}"), text)
        alike.setdefault(rows.encode(in_template).tobytes(), []).append(name)
        if not rows.count(rows.encode(alone)):
            nameless.append(name)
    groups = [group for group in alike.values() if len(group) > 1]
    if groups:
        shown = [", ".join(map(repr, group)) for group in groups[:_SHOWN]]
        logging.warning(
            "classes with the same text, of which the first is always found: %s (%d groups); say in the evaluator's "
            "option names what else they are called, such as 'c plus plus' for 'C++'",
            "; ".join(shown),
            len(groups),
        )
    if nameless:
        logging.warning(
            "classes of whose name no token is left: %s (%d); say in the evaluator's option names what they are called",
            ", ".join(map(repr, nameless[:_SHOWN])),
            len(nameless),
        )


def class_vectors(vectors: np.ndarray, classes: int) -> np.ndarray:
    """Of classes, (K, E) of length 1, by the vectors of their `prompts`."""
    means = vectors.reshape(classes, -1, vectors.shape[-1]).mean(1)
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def vectors_of_patches(
    program: TextProgram,
    networks: Networks,
    names: Sequence[str],
    templates: Sequence[str],
    module_weights: Weights,
    mesh: Mesh,
    size: int,
) -> np.ndarray:
    """What patches are compared with, (K, E) of length 1, see `patches.part_of_texts`. Arguments: of `TextProgram`."""
    texts = prompts(names, templates, program.text)
    vectors = program(texts, module_weights, mesh, size)
    objective, _ = text_term(networks, None)
    return patches.part_of_texts(objective, class_vectors(vectors, len(names)))


def make_map_answers(
    networks: Networks, data: Data, threshold: float = ANY
) -> Callable[[jax.Array, Weights, Weights, jax.Array], tuple[jax.Array]]:
    """The forward pass of maps by words, to be compiled: of the vectors of classes (K, E), the model's arrays, those of
    what the objective owns, and images (B, H, W, C) uint8, to scores (B, h, w, K) float32, the softmax of cosines.

    Args:
      threshold: the cosine that one of the classes must have; the scores then begin with one more, of none of them.

    Raises:
      ConfigError: its patches are not compared with texts.
    """
    objective, _ = text_term(networks, None)
    patches.check_patches(objective)

    def answers(
        classes: jax.Array, weights: Weights, module_weights: Weights, images: jax.Array
    ) -> tuple[jax.Array]:
        on_devices = networks.for_devices()
        model = nnx.merge(registry.abstract(on_devices.model_config)[0], *weights)
        images = prepared(images, data, jnp.dtype(on_devices.model_config.dtype))
        vectors = patches.patch_vectors(*text_term(on_devices, module_weights), model, images)
        exact = jax.lax.Precision.HIGHEST
        cosines = jnp.einsum("bhwe,ke->bhwk", vectors, classes, precision=exact)
        if threshold > ANY:
            none = jnp.full_like(cosines[..., :1], threshold)
            cosines = jnp.concatenate([none, cosines], axis=-1)
        return (jax.nn.softmax(cosines),)

    return answers


def names_of(classes: Sequence[str]) -> list[str]:
    """What classes are called: of those of ImageNet, which data sets number by WordNet, their names."""
    if not all(re.fullmatch(r"n\d{8}", name) for name in classes):
        return list(classes)
    from vit_jax.data.labels import imagenet

    known = imagenet.classes()
    return [known.get(name, name) for name in classes]


def prompt(name: str, template: str) -> str:
    """The canonical text of a class: without punctuation, in lower case, a space between words.

    >>> prompt("Great_White-Shark", "a photo of the {}.")
    'a photo of the great whiteshark'
    """
    return _canonical(template, "{}").replace("{}", _canonical(name, ","))


def _canonical(text: str, kept: str) -> str:
    removed = str.maketrans("", "", "".join(c for c in string.punctuation if c not in kept))
    return " ".join(text.replace("_", " ").translate(removed).lower().split())
