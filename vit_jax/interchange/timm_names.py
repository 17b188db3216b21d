"""The tensor names of timm's ViT, DeiT, hybrid, MLP-Mixer and BiT, as rules."""

from vit_jax.interchange import pytorch, rules
from vit_jax.interchange.rules import Rule, expanded
from vit_jax.models import hybrid, mixer, resnet

# BiT's head is a convolution: (classes, channels, 1, 1).
_HEAD = rules.chain(expanded(2, 3), rules.transposed(1, 0))


def table(config) -> list[Rule]:
    """The rules for a model of any family; parameters that the model does not have may be among them."""
    if isinstance(config, mixer.Config):
        return _mixer_rules()
    if isinstance(config, resnet.Config):
        return [
            *_resnet_rules("backbone", "", config),
            *pytorch.norm("norm", "norm"),
            Rule("head/kernel", "head.fc.weight", _HEAD),
            Rule("head/bias", "head.fc.bias"),
        ]
    embedding = [
        pytorch.convolution("embedding", "patch_embed.proj"),
        Rule("embedding/bias", "patch_embed.proj.bias"),
    ]
    if isinstance(config, hybrid.Config):
        embedding += _resnet_rules("embedding/backbone", "patch_embed.backbone.", config.backbone)
    return [*embedding, *_vit_rules(config)]


def _vit_rules(config) -> list[Rule]:
    ours, theirs = "encoder/layers", "blocks.{layer}"
    attention = f"{theirs}.attn"
    pool = "attn_pool"
    return [
        Rule("class_token", "cls_token"),
        Rule("distillation_token", "dist_token"),
        Rule("registers", "reg_token"),
        Rule("position", "pos_embed"),
        *pytorch.norm(f"{ours}/attention_norm", f"{theirs}.norm1"),
        *pytorch.attention(
            f"{ours}/attention",
            (f"{attention}.qkv",),
            f"{attention}.proj",
            config.width,
            config.heads,
        ),
        *pytorch.norm(f"{ours}/attention/query_norm", f"{attention}.q_norm"),
        *pytorch.norm(f"{ours}/attention/key_norm", f"{attention}.k_norm"),
        *pytorch.norm(f"{ours}/mlp_norm", f"{theirs}.norm2"),
        *pytorch.linear(f"{ours}/mlp/up", f"{theirs}.mlp.fc1"),
        *pytorch.linear(f"{ours}/mlp/down", f"{theirs}.mlp.fc2"),
        *pytorch.norm("encoder/norm", "norm"),
        Rule("pool/probe", f"{pool}.latent"),
        *pytorch.attention(
            "pool/attention",
            (f"{pool}.q", f"{pool}.kv"),
            f"{pool}.proj",
            config.width,
            config.heads,
        ),
        *pytorch.norm("pool/norm", f"{pool}.norm"),
        *pytorch.linear("pool/mlp/up", f"{pool}.mlp.fc1"),
        *pytorch.linear("pool/mlp/down", f"{pool}.mlp.fc2"),
        # Before its version 0.8, for ImageNet-21k.
        *pytorch.linear("representation", "pre_logits.fc"),
        *pytorch.linear("head", "head"),
        *pytorch.linear("head_distilled", "head_dist"),
    ]


def _mixer_rules() -> list[Rule]:
    ours, theirs = "layers", "blocks.{layer}"
    result = [
        pytorch.convolution("embedding", "stem.proj"),
        Rule("embedding/bias", "stem.proj.bias"),
    ]
    for kind, number in (("token", 1), ("channel", 2)):
        result += pytorch.norm(f"{ours}/{kind}_norm", f"{theirs}.norm{number}")
        result += pytorch.linear(f"{ours}/{kind}_mlp/up", f"{theirs}.mlp_{kind}s.fc1")
        result += pytorch.linear(f"{ours}/{kind}_mlp/down", f"{theirs}.mlp_{kind}s.fc2")
    return [*result, *pytorch.norm("norm", "norm"), *pytorch.linear("head", "head")]


def _resnet_rules(ours: str, theirs: str, config: resnet.Config) -> list[Rule]:
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
