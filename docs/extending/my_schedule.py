"""my_schedule.py: the learning rate falls as one minus the square root of the share of the run that is done."""

import jax.numpy as jnp

from vit_jax.extend import Span, load_config, register_schedule


def fall_early(k, span: Span):
    done = jnp.minimum(k / span.steps, 1)
    return span.end + (1 - span.end) * (1 - jnp.sqrt(done))


register_schedule("early", fall_early, reads=("lr_end",))


def get_config():
    config = load_config("digits")
    config.optim.schedule = "early"
    config.optim.lr_end = 1e-5
    return config
