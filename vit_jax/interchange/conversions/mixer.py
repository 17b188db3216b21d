"""MLP-Mixers: of google-research/vision_transformer, which big_vision shares, and of timm.

timm computes the published weights with the exact GELU, and neither a file nor a config.json can tell it
of the tanh one that they were trained with.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import contract, flax, pytorch
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.interchange.conversions.vit_new_timm import ratio, timm_size
from vit_jax.interchange.conversions.vit_timm import activation
from vit_jax.models.preprocessing import Preprocessing
from vit_jax.models.zoo import mixer

_IN_TIMM = ("s32", "s16", "b32", "b16", "l32", "l16")


class Flax(contract.Conversion):
    """google-research/vision_transformer and big_vision; the first files had other names and axes."""

    conventions = {"activation": "gelu_tanh", "epsilon": 1e-6}
    renamed = (
        (r"Mixer/encoderblock_(\d+)/", r"MixerBlock_\1/"),
        (r"(MixerBlock_\d+/LayerNorm)_[1-9]\d*/", r"\1_1/"),
        (r"(token|channel)_mixing_phase_\d+/(kernel|bias)1$", r"\1_mixing/Dense_0/\2"),
        (r"(token|channel)_mixing_phase_\d+/(kernel|bias)2$", r"\1_mixing/Dense_1/\2"),
        (r"Mixer/encoder_norm/", "pre_head_layer_norm/"),
        (r"^embedding/(kernel|bias)$", r"stem/\1"),
    )

    def canonical(self, names: Iterable[str]) -> dict[str, str]:
        """Every name with the one that it has in `rules`; only the first files have `Mixer/encoder_norm`."""
        names = tuple(names)
        first = any("Mixer/encoder_norm/" in name for name in names)
        return super().canonical(names) if first else {name: name for name in names}

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if "stem/kernel" not in shapes or "MixerBlock_0/LayerNorm_0/scale" not in shapes:
            return None
        idle = {name: list(shape) for name, shape in shapes.items() if _has_idle_axes(name, shape)}
        squeezed = {name: tuple(size for size in shape if size > 1) for name, shape in idle.items()}
        shape = {**shapes, **squeezed}
        patch, _, channels, width = shape["stem/kernel"]
        tokens, token_mlp_dim = shape["MixerBlock_0/token_mixing/Dense_0/kernel"]
        grid, _ = contract.patch_grid(tokens, (0,), patch, metadata)
        options = {
            "image_size": contract.image_size(grid, patch),
            "num_classes": shape.get("head/bias", (0,))[0],
            "patch": patch,
            "depth": contract.count_layers(shape, r"MixerBlock_(\d+)/"),
            "width": width,
            "mlp_dim": shape["MixerBlock_0/channel_mixing/Dense_0/kernel"][1],
            "token_mlp_dim": token_mlp_dim,
            "channels": channels,
        }
        return contract.DetectedModel(options, {"reshaped": idle}, assumed=tuple(self.conventions))

    def rules(self, config: mixer.Config, layout: Mapping[str, Any]) -> list[Rule]:
        block = "MixerBlock_{layer}"
        return [
            *flax.affine("embedding", "stem"),
            *flax.norm("layers/token_norm", f"{block}/LayerNorm_0"),
            *flax.mlp("layers/token_mlp", f"{block}/token_mixing"),
            *flax.norm("layers/channel_norm", f"{block}/LayerNorm_1"),
            *flax.mlp("layers/channel_mlp", f"{block}/channel_mixing"),
            *flax.norm("norm", "pre_head_layer_norm"),
            *flax.affine("head", "head"),
        ]

    def refusal(self, config: mixer.Config) -> str:
        return _refusal(config)


class Timm(contract.TimmConversion):
    """timm."""

    conventions = {"epsilon": 1e-6, "activation": "gelu"}

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if "stem.proj.weight" not in shapes:
            return None
        token_mlp_dim, tokens = shapes["blocks.0.mlp_tokens.fc1.weight"]
        options = contract.timm_sizes(shapes, "stem.proj.weight", tokens, 0, metadata) | {
            "mlp_dim": shapes["blocks.0.mlp_channels.fc1.weight"][0],
            "token_mlp_dim": token_mlp_dim,
            "activation": activation(metadata),
        }
        assumed = ("epsilon",) if "act_layer" in metadata else ("epsilon", "activation")
        return contract.DetectedModel(options, assumed=assumed)

    def rules(self, config: mixer.Config, layout: Mapping[str, Any]) -> list[Rule]:
        ours, theirs = "layers", "blocks.{layer}"
        result = pytorch.patches("embedding", "stem.proj")
        for kind, number in (("token", 1), ("channel", 2)):
            result += pytorch.norm(f"{ours}/{kind}_norm", f"{theirs}.norm{number}")
            result += pytorch.mlp(f"{ours}/{kind}_mlp", f"{theirs}.mlp_{kind}s")
        return [*result, *pytorch.norm("norm", "norm"), *pytorch.linear("head", "head")]

    def refusal(self, config: mixer.Config) -> str:
        return _refusal(config)

    def preprocessing(self, config: mixer.Config) -> Preprocessing:
        """As for the published models."""
        side = math.floor(min(config.height_width) / 0.875)
        return Preprocessing(config.image_size, eval_crop="central", eval_resize=side)

    def architecture(self, config: mixer.Config, layout: Mapping[str, Any]) -> tuple[str, dict]:
        sizes = {(depth, width): size for size, (depth, width, *_) in mixer.SIZES.items()}
        name = f"{sizes.get((config.depth, config.width), '?')}{config.patch}".lower()
        if name not in _IN_TIMM:
            raise CheckpointError(
                f"timm has no Mixer of depth {config.depth}, width {config.width} and patch {config.patch}, only "
                f"{', '.join(_IN_TIMM)}: write a .safetensors file"
            )
        ratios = [ratio(hidden, config.width) for hidden in (config.token_mlp_dim, config.mlp_dim)]
        return f"mixer_{name}_224", {"img_size": timm_size(config.image_size), "mlp_ratio": ratios}


def _refusal(config: mixer.Config) -> str:
    if config.pool == "mean" and not config.weighted_layers:
        return ""
    return "the format's Mixers take the mean of the last layer's tokens"


def _has_idle_axes(name: str, shape: tuple[int, ...]) -> bool:
    """Whether it is of an MLP and has axes of length 1 beside its own (the first files)."""
    return "_mixing/" in name and len(shape) > (2 if name.endswith("kernel") else 1)
