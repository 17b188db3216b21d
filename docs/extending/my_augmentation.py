"""my_augmentation.py: normal noise of a random strength for each image."""

import jax
import jax.numpy as jnp

from vit_jax.extend import Augmentation, load_config, register_augmentation

MOST = 20.0  # of 255


class Noise(Augmentation):
    needs_whole_images = False  # each pixel changes by itself

    def __call__(self, images, key):
        strength_key, noise_key = jax.random.split(key)
        strength = MOST * jax.random.uniform(strength_key, (len(images), 1, 1, 1))
        noise = strength * jax.random.normal(noise_key, images.shape)
        return jnp.clip(images + noise, 0, 255)


register_augmentation("noise", Noise)


def get_config():
    config = load_config("digits")
    config.augment.own = ("noise",)
    return config
