"""Accuracy and loss over a whole data set: every example counted once, whatever the batch size or
the number of hosts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax import objectives
from vit_jax.data import loader
from vit_jax.devices import meshes
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel, Watch
from vit_jax.evaluation.logits import (
    LabelOptions,
    LogitsEvaluator,
    counts_unlabelled,
    log_unlabelled,
)
from vit_jax.objectives.supervised import cross_entropy, has_class, is_right, to_targets

METRICS = ("accuracy", "top5_accuracy", "loss", "examples")
_SUMMED = (*METRICS[:3], "labelled", "images")


class Accuracy(LogitsEvaluator):
    """`accuracy`, `top5_accuracy`, `loss` and the number of `examples`.

    `loss` is the plain cross-entropy of the kind that the run is trained with (`config.objective.loss`): without
    `label_smoothing`, `focal` and `class_weights`, so that runs with other values of these can be compared. The
    evaluator `loss` gives the loss that is trained.

    An example with several labels counts as right if the best class is one of them. `accuracy` and `top5_accuracy` are
    of the examples that have a label (ImageNet-ReaL's rule, arXiv 2006.07159); the option `unlabelled` says whether
    `loss` and `examples` count the rest too.
    """

    Options = LabelOptions
    high_is_good = ("accuracy", "top5_accuracy")
    low_is_good = ("loss",)

    def __init__(self, options: LabelOptions, context: EvalContext):
        super().__init__(options, context)
        self._counts_unlabelled = counts_unlabelled(options, context.config)
        self._logged_unlabelled = False
        self._step = None

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
        return METRICS

    def main_metric(self) -> str:
        return "accuracy"

    def _means(self, sums: dict) -> dict[str, float]:
        """The metrics of all batches together."""
        totals = {name: float(value) for name, value in jax.device_get(sums).items()}
        images = totals.pop("images")
        labelled = totals.pop("labelled")
        if not self._logged_unlabelled:
            self._logged_unlabelled = True
            log_unlabelled(int(images - labelled), int(images), self._counts_unlabelled)
        examples = images if self._counts_unlabelled else labelled
        means = {name: total / max(examples, 1) for name, total in totals.items()}
        for name in ("accuracy", "top5_accuracy"):
            means[name] = totals[name] / max(labelled, 1)
        return means | {"examples": int(examples)}

    def _counted(self, batch: dict) -> jax.Array:
        """Which images of a batch count in `examples`, (B,) float32."""
        if self._counts_unlabelled:
            return batch["mask"]
        targets = to_targets(batch["label"], self.context.model_config.num_classes)
        return batch["mask"] * has_class(targets)

    def _added(self, logits: jax.Array, batch: dict, sums: dict) -> dict[str, jax.Array]:
        """`sums` with those of a batch, whose images have these logits."""
        classes = self.context.model_config.num_classes
        loss = objectives.loss(self.context.config.objective)
        targets = to_targets(batch["label"], classes)
        best = jax.lax.top_k(logits, min(5, classes))[1]
        new = {
            "accuracy": is_right(logits, targets) * batch["mask"],
            "top5_accuracy": (jnp.take_along_axis(targets, best, axis=1) > 0).any(axis=1)
            * batch["mask"],
            "loss": cross_entropy(logits, targets, loss) * self._counted(batch),
            "labelled": has_class(targets) * batch["mask"],
            "images": batch["mask"],
        }
        return {name: sums[name] + jnp.sum(values) for name, values in new.items()}


def no_sums(mesh: Mesh) -> dict[str, jax.Array]:
    """The sums of no examples, on all devices."""
    zero, whole = np.zeros((), np.float32), meshes.replicated(mesh)
    return {n: jax.make_array_from_callback((), whole, zero.__getitem__) for n in _SUMMED}
