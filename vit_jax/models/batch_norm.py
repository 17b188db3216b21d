"""Batch norm: the layer with its running statistics, and the option of the families that have it."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.compute import norms
from vit_jax.models import classifier


@dataclasses.dataclass(frozen=True)
class BatchNormConfig(classifier.ClassifierConfig):
    """Base of the `Config` of a family with batch norms."""

    fixed_statistics: bool = option(
        False,
        "batch norms use their running statistics in training too, and leave them as they are: for "
        "fine-tuning with small batches or a frozen body",
    )


def with_fixed_statistics(config):
    """The config of a model of any family, its batch norms, if it has any, with `fixed_statistics`."""
    if not isinstance(config, BatchNormConfig):
        return config
    return dataclasses.replace(config, fixed_statistics=True)


class FrozenLayers(nnx.Variable):
    """Which layers of a stack of batch norms are frozen: (layers,) bool, of one layer a scalar."""


class BatchNorm(nnx.Module):
    """Batch norm as PyTorch defines it: running statistics are averaged with weight `momentum` for
    the newest batch, of its variance the unbiased estimate.

    With `accumulate`, each part of the batch is normalised by itself and moves the running statistics,
    as passing the parts to PyTorch one after the other would.

    A frozen one normalises by its running statistics in training too, and keeps them: an image's output is that
    of the checkpoint, and does not depend on the rest of the batch.

    Attributes:
      frozen: whether it is frozen, or which layers of a stack are.

    Parameters: `scale`, `bias` (C,); not trained: `mean`, `var` (C,). All float32.
    """

    frozen: bool | FrozenLayers = False

    def __init__(
        self, channels: int, *, epsilon: float = 1e-5, momentum: float = 0.1, axis: int = -1
    ):
        self.scale, self.bias = nnx.Param(jnp.ones(channels)), nnx.Param(jnp.zeros(channels))
        self.mean, self.var = nnx.BatchStat(jnp.zeros(channels)), nnx.BatchStat(jnp.ones(channels))
        self.epsilon, self.momentum, self.axis = epsilon, momentum, axis

    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        """Normalises every channel of x over all other axes; the result is the like of x.

        Args:
          x: (..., C), or with channels along `axis`.
          training: by the statistics of x, of which the running ones take note; else by these.

        Raises:
          ConfigError: in training, a channel has but one value.
        """
        scale, bias = self.scale[...], self.bias[...]
        options = {"axis": self.axis, "epsilon": self.epsilon}
        if not training or self.frozen is True:
            return norms.normalise_by(x, self.mean[...], self.var[...], scale, bias, **options)
        count = x.size // x.shape[self.axis]
        if count == 1:
            raise ConfigError(
                f"batch norm of {x.shape}: a batch that has one value for each channel has no variance. Train "
                "with a larger batch_size or image_size, or with model.fixed_statistics=True"
            )
        y, mean, variance = norms.batch_norm(x, scale, bias, **options)
        if isinstance(self.frozen, FrozenLayers):
            is_frozen = self.frozen[...]
            fixed = norms.normalise_by(x, self.mean[...], self.var[...], scale, bias, **options)
            y = jnp.where(is_frozen, fixed, y)
            momentum = jnp.where(is_frozen, 0.0, self.momentum)
        else:
            momentum = self.momentum
        _average(self.mean, mean, momentum)
        _average(self.var, variance * (count / (count - 1)), momentum)
        return y


def _average(running: nnx.Variable, newest: jax.Array, momentum: float | jax.Array) -> None:
    now = running[...]
    running.set_value(now + momentum * (newest.astype(now.dtype) - now))
