"""New models, their weights drawn in one program: op by op, those of a small ViT are thirty."""

from flax import nnx

from vit_jax.models import registry


def new_model(config, seed: int = 0) -> nnx.Module:
    """`registry.build` with `seed`."""
    return nnx.jit(lambda: registry.build(config, rngs=nnx.Rngs(seed)))()


def new_weights(config, seed: int = 0) -> registry.Weights:
    """All arrays of `new_model`."""
    return registry.split(new_model(config, seed))[1]
