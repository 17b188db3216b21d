"""Classification with labels: softmax, sigmoid or binary cross-entropy."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.objectives.contract import Batch, Learner, Objective, ObjectiveContext


@dataclasses.dataclass(frozen=True)
class SupervisedOptions:
    """What `config.objective` says for supervised learning."""

    loss: str = option(
        "softmax",
        "cross-entropy: softmax; sigmoid, summed over classes; binary, its mean over classes, where every class "
        "in a mixed image counts fully (DeiT III)",
        choices=("softmax", "sigmoid", "binary"),
    )
    label_smoothing: float = option(
        0.0, "share of the target spread evenly over all classes", minimum=0, maximum=1
    )
    focal: float = option(
        0.0, "focal loss: easy examples count (1 - p)^focal; 0: all count alike", minimum=0
    )
    class_weights: tuple = option(
        (), "what each class counts in the loss, in the order of the classes; (): 1", minimum=0
    )


class Supervised(Objective):
    """Cross-entropy between the model's logits and the targets, which mixup may have mixed; of a model
    with early exits the sum of theirs (arXiv 2105.15075, Eq. 2).
    """

    Options = SupervisedOptions
    takes_native = True

    def __init__(self, options: SupervisedOptions, context: ObjectiveContext):
        super().__init__(options, context)
        if options.loss == "binary" and options.label_smoothing:
            raise ConfigError(
                f"config.objective.label_smoothing = {options.label_smoothing:g} gives every class a share, and "
                "config.objective.loss='binary' makes every share a 1: set label_smoothing=0, or loss='sigmoid'"
            )
        count = len(options.class_weights)
        if count and count != context.model.num_classes:
            raise ConfigError(
                f"config.objective.class_weights has {count} weights for {context.model.num_classes} "
                "classes: give one for each"
            )

    def targets(self, batch: Batch) -> Batch:
        """`label` (B, classes)."""
        return {"label": to_targets(batch["label"], self.context.model.num_classes)}

    def __call__(self, learner: Learner, batch: Batch, rngs: nnx.Rngs):
        output = learner.model(batch["image"], deterministic=False, rngs=rngs)
        return self.of_output(learner, output, (), batch, rngs)

    def of_output(self, learner: Learner, output: Any, layers: tuple, batch: Batch, rngs: nnx.Rngs):
        """The cross-entropy of each image, and the metric `accuracy`, see `training_accuracy`."""
        options = self.options
        labels = batch["label"]
        targets = smoothed(labels, options.label_smoothing)
        multi_label = self.context.multi_label
        accuracy = training_accuracy(learner, output.logits, labels, multi_label=multi_label)
        exits = self.context.model.exit_flops
        loss = cross_entropy(
            output.exits if exits else output.logits,
            targets,
            options.loss,
            focal=options.focal,
            weights=options.class_weights,
        )
        return loss.sum(axis=0) if exits else loss, {"accuracy": accuracy}


def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    kind: str,
    *,
    focal: float = 0.0,
    weights: Sequence[float] = (),
) -> jax.Array:
    """logits (…, B, K), targets (B, K) float32 -> (…, B).

    `softmax`: −Σ t log p with p = softmax(z). `sigmoid`: Σ over classes of the binary
    cross-entropies, not their mean, as the JFT and ImageNet-21k recipes have it (Scaling ViT,
    big_vision). `binary`: their mean, of targets that are 1 wherever t > 0, as DeiT III has it.

    Args:
      focal: γ; every term counts (1 − p)^γ, p being the probability that it says is right
        (arXiv 1708.02002, Eq. 4, without its α).
      weights: (K,) of the classes' terms.
    """

    def term(log_p: jax.Array) -> jax.Array:
        if not focal:
            return log_p
        wrong = -jnp.expm1(log_p)
        # At p = 1 the term and its gradient are 0; the power alone has none there for γ < 1.
        is_sure = wrong <= 0
        factor = jnp.where(is_sure, 1.0, wrong) ** focal
        return log_p * jnp.where(is_sure, 0.0, factor)

    if kind == "binary":
        targets = (targets > 0).astype(targets.dtype)
    if kind == "softmax":
        terms = targets * term(jax.nn.log_softmax(logits))
    else:
        right, wrong = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
        terms = targets * term(right) + (1 - targets) * term(wrong)
    if weights:
        terms *= jnp.array(weights, jnp.float32)
    return -(jnp.mean if kind == "binary" else jnp.sum)(terms, axis=-1)


def is_right(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Whether the best class is one with the heaviest target of its image: of several labels one of them, of mixed
    images the one with the larger share. An image of no class is not right.

    Args:
      logits, targets: (B, K); targets without label smoothing.

    Returns:
      (B,) bool.
    """
    best = logits.argmax(-1, keepdims=True)
    target = jnp.take_along_axis(targets, best, axis=-1)[:, 0]
    return (target > 0) & (target == targets.max(-1))


def has_class(targets: jax.Array) -> jax.Array:
    """Which images have a class at all: (B, K) -> (B,) bool."""
    return targets.max(-1) > 0


def training_accuracy(
    learner: Learner, logits: jax.Array, targets: jax.Array, *, multi_label: bool
) -> jax.Array:
    """(B,) float32: which images are right, see `is_right`.

    If images may have several labels, or none, it is scaled so that the mean over the batch is the mean over images
    with a class; 0 if no image has one. Each held-out image is judged alone: it is not scaled, and one of no class
    counts as wrong.
    """
    if not multi_label:  # Devices need not exchange how many images have a class.
        return (logits.argmax(-1) == targets.argmax(-1)).astype(jnp.float32)
    right = is_right(logits, targets).astype(jnp.float32)
    if learner.held_out:
        return right
    images = jnp.maximum(has_class(targets).sum(), 1)
    return right * (len(right) / images)


def smoothed(targets: jax.Array, share: float) -> jax.Array:
    """Targets (B, K) with this share of each spread evenly over all classes."""
    return targets * (1 - share) + share / targets.shape[-1]


def to_targets(labels: jax.Array, num_classes: int) -> jax.Array:
    """int32 (B,) class indices, or float (B, K) already one row of targets an example -> float32
    (B, K).
    """
    if labels.ndim == 2:
        return labels.astype(jnp.float32)
    return jax.nn.one_hot(labels, num_classes, dtype=jnp.float32)
