"""CaiT (arXiv 2103.17239): a deep ViT of patches alone whose attention mixes its heads, and two last blocks in which a
class token attends to them.

Sources: the paper, and the authors' code (facebookresearch/deit, `cait_models.py`), as timm has it. Scores are mixed
between heads before the softmax and weights after it (talking heads, arXiv 2003.02436); residuals have LayerScale.
Stochastic depth is the same in every block of patches, and the blocks of the class token have none.

Ours: linear layers begin Xavier-uniform as in the other families, in that code normal with std 0.02.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.schema import option
from vit_jax.compute import attend, choices, stack
from vit_jax.compute.dropout import drop_path, split
from vit_jax.models import classifier, contract, embeddings, stacked
from vit_jax.models.attention import Attention, attention_flops
from vit_jax.models.contract import Capture
from vit_jax.models.embeddings import prepend
from vit_jax.models.layers import LayerScale, Mlp, layer_norm, mlp_flops

# Depth, width, heads, what LayerScale begins as: paper Table 3, and the authors' code.
SIZES = {
    "XXS24": (24, 192, 4, 1e-5),
    "XXS36": (36, 192, 4, 1e-5),
    "XS24": (24, 288, 6, 1e-5),
    "S24": (24, 384, 8, 1e-5),
    "S36": (36, 384, 8, 1e-6),
    "M36": (36, 768, 16, 1e-6),
    "M48": (48, 768, 16, 1e-6),
}
VARIANTS = [f"CaiT-{size}" for size in SIZES]


@dataclasses.dataclass(frozen=True)
class CaiTConfig(stacked.StackedConfig, classifier.ClassifierConfig):
    """A CaiT."""

    activation: ClassVar[str] = "gelu"
    prefix: ClassVar[int] = 0  # the class token comes after the positions, and has none
    constant_drop_path: ClassVar[bool] = True
    class_token_attends: ClassVar[bool] = False  # in the captured attention, that of patches

    heads: int = option(8, "attention heads", minimum=1, role="size")
    class_depth: int = option(
        2, "blocks in which the class token reads the patches", minimum=1, role="size"
    )
    layer_scale_init: float = option(
        1e-5, "what LayerScale begins as (1e-6 in S36 and M)", may_change=True
    )
    pool: str = option(
        "token", "how tokens become one vector", choices=("token",), role="structure"
    )
    drop_path: float = option(
        0.0, "stochastic depth, the same in all blocks of patches", minimum=0, below=1
    )

    def __post_init__(self):
        classifier.check_heads(self)
        super().__post_init__()

    @property
    def tokens(self) -> int:
        """The class token and the patches."""
        return 1 + self.grid[0] * self.grid[1]

    @property
    def layers(self) -> dict[str, int]:
        return {"layers": self.depth, "class_blocks/layers": self.class_depth}

    def block_flops(self) -> int:
        """Operations of one block of patches, with the mixing of heads."""
        n, d = self.tokens - 1, self.width
        mixing = 4 * n**2 * self.heads**2
        return attention_flops(n, d) + mlp_flops(n, d, self.mlp_dim) + mixing

    def flops(self) -> int:
        """Operations of one image's forward pass, with the blocks of the class token."""
        n, d = self.tokens, self.width
        of_class = 4 * n * d * d + 4 * d * d + 4 * n * d + mlp_flops(1, d, self.mlp_dim)
        blocks = self.depth * self.block_flops() + self.class_depth * of_class
        return embeddings.flops(self) + blocks + 2 * d * self.num_classes


def options_from_name(name: str) -> dict | None:
    """`CaiT-XXS24` -> its size; `None` for a name of another family."""
    match = re.fullmatch(r"CaiT-(.+)", name)
    if not match:
        return None
    classifier.check_size(name, "CaiT", match[1], SIZES)
    depth, width, heads, initial = SIZES[match[1]]
    return dict(
        patch=16, depth=depth, width=width, mlp_dim=4 * width, heads=heads, layer_scale_init=initial
    )


class CaiTBlock(nnx.Module):
    """x + γ attention(norm(x)), then x + γ mlp(norm(x)), of patches."""

    def __init__(self, config: CaiTConfig, *, dtype, rngs: nnx.Rngs):
        self.attention = TalkingHeads(config.width, config.heads, dtype=dtype, rngs=rngs)
        _make_rest(self, config, dtype, rngs)

    def __call__(self, x, drop_path_rate, key, *, training: bool) -> tuple[jax.Array, dict]:
        """(B, N, D) to the same; captured is `attention` (B, H, N, N), by which the values were multiplied."""
        keys = split(key, 2)
        y, maps = self.attention(self.attention_norm(x))
        x = x + drop_path(self.attention_scale(y), drop_path_rate, keys[0])
        y = self.mlp(self.mlp_norm(x))
        return x + drop_path(self.mlp_scale(y), drop_path_rate, keys[1]), {"attention": maps}


class ClassBlock(nnx.Module):
    """The class token attends to itself and the patches, and has an MLP; the patches stay as they are (CaiT §2.2)."""

    def __init__(self, config: CaiTConfig, *, dtype, rngs: nnx.Rngs):
        self.attention = Attention(config.width, config.heads, dtype=dtype, rngs=rngs)
        _make_rest(self, config, dtype, rngs)

    def __call__(self, token: jax.Array, patches: jax.Array) -> jax.Array:
        """The class token (B, 1, D), and patches (B, N, D) -> the token."""
        both = self.attention_norm(jnp.concatenate([token, patches], axis=1))
        y, _ = self.attention(both, queries=both[:, :1])
        token = token + self.attention_scale(y)
        return token + self.mlp_scale(self.mlp(self.mlp_norm(token)))


class ClassBlocks(nnx.Module):
    """Those blocks, one after the other."""

    def __init__(self, config: CaiTConfig, *, dtype, rngs: nnx.Rngs):
        make = lambda rngs: ClassBlock(config, dtype=dtype, rngs=rngs)  # noqa: E731
        self.layers, self.config = stack.stack(make, config.class_depth, rngs), config

    def __call__(self, token: jax.Array, patches: jax.Array) -> jax.Array:
        """As `ClassBlock`."""
        step = lambda block, token: (block(token, patches), {})  # noqa: E731
        loop = dict(remat=choices.remat(self.config), unroll=self.config.unroll)
        return stack.scan(step, self.layers, token, **loop)[0]


def _make_rest(block: nnx.Module, config: CaiTConfig, dtype, rngs: nnx.Rngs) -> None:
    """What both kinds of blocks have beside attention."""
    width, initial = config.width, config.layer_scale_init
    block.attention_norm = layer_norm(width, config.epsilon, dtype, rngs)
    block.attention_scale = LayerScale(width, initial)
    block.mlp_norm = layer_norm(width, config.epsilon, dtype, rngs)
    block.mlp = Mlp(
        width, config.mlp_dim, activation=config.activation, dropout=0.0, dtype=dtype, rngs=rngs
    )
    block.mlp_scale = LayerScale(width, initial)


class TalkingHeads(Attention):
    """Attention whose logits are mixed between heads before the softmax, and its weights after it (arXiv 2003.02436).

    Parameters: those of `Attention`; `before` and `after`, each `kernel` (heads, heads), from heads to heads, and
    `bias` (heads,).
    """

    def __init__(self, width: int, heads: int, *, dtype, rngs: nnx.Rngs):
        super().__init__(width, heads, dtype=dtype, rngs=rngs)
        self.before, self.after = HeadMixing(heads, rngs), HeadMixing(heads, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(B, N, D) -> the same, and the mixed weights (B, H, N, N)."""
        q, k, v = self.project(x.astype(self.dtype), None)
        weights = jax.nn.softmax(self.before(attend.logits(q, k))).astype(q.dtype)
        weights = self.after(weights)
        return self.merge(attend.weighted(weights, v)), weights


class HeadMixing(nnx.Module):
    """A linear layer over the heads."""

    def __init__(self, heads: int, rngs: nnx.Rngs):
        draw = nnx.initializers.xavier_uniform()
        self.kernel = nnx.Param(draw(rngs.params(), (heads, heads)))
        self.bias = nnx.Param(jnp.zeros((heads,)))

    def __call__(self, maps: jax.Array) -> jax.Array:
        """(B, H, Q, N) -> the same."""
        kernel, bias = (p[...].astype(maps.dtype) for p in (self.kernel, self.bias))
        return jnp.einsum("bhqn,hg->bgqn", maps, kernel) + bias[:, None, None]


class CaiT(stacked.StackedModel):
    """Images to logits."""

    Block = CaiTBlock

    def make_positions(self, config: CaiTConfig, rngs: nnx.Rngs) -> None:
        draw = nnx.initializers.normal(0.02)
        self.class_token = nnx.Param(draw(rngs.params(), (1, 1, config.width)))
        patches = config.grid[0] * config.grid[1]
        self.position = nnx.Param(draw(rngs.params(), (1, patches, config.width)))

    def make_layers(self, config: CaiTConfig, *, dtype, rngs: nnx.Rngs) -> None:
        super().make_layers(config, dtype=dtype, rngs=rngs)
        self.class_blocks = ClassBlocks(config, dtype=dtype, rngs=rngs)

    def from_blocks(self, x: jax.Array) -> jax.Array:
        """Patches (B, N, D) -> the class token that has read them, and the patches (B, 1 + N, D)."""
        token = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (x.shape[0], 1, x.shape[2]))
        return jnp.concatenate([self.class_blocks(token, x), x], axis=1)

    def step(self, training: bool, capture: Capture) -> Callable:
        """As in `StackedModel`; of `blocks` the class token is the one that has read nothing yet."""

        def step(block, x, rate, key):
            x, arrays = block(x, rate, key, training=training)
            if not capture:
                return x, {}
            tokens = prepend([self.class_token[...].astype(x.dtype)], x)
            return x, contract.captured(capture, **arrays, blocks=tokens)

        return step


Config, Model = CaiTConfig, CaiT  # for the registry
