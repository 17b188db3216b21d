"""The body that families of equal blocks share, from the outside: a family is its block."""

import dataclasses

import jax
import numpy as np
from flax import nnx

from vit_jax.models import classifier, stacked
from vit_jax.models.layers import Mlp, layer_norm, mlp_flops


@dataclasses.dataclass(frozen=True)
class Config(stacked.StackedConfig, classifier.ClassifierConfig):
    def block_flops(self):
        return mlp_flops(self.tokens, self.width, self.mlp_dim)


class Block(nnx.Module):
    """x + mlp(norm(x))."""

    def __init__(self, config, *, dtype, rngs):
        how = dict(activation="gelu", dropout=0.0, dtype=dtype, rngs=rngs)
        self.norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        self.mlp = Mlp(config.width, config.mlp_dim, **how)

    def __call__(self, x, drop_path_rate, key, *, training):
        y = self.mlp(self.norm(x))
        return x + y, {"added": y}


class PatchMlp(stacked.StackedModel):
    Block = Block


def test_a_family_of_equal_blocks_is_its_block():
    sizes = dict(patch=4, depth=2, width=8, mlp_dim=16, num_classes=3, head_init="normal")
    config = Config((8, 12), **sizes)
    model = PatchMlp(config, rngs=nnx.Rngs(0))
    images = np.random.default_rng(0).standard_normal((2, 8, 12, 3)).astype(np.float32)
    output = jax.jit(lambda x: model(x, capture=True))(images)
    assert output.logits.shape == (2, 3) and output.tokens.shape == (
        2,
        7,
        8,
    )  # class token, patches
    found = {name: x.shape for name, x in output.intermediates.items()}
    assert found == {"added": (2, 2, 7, 8), "blocks": (2, 2, 7, 8)}
    # Its block by block: layers follow each other.
    first, second = output.intermediates["blocks"]
    np.testing.assert_allclose(first + output.intermediates["added"][1], second, atol=1e-6)
    patches, blocks, head = 2 * 6 * 48 * 8, 2 * 4 * 7 * 8 * 16, 2 * 8 * 3
    assert config.flops() == patches + blocks + head
    assert config.layers == {"layers": 2}
