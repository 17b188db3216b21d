"""my_position.py: positions as rings, sines and cosines of a patch's distance from the middle of the image."""

import jax.numpy as jnp

from vit_jax.extend import ComputedPosition, load_config, register_position


class Rings(ComputedPosition):
    """Half of the channels are sines, half cosines, from one wave over an image to many."""

    def values(self, variables, rows, columns, height, width):
        down = (rows + 0.5) / height - 0.5
        across = (columns + 0.5) / width - 0.5
        distance = jnp.sqrt(down**2 + across**2)
        waves = jnp.arange(1, self.config.width // 2 + 1)
        angles = 2 * jnp.pi * distance[..., None] * waves
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


register_position("rings", Rings)


def get_config():
    config = load_config("digits")
    config.model.position = "rings"
    return config
