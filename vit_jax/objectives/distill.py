"""Learning from labels and from a teacher (DeiT, arXiv 2012.12877, §4).

`hard`: half of the loss is the cross-entropy with the labels, half that with the teacher's decision.
`soft`: (1 - alpha) of it is the first, alpha is τ² KL(teacher ‖ student) of logits divided by the
temperature τ. A model with a distillation token learns from the teacher by that token's head, from
labels by the class token's; another does both by the one head that it has, or by each of its early
exits, whose losses are added up. The teacher sees the
images that the student sees, mixed-up ones too, at its own size and normalisation.

Patient and consistent distillation ("function matching", arXiv 2106.05237) is `soft` with an alpha of 1: the labels say
nothing, the teacher sees the very crops and mixtures that the student sees, and training takes long.

Where sources differ: the authors' code divides its soft loss by the number of classes as well, the
paper does not; here it is the paper's. Their alpha is 0.5, τ 1; secondary
sources give the paper's soft setting as 0.1 and 3.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.objectives.contract import Batch, FromCheckpoint, Learner, Objective, ObjectiveContext
from vit_jax.objectives.supervised import cross_entropy, smoothed, to_targets, training_accuracy


@dataclasses.dataclass(frozen=True)
class DistillOptions:
    """What `config.objective` says for distillation."""

    teacher: str = option(
        "", "checkpoint of any format and family that classifies the same classes"
    )
    kind: str = option(
        "hard", "the teacher's decision, or its probabilities", choices=("hard", "soft")
    )
    alpha: float = option(0.5, "the teacher's share of the loss", minimum=0, maximum=1)
    temperature: float = option(1.0, "soft: logits are divided by it", above=0)
    loss: str = option(
        "softmax",
        "with the labels: cross-entropy, softmax or sigmoid",
        choices=("softmax", "sigmoid"),
    )
    label_smoothing: float = option(
        0.0, "share of the labels' target spread evenly over all classes", minimum=0, maximum=1
    )


class Distill(Objective):
    """The loss; metrics are `accuracy`, see `supervised.training_accuracy`, and `agreement` with the teacher."""

    Options = DistillOptions

    def __init__(self, options: DistillOptions, context: ObjectiveContext):
        super().__init__(options, context)
        if not options.teacher:
            raise ConfigError(
                "objective distill needs a teacher: set --config.objective.teacher=CHECKPOINT"
            )
        if options.alpha == 1 and context.model.two_heads:
            raise ConfigError(
                "config.objective.alpha = 1 leaves nothing to learn for the class token's head, which answers too: "
                "set --config.model.distilled=False"
            )

    def teacher(self) -> FromCheckpoint:
        return FromCheckpoint(self.options.teacher)

    def targets(self, batch: Batch) -> Batch:
        """`label` (B, classes)."""
        return {"label": to_targets(batch["label"], self.context.model.num_classes)}

    def __call__(self, learner: Learner, batch: Batch, rngs: nnx.Rngs):
        options, labels = self.options, batch["label"]
        taught = jax.lax.stop_gradient(learner.teacher.logits(batch["image"]))
        output = learner.model(batch["image"], deterministic=False, rngs=rngs)
        exits = self.context.model.exit_flops
        if self.context.model.two_heads:
            by_label, by_teacher = output.exits
        else:
            by_label = by_teacher = output.exits if exits else output.logits
        targets = smoothed(labels, options.label_smoothing)
        loss = (1 - options.alpha) * cross_entropy(by_label, targets, options.loss)
        loss += options.alpha * self._from_teacher(by_teacher, taught)
        decision = output.logits.argmax(-1)
        multi_label = self.context.multi_label
        accuracy = training_accuracy(learner, output.logits, labels, multi_label=multi_label)
        return loss.sum(axis=0) if exits else loss, {
            "accuracy": accuracy,
            "agreement": (decision == taught.argmax(-1)).astype(jnp.float32),
        }

    def _from_teacher(self, logits: jax.Array, taught: jax.Array) -> jax.Array:
        """logits (…, B, classes), taught (B, classes) -> (…, B)."""
        if self.options.kind == "hard":
            decision = jax.nn.one_hot(taught.argmax(-1), taught.shape[-1], dtype=jnp.float32)
            return cross_entropy(logits, decision, "softmax")
        heat = self.options.temperature
        return heat**2 * divergence(taught / heat, logits / heat)


def divergence(taught: jax.Array, logits: jax.Array) -> jax.Array:
    """KL(teacher ‖ student) in nats of logits (…, B, classes): (…, B)."""
    teacher, student = jax.nn.log_softmax(taught), jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)
