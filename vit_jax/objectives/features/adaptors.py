"""From a student's tokens to features of a teacher's width: what a student is trained with and does without later."""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.models.attention import Attention
from vit_jax.models.layer_features import LayerFeatures
from vit_jax.models.layers import LayerScale, Mlp, layer_norm

KINDS = ("ladder", "block", "mlp", "linear")
_STD = 0.02  # of kernels at first, as UNIC's
_SCALE = 1e-4  # what LayerScale begins as, in DUNE
_EPSILON = 1e-6
_DRAW = nnx.initializers.truncated_normal(_STD)


class TwoLayers(nnx.Module):
    """Linear, exact GELU, linear: (…, D) -> (…, F)."""

    def __init__(self, inputs: int, hidden: int, outputs: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        sizes = dict(kernel_init=_DRAW, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(inputs, hidden, **sizes)
        self.down = nnx.Linear(hidden, outputs, **sizes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


class Ladder(nnx.Module):
    """An MLP for each layer of the student, the last one larger, whose results are added up (UNIC, ECCV 2024)."""

    def __init__(
        self,
        widths: list[int],
        outputs: int,
        *,
        hidden: int,
        last_hidden: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Args: `widths`: of the layers' tokens."""
        sizes = [hidden] * (len(widths) - 1) + [last_hidden]
        self.rungs = nnx.List([
            TwoLayers(width, size, outputs, dtype=dtype, rngs=rngs)
            for width, size in zip(widths, sizes, strict=True)
        ])  # fmt: skip

    def __call__(self, layers: list[jax.Array]) -> jax.Array:
        """(…, D) of each layer -> (…, F)."""
        return sum(rung(x) for rung, x in zip(self.rungs, layers, strict=True))


class TransformerBlock(nnx.Module):
    """A block of a ViT with LayerScale: (B, N, D) -> the same (DUNE, arXiv 2503.14405)."""

    def __init__(self, width: int, heads: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        common = dict(dropout=0.0, dtype=dtype, rngs=rngs)
        self.attention_norm, self.mlp_norm = (
            layer_norm(width, _EPSILON, dtype, rngs) for _ in range(2)
        )
        self.attention = Attention(width, heads, implementation="auto", **common)
        self.mlp = Mlp(width, 4 * width, activation="gelu", **common)
        self.attention_scale, self.mlp_scale = (LayerScale(width, _SCALE) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention_scale(self.attention(self.attention_norm(x))[0])
        return x + self.mlp_scale(self.mlp(self.mlp_norm(x)))


class Adaptor(nnx.Module):
    """What a student's layers become for one teacher, by kind: 'summary' of the image, 'patches'."""

    def __init__(
        self,
        kind: str,
        widths: list[int],
        outputs: dict[str, int],
        *,
        heads: int,
        hidden: int,
        last_hidden: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Args:
        kind: one of `KINDS`; all but a ladder take the last layer.
        widths: of the layers' tokens.
        outputs: the teacher's width by the kind of its features.
        heads: of a block's attention.
        hidden, last_hidden: sizes of the hidden layers, of an MLP of the last layer the second.
        """
        common, width = dict(dtype=dtype, rngs=rngs), widths[-1]

        def make(size: int) -> nnx.Module:
            if kind == "ladder":
                sizes = dict(hidden=hidden, last_hidden=last_hidden)
                return Ladder(widths, size, **sizes, **common)
            if kind == "mlp":
                return TwoLayers(width, last_hidden, size, **common)
            return nnx.Linear(width, size, kernel_init=_DRAW, **common)

        self.kind = kind
        if kind == "block":
            self.block = TransformerBlock(width, heads, **common)
        self.outputs = nnx.Dict({name: make(size) for name, size in outputs.items()})

    def __call__(self, layers: list[LayerFeatures]) -> dict[str, jax.Array]:
        """`summary` (B, F), `patches` (B, N, F), as the teacher has them."""
        if self.kind == "block":
            last = layers[-1]
            layers = [last.replace(tokens=self.block(last.tokens))]
        outputs = {}
        for name, layer_of in self.outputs.items():
            x = [image_vector(layer) if name == "summary" else layer.patches for layer in layers]
            outputs[name] = layer_of(x if self.kind == "ladder" else x[-1])
        return outputs


def image_vector(layer: LayerFeatures) -> jax.Array:
    """What a layer says of the whole image, (B, D): its class token, or the mean of its tokens."""
    return layer.tokens.mean(1) if layer.class_token is None else layer.class_token
