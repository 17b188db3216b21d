"""Classification with labels: softmax or sigmoid cross-entropy."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.schema import option
from vit_jax.objectives.contract import Batch, Learner, Objective


@dataclasses.dataclass(frozen=True)
class Options:
    """What `config.objective` says for supervised learning."""

    loss: str = option(
        "softmax",
        "cross-entropy: softmax, or sigmoid summed over classes",
        choices=("softmax", "sigmoid"),
    )
    label_smoothing: float = option(
        0.0, "share of the target spread evenly over all classes", minimum=0, maximum=1
    )


class Supervised(Objective):
    """Cross-entropy between the model's logits and the targets, which mixup may have mixed."""

    Options = Options

    def targets(self, batch: Batch) -> Batch:
        """`label` (B, classes)."""
        return {"label": to_targets(batch["label"], self.setting.model.num_classes)}

    def __call__(self, learner: Learner, batch: Batch, rngs: nnx.Rngs):
        """See `Objective`; the metric is `accuracy`, of the heaviest target."""
        logits = learner.model(batch["image"], deterministic=False, rngs=rngs).logits
        targets = smoothed(batch["label"], self.options.label_smoothing)
        accuracy = (logits.argmax(-1) == targets.argmax(-1)).astype(jnp.float32)
        return cross_entropy(logits, targets, self.options.loss), {"accuracy": accuracy}


def cross_entropy(logits: jax.Array, targets: jax.Array, kind: str) -> jax.Array:
    """logits, targets (B, K) float32 -> (B,).

    `softmax`: −Σ t log softmax(z). `sigmoid`: Σ over classes of the binary cross-entropies, not
    their mean, as the JFT and ImageNet-21k recipes have it (Scaling ViT, big_vision).
    """
    if kind == "softmax":
        return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)
    return -jnp.sum(
        targets * jax.nn.log_sigmoid(logits) + (1 - targets) * jax.nn.log_sigmoid(-logits), axis=-1
    )


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
