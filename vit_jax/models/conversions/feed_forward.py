"""Feed-forward-only networks with the names of their authors' code, lukemelas/do-you-even-need-attention."""

import math
from collections.abc import Mapping
from typing import Any

from vit_jax.models.conversions import pytorch
from vit_jax.models.conversions.contract import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Conversion,
    DetectedModel,
    Preprocessing,
    Shapes,
    count,
    image_size,
    patch_grid,
    refusal_of_pooling,
)
from vit_jax.models.conversions.rules import Rule, transposed

_TABLE = "pos_encoding.pos_embed"


class Authors(Conversion):
    """lukemelas/do-you-even-need-attention, its `LinearVisionTransformer`."""

    conventions = {"activation": "gelu", "epsilon": 1e-6}

    def recognise(self, shapes: Shapes, said: Mapping[str, Any]) -> DetectedModel | None:
        """See `Conversion`."""
        if _TABLE not in shapes or "blocks.0.mlp2.fc1.weight" not in shapes:
            return None
        width, channels, patch, _ = shapes["patch_embed.proj.weight"]
        hidden, tokens = shapes["blocks.0.mlp2.fc1.weight"]
        grid, _ = patch_grid(tokens, (1,), patch, said)
        options = {
            "image_size": image_size(grid, patch),
            "num_classes": shapes.get("head.bias", (0,))[0],
            "patch": patch,
            "depth": count(shapes, r"blocks\.(\d+)\."),
            "width": width,
            "mlp_dim": shapes["blocks.0.mlp1.fc1.weight"][0],
            "token_mlp_dim": hidden,
            "position_grid": shapes[_TABLE][2:],
            "channels": channels,
        }
        return DetectedModel(options, assumed=tuple(self.conventions))

    def rules(self, config, layout: Mapping[str, Any]) -> list[Rule]:
        """See `Conversion`."""
        result = [
            pytorch.convolution("embedding", "patch_embed.proj"),
            Rule("embedding/bias", "patch_embed.proj.bias"),
            Rule("class_token", "cls_token"),
            Rule("class_position", "pos_encoding.cls_pos_embed"),
            Rule("position", _TABLE, transposed(0, 2, 3, 1)),
        ]
        for kind, number in (("channel", 1), ("token", 2)):
            ours, theirs = f"layers/{kind}", "blocks.{layer}"
            result += pytorch.norm(f"{ours}_norm", f"{theirs}.norm{number}")
            result += pytorch.linear(f"{ours}_mlp/up", f"{theirs}.mlp{number}.fc1")
            result += pytorch.linear(f"{ours}_mlp/down", f"{theirs}.mlp{number}.fc2")
        return [*result, *pytorch.norm("norm", "norm"), *pytorch.linear("head", "head")]

    def refusal(self, config) -> str:
        """See `Conversion`."""
        return refusal_of_pooling(config)

    def preprocessing(self, config) -> Preprocessing:
        """Of the published models."""
        side = math.floor(min(config.height_width) / 0.875)
        return Preprocessing(
            config.image_size, IMAGENET_MEAN, IMAGENET_STD, "torchvision", side, "bicubic"
        )
