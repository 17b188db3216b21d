"""my_term.py: a term of a sum, by which features spread over the sphere (uniformity, arXiv 2005.10242)."""

import dataclasses

import jax.numpy as jnp

from vit_jax.extend import OutputTerm, load_config, option, register_objective


@dataclasses.dataclass(frozen=True)
class Options:
    sharpness: float = option(2.0, "of the Gaussian of two features' distance", above=0)


class Uniformity(OutputTerm):
    Options = Options
    needs_labels = False

    def of_output(self, learner, output, layers, batch, rngs):
        x = output.features.astype(jnp.float32)
        x /= jnp.linalg.norm(x, axis=1, keepdims=True)
        distances = jnp.square(x[:, None] - x).sum(-1)
        others = 1 - jnp.eye(len(x))
        near = jnp.exp(-self.options.sharpness * distances) * others
        loss = jnp.log(near.sum(1) / others.sum(1))
        return loss, {"distance": distances.mean(1)}


register_objective("uniformity", Uniformity)


def get_config():
    config = load_config("digits")
    config.objective.name = "sum"
    config.objective.terms = (("supervised", {}), ("uniformity", {"weight": 0.1}))
    return config
