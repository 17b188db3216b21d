"""Accuracy and loss over a whole data set: every example counted once, whatever the batch size or
the number of hosts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from vit_jax import objectives
from vit_jax.data import loader
from vit_jax.devices import meshes
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel, EvaluatorOptions, Watch
from vit_jax.evaluation.logits import LogitsEvaluator
from vit_jax.objectives.supervised import cross_entropy, has_class, is_right, to_targets

SUMMED = ("accuracy", "top5_accuracy", "loss", "examples")


class Accuracy(LogitsEvaluator):
    """`accuracy`, `top5_accuracy`, `loss` and the number of `examples`.

    `loss` is the plain cross-entropy of the kind that the run is trained with (`config.objective.loss`): without
    `label_smoothing`, `focal` and `class_weights`, so that runs with other values of these can be compared. The
    evaluator `loss` gives the loss that is trained.

    An example with several labels counts as right if the best class is one of them; one with no
    label at all is excluded (ImageNet-ReaL's rule, arXiv 2006.07159).
    """

    high_is_good = ("accuracy", "top5_accuracy")
    low_is_good = ("loss",)

    def __init__(self, options: EvaluatorOptions, context: EvalContext):
        super().__init__(options, context)
        self._step, self._logged_unlabelled = None, False

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        self._step = self._step or self.of_logits(self._added, meshes.replicated(mesh))
        # Each step waits for the sums of the previous one: programs with collectives must not overtake
        # each other, and on simulated devices nothing else keeps them in line.
        sums = no_sums(mesh)
        with loader.eval_batches(self.source, self.config, meshes.batch_sharding(mesh)) as batches:
            for batch in watch(batches):
                sums = self._step(trained.weights, batch, sums)
        return self._means(sums)

    def metrics(self) -> tuple[str, ...]:
        return SUMMED

    def main_metric(self) -> str:
        return "accuracy"

    def _means(self, sums: dict) -> dict[str, float]:
        """The metrics of all batches together."""
        totals = {name: float(value) for name, value in jax.device_get(sums).items()}
        count = totals.pop("examples")
        if self.source.multi_label and not self._logged_unlabelled:
            self._logged_unlabelled = True
            logging.info(
                "evaluation: %d of %d images have no label and are excluded",
                len(self.source) - count, len(self.source),
            )  # fmt: skip
        means = {name: total / max(count, 1) for name, total in totals.items()}
        return means | {"examples": int(count)}

    def _added(self, logits: jax.Array, batch: dict, sums: dict) -> dict[str, jax.Array]:
        """`sums` with those of a batch, whose images have these logits."""
        context = self.context
        classes = context.model_config.num_classes
        top, loss = min(5, classes), objectives.loss(context.config.objective)
        targets = to_targets(batch["label"], classes)
        mask = batch["mask"] * has_class(targets)
        best = jax.lax.top_k(logits, top)[1]
        among_best = (jnp.take_along_axis(targets, best, axis=1) > 0).any(axis=1)
        new = (is_right(logits, targets), among_best, cross_entropy(logits, targets, loss), 1)
        return {n: sums[n] + jnp.sum(v * mask) for n, v in zip(SUMMED, new, strict=True)}


def no_sums(mesh: Mesh) -> dict[str, jax.Array]:
    """`SUMMED` of no examples, on all devices."""
    zero, whole = np.zeros((), np.float32), meshes.replicated(mesh)
    return {n: jax.make_array_from_callback((), whole, zero.__getitem__) for n in SUMMED}
