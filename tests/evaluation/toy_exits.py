"""A family whose models have three exits: each sees the image on a finer grid, and adds what the one
before made of it.
"""

import dataclasses
import itertools

import jax.numpy as jnp
from flax import nnx

from vit_jax.base.schema import option
from vit_jax.models import classifier
from vit_jax.models.contract import ModelOutput

VARIANTS = ["Toy-3"]
GRIDS = (1, 2, 4)


@dataclasses.dataclass(frozen=True)
class Config(classifier.ClassifierConfig):
    width: int = option(24, "size of the features", minimum=1, role="size")
    exits: int = option(3, "exits", minimum=1, maximum=3, role="size")

    @property
    def tokens(self):
        return sum(grid**2 for grid in GRIDS[: self.exits])

    def _cumulative(self):
        inputs = [grid**2 * self.channels for grid in GRIDS[: self.exits]]
        # As if each operation were a million, so that costs are numbers that a person can read.
        alone = [2_000_000 * self.width * (n + self.num_classes) for n in inputs]
        return tuple(itertools.accumulate(alone))

    @property
    def exit_flops(self):
        return self._cumulative() if self.exits > 1 else ()

    def flops(self):
        return self._cumulative()[-1]


def options_from_name(name):
    return {} if name == "Toy-3" else None


class Model(nnx.Module):
    def __init__(self, config, *, rngs):
        self.config, self.num_exits = config, config.exits
        inputs = [grid**2 * config.channels for grid in GRIDS[: config.exits]]
        self.stems = nnx.List([nnx.Linear(n, config.width, rngs=rngs) for n in inputs])
        self.heads = nnx.List([classifier.head(config.width, config, rngs) for _ in inputs])

    def exit(self, index, images, carried):
        rows, size = len(images), images.shape[1] // GRIDS[index]
        cells = images.reshape(rows, GRIDS[index], size, GRIDS[index], size, -1).mean((2, 4))
        features = jnp.tanh(self.stems[index](cells.reshape(rows, -1)))
        if carried is not None:
            features = features + carried["features"] * carried["pair"][0][:, None]
        logits = self.heads[index](features.astype(jnp.float32))
        return logits, {"features": features, "pair": (features.mean(-1), images)}

    def __call__(self, images, *, deterministic=True, rngs=None, capture=False):
        carried, logits = None, []
        for index in range(self.num_exits):
            found, carried = self.exit(index, images, carried)
            logits.append(found)
        features = carried["features"]
        return ModelOutput(
            logits[-1], features, features[:, None], {}, jnp.stack(logits) if logits[1:] else None
        )
