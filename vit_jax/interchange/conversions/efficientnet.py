"""EfficientNets of timm, `tf_efficientnet_*`, and of Hugging Face `transformers`. Both have the conventions
of the published code; timm's `efficientnet_*` without `tf` pad and normalise otherwise, under the same
names and with the same shapes: a file that nobody names is refused.

transformers pads the image for the first convolution at its end only, which is TensorFlow's padding for an even
number of pixels; and where a stride meets an odd number of rows, `depthwise_padding` in config.json
has the number of the block.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.base import sizes
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import contract, pytorch
from vit_jax.interchange.conversions.rules import Constant, Rule
from vit_jax.models.preprocessing import Preprocessing, torchvision_crop
from vit_jax.models.zoo import efficientnet
from vit_jax.models.zoo.efficientnet import STAGES, Config, Shape

# Our layers inside a block and theirs; timm has other names where a block does not widen.
_TIMM = {
    "expand": "conv_pw", "expand_norm": "bn1", "depthwise": "conv_dw", "depthwise_norm": "bn2",
    "gate/reduce": "se.conv_reduce", "gate/expand": "se.conv_expand", "project": "conv_pwl",
    "project_norm": "bn3",
}  # fmt: skip
_TIMM_AS_WIDE = _TIMM | {"depthwise_norm": "bn1", "project": "conv_pw", "project_norm": "bn2"}
_HUGGING_FACE = {
    "expand": "expansion.expand_conv", "expand_norm": "expansion.expand_bn",
    "depthwise": "depthwise_conv.depthwise_conv",
    "depthwise_norm": "depthwise_conv.depthwise_norm",
    "gate/reduce": "squeeze_excite.reduce", "gate/expand": "squeeze_excite.expand",
    "project": "projection.project_conv", "project_norm": "projection.project_bn",
}  # fmt: skip
# What transformers takes where config.json says nothing.
_DEFAULTS = {
    "image_size": 600, "num_channels": 3, "width_coefficient": 2.0, "depth_coefficient": 3.1,
    "num_block_repeats": [stage.units for stage in STAGES], "depthwise_padding": (),
}  # fmt: skip
# What our code computes, under transformers' names; its defaults too.
_COMPUTED = {
    "depth_divisor": efficientnet.DIVISOR,
    "kernel_sizes": [stage.kernel for stage in STAGES],
    "in_channels": [efficientnet.ROOT, *(stage.channels for stage in STAGES[:-1])],
    "out_channels": [stage.channels for stage in STAGES],
    "strides": [stage.stride for stage in STAGES],
    "expand_ratios": [stage.expansion for stage in STAGES],
    "squeeze_expansion_ratio": 0.25,
    "hidden_act": "swish",
    "pooling_type": "mean",
    "batch_norm_eps": efficientnet.EPSILON,
}


class Timm(contract.TimmConversion):
    """timm's EfficientNets with TensorFlow's conventions."""

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if not {"conv_stem.weight", "conv_head.weight", "blocks.0.0.conv_dw.weight"} <= set(shapes):
            return None
        architecture = metadata.get("architecture")
        if not architecture and not metadata.get("written_here"):
            raise CheckpointError(
                "the file does not state whether it pads as TensorFlow (timm's tf_efficientnet_*), which is "
                "supported, or as PyTorch (efficientnet_*): the tensors are alike, the results are not. Name the file "
                "or its folder as the published model is called, such as tf_efficientnet_b0, or put its config.json "
                "beside it"
            )
        if architecture and not architecture.startswith("tf_efficientnet"):
            raise CheckpointError(
                f"of EfficientNets only timm's tf_efficientnet_* are supported, not {architecture}, which pads and "
                "normalises otherwise"
            )
        stages = contract.count_layers(shapes, r"blocks\.(\d+)\.")
        options = {
            "image_size": metadata.get("image_size", contract.USUAL_IMAGE_SIZE),
            "num_classes": shapes.get("classifier.bias", (0,))[0],
            "units": tuple(
                contract.count_layers(shapes, rf"blocks\.{s}\.(\d+)\.") for s in range(stages)
            ),
            "width_factor": shapes["conv_head.weight"][0] / efficientnet.TOP,
            "channels": shapes["conv_stem.weight"][1],
        }
        return contract.DetectedModel(
            options, assumed=() if "image_size" in metadata else ("image_size",)
        )

    def rules(self, config: Config, layout: Mapping[str, Any]) -> list[Rule | Constant]:
        all_rules = [
            pytorch.convolution("root", "conv_stem"),
            *pytorch.batch_norm("root/norm", "bn1"),
            pytorch.pointwise("top", "conv_head"),
            *pytorch.batch_norm("top_norm", "bn2"),
            *pytorch.linear("head", "classifier"),
        ]
        for shape in config.blocks:
            _, stage, part = shape.name.split("/")
            layers = None if part == "first" else range(1, shape.count + 1)
            block = f"blocks.{int(stage) - 1}.{0 if layers is None else '{layer}'}"
            names = _TIMM if shape.expansion > 1 else _TIMM_AS_WIDE
            all_rules += _block(shape, block, names, layers)
        return all_rules

    def preprocessing(self, config: Config) -> Preprocessing:
        """As for the published models."""
        return _preprocessing(config)

    def architecture(self, config: Config, layout: Mapping[str, Any]) -> tuple[str, dict]:
        for name, size in efficientnet.SIZES.items():
            published = efficientnet.units(size.depth), size.width
            if (config.units, config.width_factor) == published:
                channels = {} if config.channels == 3 else {"in_chans": config.channels}
                return f"tf_efficientnet_{name.lower()}", channels
        raise CheckpointError(
            f"timm has no EfficientNet of units {config.units} and width {config.width_factor:g}, only "
            f"{', '.join(efficientnet.SIZES)}: write a .safetensors file"
        )


class HuggingFace(contract.HuggingFaceConversion):
    """EfficientNetForImageClassification, and EfficientNetModel without a head."""

    model_types = ("efficientnet",)

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if metadata.get("model_type") not in self.model_types:
            return None
        value = _DEFAULTS | dict(metadata)
        depth = value["depth_coefficient"]
        options = {
            "image_size": sizes.parse(value["image_size"]),
            "num_classes": shapes.get("classifier.bias", (0,))[0],
            "units": tuple(math.ceil(depth * n) for n in value["num_block_repeats"]),
            "width_factor": value["width_coefficient"],
            "channels": value["num_channels"],
        }
        config = Config(**options)
        for name, computed in _of_stages(config).items():
            if _listed(value.get(name, computed)) != _listed(computed):
                raise CheckpointError(
                    f"an EfficientNet with {name} = {value[name]} is not supported, only with {computed}"
                )
        blocks = {shape.first for shape in config.blocks if shape.stride == 2}
        asymmetric, padded = _padded(config), sorted(blocks & set(value["depthwise_padding"]))
        if padded != asymmetric:
            raise CheckpointError(
                f"depthwise_padding has the blocks {padded}, but with images of {value['image_size']} pixels "
                f"TensorFlow pads so in the blocks {asymmetric}: other paddings are not supported"
            )
        prefix = "efficientnet." if any(n.startswith("efficientnet.") for n in shapes) else ""
        return contract.DetectedModel(options, {"prefix": prefix})

    def rules(self, config: Config, layout: Mapping[str, Any]) -> list[Rule | Constant]:
        """Which tensors are which parameters; `prefix` is of all names but the head's."""
        prefix = layout["prefix"]
        all_rules = [
            pytorch.convolution("root", f"{prefix}embeddings.convolution"),
            *pytorch.batch_norm("root/norm", f"{prefix}embeddings.batchnorm"),
            pytorch.pointwise("top", f"{prefix}encoder.top_conv"),
            *pytorch.batch_norm("top_norm", f"{prefix}encoder.top_bn"),
            *pytorch.linear("head", "classifier"),
        ]
        for shape in config.blocks:
            first = shape.name.endswith("first")
            layers = None if first else range(shape.first, shape.first + shape.count)
            block = f"{prefix}encoder.blocks.{shape.first if first else '{layer}'}"
            all_rules += _block(shape, block, _HUGGING_FACE, layers)
        return all_rules

    def layout(self, config: Config) -> dict:
        return {"prefix": "efficientnet." if config.num_classes else ""}

    def refusal(self, config: Config) -> str:
        if any(length % 2 for length in config.height_width):
            return "transformers pads images of an odd height or width otherwise than TensorFlow"
        pairs = zip(config.blocks, config.grids, strict=False)
        if any(shape.stride == 2 and sum(grid) % 2 for shape, grid in pairs):
            return (
                "transformers pads height and width alike, which images of this shape do not need"
            )
        added = [s for s in config.blocks if s.name.endswith("first") and s.inputs == s.outputs]
        if any(shape.stride == 1 for shape in added):
            return "in transformers the first block of a stage is never added to its input"
        return ""

    def preprocessing(self, config: Config) -> Preprocessing:
        """As for the published models."""
        return _preprocessing(config)

    def config_json(self, config: Config, layout: Mapping[str, Any]) -> dict[str, Any]:
        size = config.image_size
        task = "ForImageClassification" if config.num_classes else "Model"
        return _of_stages(config) | {
            "architectures": [f"EfficientNet{task}"],
            "model_type": "efficientnet",
            "image_size": size if isinstance(size, int) else list(size),
            "num_channels": config.channels,
            "width_coefficient": config.width_factor,
            "depth_coefficient": 1.0,
            "num_block_repeats": list(config.units),
            "depthwise_padding": _padded(config),
            "dropout_rate": config.dropout,
            "drop_connect_rate": config.drop_path,
        }


def _block(
    shape: Shape, theirs: str, names: Mapping[str, str], layers: range | None
) -> Iterator[Rule | Constant]:
    """The rules of a block, or of the stacked ones of a stage, whose numbers are `layers`."""
    first = layers[0] if layers else 0
    for ours, name in names.items():
        ours_in, theirs_in = f"{shape.name}/{ours}", f"{theirs}.{name}"
        if ours.startswith("expand") and shape.expansion == 1:
            continue
        if ours.endswith("norm"):
            yield from pytorch.batch_norm(ours_in, theirs_in, layers)
        elif ours == "depthwise":
            yield pytorch.convolution(ours_in, theirs_in, first)
        else:
            yield pytorch.pointwise(ours_in, theirs_in, first)
        if ours.startswith("gate"):
            yield Rule(f"{ours_in}/bias", f"{theirs_in}.bias", first_layer=first)


def _preprocessing(config: Config) -> Preprocessing:
    """Of the published models: an image is cut with 32 pixels to spare."""
    side = min(config.height_width) + 32
    return torchvision_crop(config.image_size, side)


def _of_stages(config: Config) -> dict[str, Any]:
    """`_COMPUTED` of as many stages as there are, and the channels of the last feature map."""
    stages = len(config.units)
    computed = {n: v[:stages] if isinstance(v, list) else v for n, v in _COMPUTED.items()}
    return computed | {"hidden_dim": config.outputs}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _padded(config: Config) -> list[int]:
    """The blocks of stride 2 that meet an odd height, around which TensorFlow pads alike."""
    pairs = zip(config.blocks, config.grids, strict=False)
    return [shape.first for shape, grid in pairs if shape.stride == 2 and grid[0] % 2]
