"""CaiTs with the names of their authors' code and of timm, which are the same."""

from collections.abc import Mapping
from typing import Any

from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import contract, pytorch
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.interchange.conversions.vit_new_timm import ratio, timm_size
from vit_jax.models.zoo import cait


class Timm(contract.TimmConversion):
    """timm's Cait."""

    file_conventions = {}

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if "blocks_token_only.0.attn.q.weight" not in shapes:
            return None
        if metadata.get("global_pool", "token") != "token":
            raise CheckpointError("of timm's CaiTs, those with global_pool='avg' are not supported")
        hidden = shapes["blocks.0.mlp.fc1.bias"][0]
        if shapes["blocks_token_only.0.mlp.fc1.bias"][0] != hidden:
            raise CheckpointError(
                "a CaiT whose class token has MLPs of another size than the patches is not supported"
            )
        options = contract.timm_sizes(
            shapes, "patch_embed.proj.weight", shapes["pos_embed"][1], 0, metadata
        )
        return contract.DetectedModel(
            options
            | {
                "mlp_dim": hidden,
                "heads": shapes["blocks.0.attn.proj_l.bias"][0],
                "class_depth": contract.count_layers(shapes, r"blocks_token_only\.(\d+)\."),
            }
        )

    def rules(self, config: cait.CaiTConfig, layout: Mapping[str, Any]) -> list[Rule]:
        patches, theirs = "layers", "blocks.{layer}"
        of_class, last = "class_blocks/layers", "blocks_token_only.{layer}"
        attention = f"{last}.attn"
        return [
            *pytorch.patches("embedding", "patch_embed.proj"),
            Rule("class_token", "cls_token"),
            Rule("position", "pos_embed"),
            *pytorch.block(patches, theirs, config.width, config.heads),
            *pytorch.linear(f"{patches}/attention/before", f"{theirs}.attn.proj_l"),
            *pytorch.linear(f"{patches}/attention/after", f"{theirs}.attn.proj_w"),
            *_scales(patches, theirs),
            *pytorch.norm(f"{of_class}/attention_norm", f"{last}.norm1"),
            *pytorch.attention(
                f"{of_class}/attention",
                tuple(f"{attention}.{name}" for name in "qkv"),
                f"{attention}.proj",
                config.width,
                config.heads,
            ),
            *pytorch.norm(f"{of_class}/mlp_norm", f"{last}.norm2"),
            *pytorch.mlp(f"{of_class}/mlp", f"{last}.mlp"),
            *_scales(of_class, last),
            *pytorch.norm("norm", "norm"),
            *pytorch.linear("head", "head"),
        ]

    def refusal(self, config: cait.CaiTConfig) -> str:
        return contract.refusal_of_pooling(config)

    def architecture(self, config: cait.CaiTConfig, layout: Mapping[str, Any]) -> tuple[str, dict]:
        return "cait_xxs24_224", {
            "img_size": timm_size(config.image_size),
            "patch_size": config.patch,
            "embed_dim": config.width,
            "depth": config.depth,
            "num_heads": config.heads,
            "mlp_ratio": ratio(config.mlp_dim, config.width),
            "mlp_ratio_token_only": ratio(config.mlp_dim, config.width),
            "depth_token_only": config.class_depth,
            "init_values": config.layer_scale_init,
        }


def _scales(ours: str, theirs: str) -> list[Rule]:
    """LayerScale of attention and MLP."""
    return [
        Rule(f"{ours}/attention_scale/scale", f"{theirs}.gamma_1"),
        Rule(f"{ours}/mlp_scale/scale", f"{theirs}.gamma_2"),
    ]
