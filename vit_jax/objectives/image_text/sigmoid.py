"""The loss of SigLIP (arXiv 2303.15343 §3.2): whether an image and a text belong together, for every pair by itself."""

import math

import jax
import jax.numpy as jnp

from vit_jax.objectives.image_text import ring
from vit_jax.objectives.image_text.ring import exact_product

TEMPERATURE, BIAS = math.log(10), -10.0  # at the beginning; the first as a logarithm


@jax.custom_vjp
def sigmoid_loss(
    images: jax.Array, texts: jax.Array, temperature: jax.Array, bias: jax.Array
) -> jax.Array:
    """The sum over all texts j of -log σ(± (exp(temperature) zᵢ·zⱼ + bias)) of each image i, + where j is i.

    Nothing of a pair is stored for the backward pass, which computes the logits again.

    Args:
      images, texts: (B, D) float32 of length 1; row i of both is a pair.
      temperature: () float32, the logarithm of what the cosine is multiplied by.
      bias: () float32.

    Returns:
      (B,) float32; not divided by the number of texts.
    """
    return _forward(images, texts, temperature, bias)[0]


def _forward(images, texts, temperature, bias):
    def of_device(ring, total, images, texts, temperature, bias):
        scale = jnp.exp(temperature)

        def visit(loss, texts):
            # Every pair as one that does not belong together: softplus(x) = -log σ(-x).
            return loss + jax.nn.softplus(scale * exact_product(images, texts.T) + bias).sum(
                1
            ), texts

        # softplus(-x) = softplus(x) - x
        same_device = scale * jnp.sum(images * texts, axis=1) + bias
        return ring(visit, -same_device, texts)[0]

    saved = images, texts, temperature, bias
    return ring.over_devices(of_device, *saved), saved


def _backward(saved, dloss):
    def of_device(ring, total, images, texts, temperature, bias, dloss):
        scale, zero = jnp.exp(temperature), jnp.zeros_like(images)

        def visit(sums, block):
            texts, dtexts = block
            cosines = exact_product(images, texts.T)
            dlogits = dloss[:, None] * jax.nn.sigmoid(scale * cosines + bias)
            dimages, dscale, dbias = sums
            sums = (
                dimages + exact_product(dlogits, texts),
                dscale + jnp.sum(dlogits * cosines),
                dbias + dlogits.sum(),
            )
            return sums, (texts, dtexts + exact_product(dlogits.T, images))

        slope = dloss[:, None]
        start = -slope * texts, -jnp.sum(slope * images * texts), -dloss.sum()
        (dimages, dscale, dbias), (_, dtexts) = ring(visit, start, (texts, zero))
        dscale, dbias = total((dscale, dbias))
        return scale * dimages, scale * (dtexts - slope * images), scale * dscale, dbias

    return ring.over_devices(of_device, *saved, dloss)


sigmoid_loss.defvjp(_forward, _backward)
