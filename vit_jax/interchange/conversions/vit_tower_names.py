"""Which tensors of Hugging Face's other ViTs are which parameters. What their config.json says is in `vit_towers`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.interchange.conversions import pytorch
from vit_jax.interchange.conversions.rules import Constant, Rule, reshaped
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig


def rules(config: PublishedViTConfig, layout: Mapping[str, Any]) -> list[Rule | Constant]:
    """Which tensors are which parameters, by the kind that `layout` has."""
    kind, at = layout["kind"], layout["prefix"]
    own = {"dinov3_vit": _rules_dinov3, "vit_mae": _rules_bert, "clip": _rules_clip}
    own |= {"siglip": _rules_clip, "siglip2": _rules_clip, "tipsv2": _rules_tips}
    own |= {"beit": _rules_beit, "data2vec-vision": _rules_beit, "aimv2": _rules_aim}
    idle = kind == "clip" and config.last_norm == "none"
    return [
        *own.get(kind, _rules_bert)(config, kind, at),
        *pytorch.linear("head", "classifier"),
        *(_idle_norm(f"{at}post_layernorm", config.width) if idle else ()),
    ]


def _idle_norm(theirs: str, width: int) -> list[Constant]:
    """The last norm of CLIP, which its classifier does not read."""
    values = {"weight": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}
    return [Constant(f"{theirs}.{name}", value) for name, value in values.items()]


def _rules_bert(config: PublishedViTConfig, kind: str, at: str) -> list[Rule]:
    """DINOv2's, MAE's, I-JEPA's and ViT-MSN's names, which continue those of BERT."""
    theirs, plain = f"{at}encoder.layer.{{layer}}", not kind.startswith("dinov2")
    attention = f"{theirs}.attention.attention"
    norms = ("layernorm_before", "layernorm_after") if plain else ("norm1", "norm2")
    up = f"{theirs}.intermediate.dense" if plain else f"{theirs}.mlp.fc1"
    down = f"{theirs}.output.dense" if plain else f"{theirs}.mlp.fc2"
    if config.gated_mlp:
        down = f"{theirs}.mlp.weights_out"
    return [
        Rule("class_token", f"{at}embeddings.cls_token"),
        Rule("registers", f"{at}embeddings.register_tokens"),
        Rule("position", f"{at}embeddings.position_embeddings"),
        pytorch.convolution("embedding", f"{at}embeddings.patch_embeddings.projection"),
        Rule("embedding/bias", f"{at}embeddings.patch_embeddings.projection.bias"),
        *_blocks(
            config,
            theirs,
            norms=norms,
            qkv=tuple(f"{attention}.{name}" for name in ("query", "key", "value")),
            out=f"{theirs}.attention.output.dense",
            up=f"{theirs}.mlp.weights_in" if config.gated_mlp else up,
            down=down,
        ),
        *pytorch.norm("encoder/norm", f"{at}layernorm"),
    ]


def _rules_beit(config: PublishedViTConfig, kind: str, at: str) -> list[Rule]:
    """BEiT's and data2vec's names: those of ViT, tables of biases, LayerScale and a norm of what is pooled."""
    theirs, table = (
        f"{at}encoder.layer.{{layer}}",
        "relative_position_bias.relative_position_bias_table",
    )
    plain = _rules_bert(config, kind, at)
    biased = config.position == "bias2d"
    own = [
        Rule("encoder/layers/position", f"{theirs}.attention.attention.{table}"),
        Rule("position", f"{at}encoder.{table}"),
    ]
    return [
        *(
            r
            for r in plain
            if not r.ours.endswith("_scale/scale") and (r.ours != "position" or not biased)
        ),
        *(own if biased else ()),
        Rule("encoder/layers/attention_scale/scale", f"{theirs}.lambda_1"),
        Rule("encoder/layers/mlp_scale/scale", f"{theirs}.lambda_2"),
        *pytorch.norm("pool_norm", f"{at}pooler.layernorm"),
    ]


def _rules_tips(config: PublishedViTConfig, kind: str, at: str) -> list[Rule]:
    """TIPSv2's names: timm's, but of the MLPs."""
    theirs = f"{at}blocks.{{layer}}"
    return [
        Rule("class_token", f"{at}cls_token"),
        Rule("registers", f"{at}register_tokens"),
        Rule("position", f"{at}pos_embed"),
        *pytorch.patches("embedding", f"{at}patch_embed.proj"),
        *_blocks(
            config,
            theirs,
            norms=("norm1", "norm2"),
            qkv=(f"{theirs}.attn.qkv",),
            out=f"{theirs}.attn.proj",
            up=f"{theirs}.mlp.w12" if config.gated_mlp else f"{theirs}.mlp.c_fc",
            down=f"{theirs}.mlp.w3" if config.gated_mlp else f"{theirs}.mlp.c_proj",
            scales=("ls1.gamma", "ls2.gamma"),
        ),
        *pytorch.norm("encoder/norm", f"{at}norm"),
    ]


def _rules_aim(config: PublishedViTConfig, kind: str, at: str) -> list[Rule]:
    """AIMv2's names."""
    theirs, width = f"{at}encoder.layers.{{layer}}", config.width
    table = reshaped((1, -1, width), (-1, width))
    return [
        Rule("position", f"{at}embeddings.position_embedding.weight", table),
        *pytorch.patches("embedding", f"{at}embeddings.patch_embed"),
        *pytorch.norm("patch_norm", f"{at}embeddings.rms_norm"),
        *_blocks(
            config,
            theirs,
            norms=("rms_norm1", "rms_norm2"),
            qkv=tuple(f"{theirs}.attention.{name}_proj" for name in "qkv"),
            out=f"{theirs}.attention.out_proj",
            up=(f"{theirs}.ffn.gate_proj", f"{theirs}.ffn.up_proj"),
            down=f"{theirs}.ffn.down_proj",
        ),
        *pytorch.norm("encoder/norm", f"{at}rms_norm"),
    ]


def _rules_dinov3(config: PublishedViTConfig, kind: str, at: str) -> list[Rule]:
    theirs = f"{at}layer.{{layer}}"
    gate = (f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj")
    return [
        Rule("class_token", f"{at}embeddings.cls_token"),
        Rule("registers", f"{at}embeddings.register_tokens"),
        pytorch.convolution("embedding", f"{at}embeddings.patch_embeddings"),
        Rule("embedding/bias", f"{at}embeddings.patch_embeddings.bias"),
        *_blocks(
            config,
            theirs,
            norms=("norm1", "norm2"),
            qkv=tuple(f"{theirs}.attention.{name}_proj" for name in "qkv"),
            out=f"{theirs}.attention.o_proj",
            up=gate if config.gated_mlp else gate[1],
            down=f"{theirs}.mlp.down_proj",
        ),
        *pytorch.norm("encoder/norm", f"{at}norm"),
    ]


def _rules_clip(config: PublishedViTConfig, kind: str, at: str) -> list[Rule]:
    """CLIP's and SigLIP's names."""
    theirs, width = f"{at}encoder.layers.{{layer}}", config.width
    last = "pool_norm" if config.last_norm == "pooled" else "encoder/norm"
    patches = f"{at}embeddings.patch_embedding"
    kernel = pytorch.convolution("embedding", patches)
    if kind == "siglip2":
        kernel = Rule("embedding/kernel", f"{patches}.weight", pytorch.flat_patches(config))
    return [
        Rule("class_token", f"{at}embeddings.class_embedding", reshaped((1, 1, width), (width,))),
        Rule(
            "position",
            f"{at}embeddings.position_embedding.weight",
            reshaped((1, -1, width), (-1, width)),
        ),
        kernel,
        Rule("embedding/bias", f"{patches}.bias"),
        *pytorch.norm("pre_norm", f"{at}pre_layrnorm"),
        *_blocks(
            config,
            theirs,
            norms=("layer_norm1", "layer_norm2"),
            qkv=tuple(f"{theirs}.self_attn.{name}_proj" for name in "qkv"),
            out=f"{theirs}.self_attn.out_proj",
            up=f"{theirs}.mlp.fc1",
            down=f"{theirs}.mlp.fc2",
        ),
        *pytorch.norm(last, f"{at}post_layernorm"),
        Rule("pool/probe", f"{at}head.probe"),
        *pytorch.attention(
            "pool/attention",
            (f"{at}head.attention.in_proj",),
            f"{at}head.attention.out_proj",
            width,
            config.pool_heads,
        ),
        *pytorch.norm("pool/norm", f"{at}head.layernorm"),
        *pytorch.mlp("pool/mlp", f"{at}head.mlp"),
    ]


def _blocks(
    config: PublishedViTConfig,
    theirs: str,
    *,
    norms: tuple[str, str],
    qkv: tuple[str, ...],
    out: str,
    up: str | tuple[str, str],
    down: str,
    scales: tuple[str, str] = ("layer_scale1.lambda1", "layer_scale2.lambda1"),
) -> list[Rule]:
    """The rules of a block, from its names."""
    ours = "encoder/layers"
    mlp = pytorch.gated if config.gated_mlp else pytorch.linear
    biases = None if config.key_bias else (f"{qkv[0]}.bias", f"{qkv[2]}.bias")
    return [
        *pytorch.norm(f"{ours}/attention_norm", f"{theirs}.{norms[0]}"),
        *pytorch.attention(
            f"{ours}/attention",
            qkv,
            out,
            config.width,
            config.heads,
            query_value_biases=biases,
        ),
        Rule(f"{ours}/attention_scale/scale", f"{theirs}.{scales[0]}"),
        *pytorch.norm(f"{ours}/mlp_norm", f"{theirs}.{norms[1]}"),
        *mlp(f"{ours}/mlp/up", up),
        *pytorch.linear(f"{ours}/mlp/down", down),
        Rule(f"{ours}/mlp_scale/scale", f"{theirs}.{scales[1]}"),
    ]
