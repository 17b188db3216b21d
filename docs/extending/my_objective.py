"""my_objective.py: images are turned, and the model learns by how much (RotNet, arXiv 1803.07728)."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from vit_jax.extend import Objective, load_config, option, register_objective


@dataclasses.dataclass(frozen=True)
class Options:
    turns: int = option(4, "quarter turns to tell apart", minimum=2, maximum=4)


class Rotation(Objective):
    Options = Options
    needs_labels = False  # a model without a head, and data without labels
    mixes = False  # mixup and cutmix are refused

    def make_modules(self, rngs):
        return nnx.Linear(self.context.model.width, self.options.turns, rngs=rngs)

    def __call__(self, learner, batch, rngs):
        images = batch["image"]
        turn = jax.random.randint(rngs.dropout(), images.shape[:1], 0, self.options.turns)
        turns = [lambda x, k=k: jnp.rot90(x, k) for k in range(self.options.turns)]
        turned = jax.vmap(lambda image, k: jax.lax.switch(k, turns, image))(images, turn)
        features = learner.model(turned, deterministic=False, rngs=rngs).features
        logits = learner.modules(features.astype(jnp.float32))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, turn)
        return loss, {"accuracy": (logits.argmax(-1) == turn).astype(jnp.float32)}


register_objective("rotation", Rotation)


def get_config():
    config = load_config("digits")
    config.augment.mixup = 0.0
    config.objective.name = "rotation"
    return config
