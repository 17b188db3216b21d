"""LocalViTs with the names of their authors' code, ofsoundof/LocalViT.

What no tensor tells: heads, of which published widths have theirs; the activation, taken for the hard
swish of all published models; and which sigmoid efficient channel attention has.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.interchange.conversions import contract, pytorch
from vit_jax.interchange.conversions.rules import Constant, Rule, reshaped
from vit_jax.models.preprocessing import Preprocessing, torchvision_crop
from vit_jax.models.zoo import localvit

# In the `Sequential` of an MLP: the convolutions, their norms, and the gate, which moves what follows.
_UP, _UP_NORM, _DEPTHWISE, _DEPTHWISE_NORM, _GATE = 0, 1, 3, 4, 6


class Authors(contract.Conversion):
    """ofsoundof/LocalViT."""

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if _part(_DEPTHWISE).format(layer=0) + ".weight" not in shapes:
            return None
        mlp = {n.removeprefix("blocks.0.conv.conv."): shape for n, shape in shapes.items()}
        rows = shapes["pos_embed"][1]
        common = contract.timm_sizes(shapes, "patch_embed.proj.weight", rows, 1, metadata)
        hidden, width = mlp[f"{_UP}.weight"][0], common["width"]
        squeezed = mlp.get(f"{_GATE}.fc.0.bias")
        gate = "se" if squeezed else "eca" if f"{_GATE}.conv.weight" in mlp else "none"
        published = {size["width"]: size["heads"] for size in localvit.SIZES.values()}
        options = common | {
            "mlp_dim": hidden,
            "heads": published.get(width),
            "activation": "hard_swish",
            "gate": gate,
            "reduction": hidden // squeezed[0] if squeezed else 1,
        }
        left_open = contract.heads_of(published, width) | {
            "activation": contract.Open(doubt="" if squeezed else "activation=hard_swish is taken"),
        }
        if gate == "eca":
            left_open["gate"] = contract.Open(("eca", "eca_hard"), "gate=eca is taken")
        return contract.DetectedModel(options, open=left_open)

    def rules(self, config, layout: Mapping[str, Any]) -> list[Rule | Constant]:
        block, layers = "blocks.{layer}", range(config.depth)
        mlp, gate = "layers/mlp", _part(_GATE)
        down = _GATE + (config.gate != "none")
        eca = localvit.eca_size(config.mlp_dim)
        return [
            *pytorch.patches("embedding", "patch_embed.proj"),
            Rule("class_token", "cls_token"),
            Rule("position", "pos_embed"),
            *pytorch.norm("layers/attention_norm", f"{block}.norm1"),
            *pytorch.attention(
                "layers/attention",
                (f"{block}.attn.qkv",),
                f"{block}.attn.proj",
                config.width,
                config.heads,
            ),
            pytorch.pointwise(f"{mlp}/up", _part(_UP)),
            *pytorch.batch_norm(f"{mlp}/up_norm", _part(_UP_NORM), layers),
            pytorch.convolution(f"{mlp}/depthwise", _part(_DEPTHWISE)),
            *pytorch.batch_norm(f"{mlp}/depthwise_norm", _part(_DEPTHWISE_NORM), layers),
            *pytorch.linear(f"{mlp}/gate/reduce", f"{gate}.fc.0"),
            *pytorch.linear(f"{mlp}/gate/expand", f"{gate}.fc.2"),
            Rule(f"{mlp}/gate/kernel", f"{gate}.conv.weight", reshaped((eca,), (1, 1, eca))),
            pytorch.pointwise(f"{mlp}/down", _part(down)),
            *pytorch.batch_norm(f"{mlp}/down_norm", _part(down + 1), layers),
            *pytorch.norm("norm", "norm"),
            *pytorch.linear("head", "head"),
        ]

    def refusal(self, config) -> str:
        return contract.refusal_of_pooling(config)

    def preprocessing(self, config) -> Preprocessing:
        """Of the published models."""
        side = int(np.floor(min(config.height_width) / 0.875))
        return torchvision_crop(config.image_size, side)


def _part(number: int) -> str:
    """A part of a block's `Sequential`."""
    return f"blocks.{{layer}}.conv.conv.{number}"
