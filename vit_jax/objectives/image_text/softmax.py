"""The loss of CLIP (arXiv 2103.00020, Fig. 3): which text belongs to an image, and which image to a text."""

import math

import jax
import jax.numpy as jnp

from vit_jax.objectives.image_text import ring
from vit_jax.objectives.image_text.ring import exact_product

TEMPERATURE = math.log(1 / 0.07)  # at the beginning, as a logarithm
MOST = math.log(100)  # of it


@jax.custom_vjp
def softmax_loss(images: jax.Array, texts: jax.Array, temperature: jax.Array) -> jax.Array:
    """Half of each pair's two cross-entropies: of its image among all texts, of its text among all images. Logits are
    exp(temperature) zᵢ·zⱼ, of which the backward pass stores the logarithms of the two denominators alone.

    Args:
      images, texts: (B, D) float32 of length 1; row i of both is a pair.
      temperature: () float32, the logarithm of what the cosine is multiplied by.

    Returns:
      (B,) float32.
    """
    return _forward(images, texts, temperature)[0]


def _forward(images, texts, temperature):
    def of_device(ring, total, images, texts, temperature):
        scale = jnp.exp(temperature)

        def visit(of_images, block):
            texts, of_texts = block
            logits = scale * exact_product(images, texts.T)
            of_images = jnp.logaddexp(of_images, jax.nn.logsumexp(logits, axis=1))
            return of_images, (texts, jnp.logaddexp(of_texts, jax.nn.logsumexp(logits, axis=0)))

        nothing = jnp.full(len(images), -jnp.inf)
        of_images, (_, of_texts) = ring(visit, nothing, (texts, nothing))
        matching = scale * jnp.sum(images * texts, axis=1)
        return (of_images + of_texts) / 2 - matching, of_images, of_texts

    arguments = images, texts, temperature
    loss, of_images, of_texts = ring.over_devices(of_device, *arguments)
    return loss, (*arguments, of_images, of_texts)


def _backward(saved, dloss):
    def of_device(ring, total, images, texts, temperature, of_images, of_texts, dloss):
        scale = jnp.exp(temperature)

        def visit(sums, block):
            texts, of_texts, dloss_of_texts, dtexts = block
            cosines = exact_product(images, texts.T)
            dlogits = dloss[:, None] * jnp.exp(scale * cosines - of_images[:, None])
            dlogits = (dlogits + dloss_of_texts * jnp.exp(scale * cosines - of_texts)) / 2
            dimages, dscale = sums
            sums = dimages + exact_product(dlogits, texts), dscale + jnp.sum(dlogits * cosines)
            return sums, (
                texts,
                of_texts,
                dloss_of_texts,
                dtexts + exact_product(dlogits.T, images),
            )

        slope = dloss[:, None]
        start = -slope * texts, -jnp.sum(slope * images * texts)
        block = texts, of_texts, dloss, -slope * images
        (dimages, dscale), (*_, dtexts) = ring(visit, start, block)
        return scale * dimages, scale * dtexts, scale * total(dscale)

    return ring.over_devices(of_device, *saved, dloss)


softmax_loss.defvjp(_forward, _backward)
