"""The trust ratios of LAMB (You et al. 2020, arXiv 1904.00962) and LARS (You et al. 2017, arXiv 1708.03888): each
layer's update is as long, relative to the learning rate, as its parameters are; in LARS a thousandth of that.
"""

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import patterns

# The trust coefficient of the paper, and of the linear probes of MoCo v3 and MAE.
_LARS = 1e-3
# The parameters of one axis in the authors' code, which LARS does not scale.
_VECTORS = re.compile(r"(^|/)(bias|scale)$")


def with_trust_ratio(
    name: str, direction: optax.GradientTransformation, decays: Mapping[str, float]
) -> optax.GradientTransformation:
    """LAMB scales Adam's direction; LARS the gradient, of which `direction`, its momentum, is taken.

    LAMB scales the parameters that have decay, as apex's `FusedLAMB` does by default, and DeiT III with it. LARS scales
    all parameters but biases and the scales of norms, with decay and without: the linear probes of MoCo v3 and MAE have
    a decay of 0.

    Args:
      name: of the optimizer.
      decays: see `scale_by_trust_ratio`.
    """
    if name == "lars":
        scaled = {parameter: not _VECTORS.search(parameter) for parameter in decays}
        return optax.chain(scale_by_trust_ratio(decays, scaled, _LARS), direction)
    scaled = {parameter: bool(decay) for parameter, decay in decays.items()}
    return optax.chain(direction, scale_by_trust_ratio(decays, scaled))


def scale_by_trust_ratio(
    decays: Mapping[str, float], scaled: Mapping[str, bool], coefficient: float = 1.0
) -> optax.GradientTransformation:
    """Directions u to ratio · (u + d p), where the ratio is c |p| / |u + d p|, and 1 if either is 0.

    The layers of a stack have a ratio each; queries, keys and values, one parameter, have one together.

    Args:
      decays: d by parameter name.
      scaled: which parameters have a ratio, by name; the ratio of the others is 1.
      coefficient: c.
    """

    def scale(name: str, u: jax.Array, p: jax.Array) -> jax.Array:
        if decays[name]:
            u += decays[name] * p
        if not scaled[name]:
            return u
        axes = tuple(range(int(patterns.is_stacked(name)), p.ndim))
        lengths = [jnp.sqrt(jnp.sum(jnp.square(x), axes, keepdims=True)) for x in (p, u)]
        known = (lengths[0] > 0) & (lengths[1] > 0)
        ratio = coefficient * lengths[0] / jnp.where(known, lengths[1], 1.0)
        return u * jnp.where(known, ratio, 1.0)

    return optax.stateless(lambda us, params: patterns.map_named(scale, us, params))
