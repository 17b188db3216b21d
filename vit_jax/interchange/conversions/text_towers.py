"""What the objective image_text owns, the text tower and what compares its vectors with images', in the files of
transformers' SiglipModel and CLIPModel: beside the image tower. Other names are in `text_tower_formats`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging
from flax import nnx

from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange.conversions import (
    contract,
    pytorch,
    translation,
    vit_new_towers,
    vit_tower_names,
)
from vit_jax.interchange.conversions.contract import NOTHING, Beside, ObjectiveConversion
from vit_jax.interchange.conversions.rules import Rule, reshaped, transposed
from vit_jax.models import registry
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.registry import Weights
from vit_jax.models.text_tower import CONVENTIONS
from vit_jax.objectives.contract import ObjectiveContext, SavedObjective
from vit_jax.objectives.image_text.image_text import ImageText, ImageTextOptions

_TABLE = "text_model.embeddings.token_embedding.weight"
_POSITION = "text_model.embeddings.position_embedding.weight"
_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu", "gelu": "gelu"}
# What transformers takes where config.json says nothing.
_USUAL = {"siglip": {"num_attention_heads": 12}, "clip": {"num_attention_heads": 8}}
# By width, of OpenAI's, open_clip's and Google's: 64 channels each, but for So400m's.
HEADS = {384: 6, 512: 8, 640: 10, 768: 12, 896: 14, 1024: 16, 1152: 16, 1280: 20}
LOSSES = {"siglip": "sigmoid", "clip": "softmax"}
_MODELS = {"siglip": "SiglipModel", "clip": "CLIPModel"}


class TextTowerHuggingFace(ObjectiveConversion):
    """transformers' SiglipModel and CLIPModel."""

    def find(
        self,
        config: ClassifierConfig,
        tensors: Mapping[str, LazyArray],
        layout: Mapping[str, Any],
        hints: Mapping[str, Any],
    ) -> SavedObjective | None:
        kind = layout.get("kind", "").replace("siglip2", "siglip")
        if _TABLE not in tensors or kind not in LOSSES or "logit_scale" not in tensors:
            return None
        theirs = layout.get("config", {}).get("text_config") or {}
        if "bare" in layout:
            theirs = _fields_of_bare(kind, config, tensors, hints)
            if theirs is None:
                return None
        options = _options(kind, tensors, theirs)
        if options is None:
            return None
        return saved_in(config, options, rules_of(config, options), tensors)

    def beside(self, config: ClassifierConfig, saved: SavedObjective) -> Beside:
        options = ImageTextOptions(**saved.options)
        kind = options.text
        if not is_theirs(config, options):
            logging.warning(
                "the text tower is not written: transformers has no model with such an image tower, text tower and loss"
            )
            return NOTHING
        text = objective_of(config, options).text_config()
        blocks = text.blocks
        fields = {
            "model_type": f"{kind}_text_model",
            "vocab_size": text.vocabulary,
            "max_position_embeddings": text.length,
            "hidden_size": blocks.width,
            "intermediate_size": blocks.mlp_dim,
            "num_hidden_layers": blocks.depth,
            "num_attention_heads": blocks.heads,
            "hidden_act": _ACTIVATIONS[blocks.activation],
            "layer_norm_eps": blocks.epsilon,
            "bos_token_id": None,
            "eos_token_id": options.text_end,
            "pad_token_id": options.text_pad,
            "projection_size" if kind == "siglip" else "projection_dim": text.outputs,
        }
        described = {
            "architectures": [_MODELS[kind]],
            "model_type": kind,
            "vision_config": vit_new_towers.config_json(config, kind)
            | {"projection_dim": text.outputs},
            "text_config": fields,
            "projection_dim": text.outputs,
        }
        return Beside(rules_of(config, options), saved.read().params, described)


def rules_of(config: ClassifierConfig, options: ImageTextOptions) -> list[Rule]:
    """Which tensors are which parameters of `objectives.image_text.ImageTextModules`."""
    text = objective_of(config, options).text_config()
    kind, width = options.text, text.blocks.width
    blocks = vit_tower_names.rules(text.blocks, {"kind": kind, "prefix": "text_model."})
    head = [Rule("text/head/kernel", "text_projection.weight", transposed(1, 0))]
    scalar = reshaped((), (1,)) if kind == "siglip" else reshaped((), ())
    return [
        Rule("text/token_table", _TABLE),
        Rule("text/position", _POSITION, reshaped((1, -1, width), (-1, width))),
        *(
            dataclasses.replace(rule, ours=f"text/{rule.ours}")
            for rule in blocks
            if isinstance(rule, Rule) and rule.ours.startswith("encoder/layers/")
        ),
        *pytorch.norm("text/encoder/norm", "text_model.final_layer_norm"),
        *(pytorch.linear("text/head", "text_model.head") if kind == "siglip" else head),
        Rule("image_projection/kernel", "visual_projection.weight", transposed(1, 0)),
        Rule("temperature", "logit_scale", scalar),
        Rule("bias", "logit_bias", scalar),
    ]


def saved_in(
    config: ClassifierConfig,
    options: ImageTextOptions,
    rules: Sequence[Rule],
    tensors: Mapping[str, LazyArray],
) -> SavedObjective | None:
    """What the tensors of a file have of an objective; `None`, with a log, if some are of another tower.

    Args:
      rules: of the file's names.
    """
    like = like_own(config, options)
    wanted = translation.specs(rules, like)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name in wanted}
    if shapes != {name: shape for name, (shape, _) in wanted.items()}:
        logging.warning(
            "the text tower in the checkpoint is skipped: it is none of %s", _MODELS[options.text]
        )
        return None
    own = {name: tensors[name] for name in wanted}
    params = translation.to_ours(rules, own, like, source="the text tower")
    stated = dataclasses.asdict(options)
    del stated["tokenizer"]
    return SavedObjective(ImageText, stated, lambda: Weights(params, {}))


def is_theirs(config: ClassifierConfig, options: ImageTextOptions) -> bool:
    """Whether CLIP or SigLIP is a model of such an image tower, text tower and loss."""
    kind = options.text
    same = options.loss == LOSSES[kind] and bool(options.embed) == (kind == "clip")
    return same and vit_new_towers.kind_of(config) == kind and not options.image_blocks


def _fields_of_bare(
    kind: str,
    config: ClassifierConfig,
    tensors: Mapping[str, LazyArray],
    hints: Mapping[str, Any],
) -> dict[str, Any] | None:
    """The fields of a text tower's config.json that is not there; `None` if nothing says its heads."""
    width = tensors[_TABLE].shape[1]
    heads = hints.get("text_heads") or HEADS.get(width)
    if heads is None:
        logging.warning(
            "the text tower in the checkpoint is skipped: nothing says its heads, and no published one has the width "
            "%d: put its config.json beside the file, or set config.objective.text_heads", width,
        )  # fmt: skip
        return None
    fields = {"num_attention_heads": heads}
    if kind == "clip":  # both towers have one activation
        fields["hidden_act"] = _ACTIVATIONS[config.activation]
    return fields


def _options(
    kind: str, tensors: Mapping[str, LazyArray], stated: Mapping[str, Any]
) -> ImageTextOptions | None:
    """The options that a file's tensors and config.json tell; `None` of a tower that computes otherwise."""
    theirs = _USUAL[kind] | dict(stated)
    ours = CONVENTIONS[kind]
    activations = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}
    stated_activation = theirs.get("hidden_act", _ACTIVATIONS[ours["activation"]])
    epsilon = theirs.get("layer_norm_eps", ours["epsilon"])
    if stated_activation not in activations or epsilon != ours["epsilon"]:
        logging.warning(
            "the text tower in the checkpoint is skipped: it computes with hidden_act = %s and layer_norm_eps = %s, "
            "and only %s and %s are known", stated_activation, epsilon, ", ".join(activations), ours["epsilon"],
        )  # fmt: skip
        return None
    activation = activations[stated_activation]
    vocabulary, width = tensors[_TABLE].shape
    layer = "text_model.encoder.layers"
    end = theirs.get("eos_token_id", 49407 if kind == "clip" else 1)
    # CLIP's first files have 2 for the largest number, which is its end token.
    end = vocabulary - 1 if kind == "clip" and end == 2 else end
    return ImageTextOptions(
        loss=LOSSES[kind],
        text=kind,
        text_length=tensors[_POSITION].shape[0],
        text_width=width,
        text_depth=contract.count_layers(tensors, rf"{layer.replace('.', '[.]')}[.](\d+)[.]"),
        text_mlp_dim=tensors[f"{layer}.0.mlp.fc1.bias"].shape[0],
        text_heads=theirs["num_attention_heads"],
        text_activation="" if activation == ours["activation"] else activation,
        embed=tensors["text_projection.weight"].shape[0] if kind == "clip" else 0,
        vocabulary=vocabulary,
        text_end=end,
    )


def like_own(config: ClassifierConfig, options: ImageTextOptions) -> dict:
    """Shapes and dtypes of what a run's objective owns."""
    objective = objective_of(config, options)
    own = nnx.eval_shape(lambda: objective.make_modules(registry.Rngs(0)))
    return registry.split(own)[1].params


def objective_of(config: ClassifierConfig, options: ImageTextOptions) -> ImageText:
    """The objective beside a model."""
    context = ObjectiveContext(config, (), (), total_steps=1, to_steps=int)
    return ImageText(options, context)
