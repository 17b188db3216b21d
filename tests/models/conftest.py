"""What the tests of the models share: a ViT of a few thousand parameters, and parameters that hide
nothing.
"""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from vit_jax.base import patterns
from vit_jax.models import registry

TINY = dict(
    image_size=12,
    patch=4,
    depth=3,
    width=16,
    mlp_dim=32,
    heads=2,
    num_classes=5,
    head_init="normal",
    unroll=1,
)


def config(**options):
    """A ViT of three layers and 9 patches, and what `options` say."""
    return registry.model_config("ViT-mu/16", **TINY | options)


def parameters(config, seed=0):
    """Random float32 parameters, sized as in a trained model: kernels 1/sqrt(inputs), norms near 1,
    others near 0.
    """
    rng = np.random.default_rng(seed)

    def draw(name, leaf):
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        if name.endswith("kernel"):
            stacked, outputs = patterns.is_stacked(name), 3 if "qkv" in name else 1
            inputs = leaf.shape[stacked:-outputs]
            return noise / np.sqrt(np.prod(inputs), dtype=np.float32)
        return noise / 5 + name.endswith("scale")

    return patterns.map_named(draw, registry.abstract(config)[1])


def statistics(config, seed=0):
    """Random state that is not trained: means near 0, variances near 1."""
    rng = np.random.default_rng(seed)

    def draw(name, leaf):
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        return np.exp(noise / 3) if name.endswith("var") else noise / 5

    return patterns.map_named(draw, registry.abstract_weights(config)[1].variables)


def apply(config, parameters, images, key=None, **options):
    """The model's output, its running statistics those of `statistics`; with a key, not
    deterministic.
    """
    model = nnx.merge(registry.abstract(config)[0], parameters, statistics(config))
    rngs = None if key is None else nnx.Rngs(dropout=key)
    return model(images, deterministic=key is None, rngs=rngs, **options)


def run(config, parameters, images, key=None, **options):
    """`apply`, compiled; a NumPy tree."""
    return jax.tree.map(
        np.asarray,
        jax.jit(lambda p, x, k: apply(config, p, x, k, **options))(parameters, images, key),
    )


@pytest.fixture(scope="session")
def kit():
    """`config(**options)`, `parameters(config)`, `apply` and `run(config, parameters, images,
    key)`, `images`.
    """
    images = np.random.default_rng(1).uniform(-1, 1, (4, 12, 12, 3)).astype(np.float32)
    return SimpleNamespace(
        config=config, parameters=parameters, apply=apply, run=run, images=images
    )
