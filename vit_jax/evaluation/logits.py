"""The logits of a whole data set: what evaluators of a classifier have in common."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from vit_jax import objectives
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.config import Config
from vit_jax.data import crops, loader, sources
from vit_jax.data.labels.classes import with_classes
from vit_jax.data.options import Data
from vit_jax.devices import meshes
from vit_jax.evaluation.contract import (
    EvalContext,
    EvaluatedModel,
    Evaluator,
    EvaluatorOptions,
    Watch,
)
from vit_jax.evaluation.forward import make_forward
from vit_jax.evaluation.gathering import on_host
from vit_jax.models.contract import images_of
from vit_jax.models.registry import Weights
from vit_jax.objectives.supervised import to_targets

_MADE_UP = 1 << 24  # logits of a rehearsal: 64 MiB


@dataclasses.dataclass(frozen=True)
class LabelOptions(EvaluatorOptions):
    """Options of evaluators that compare logits with labels."""

    unlabelled: str = option(
        "",
        "images without any label, where images may have several: none: they are of none of the classes; unknown: "
        "they are excluded; '': none if the probabilities are sigmoids, else unknown",
        choices=("", "unknown", "none"),
    )


def counts_unlabelled(options: LabelOptions, config: Config) -> bool:
    """Whether images without a label count, as images of none of the classes.

    Raises:
      ConfigError: they are to count, and the probabilities of the classes add up to 1.
    """
    has_sigmoids = objectives.probabilities(config.objective) == "sigmoid"
    if options.unlabelled == "none" and not has_sigmoids:
        raise ConfigError(
            "config.eval.evaluators: unlabelled='none' is for sigmoids: by a softmax every image is of a class. Set "
            "unlabelled='unknown', or --config.objective.loss=sigmoid if the model was trained so"
        )
    return options.unlabelled != "unknown" and has_sigmoids


def log_unlabelled(unlabelled: int, images: int, counts: bool) -> None:
    """Logs how many of the images have no label, if any, and how they count."""
    if not unlabelled:
        return
    consequence = "are excluded (option unlabelled='unknown')"
    if counts:
        consequence = "count as images of no class, except in accuracy and top5_accuracy (option unlabelled='none')"
    logging.info(
        "evaluation: %d of %d images have no label and %s", unlabelled, images, consequence
    )


class Logits(NamedTuple):
    """Logits of examples on the host.

    Attributes:
      logits: (n, classes) float32.
      targets: (n, classes) bool; a row has one or more true classes, or none where an example has no label.
      positions: (n,) of the examples in the source.
    """

    logits: np.ndarray
    targets: np.ndarray
    positions: np.ndarray


class LogitsEvaluator(Evaluator):
    """Base of evaluators of logits, which judge on `eval_split`. A subclass defines `score`, or its own `__call__`
    where the logits of all examples would not fit the host's memory.

    Attributes:
      source: the examples.
      config: of the run, with what the options change of its data.
    """

    Options = EvaluatorOptions
    by_engine = True
    expects = (
        "score(self, examples) gets one Logits with .logits (n, classes) float32, .targets (n, classes) bool and "
        ".positions (n,), and returns metrics by name, {'recall': 0.9}"
    )

    def __init__(self, options: EvaluatorOptions, context: EvalContext):
        super().__init__(options, context)
        if not context.model_config.num_classes:
            raise ConfigError(
                "the model has no head, so that it has no accuracy: judge its features with "
                "--config.eval.evaluators='(\"knn\",)' or few_shot"
            )
        self.config = dataclasses.replace(context.config, data=self.data())
        data = self.config.data
        self.source = with_classes(sources.open_eval(data), context.classes, data.class_order)
        self._gather = None

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        return self.score(self.collect(trained.weights, mesh, watch))

    def score(self, examples: Logits) -> dict[str, float]:
        """Metrics by name, of the logits and targets of all examples; computed on the host, by every process."""
        raise NotImplementedError

    def rehearse(self) -> None:
        from vit_jax.evaluation import rehearsal  # for evaluators of users alone

        super().rehearse()
        rehearsal.check_output(
            self.forward(), self.context, self.config.data, self.context.model_config.num_classes
        )
        if type(self).__call__ is LogitsEvaluator.__call__:
            examples = self._made_up()
            rehearsal.check_metrics(self.score(examples), self.metrics())

    def _made_up(self) -> Logits:
        """As `collect`, of as many examples, but none of the data set's; of fewer where they would take long."""
        classes = self.context.model_config.num_classes
        count = max(1, min(len(self.source), _MADE_UP // classes))
        targets = np.arange(count)[:, None] % classes == np.arange(classes)
        logits = np.random.default_rng(0).standard_normal(targets.shape, np.float32)
        return Logits(logits, targets, np.arange(count))

    def forward(self) -> Callable[[Weights, jax.Array], jax.Array]:
        """To be traced: weights and images (B, H, W, C) uint8 to logits (B, classes) float32. XLA computes them,
        whatever the engine; `of_logits` calls the engine.
        """
        context = self.context
        network = make_forward(context.definition, context.model_config, self.config.data)
        return lambda weights, images: network(weights, images).logits

    def collect(self, weights: Weights, mesh: Mesh, watch: Watch = iter) -> Logits:
        """The logits of all examples that can be read, in their order, in every process."""
        self._gather = self._gather or self.of_logits(_gathered, meshes.batch_sharding(mesh))
        with loader.eval_batches(self.source, self.config, meshes.batch_sharding(mesh)) as batches:
            gathered = (self._gather(weights, batch) for batch in watch(batches))
            logits, targets, mask = on_host(gathered, mesh)
        positions = np.flatnonzero(mask > 0)
        return Logits(logits[positions], targets[positions] > 0, positions)

    def of_logits(self, function: Callable, out_shardings: Any) -> Callable:
        """`function(logits, batch, …)`, compiled, as a function of (weights, batch, …): of the logits of a batch, by
        the context's engine or XLA.
        """
        logits_of = self.context.logits_of
        if logits_of is None:
            forward = self.forward()

            def traced(weights: Weights, batch: dict, *others: Any) -> Any:
                return function(forward(weights, images_of(batch)), batch, *others)

            return jax.jit(traced, out_shardings=out_shardings)
        if _images(self.config.data) != _images(self.context.config.data):
            raise ConfigError(
                "config.eval.evaluators: data: another engine computes images normalised as config.data says: set "
                "--engine=xla, or mean, std, image_size and permute there"
            )
        if self.config.data.native_tokens:
            raise ConfigError(
                "config.data.native_tokens: only XLA computes images at sizes of their own; set --engine=xla"
            )
        compiled = jax.jit(function, out_shardings=out_shardings)

        def by_engine(weights: Weights, batch: dict, *others: Any) -> Any:
            images = batch["image"]
            logits = jax.device_put(logits_of(jax.device_get(images)), images.sharding)
            return compiled(logits, batch, *others)

        return by_engine


def _gathered(logits: jax.Array, batch: dict) -> tuple[jax.Array, ...]:
    """Logits, targets and mask."""
    return logits, to_targets(batch["label"], logits.shape[-1]), batch["mask"]


def _images(data: Data) -> tuple:
    """What a program of images depends on."""
    return crops.shape(data), data.mean, data.std, data.permute
