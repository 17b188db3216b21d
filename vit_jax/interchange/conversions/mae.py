"""What MAE owns, its decoder, in the files of its authors and of transformers' ViTMAEForPreTraining: beside the
encoder.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from absl import logging
from flax import nnx

from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange.conversions import (
    contract,
    pytorch,
    rules,
    translation,
    vit_flax,
    vit_timm,
    vit_tower_names,
)
from vit_jax.interchange.conversions.contract import Beside, ObjectiveConversion
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.models import registry
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.embeddings import sincos_2d
from vit_jax.models.registry import Weights
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig
from vit_jax.objectives import mae
from vit_jax.objectives.contract import SavedObjective

LAYOUT = "decoder"  # the key of a layout, and of a header, with what tensors do not tell
# By format: what its names of blocks and of the norm after them become, and what stands before all others.
_NAMES = {
    "timm": (("blocks.", "decoder_blocks."), ("norm.", "decoder_norm."), ""),
    "huggingface": (
        ("encoder.layer.", "decoder.decoder_layers."), ("layernorm.", "decoder.decoder_norm."), "decoder.",
    ),
}  # fmt: skip
# By format: the bias before the decoder, and that of a block's first layer of the MLP.
_BIASES = {
    "timm": ("decoder_embed.bias", "decoder_blocks.{}.mlp.fc1.bias"),
    "huggingface": (
        "decoder.decoder_embed.bias", "decoder.decoder_layers.{}.intermediate.dense.bias",
    ),
}  # fmt: skip
# Of config.json, in the words of `mae.MaeOptions`.
_OF_CONFIG_JSON = {
    "heads": "decoder_num_attention_heads", "masked": "mask_ratio", "normalize": "norm_pix_loss",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder in a checkpoint.

    Attributes:
      options: of the objective that it belongs to.
      config: its blocks, as those of a ViT.
      params: like those of `objectives.mae.MaeModules`; leaves are `LazyArray`.
    """

    options: mae.MaeOptions
    config: PublishedViTConfig
    params: dict


class MaeConversion(ObjectiveConversion):
    """The decoder in one format's names."""

    key = LAYOUT
    names: ClassVar[str]  # of `_NAMES`

    def find(
        self,
        config: ClassifierConfig,
        tensors: Mapping[str, LazyArray],
        layout: Mapping[str, Any],
        hints: Mapping[str, Any],
    ) -> SavedObjective | None:
        decoder = find_decoder(config, tensors, layout, self.names, hints.get("heads", 0))
        if decoder is None:
            return None
        options = dataclasses.asdict(decoder.options)
        return SavedObjective(mae.Mae, options, lambda: Weights(decoder.params, {}))

    def beside(self, config: ClassifierConfig, saved: SavedObjective) -> Beside:
        options = mae.MaeOptions(**saved.options)
        decoder, params = mae.decoder_of(config, options), saved.read().params
        return Beside(
            rules_of(decoder, self.names),
            params | {"position": _positions(decoder)},
            **self.described(options, decoder),
        )

    def described(self, options: mae.MaeOptions, decoder: PublishedViTConfig) -> dict[str, Any]:
        """The further fields of `Beside`."""
        raise NotImplementedError


class MaeAuthors(MaeConversion):
    """The authors' file: timm's names for the encoder, and the decoder beside it."""

    names = "timm"
    conventions = {"activation": "gelu", "epsilon": 1e-6}  # what the authors' code computes with

    def described(self, options: mae.MaeOptions, decoder: PublishedViTConfig) -> dict[str, Any]:
        return {"stated": {LAYOUT: dataclasses.asdict(options)}, "model_format": "timm"}

    def refusal(self, config: PublishedViTConfig) -> str:
        lacks = {
            "models without a class token": not config.has_class_token,
            "registers": config.registers,
            "distillation token": config.distilled,
            "qk_norm": config.qk_norm,
            "parallel blocks": config.parallel,
            "blocks without biases": not config.qkv_bias,
        }
        missing = [name for name, lacking in lacks.items() if lacking]
        reason = f"MAE's own code has no {', no '.join(missing)}" if missing else ""
        return reason or vit_flax.refusal_everywhere(config)


class MaeHuggingFace(MaeConversion):
    """transformers' ViTMAEForPreTraining."""

    names = "huggingface"

    def described(self, options: mae.MaeOptions, decoder: PublishedViTConfig) -> dict[str, Any]:
        fields = {theirs: getattr(options, ours) for ours, theirs in _OF_CONFIG_JSON.items()}
        fields |= {
            "architectures": ["ViTMAEForPreTraining"],
            "model_type": "vit_mae",
            "decoder_hidden_size": decoder.width,
            "decoder_num_hidden_layers": decoder.depth,
            "decoder_intermediate_size": decoder.mlp_dim,
        }
        return {"stated": fields, "layout": {"kind": "vit_mae", "prefix": "vit."}}


CONVERSIONS = {"authors": MaeAuthors(), "huggingface": MaeHuggingFace()}


def find_decoder(
    model: ClassifierConfig,
    tensors: Mapping[str, LazyArray],
    layout: Mapping[str, Any],
    format: str,
    heads: int = 0,
) -> Decoder | None:
    """The decoder beside a model; `None` if there is none, or another than MAE's, of which a sentence is logged.

    Args:
      model: its config.
      tensors, layout: see `ObjectiveConversion.find`.
      format: whose names it has, a key of `_NAMES`.
      heads: where the file does not tell; 0: as many as in the authors' models.
    """
    # Transformers 5 saves blocks under another name than the released one.
    extras = {
        name.replace(".decoder_encoder.layer.", ".decoder_layers."): tensor
        for name, tensor in tensors.items()
    }
    if not all(bias.format(0) in extras for bias in _BIASES[format]):
        return None
    options = _options(extras, layout, format, heads)
    if options.width % 4 or options.width % options.heads:
        logging.info(
            "the decoder in the checkpoint is skipped: %d channels are not divisible by 4 and by its %d heads (assumed "
            "if the checkpoint does not state them)", options.width, options.heads,
        )  # fmt: skip
        return None
    config = mae.decoder_of(model, options)
    table, wanted = rules_of(config, format), like(model, options)
    positions = table[-1].theirs
    if positions in extras:
        wanted["position"] = jax.ShapeDtypeStruct(_positions(config).shape, np.float32)
    tensors = {n: x for n, x in extras.items() if n.startswith("decoder") or n == "mask_token"}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {name: shape for name, (shape, _) in translation.specs(table, wanted).items()}:
        logging.info("the decoder in the checkpoint is skipped: it is none of MAE's")
        return None
    params = translation.to_ours(table, tensors, wanted, source="the decoder")
    position = params.pop("position", None)
    if position is not None and not np.allclose(position, _positions(config), atol=1e-5):
        logging.info(
            "the decoder in the checkpoint is skipped: its positions are not those of such images"
        )
        return None
    return Decoder(options, config, params)


def rules_of(decoder: PublishedViTConfig, format: str) -> list[Rule]:
    """Which tensors of a format are which parameters of `objectives.mae.MaeModules`, and its `position`."""
    if format == "huggingface":
        table = vit_tower_names.rules(decoder, {"kind": "vit_mae", "prefix": ""})
    else:
        conversion = vit_timm.Timm()
        table = conversion.rules(decoder, conversion.layout(decoder))
    *starts, before = _NAMES[format]

    def theirs(name: str) -> str:
        old, new = next(pair for pair in starts if name.startswith(pair[0]))
        return new + name.removeprefix(old)

    return [
        *(
            dataclasses.replace(
                rule,
                ours=f"decoder/{rule.ours.removeprefix('encoder/')}",  # pyrefly: ignore
                theirs=tuple(map(theirs, rule.names)),
            )
            for rule in table
            if rule.ours.startswith("encoder/")
        ),
        *pytorch.linear("embed", f"{before}decoder_embed"),
        Rule("mask", f"{before}mask_token", rules.expanded(0, 1)),
        *pytorch.linear("head", f"{before}decoder_pred"),
        Rule("position", f"{before}decoder_pos_embed"),
    ]


def like(model: PublishedViTConfig, options: mae.MaeOptions) -> dict:
    """Shapes and dtypes of what a run's objective owns."""
    decoder = mae.decoder_of(model, options)
    own = nnx.eval_shape(lambda: mae.MaeModules(model, decoder, nnx.Rngs(0)))
    return registry.split(own)[1].params


def _options(
    extras: Mapping[str, LazyArray], layout: Mapping[str, Any], format: str, heads: int
) -> mae.MaeOptions:
    """What tensors and what stands beside them tell of the objective; the rest is as in the authors' models."""
    embed, up = _BIASES[format]
    (width,), (hidden,) = extras[embed].shape, extras[up.format(0)].shape
    before, after = up.split("{}")
    depth = contract.count_layers(extras, rf"{before}(\d+){after}")
    fields = layout.get("config", {})
    stated = {ours: fields[theirs] for ours, theirs in _OF_CONFIG_JSON.items() if theirs in fields}
    stated = ({"heads": heads} if heads else {}) | stated | layout.get(LAYOUT, {})
    options = mae.MaeOptions(
        **stated | {"width": width, "depth": depth, "mlp_ratio": hidden // width}
    )
    if "heads" not in stated:
        logging.info(
            "the checkpoint does not state the decoder's heads: %d are assumed, as in the authors' models",
            options.heads,
        )
    return options


def _positions(decoder: PublishedViTConfig) -> np.ndarray:
    """The table (1, 1 + N, D) of the decoder's positions; that of the class token is zero."""
    table = sincos_2d(decoder.grid, decoder.width, periods=decoder.width // 4)
    return np.pad(np.asarray(table, np.float32), ((0, 0), (1, 0), (0, 0)))
