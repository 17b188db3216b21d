"""Images and texts that belong together get vectors of the same direction: SigLIP (arXiv 2303.15343), CLIP (arXiv
2103.00020), LiT (arXiv 2111.07991), whose image tower is frozen by `config.optim.freeze`, and dino.txt (arXiv
2412.16334), which trains blocks on top of a frozen one.

The model is the image tower; the text tower, the projections and the loss's temperature and bias are the objective's
own. A loss is over all pairs of a batch, so that a batch is never split: `config.accumulate` must be 1. As in the
authors' code an image and the text of another never belong together. Where captions are equal, they are wrong to the
sigmoid loss, while the sum of the softmax is as if all of them were right.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.data import texts
from vit_jax.models import layer_features, layout, registry
from vit_jax.models.contract import ModelOutput
from vit_jax.models.layers import Linear
from vit_jax.models.registry import Weights
from vit_jax.models.text_tower import KINDS, TextTower, TextTowerConfig, blocks_of
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig
from vit_jax.objectives.contract import Batch, Learner, ObjectiveContext, SavedObjective
from vit_jax.objectives.image_text import sigmoid, softmax, vision_head
from vit_jax.objectives.output_term import OutputTerm

_DIGEST, _TABLE = "tokenizer_digest", "text/token_table"
_LEAST = 1e-8  # added to a length, as in big_vision


@dataclasses.dataclass(frozen=True)
class TokenOptions:
    """What `config.objective` says of texts as tokens."""

    tokenizer: str = option(
        "bytes",
        "how captions become tokens: a tokenizer.json, a SentencePiece .model, the folder of one, or 'bytes' of UTF-8",
    )
    text: str = option(
        "siglip",
        "the text tower: tokens that see all others, the last one read, or those before them, the end token read",
        choices=KINDS,
    )
    text_length: int = option(64, "tokens of a text; longer ones are cut", minimum=2)
    vocabulary: int = option(0, "rows of the table of tokens; 0: the tokenizer's", minimum=0)
    tokenizer_digest: str = option(
        "", "fingerprint of the tokens, which a run keeps: no tokenizer with others is taken"
    )
    text_end: int = option(-1, "token at the end of a text; -1: the tokenizer's", minimum=-1)
    text_pad: int = option(-1, "token after the end; -1: the tokenizer's", minimum=-1)


@dataclasses.dataclass(frozen=True)
class ImageTextOptions(TokenOptions):
    """What `config.objective` says for images and texts."""

    loss: str = option(
        "sigmoid", "of all pairs of a batch: SigLIP's or CLIP's", choices=("sigmoid", "softmax")
    )
    text_width: int = option(0, "size of a token; 0: as of the image tower", minimum=0)
    text_depth: int = option(0, "number of blocks; 0: as of the image tower", minimum=0)
    text_mlp_dim: int = option(0, "hidden size of the MLPs; 0: as of the image tower", minimum=0)
    text_heads: int = option(0, "attention heads; 0: as of the image tower", minimum=0)
    text_activation: str = option(
        "",
        "activation of the text tower's MLPs; '': gelu_tanh as SigLIP's, quick_gelu as OpenAI's CLIP (gelu in most of "
        "open_clip's)",
        choices=("", "gelu_tanh", "gelu", "quick_gelu"),
    )
    image_blocks: int = option(
        0,
        "blocks on the tokens of the image tower, which itself computes as in evaluation; an image's vector is then "
        "their class token beside the mean of their patches (dino.txt); 0: none",
        minimum=0,
    )
    image_drop_path: float = option(
        0.0, "stochastic depth of each of these blocks", minimum=0, below=1
    )
    embed: int = option(
        0,
        "size of both vectors, images projected too; 0: the image tower's width, of image_blocks twice that",
        minimum=0,
    )
    temperature: float = option(
        0.0,
        "by which cosines are multiplied at the beginning; 0: 10, or 1/0.07 of softmax",
        minimum=0,
    )
    bias: float = option(
        sigmoid.BIAS, "added to them at the beginning", when={"loss": ("sigmoid",)}
    )


class ImageTextModules(nnx.Module):
    """The text tower, and what compares the vectors of both."""

    def __init__(
        self,
        text: TextTowerConfig,
        width: int,
        blocks: PublishedViTConfig | None,
        options: ImageTextOptions,
        rngs: nnx.Rngs,
    ):
        """`width`: of what the image tower gives; `blocks`: those on top of it, see `vision_head`."""
        self.text = TextTower(text, rngs)
        dtype, bias = jnp.dtype(text.blocks.dtype), dict(use_bias=False)
        projects = options.embed and not blocks
        self.image_projection = (
            Linear(width, options.embed, **bias, dtype=dtype, rngs=rngs) if projects else None
        )
        usual = sigmoid.TEMPERATURE if options.loss == "sigmoid" else softmax.TEMPERATURE
        given = options.temperature
        self.temperature = nnx.Param(jnp.float32(math.log(given) if given else usual))
        self.bias = nnx.Param(jnp.float32(options.bias)) if options.loss == "sigmoid" else None
        self.image_head = vision_head.VisionHead(blocks, text.outputs, rngs) if blocks else None


class ImageText(OutputTerm):
    """The loss of pairs; metrics are the `cosine` of a pair, the `temperature` that cosines are multiplied by, and for
    the sigmoid loss the `bias`.
    """

    Options = ImageTextOptions
    needs_labels = False
    mixes = False
    evaluates_with_modules = True
    evaluator = "retrieval"

    def __init__(self, options: ImageTextOptions, context: ObjectiveContext):
        super().__init__(options, context)
        if context.batch_size == 1:
            raise ConfigError(
                "config.batch_size = 1: the objective image_text learns from which images and texts of a batch do not "
                "belong together; set it to 2 or more, as many as fit"
            )

    @functools.cached_property
    def blocks(self) -> PublishedViTConfig | None:
        """Those on top of the image tower."""
        options = self.options
        if not options.image_blocks:
            return None
        return vision_head.blocks_of(
            self.context.model, options.image_blocks, options.image_drop_path
        )

    @functools.cached_property
    def width(self) -> int:
        """Of an image's vector before it is projected. The model is traced for it, once: each log counts operations."""
        if self.blocks:
            return 2 * self.blocks.width
        features = layer_features.shapes_of(self.context.model, lambda model, x: model(x).features)
        return features.shape[-1]

    def text_config(self) -> TextTowerConfig:
        """The text tower's."""
        options, model = self.options, self.context.model
        sizes = {}
        for name in ("depth", "width", "mlp_dim", "heads"):
            sizes[name] = getattr(options, f"text_{name}") or getattr(model, name, 0)
            if not sizes[name]:
                raise ConfigError(
                    f"config.objective.text_{name} = 0, and the image tower has no {name} that the text tower could "
                    "take: set it"
                )
        if sizes["width"] % sizes["heads"]:
            raise ConfigError(
                f"config.objective.text_width = {sizes['width']} must be divisible by config.objective.text_heads = "
                f"{sizes['heads']}"
            )
        return TextTowerConfig(
            kind=options.text,
            vocabulary=options.vocabulary,
            length=options.text_length,
            end=options.text_end,
            outputs=options.embed or self.width,
            blocks=blocks_of(model, options.text, options.text_activation, **sizes),
        )

    @classmethod
    def resolve(cls, config: Any, options: Any) -> Any:
        return texts.for_run(config, options)

    def make_modules(self, rngs: nnx.Rngs) -> ImageTextModules:
        return ImageTextModules(self.text_config(), self.width, self.blocks, self.options, rngs)

    def continue_from(
        self, saved: SavedObjective, like: Weights
    ) -> tuple[dict[str, Any], dict[str, str]]:
        taken, reset = super().continue_from(saved, like)
        before, now = saved.options.get(_DIGEST), self.options.tokenizer_digest
        if before and now and before != now and _TABLE in taken:
            del taken[_TABLE]
            reset[_TABLE] = "the checkpoint's tokenizer has other tokens"
        return taken, reset

    def targets(self, batch: Batch) -> Batch:
        """`tokens` (B, L) int32, which nothing mixes; of images to be evaluated none."""
        return {"tokens": batch["tokens"]} if "tokens" in batch else {}

    def flops(self) -> int:
        """Operations of an image's and a text's forward pass, and of their products with all of the batch."""
        text = self.text_config()
        towers = registry.count_flops(self.context.model) + text.flops()
        if self.blocks:
            patches = math.prod(layout.grid(self.context.model))
            projection = vision_head.head_flops(self.blocks, patches, text.outputs)
        else:
            projection = 2 * self.width * self.options.embed
        return towers + projection + 2 * self.context.batch_size * text.outputs

    def image_vectors(
        self, modules: ImageTextModules, output: ModelOutput, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        """Of length 1, (B, E) float32, for what the image tower gives; `rngs` in training."""
        if modules.image_head is not None:
            token, patches = modules.image_head(output, self.context.model, rngs)
            return unit(jnp.concatenate([token, patches.mean(1)], axis=-1))
        return unit(self.projected(modules, output.features))

    def projected(self, modules: ImageTextModules, features: jax.Array) -> jax.Array:
        """What the image tower gives (n, D) as vectors (n, E) of any length."""
        return features if modules.image_projection is None else modules.image_projection(features)

    def text_vectors(self, modules: ImageTextModules, tokens: jax.Array) -> jax.Array:
        """Of length 1, (B, E) float32, for tokens (B, L) int32."""
        return unit(modules.text(tokens))

    def text_term(
        self, modules: ImageTextModules | None
    ) -> tuple["ImageText", ImageTextModules | None]:
        """What compares images with texts, and what it owns: itself; of a sum one of its terms."""
        return self, modules

    @property
    def fixed_model(self) -> bool:
        return bool(self.options.image_blocks)

    def of_output(
        self, learner: Learner, output: ModelOutput, layers: tuple, batch: Batch, rngs: nnx.Rngs
    ):
        modules = learner.modules
        images = self.image_vectors(modules, output, rngs)
        texts = self.text_vectors(modules, batch["tokens"])
        temperature = modules.temperature[...]
        metrics = {"cosine": jnp.sum(images * texts, axis=1)}
        if modules.bias is not None:
            loss = sigmoid.sigmoid_loss(images, texts, temperature, modules.bias[...])
            metrics["bias"] = jnp.broadcast_to(modules.bias[...], loss.shape)
        else:
            # The value is bounded, the gradient is not: else it could not come back.
            bounded = jnp.minimum(temperature, softmax.MOST)
            temperature += jax.lax.stop_gradient(bounded - temperature)
            loss = softmax.softmax_loss(images, texts, temperature)
        return loss, metrics | {"temperature": jnp.broadcast_to(jnp.exp(temperature), loss.shape)}


def unit(x: jax.Array) -> jax.Array:
    """(…, D) -> float32 of length 1."""
    x = x.astype(jnp.float32)
    # The root of zero has no gradient.
    return x / (jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x), -1, keepdims=True), 1e-30)) + _LEAST)
