"""The optimizers by name: each maps gradients to the direction of an update, still without learning
rate or decay.

Gradient clipping, learning rates, weight decay and freezing are common to all and live in
`vit_jax/optim/__init__.py`. All directions are computed in float32 whatever type the first moment
is kept in.
"""

import jax
import jax.numpy as jnp
import optax

from vit_jax.optim.options import Optim


def adamw(config: Optim) -> optax.GradientTransformation:
    """Adam with bias correction (Kingma & Ba 2015, Algorithm 1); second moment in float32 (Scaling
    ViT §3.4).
    """
    return keep(optax.scale_by_adam(config.b1, config.b2, config.eps), "mu", config.moment_dtype)


def nadamw(config: Optim) -> optax.GradientTransformation:
    """AdamW with Nesterov's momentum: the first moment looks one update ahead, (b1 m + (1 - b1) g) / (1 - b1^t),
    as AlgoPerf's baseline and timm's have it (Dozat 2016 corrects both terms each by its own count).
    """

    def update(grads, state, params=None):
        count = state.count + 1
        mu = optax.tree.update_moment(grads, state.mu, config.b1, 1)
        nu = optax.tree.update_moment(grads, state.nu, config.b2, 2)
        ahead = optax.tree.update_moment(grads, mu, config.b1, 1)
        ahead = optax.tree.bias_correction(ahead, config.b1, count)
        squares = optax.tree.bias_correction(nu, config.b2, count)
        direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + config.eps), ahead, squares)
        return direction, optax.ScaleByAdamState(count, mu, nu)

    init = optax.scale_by_adam(config.b1, config.b2, config.eps).init
    return keep(optax.GradientTransformation(init, update), "mu", config.moment_dtype)


def sgd(config: Optim) -> optax.GradientTransformation:
    """Momentum b1, not dampened: m = b1 m + g; direction m (ViT §4.1). With b1 = 0 there is no
    state.
    """
    if not config.b1:
        return optax.identity()
    return keep(optax.trace(config.b1), "trace", config.moment_dtype)


def adafactor(config: Optim) -> optax.GradientTransformation:
    """Factored second moment, its decay capped by b2; then m = b1 m + (1 - b1) u, not debiased
    (Scaling ViT §3.4).
    """
    from vit_jax.optim.adafactor import scale_by_adafactor

    if not config.b1:
        return scale_by_adafactor(config.b2)
    momentum = keep(optax.ema(config.b1, debias=False), "ema", config.moment_dtype)
    return optax.chain(scale_by_adafactor(config.b2), momentum)


def rmsprop(config: Optim) -> optax.GradientTransformation:
    """v = b2 v + (1 - b2) g², v beginning at 1; then momentum m = b1 m + g / sqrt(v + eps); direction m.
    TensorFlow's, as EfficientNets are trained with it (arXiv 1905.11946 §5); there the learning rate goes
    into m.
    """
    scaled = optax.scale_by_rms(config.b2, config.eps, initial_scale=1.0)
    return optax.chain(scaled, sgd(config))


def lion(config: Optim) -> optax.GradientTransformation:
    """The sign of b1 m + (1 - b1) g, then m = b2 m + (1 - b2) g (Chen et al. 2023, Algorithm 2)."""
    return keep(optax.scale_by_lion(config.b1, config.b2), "mu", config.moment_dtype)


def lamb(config: Optim) -> optax.GradientTransformation:
    """Adam's direction (You et al. 2020, Algorithm 2); `trust.scale_by_trust_ratio` adds decay and scales it."""
    return adamw(config)


def lars(config: Optim) -> optax.GradientTransformation:
    """SGD's momentum (You et al. 2017, Algorithm 1) of gradients that `trust` has scaled together with their decay; the
    learning rate multiplies the momentum, as in the linear probes of MoCo v3 and MAE, and is not inside it.
    """
    return sgd(config)


def schedule_free(config: Optim) -> optax.GradientTransformation:
    """Adam's direction without a first moment; `schedule_free.averaged` has what takes its place."""
    return optax.scale_by_rms(config.b2, config.eps, eps_in_sqrt=False, bias_correction=True)


OPTIMIZERS = {
    "adamw": adamw,
    "nadamw": nadamw,
    "sgd": sgd,
    "adafactor": adafactor,
    "lion": lion,
    "rmsprop": rmsprop,
    "lamb": lamb,
    "lars": lars,
    "schedule_free": schedule_free,
}
# Their directions are scaled to the length of the parameter; the decay belongs to the direction.
SCALED_BY_TRUST = ("lamb", "lars")


def keep(
    inner: optax.GradientTransformation, field: str, dtype: str
) -> optax.GradientTransformation:
    """`inner` with one field of its state kept in `dtype` between updates.

    optax's own dtype arguments would also round products such as b1 m to that type.
    """

    def cast(state, dtype):
        return state._replace(**{field: optax.tree.cast(getattr(state, field), dtype)})

    def update(updates, state, params=None):
        updates, state = inner.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, jnp.dtype(dtype))

    return optax.GradientTransformation(
        lambda params: cast(inner.init(params), jnp.dtype(dtype)), update
    )
