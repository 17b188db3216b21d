"""The tensor names of google-research/vision_transformer, big_vision and BiT.

They are variants of each other. A layout says which one a file has; from it follow the rules. What
model a file holds is found out in `flax_models`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.interchange.rules import SAME, Rule, Transform, expanded, stacked
from vit_jax.models import hybrid, mixer, resnet

# Where a file may keep its parameters: the two-tower models under `img`, old checkpoints beside the
# optimizer's state.
PREFIXES = ("", "params/", "opt/target/", "params/img/", "opt/target/img/")
# Each model has one of these.
ROOTS = (
    "embedding/kernel",
    "stem/kernel",
    "conv_root/kernel",
    "root_block/conv_root/kernel",
    "resnet/root_block/standardized_conv2d/kernel",
)
POSITION_OFFICIAL = "Transformer/posembed_input/pos_embedding"
POSITION_BIG_VISION = "pos_embedding"
POSITIONS = (POSITION_OFFICIAL, POSITION_BIG_VISION, "Transformer/pos_embedding")
# Numbers of a block's second norm, attention and MLP. Before Linen one counter ran over modules of
# all kinds.
NUMBERS = {"linen": (1, 0, 0), "pre_linen": (2, 1, 3)}


# The first Mixers' names and what became of them; numbers of modules as `NUMBERS` says.
_OLD_MIXER = (
    (r"Mixer/encoderblock_(\d+)/", r"MixerBlock_\1/"),
    (r"(MixerBlock_\d+/LayerNorm)_[1-9]\d*/", r"\1_1/"),
    (r"(token|channel)_mixing_phase_\d+/(kernel|bias)1$", r"\1_mixing/Dense_0/\2"),
    (r"(token|channel)_mixing_phase_\d+/(kernel|bias)2$", r"\1_mixing/Dense_1/\2"),
    (r"Mixer/encoder_norm/", "pre_head_layer_norm/"),
    (r"(^|/)embedding/(kernel|bias)$", r"\1stem/\2"),
)


def canonical(names: Iterable[str]) -> dict[str, str]:
    """Every name with the one it has in `rules`.

    Others are those of the first Mixers (big_vision's loader knows them too), and of BiT's
    convolutions where TensorFlow numbered them.
    """
    names = tuple(names)
    table = ((r"(standardized_conv2d)_\d+", r"\1"),)
    if any("Mixer/encoder_norm/" in name for name in names):
        table += _OLD_MIXER
    result = {name: name for name in names}
    for pattern, new in table:
        result = {name: re.sub(pattern, new, now) for name, now in result.items()}
    return result


def find_prefix(names: Iterable[str]) -> str | None:
    """What stands before the parameters' names; `None` for a file without such a model."""
    names = set(canonical(names).values())
    return next(
        (prefix for prefix in PREFIXES if any(prefix + root in names for root in ROOTS)), None
    )


def layout_of(tensors: Mapping[str, Any]) -> dict:
    """The variant of a file's names.

    Args:
      tensors: by canonical names, without prefix; what has `shape` and `dtype`.

    Returns:
      JSON with these fields, of which `rules` uses the first six:
        numbers: how modules of a block are counted, see `NUMBERS`.
        scanned: blocks are stacked along a leading axis.
        position: name of the position embedding; `None` without one.
        pooling: what stands before the names of the attention pooling; '' in old files.
        norm_axes: group norms are (1, 1, 1, C).
        resnet: 'flax' or 'tensorflow' names.
        dtypes: of tensors that are not float32.
    """
    norms = [
        t
        for name, t in tensors.items()
        if re.search(r"(gn\w*|norm-pre-head|group_norm)/(scale|gamma)", name)
    ]
    return {
        "numbers": "pre_linen"
        if any("MultiHeadDotProductAttention_1/" in name for name in tensors)
        else "linen",
        "scanned": any(name.startswith("Transformer/encoderblock/") for name in tensors),
        "position": next((name for name in POSITIONS if name in tensors), None),
        "pooling": "" if "probe" in tensors else "MAPHead_0/",
        "norm_axes": any(len(norm.shape) == 4 for norm in norms),
        "resnet": "tensorflow" if any(name.startswith("resnet/") for name in tensors) else "flax",
        "dtypes": {
            n: np.dtype(t.dtype).name for n, t in tensors.items() if np.dtype(t.dtype) != np.float32
        },
    }


def rules(config, layout: Mapping[str, Any]) -> list[Rule]:
    """The rules for a model of any family; some may be for parameters it does not have."""
    if isinstance(config, mixer.Config):
        return [*_affine("embedding", "stem"), *_mixer_rules(), *_affine("head", "head")]
    if isinstance(config, resnet.Config):
        return _resnet_rules("backbone", config, layout)
    table = [*_affine("embedding", "embedding"), *_vit_rules(layout), *_affine("head", "head")]
    if isinstance(config, hybrid.Config):
        table += _resnet_rules("embedding/backbone", config.backbone, layout)
    return table


def _vit_rules(layout: Mapping[str, Any]) -> list[Rule]:
    block = "Transformer/encoderblock" if layout["scanned"] else "Transformer/encoderblock_{layer}"
    norm, attention, mlp = NUMBERS[layout["numbers"]]
    pooling = layout["pooling"]
    return [
        Rule("class_token", "cls"),
        Rule("position", layout["position"] or POSITION_BIG_VISION),
        *_norm("encoder/layers/attention_norm", f"{block}/LayerNorm_0"),
        *_attention(
            "encoder/layers/attention", f"{block}/MultiHeadDotProductAttention_{attention}"
        ),
        *_norm("encoder/layers/mlp_norm", f"{block}/LayerNorm_{norm}"),
        *_mlp("encoder/layers/mlp", f"{block}/MlpBlock_{mlp}"),
        *_norm("encoder/norm", "Transformer/encoder_norm"),
        Rule("pool/probe", f"{pooling}probe"),
        *_attention("pool/attention", f"{pooling}MultiHeadDotProductAttention_0"),
        *_norm("pool/norm", f"{pooling}LayerNorm_0"),
        *_mlp("pool/mlp", f"{pooling}MlpBlock_0"),
        *_affine("representation", "pre_logits"),
    ]


def _mixer_rules() -> list[Rule]:
    block = "MixerBlock_{layer}"
    return [
        *_norm("layers/token_norm", f"{block}/LayerNorm_0"),
        *_mlp("layers/token_mlp", f"{block}/token_mixing"),
        *_norm("layers/channel_norm", f"{block}/LayerNorm_1"),
        *_mlp("layers/channel_mlp", f"{block}/channel_mixing"),
        *_norm("norm", "pre_head_layer_norm"),
    ]


def _resnet_rules(ours: str, config: resnet.Config, layout: Mapping[str, Any]) -> list[Rule]:
    """Root, units and, for a ResNet that stands alone, last norm and head."""
    axes = expanded(0, 1, 2) if layout["norm_axes"] else SAME
    if layout["resnet"] == "tensorflow":
        return _tensorflow_rules(ours, config, axes)
    unit, root = ("unit{layer:02d}", "root_block/") if config.preactivation else ("unit{layer}", "")
    table = [
        Rule(f"{ours}/root/conv/kernel", f"{root}conv_root/kernel"),
        *_norm(f"{ours}/root/norm", "gn_root", axes),
        *_norm("norm", "norm-pre-head", axes),
        *_affine("head", "head"),
    ]
    for part, theirs in _units(ours, config, unit):
        for n in (1, 2, 3):
            table.append(Rule(f"{part}/conv{n}/kernel", f"{theirs}/conv{n}/kernel", first_layer=2))
            table += _norm(f"{part}/norm{n}", f"{theirs}/gn{n}", axes, first_layer=2)
        table.append(Rule(f"{part}/shortcut/kernel", f"{theirs}/conv_proj/kernel"))
        table += _norm(f"{part}/shortcut_norm", f"{theirs}/gn_proj", axes)
    return table


def _tensorflow_rules(ours: str, config: resnet.Config, axes: Transform) -> list[Rule]:
    kernel, norm = "standardized_conv2d/kernel", ("gamma", "beta")
    table = [
        Rule(f"{ours}/root/conv/kernel", f"resnet/root_block/{kernel}"),
        *_norm("norm", "resnet/group_norm", axes, norm),
        Rule("head/kernel", "resnet/head/conv2d/kernel", expanded(0, 1)),
        Rule("head/bias", "resnet/head/conv2d/bias"),
    ]
    for part, theirs in _units(ours, config, "unit{layer:02d}"):
        for n, letter in enumerate("abc", 1):
            at = f"resnet/{theirs}/{letter}"
            table.append(Rule(f"{part}/conv{n}/kernel", f"{at}/{kernel}", first_layer=2))
            table += _norm(f"{part}/norm{n}", f"{at}/group_norm", axes, norm, first_layer=2)
        table.append(Rule(f"{part}/shortcut/kernel", f"resnet/{theirs}/a/proj/{kernel}"))
    return table


def _units(ours: str, config: resnet.Config, unit: str):
    """The first unit of every stage and the others, which are stacked: (our name, theirs)."""
    for stage in range(1, len(config.units) + 1):
        yield f"{ours}/stages/{stage}/first", f"block{stage}/{unit.format(layer=1)}"
        yield f"{ours}/stages/{stage}/layers", f"block{stage}/{unit}"


def _affine(ours: str, theirs: str) -> list[Rule]:
    return [Rule(f"{ours}/{part}", f"{theirs}/{part}") for part in ("kernel", "bias")]


def _norm(
    ours: str, theirs: str, axes: Transform = SAME, names=("scale", "bias"), first_layer: int = 0
) -> list[Rule]:
    pairs = zip(("scale", "bias"), names, strict=True)
    return [Rule(f"{ours}/{our}", f"{theirs}/{their}", axes, first_layer) for our, their in pairs]


def _mlp(ours: str, theirs: str) -> list[Rule]:
    return [
        *_affine(f"{ours}/up", f"{theirs}/Dense_0"),
        *_affine(f"{ours}/down", f"{theirs}/Dense_1"),
    ]


def _attention(ours: str, theirs: str) -> list[Rule]:
    """query, key and value (D, H, C) become one qkv (D, 3, H, C)."""
    kernels, biases = (
        [f"{theirs}/{name}/{part}" for name in ("query", "key", "value")]
        for part in ("kernel", "bias")
    )
    return [
        Rule(f"{ours}/qkv/kernel", tuple(kernels), stacked(1)),
        Rule(f"{ours}/qkv/bias", tuple(biases), stacked(0)),
        *_affine(f"{ours}/out", f"{theirs}/out"),
    ]
