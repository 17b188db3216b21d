"""Which text belongs to an image, and which image to a text, among all of a data set (big_vision's
evaluators/proj/image_text/image_text_retrieval).
"""

import dataclasses

import numpy as np
from jax.sharding import Mesh

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.data import sources
from vit_jax.data.record import DataError
from vit_jax.data.texts import captions_of
from vit_jax.evaluation import contract
from vit_jax.evaluation.both_towers import TwoTowerEvaluator
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel, Watch

_AT_ONCE = 1024  # rows of the matrix of similarities


@dataclasses.dataclass(frozen=True)
class RetrievalOptions(contract.EvaluatorOptions):
    """What `retrieval` takes."""

    at: tuple = option((1, 5, 10), "the right one is among this many of the nearest", minimum=1)
    captions: int = option(
        5, "of an image at most this many, the first ones, as on COCO", minimum=1
    )


class Retrieval(TwoTowerEvaluator):
    """`image_to_text_K`, the share of images with one of their texts among the K nearest; `text_to_image_K`, that of
    texts whose image is; and how many `images` and `texts` there are.

    A text that several images share belongs to all of them.
    """

    Options = RetrievalOptions

    def __init__(self, options: RetrievalOptions, context: EvalContext):
        super().__init__(options, context)
        self.source = sources.open_eval(self.config.data)
        if not captions_of(self.source, 0):
            raise ConfigError(
                f"config.eval.evaluators: 'retrieval' needs images with captions, and {self.config.data.name!r} has "
                "none: set its option data to pairs, or name zero_shot"
            )

    high_is_good = ("image_to_text_*", "text_to_image_*")

    def metrics(self) -> tuple[str, ...]:
        ways = ("image_to_text", "text_to_image")
        return (*(f"{way}_{k}" for way in ways for k in self.options.at), "images", "texts")

    def main_metric(self) -> str:
        return f"image_to_text_{self.options.at[0]}"

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        images, is_read, _ = self.image_vectors(self.source, trained, mesh, watch)
        if not is_read.any():
            raise DataError("retrieval: none of the images can be read")
        texts: dict[str, int] = {}
        pairs = [
            (place, texts.setdefault(text, len(texts)))
            for place, index in enumerate(np.flatnonzero(is_read).tolist())
            for text in captions_of(self.source, index)[: self.options.captions]
        ]
        vectors = self.text_vectors(list(texts), trained, mesh, watch)
        return recalls(images[is_read], vectors, np.asarray(pairs), self.options.at)


def recalls(
    images: np.ndarray, texts: np.ndarray, pairs: np.ndarray, at: tuple[int, ...]
) -> dict[str, float]:
    """The metrics of `Retrieval`.

    Args:
      images, texts: (n, E) and (m, E) float32 of length 1.
      pairs: (p, 2), which image and which text belong together.
      at: numbers K.
    """
    metrics = {}
    for way, own, others, rows, columns in (
        ("image_to_text", images, texts, *pairs.T),
        ("text_to_image", texts, images, *pairs.T[::-1]),
    ):
        ranks = _best_ranks(own, others, rows, columns)
        metrics |= {f"{way}_{k}": float(np.mean(ranks < k)) for k in at}
    return metrics | {"images": len(images), "texts": len(texts)}


def _best_ranks(
    own: np.ndarray, others: np.ndarray, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """How many of the others are nearer to each of `own` than the nearest that belongs to it, (n,). One that is as near
    and belongs to another counts as nearer: a model that gives one vector for all finds nothing.
    """
    ranks = np.empty(len(own), np.int64)
    for first in range(0, len(own), _AT_ONCE):
        similar = own[first : first + _AT_ONCE] @ others.T
        here = (rows >= first) & (rows < first + _AT_ONCE)
        right = np.zeros(similar.shape, bool)
        right[rows[here] - first, columns[here]] = True
        best = np.where(right, similar, -np.inf).max(1, keepdims=True)
        ranks[first : first + _AT_ONCE] = np.sum((similar >= best) & ~right, axis=1)
    return ranks
