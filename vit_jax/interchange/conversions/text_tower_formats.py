"""Text towers in the files of OpenAI's CLIP, of open_clip and of big_vision's SigLIP, and of transformers, see
`text_towers`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from absl import logging

from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange.conversions import (
    clip_names,
    contract,
    flax,
    pytorch,
    text_towers,
    vit_flax,
    vit_tower_names,
)
from vit_jax.interchange.conversions.contract import NOTHING, Beside, ObjectiveConversion
from vit_jax.interchange.conversions.rules import Rule, reshaped
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.text_tower import CONVENTIONS, KINDS
from vit_jax.objectives.contract import SavedObjective
from vit_jax.objectives.image_text.image_text import ImageTextOptions

_STATED = ("text_heads", "text_end", "text_pad", "text_activation")
# Of the vocabularies that published files are for: CLIP's end, and that of SigLIP's SentencePiece models.
_ENDS = {"clip": 49407, "siglip": 1}


class _TextTower(ObjectiveConversion):
    """What files of PyTorch and of Flax share."""

    key = clip_names.KEY
    kinds: ClassVar[tuple[str, ...]] = KINDS  # of text towers that the format has

    def beside(self, config: ClassifierConfig, saved: SavedObjective) -> Beside:
        options = ImageTextOptions(**saved.options)
        theirs = text_towers.is_theirs(config, options) and options.text in self.kinds
        if not theirs or not self.has_activation(config, options):
            logging.warning(
                "the text tower is not written: the format has none beside such an image tower and loss"
            )
            return NOTHING
        text = text_towers.objective_of(config, options).text_config()
        # As the numbers are, not as 0 stands for them.
        stated = dict(
            zip(
                _STATED,
                (text.blocks.heads, options.text_end, options.text_pad, options.text_activation),
                strict=True,
            )
        )
        rules = self.rules_of(config, options, self.new_prefix(options.text))
        return Beside(rules, saved.read().params, {clip_names.KEY: stated})

    def has_activation(self, config: ClassifierConfig, options: ImageTextOptions) -> bool:
        """Whether the format's code computes the text tower with its activation beside such an image tower."""
        text = text_towers.objective_of(config, options).text_config()
        return text.blocks.activation == CONVENTIONS[options.text]["activation"]

    def new_prefix(self, kind: str) -> str:
        """What stands before the names of a new file's text tower."""
        raise NotImplementedError

    def rules_of(
        self, config: ClassifierConfig, options: ImageTextOptions, prefix: str
    ) -> list[Rule]:
        """Which tensors are which parameters of `objectives.image_text.ImageTextModules`."""
        raise NotImplementedError


class OpenClip(_TextTower):
    """OpenAI's CLIP, and open_clip's CLIP and SigLIP."""

    def find(
        self,
        config: ClassifierConfig,
        tensors: Mapping[str, LazyArray],
        layout: Mapping[str, Any],
        hints: Mapping[str, Any],
    ) -> SavedObjective | None:
        at = "text."  # see `vit_open_clip.RENAMED`
        if f"{at}token_embedding.weight" not in tensors or "logit_scale" not in tensors:
            return None
        kind = "siglip" if "logit_bias" in tensors else "clip"
        projection = f"{at}text_projection"
        vocabulary, width = tensors[f"{at}token_embedding.weight"].shape
        block = f"{at}transformer.resblocks"
        options = _options(kind, width, vocabulary, hints, layout) | {
            "text_length": tensors[f"{at}positional_embedding"].shape[0],
            "text_depth": contract.count_layers(
                tensors, rf"{block.replace('.', '[.]')}[.](\d+)[.]"
            ),
            "text_mlp_dim": tensors[f"{block}.0.mlp.c_fc.bias"].shape[0],
            "embed": tensors[projection].shape[1] if projection in tensors else 0,
        }
        if kind == "clip" and "text_activation" not in layout.get(clip_names.KEY, {}):
            options["text_activation"] = _same_as(config, kind)
        made = ImageTextOptions(**options)
        return text_towers.saved_in(config, made, self.rules_of(config, made, at), tensors)

    def has_activation(self, config: ClassifierConfig, options: ImageTextOptions) -> bool:
        """Both towers of a CLIP have one."""
        text = text_towers.objective_of(config, options).text_config()
        return options.text == "siglip" or text.blocks.activation == config.activation

    def new_prefix(self, kind: str) -> str:
        return "text." if kind == "siglip" else ""

    def rules_of(
        self, config: ClassifierConfig, options: ImageTextOptions, prefix: str
    ) -> list[Rule]:
        text = text_towers.objective_of(config, options).text_config()
        siglip = options.text == "siglip"
        blocks = [
            rule
            for rule in vit_tower_names.rules(text.blocks, {"kind": options.text, "prefix": ""})
            if isinstance(rule, Rule) and rule.ours.startswith("encoder/layers/")
        ]
        return [
            Rule("text/token_table", f"{prefix}token_embedding.weight"),
            Rule(
                "text/position",
                f"{prefix}positional_embedding",
                reshaped((1, -1, text.blocks.width), (-1, text.blocks.width)),
            ),
            *_of_text(clip_names.renamed(blocks, prefix, text.blocks)),
            *pytorch.norm("text/encoder/norm", f"{prefix}ln_final"),
            *(
                pytorch.linear("text/head", f"{prefix}text_projection")
                if siglip
                else [clip_names.projection("text/head", f"{prefix}text_projection")]
            ),
            clip_names.projection("image_projection", "visual.proj"),
            Rule("temperature", "logit_scale"),
            Rule("bias", "logit_bias"),
        ]


class BigVision(_TextTower):
    """big_vision's SigLIP; names without the `params/` that stands before all of a file."""

    kinds = ("siglip",)

    def find(
        self,
        config: ClassifierConfig,
        tensors: Mapping[str, LazyArray],
        layout: Mapping[str, Any],
        hints: Mapping[str, Any],
    ) -> SavedObjective | None:
        if not {"txt/Embed_0/embedding", "txt/head/bias", "t", "b"} <= tensors.keys():
            return None
        stacked = any(name.startswith("txt/Encoder_0/encoderblock/") for name in tensors)
        block = "txt/Encoder_0/encoderblock" + ("" if stacked else "_0")
        vocabulary, width = tensors["txt/Embed_0/embedding"].shape
        *layers, _, heads, _ = tensors[f"{block}/MultiHeadDotProductAttention_0/query/kernel"].shape
        depth = contract.count_layers(tensors, r"txt/Encoder_0/encoderblock_(\d+)/")
        options = _options("siglip", width, vocabulary, hints, layout) | {
            "text_length": tensors["txt/pos_embedding"].shape[1],
            "text_depth": layers[0] if layers else depth,
            "text_mlp_dim": tensors[f"{block}/MlpBlock_0/Dense_0/kernel"].shape[-1],
            "text_heads": heads,
        }
        made = ImageTextOptions(**options)
        rules = self.rules_of(config, made, "txt/")
        rules = flax.stacked_blocks(rules) if stacked else rules
        return text_towers.saved_in(config, made, rules, tensors)

    def new_prefix(self, kind: str) -> str:
        return "txt/"

    def rules_of(
        self, config: ClassifierConfig, options: ImageTextOptions, prefix: str
    ) -> list[Rule]:
        table = vit_flax.rules(
            {"numbers": "linen", "scanned": False, "position": "", "pooling": ""}
        )
        encoder = [
            dataclasses.replace(
                rule,
                theirs=tuple(n.replace("Transformer/", f"{prefix}Encoder_0/") for n in rule.names),
            )
            for rule in table
            if rule.ours.startswith("encoder/")
        ]
        scalar = reshaped((), (1,))
        return [
            Rule("text/token_table", f"{prefix}Embed_0/embedding"),
            Rule("text/position", f"{prefix}pos_embedding"),
            *_of_text(encoder),
            *flax.affine("text/head", f"{prefix}head"),
            Rule("temperature", "t", scalar),
            Rule("bias", "b", scalar),
        ]


CONVERSIONS = {
    "huggingface": text_towers.TextTowerHuggingFace(),
    "authors": OpenClip(),
    "big_vision": BigVision(),
}


def _same_as(config: ClassifierConfig, kind: str) -> str:
    """The activation of the image tower, as `text_activation` says it."""
    return "" if config.activation == CONVENTIONS[kind]["activation"] else config.activation


def _of_text(rules: list[Rule]) -> list[Rule]:
    return [dataclasses.replace(rule, ours=f"text/{rule.ours}") for rule in rules]


def _options(
    kind: str,
    width: int,
    vocabulary: int,
    hints: Mapping[str, Any],
    layout: Mapping[str, Any],
) -> dict[str, Any]:
    """The options of the objective that follow from the sizes of the table of tokens, and what the file states."""
    end = min(_ENDS[kind], vocabulary - 1)
    stated = layout.get(clip_names.KEY, {})
    heads = hints.get("text_heads") or text_towers.HEADS.get(width)
    if not heads:
        heads = max(1, width // 64)
        if "text_heads" not in stated:
            logging.warning(
                "the file does not state the heads of its text tower of width %d: %d are taken, of 64 channels each. "
                "If it has others, set config.objective.text_heads", width, heads,
            )  # fmt: skip
    return {
        "loss": text_towers.LOSSES[kind],
        "text": kind,
        "text_width": width,
        "text_heads": heads,
        "vocabulary": vocabulary,
        "text_end": end,
    } | stated
