"""Weighted nearest neighbours of frozen features, as self-supervised models are judged (DINO, arXiv
2104.14294 §4; the weighting is that of arXiv 1805.01978 §3.4).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from vit_jax.base.schema import option
from vit_jax.devices import meshes
from vit_jax.evaluation import contract
from vit_jax.evaluation.contract import EvaluatedModel, Watch
from vit_jax.evaluation.features import FeatureEvaluator, Features, stacked

_EXACT = (
    jax.lax.Precision.HIGHEST
)  # by default TPUs and GPUs round factors, and other neighbours are nearest


@dataclasses.dataclass(frozen=True)
class NeighbourOptions(contract.EvaluatorOptions):
    """What `knn` takes."""

    k: tuple = option(
        (20,), "neighbours that vote; of several, `accuracy` is of the first", minimum=1
    )
    temperature: float = option(0.07, "a vote weighs softmax(similarity / temperature)", above=0)


class Neighbours(FeatureEvaluator):
    """`accuracy`, `top5_accuracy` and the number of `examples`; of further k `accuracy_K`.

    Similarity is the cosine. The examples to compare with stay sharded over the devices: each finds its
    own nearest, and the nearest of all are found among those.
    """

    Options = NeighbourOptions
    high_is_good = ("accuracy", "accuracy_*", "top5_accuracy")
    _vote = None  # compiled

    def metrics(self) -> tuple[str, ...]:
        further = (f"accuracy_{k}" for k in self.options.k[1:] if k != self.options.k[0])
        return ("accuracy", "top5_accuracy", *further, "examples")

    def main_metric(self) -> str:
        return "accuracy"

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        self._vote = self._vote or _make_vote(
            self.options, len(self.train.classes), len(self.train), mesh
        )
        bank = stacked(self.batches(self.train, trained.weights, mesh, watch), mesh)
        bank = bank._replace(features=_unit(bank.features))
        counts = [
            jax.device_get(self._vote(bank, batch))
            for batch in self.batches(self.test, trained.weights, mesh, watch)
        ]
        right = {name: sum(int(count[name]) for count in counts) for name in counts[0]}
        total = right.pop("examples")
        return {name: count / total for name, count in right.items()} | {"examples": total}


def _make_vote(options: NeighbourOptions, classes: int, examples: int, mesh: Mesh):
    """The compiled (bank, batch) -> how many of the batch are right, by metric."""
    ks = [min(k, examples) for k in options.k]

    def vote(bank: Features, batch: Features) -> dict[str, jax.Array]:
        similarity, labels = nearest(bank, _unit(batch.features), max(ks), mesh)
        counts = {"examples": batch.mask.sum()}
        for asked, k in zip(options.k, ks, strict=True):
            weights = jax.nn.softmax(similarity[:, :k] / options.temperature, axis=-1)
            of_class = jax.nn.one_hot(labels[:, :k], classes)
            votes = jnp.einsum("qk,qkc->qc", weights, of_class, precision=_EXACT)
            most, best = jax.lax.top_k(votes, min(5, classes))
            # Of few neighbours not five classes have a vote: the others are in order of their number.
            right = (best == batch.label[:, None]) * (most > 0) * batch.mask[:, None]
            first = asked == options.k[0]
            counts["accuracy" if first else f"accuracy_{asked}"] = right[:, 0].sum()
            if first:
                counts["top5_accuracy"] = right.sum()
        return counts

    return jax.jit(vote, out_shardings=meshes.replicated(mesh))


def nearest(bank: Features, queries: jax.Array, k: int, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """The k examples of `bank` that are nearest to each query, nearest first; of equals, the one that
    comes first.

    Args:
      bank: (S, B, …), sharded over the mesh; its features of length 1.
      queries: (Q, D), of length 1.

    Returns:
      Similarities and labels (Q, k).
    """
    size = bank.mask.shape[0] * bank.mask.shape[1]
    position = jnp.arange(size, dtype=jnp.int32).reshape(bank.mask.shape)

    def of_a_device(bank: Features, position: jax.Array, queries: jax.Array):
        bank = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), bank)
        cosines = jnp.matmul(queries, bank.features.T, precision=_EXACT)
        similarity = jnp.where(bank.mask > 0, cosines, -jnp.inf)
        # Within a device rows rise with the position, so that top_k takes the first of equals.
        values, rows = jax.lax.top_k(similarity, min(k, similarity.shape[1]))
        neighbours = (values, position.reshape(-1)[rows], bank.label[rows])
        return tuple(jax.lax.all_gather(x, meshes.BATCH, axis=1, tiled=True) for x in neighbours)

    cut, whole = P(None, meshes.BATCH), P()
    values, places, labels = jax.shard_map(
        of_a_device, mesh=mesh, in_specs=(cut, cut, whole), out_specs=whole, check_vma=False
    )(bank, position, queries)
    values, _, labels = jax.lax.sort((-values, places, labels), num_keys=2)
    return -values[:, :k], labels[:, :k]


def _unit(x: jax.Array) -> jax.Array:
    """(…, D) of length 1."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), np.finfo(np.float32).tiny)
