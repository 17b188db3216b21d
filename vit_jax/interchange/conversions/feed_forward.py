"""Feed-forward-only networks with the names of their authors' code, lukemelas/do-you-even-need-attention."""

import math
from collections.abc import Mapping
from typing import Any

from vit_jax.interchange.conversions import contract, pytorch
from vit_jax.interchange.conversions.rules import Rule, transposed
from vit_jax.models.preprocessing import Preprocessing, torchvision_crop

_TABLE = "pos_encoding.pos_embed"


class Authors(contract.Conversion):
    """lukemelas/do-you-even-need-attention, its `LinearVisionTransformer`."""

    conventions = {"activation": "gelu", "epsilon": 1e-6}

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if _TABLE not in shapes or "blocks.0.mlp2.fc1.weight" not in shapes:
            return None
        hidden, tokens = shapes["blocks.0.mlp2.fc1.weight"]
        options = contract.timm_sizes(shapes, "patch_embed.proj.weight", tokens, 1, metadata) | {
            "mlp_dim": shapes["blocks.0.mlp1.fc1.weight"][0],
            "token_mlp_dim": hidden,
            "position_grid": shapes[_TABLE][2:],
        }
        return contract.DetectedModel(options, assumed=tuple(self.conventions))

    def rules(self, config, layout: Mapping[str, Any]) -> list[Rule]:
        result = [
            *pytorch.patches("embedding", "patch_embed.proj"),
            Rule("class_token", "cls_token"),
            Rule("class_position", "pos_encoding.cls_pos_embed"),
            Rule("position", _TABLE, transposed(0, 2, 3, 1)),
        ]
        for kind, number in (("channel", 1), ("token", 2)):
            ours, theirs = f"layers/{kind}", "blocks.{layer}"
            result += pytorch.norm(f"{ours}_norm", f"{theirs}.norm{number}")
            result += pytorch.mlp(f"{ours}_mlp", f"{theirs}.mlp{number}")
        return [*result, *pytorch.norm("norm", "norm"), *pytorch.linear("head", "head")]

    def refusal(self, config) -> str:
        return contract.refusal_of_pooling(config)

    def preprocessing(self, config) -> Preprocessing:
        """Of the published models."""
        side = math.floor(min(config.height_width) / 0.875)
        return torchvision_crop(config.image_size, side)
