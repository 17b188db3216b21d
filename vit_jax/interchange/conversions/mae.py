"""MAE's own conversion: the decoder that checkpoints hold beside the encoder, in the files of MAE's authors, of
transformers' ViTMAEForPreTraining, and of our runs. It belongs to the objective, not to the model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np
from absl import logging
from flax import nnx
from ml_collections import ConfigDict

from vit_jax import objectives
from vit_jax.base import patterns
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange.conversions import (
    contract,
    pytorch,
    rules,
    translation,
    vit_flax,
    vit_timm,
    vit_towers,
)
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.models import registry
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.embeddings import sincos_2d
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig
from vit_jax.objectives import mae
from vit_jax.objectives.networks import OWN

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
# What the authors' code computes with.
CONVENTIONS = {"activation": "gelu", "epsilon": 1e-6}


class Checkpoint(Protocol):
    """What is read of a checkpoint in any format, see `interchange.formats`."""

    model_config: ClassifierConfig
    layout: Mapping[str, Any]
    extras: Mapping[str, LazyArray]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder in a checkpoint.

    Attributes:
      options: of the objective that it belongs to.
      config: its blocks, as those of a ViT.
      params: like those of `objectives.mae.Own`; leaves are `LazyArray`.
    """

    options: mae.MaeOptions
    config: PublishedViTConfig
    params: dict

    def beside(self, format: str) -> tuple[list[Rule], dict]:
        """What a file of a format has of it, as `tensors_by_name.write_safetensors` takes it: the positions too."""
        return rules_of(self.config, format), self.params | {"position": _positions(self.config)}

    def config_json(self) -> dict[str, Any]:
        """What transformers' config.json says of a model with this decoder."""
        fields = {theirs: getattr(self.options, ours) for ours, theirs in _OF_CONFIG_JSON.items()}
        return fields | {
            "architectures": ["ViTMAEForPreTraining"],
            "model_type": "vit_mae",
            "decoder_hidden_size": self.config.width,
            "decoder_num_hidden_layers": self.config.depth,
            "decoder_intermediate_size": self.config.mlp_dim,
        }


def decoder_in(checkpoint: Checkpoint, heads: int = 0) -> Decoder | None:
    """The decoder of a checkpoint; `None` if it has none, or another than MAE's, of which a sentence is logged.

    Args:
      checkpoint: what was read.
      heads: where it does not tell; 0: as many as in the authors' models.
    """
    model = checkpoint.model_config
    if f"{OWN}/mask" in checkpoint.extras:
        options = mae.MaeOptions(**checkpoint.layout[LAYOUT])
        params = patterns.map_named(
            lambda n, _: checkpoint.extras[f"{OWN}/{n}"], like(model, options)
        )
        return Decoder(options, mae.decoder_of(model, options), params)
    # Transformers 5 saves blocks under another name than the released one.
    extras = {
        name.replace(".decoder_encoder.layer.", ".decoder_layers."): tensor
        for name, tensor in checkpoint.extras.items()
    }
    known = (f for f, biases in _BIASES.items() if all(b.format(0) in extras for b in biases))
    format = next(known, "")
    if not format:
        return None
    options = _options(extras, checkpoint.layout, format, heads)
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
    """Which tensors of a format are which parameters of `objectives.mae.Own`, and its `position`."""
    if format == "huggingface":
        table = vit_towers.rules(decoder, {"kind": "vit_mae", "prefix": ""})
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


def options_of_run(objective: ConfigDict) -> mae.MaeOptions | None:
    """The options of a run's objective, by its config, if that has a decoder."""
    if objectives.OBJECTIVES.get(objective.name) is not mae.Mae:
        return None
    return objectives.find_objective(objective)[1]


def like(model: PublishedViTConfig, options: mae.MaeOptions) -> dict:
    """Shapes and dtypes of what a run's objective owns."""
    decoder = mae.decoder_of(model, options)
    own = nnx.eval_shape(lambda: mae.Own(model, decoder, nnx.Rngs(0)))
    return registry.split(own)[1].params


def refusal(config: PublishedViTConfig) -> str:
    """Why MAE's own code cannot compute an encoder; '' if it can."""
    lacks = {
        "models without a class token": not config.has_class_token,
        "registers": config.registers,
        "distillation token": config.distilled,
        "qk_norm": config.qk_norm,
        "parallel blocks": config.parallel,
        "blocks without biases": not config.qkv_bias,
    }
    found = [name for name, there in lacks.items() if there]
    reason = f"MAE's own code has no {', no '.join(found)}" if found else ""
    return reason or vit_flax.refusal_everywhere(config)


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
