"""BiT and the ResNets of big_vision and timm, alone or below a hybrid ViT.

No file tells the image size, and none whether the map before BiT's root pooling is padded with zeros:
big_vision does not, timm does.
"""

import re
from collections.abc import Mapping
from typing import Any

from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import contract, flax, pytorch
from vit_jax.interchange.conversions.rules import SAME, Rule, Transform, chain, expanded, transposed
from vit_jax.models.preprocessing import Preprocessing
from vit_jax.models.zoo import resnet

ROOTS = (
    "conv_root/kernel",
    "root_block/conv_root/kernel",
    "resnet/root_block/standardized_conv2d/kernel",
)
_PREACTIVATION_NORMS = ("norm-pre-head/scale", "resnet/group_norm/gamma")
_IN_TIMM = ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")


class BigVision(contract.Conversion):
    """`bit` and `bit_paper` of big_vision, and BiT's published files with TensorFlow's names."""

    conventions = {"root_zeros": False}
    # TensorFlow numbered the convolutions of some files.
    renamed = ((r"(standardized_conv2d)_\d+", r"\1"),)

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if "embedding/kernel" in shapes or not any(name in shapes for name in ROOTS):
            return None
        head = shapes.get("head/bias") or shapes.get("resnet/head/conv2d/bias") or (0,)
        options = flax_sizes(shapes) | {
            "image_size": contract.USUAL_IMAGE_SIZE,
            "num_classes": head[0],
            "preactivation": any(name in shapes for name in _PREACTIVATION_NORMS),
        }
        assumed = ("image_size", "root_zeros", "epsilons")
        return contract.DetectedModel(options, flax_layout(shapes), assumed=assumed)

    def rules(self, config: resnet.Config, layout: Mapping[str, Any]) -> list[Rule]:
        return flax_rules("backbone", config, layout)

    def layout(self, config: resnet.Config) -> dict:
        """The names of big_vision."""
        return dict(norm_axes=config.preactivation, resnet="flax")


class Timm(contract.TimmConversion):
    """timm's BiT. Its kernels are standardised with an epsilon of 1e-8, which moves logits by 2e-5: what is
    read keeps that, what is written gets it.
    """

    conventions = {"root_zeros": True}

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if "stem.conv.weight" not in shapes:
            return None
        options = timm_sizes(shapes) | {
            "image_size": metadata.get("image_size", contract.USUAL_IMAGE_SIZE),
            "num_classes": shapes.get("head.fc.bias", (0,))[0],
            "preactivation": True,
            "root_zeros": True,
            "epsilons": "timm",
        }
        return contract.DetectedModel(
            options, assumed=() if "image_size" in metadata else ("image_size",)
        )

    def rules(self, config: resnet.Config, layout: Mapping[str, Any]) -> list[Rule]:
        """Which tensors are which parameters. BiT's head is a convolution: (classes, channels, 1, 1)."""
        return [
            *timm_rules("backbone", "", config),
            *pytorch.norm("norm", "norm"),
            Rule("head/kernel", "head.fc.weight", chain(expanded(2, 3), transposed(1, 0))),
            Rule("head/bias", "head.fc.bias"),
        ]

    def refusal(self, config: resnet.Config) -> str:
        return "" if config.preactivation else "of ResNets v1 timm has those in hybrids only"

    def preprocessing(self, config: resnet.Config) -> Preprocessing:
        """As for the published models."""
        return Preprocessing(config.image_size)

    def architecture(self, config: resnet.Config, layout: Mapping[str, Any]) -> tuple[str, dict]:
        depth = next((d for d, units in resnet.UNITS.items() if units == config.units), "?")
        name = f"{depth}x{config.width_factor:g}"
        if name not in _IN_TIMM:
            raise CheckpointError(
                f"timm has no BiT-R{name}, only {', '.join(_IN_TIMM)}: write a .safetensors file"
            )
        return f"resnetv2_{name}_bit", {}


class HuggingFace(contract.HuggingFaceConversion):
    """`BitForImageClassification` and `BitModel`: timm's BiT under other names. Files are written again as
    they were read; new ones are not.
    """

    conventions = {"root_zeros": True}
    model_types = ("bit",)
    renamed = (
        (r"^(bit\.)?embedder\.convolution\.", "stem.conv."),
        (r"^(bit\.)?encoder\.(stages\.\d+)\.layers\.", r"\2.blocks."),
        (r"^bit\.norm\.", "norm."),
    )

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if metadata.get("model_type") not in self.model_types:
            return None
        usual = {"layer_type": "preactivation", "global_padding": None, "num_groups": 32}
        usual |= {"embedding_dynamic_padding": False, "output_stride": 32, "hidden_act": "relu"}
        for name, value in usual.items():
            if metadata.get(name, value) != value:
                raise CheckpointError(
                    f"{name} = {metadata[name]!r} is not supported, only {value!r}"
                )
        size = metadata.get("processor_size") or contract.USUAL_IMAGE_SIZE
        options = timm_sizes(shapes) | {
            "image_size": metadata.get("image_size", size),
            "num_classes": shapes.get("classifier.1.bias", (0,))[0],
            "preactivation": True,
            "root_zeros": True,
            "epsilons": "timm",
        }
        sized = "image_size" in metadata or metadata.get("processor_size")
        return contract.DetectedModel(
            options, {"kind": "bit"}, assumed=() if sized else ("image_size",)
        )

    def rules(self, config: resnet.Config, layout: Mapping[str, Any]) -> list[Rule]:
        return [
            *timm_rules("backbone", "", config),
            *pytorch.norm("norm", "norm"),
            *pytorch.linear("head", "classifier.1"),
        ]

    def refusal(self, config: resnet.Config) -> str:
        return "BiT is not written for transformers, unless it was read from there"

    def config_json(self, config: resnet.Config, layout: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing: the file's own values stay."""
        return {}


def flax_sizes(shapes: contract.Shapes) -> dict[str, Any]:
    """Units, width and channels of a ResNet with big_vision's, vision_transformer's or BiT's names."""
    root = next(shapes[name] for name in ROOTS if name in shapes and shapes[name][:2] == (7, 7))
    units = {}
    for name in shapes:
        if match := re.search(r"block(\d+)/unit(\d+)/", name):
            stage, unit = map(int, match.groups())
            units[stage] = max(units.get(stage, 0), unit)
    return {
        "units": tuple(units[stage] for stage in sorted(units)),
        "width_factor": root[-1] / 64,
        "channels": root[2],
    }


def flax_layout(shapes: contract.Shapes) -> dict[str, Any]:
    """`norm_axes`: group norms are (1, 1, 1, C); `resnet`: 'flax' or 'tensorflow' names."""
    norms = [
        shape
        for name, shape in shapes.items()
        if re.search(r"(gn\w*|norm-pre-head|group_norm)/(scale|gamma)", name)
    ]
    return {
        "norm_axes": any(len(norm) == 4 for norm in norms),
        "resnet": "tensorflow" if any(name.startswith("resnet/") for name in shapes) else "flax",
    }


def flax_rules(ours: str, config: resnet.Config, layout: Mapping[str, Any]) -> list[Rule]:
    """Root, units and, for a ResNet that stands alone, last norm and head."""
    axes = expanded(0, 1, 2) if layout["norm_axes"] else SAME
    if layout["resnet"] == "tensorflow":
        return _tensorflow_rules(ours, config, axes)
    unit, root = ("unit{layer:02d}", "root_block/") if config.preactivation else ("unit{layer}", "")
    table = [
        Rule(f"{ours}/root/conv/kernel", f"{root}conv_root/kernel"),
        *flax.norm(f"{ours}/root/norm", "gn_root", axes),
        *flax.norm("norm", "norm-pre-head", axes),
        *flax.affine("head", "head"),
    ]
    for part, theirs in _units(ours, config, unit):
        for n in (1, 2, 3):
            table.append(Rule(f"{part}/conv{n}/kernel", f"{theirs}/conv{n}/kernel", first_layer=2))
            table += flax.norm(f"{part}/norm{n}", f"{theirs}/gn{n}", axes, first_layer=2)
        table.append(Rule(f"{part}/shortcut/kernel", f"{theirs}/conv_proj/kernel"))
        table += flax.norm(f"{part}/shortcut_norm", f"{theirs}/gn_proj", axes)
    return table


def _tensorflow_rules(ours: str, config: resnet.Config, axes: Transform) -> list[Rule]:
    kernel, norm = "standardized_conv2d/kernel", ("gamma", "beta")
    table = [
        Rule(f"{ours}/root/conv/kernel", f"resnet/root_block/{kernel}"),
        *flax.norm("norm", "resnet/group_norm", axes, norm),
        Rule("head/kernel", "resnet/head/conv2d/kernel", expanded(0, 1)),
        Rule("head/bias", "resnet/head/conv2d/bias"),
    ]
    for part, theirs in _units(ours, config, "unit{layer:02d}"):
        for n, letter in enumerate("abc", 1):
            at = f"resnet/{theirs}/{letter}"
            table.append(Rule(f"{part}/conv{n}/kernel", f"{at}/{kernel}", first_layer=2))
            table += flax.norm(f"{part}/norm{n}", f"{at}/group_norm", axes, norm, first_layer=2)
        table.append(Rule(f"{part}/shortcut/kernel", f"resnet/{theirs}/a/proj/{kernel}"))
    return table


def _units(ours: str, config: resnet.Config, unit: str):
    """The first unit of every stage and the others, which are stacked: (our name, theirs)."""
    for stage in range(1, len(config.units) + 1):
        yield f"{ours}/stages/{stage}/first", f"block{stage}/{unit.format(layer=1)}"
        yield f"{ours}/stages/{stage}/layers", f"block{stage}/{unit}"


def timm_sizes(shapes: contract.Shapes) -> dict[str, Any]:
    """Units, width and channels of a ResNet with timm's names."""
    stages = contract.count_layers(shapes, r"stages\.(\d+)\.")
    root = shapes["stem.conv.weight"] if "stem.conv.weight" in shapes else shapes["conv.weight"]
    return {
        "units": tuple(
            contract.count_layers(shapes, rf"stages\.{s}\.blocks\.(\d+)\.") for s in range(stages)
        ),
        "width_factor": root[0] / 64,
        "channels": root[1],
    }


def timm_rules(ours: str, theirs: str, config: resnet.Config) -> list[Rule]:
    """Root and units."""
    root = f"{theirs}stem" if config.units else theirs.removesuffix(".")
    result = [pytorch.convolution(f"{ours}/root/conv", f"{root}.conv")]
    result += pytorch.norm(f"{ours}/root/norm", f"{root}.norm")
    for stage in range(len(config.units)):
        blocks = f"{theirs}stages.{stage}.blocks"
        for part, block in (("first", f"{blocks}.0"), ("layers", f"{blocks}.{{layer}}")):
            unit = f"{ours}/stages/{stage + 1}/{part}"
            for n in (1, 2, 3):
                result.append(
                    pytorch.convolution(f"{unit}/conv{n}", f"{block}.conv{n}", first_layer=1)
                )
                result += pytorch.norm(f"{unit}/norm{n}", f"{block}.norm{n}", first_layer=1)
            result.append(pytorch.convolution(f"{unit}/shortcut", f"{block}.downsample.conv"))
            result += pytorch.norm(f"{unit}/shortcut_norm", f"{block}.downsample.norm")
    return result
