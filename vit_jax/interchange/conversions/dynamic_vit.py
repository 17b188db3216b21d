"""Dynamic Vision Transformers with the names of their authors' code, as `torch.save` wrote them or as
tensors alone.

The released files hold the weights as `model_state_dict`; what else is in them, thresholds and accuracies,
is not read. An exit has the names of a T2T-ViT or of timm's DeiT, with what is reused beside them. What no
tensor tells, and is then taken unless the user, the model that is loaded or a file of ours says it:
heads, where no relations are reused; the windows of T2T-ViTs, the published ones of 14, 11 or 7 pixels.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from vit_jax.base import sizes
from vit_jax.base.errors import CheckpointError
from vit_jax.base.sizes import Size
from vit_jax.interchange.conversions import contract, pytorch, t2t, vit_timm
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.models.preprocessing import Preprocessing, torchvision_crop
from vit_jax.models.zoo import cascade, dynamic_vit

# Exits, in their order.
NAMES = ("less_less_token", "less_token", "normal_token")
# What their code cannot vary.
_STRUCTURE = {
    "grids": dynamic_vit.GRIDS,
    "feature_hidden": 128,
    "feature_width": 48,
}
_T2T = "tokens_to_token.attention1"
_FEATURES = "feature_resuse_mlp"  # their spelling
_RELATIONS = "relation_reuse_conv"


class Authors(contract.Conversion):
    """blackfeather-wang/Dynamic-Vision-Transformer."""

    conventions = {"activation": "gelu"}

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if not any(name.startswith(f"{NAMES[-1]}.") for name in shapes):
            return None
        exits = [_below(name, shapes) for name in NAMES]
        last = exits[-1]
        widths = [names["cls_token"][-1] for names in exits]
        if len(set(widths)) > 1:
            raise CheckpointError(
                f"its exits have tokens of {', '.join(map(str, widths))} channels: what an exit reuses is "
                "as wide as the exit itself, so all must be equal"
            )
        is_t2t = f"{_T2T}.norm1.weight" in last
        depth, width = contract.count_layers(last, r"blocks\.(\d+)\."), widths[-1]
        windows, image_size, channels = (_of_t2t if is_t2t else _of_deit)(exits, metadata)
        options = {
            "image_size": image_size,
            "channels": channels,
            "num_classes": last.get("head.bias", (0,))[0],
            "backbone": "t2t" if is_t2t else "deit",
            "grids": dynamic_vit.GRIDS,
            "windows": windows,
            "depth": depth,
            "width": width,
            "mlp_dim": last["blocks.0.mlp.fc1.bias"][0],
            "position": "sinusoid" if is_t2t else "learned",
            "qkv_bias": "blocks.0.attn.qkv.bias" in last,
            "activation": "gelu",
            "epsilon": 1e-5 if is_t2t else 1e-6,
            "feature_reuse": f"blocks.0.{_FEATURES}.1.fc1.bias" in last,
            "relation_reuse": f"{_RELATIONS}.0.bias" in last,
        }
        if is_t2t:
            options["token_width"] = last[f"{_T2T}.norm2.weight"][0]
            options["random_features"] = last[f"{_T2T}.w"][0]
        assumed = ("epsilon", *self.conventions)
        if options["relation_reuse"]:
            heads = last[f"{_RELATIONS}.2.bias"][0] // depth
            return contract.DetectedModel(options | {"heads": heads}, assumed=assumed)
        published = {(d, w): heads for _, (d, w, _, heads) in dynamic_vit.SIZES.values()}
        heads = published.get((depth, width))
        return contract.DetectedModel(
            options | {"heads": heads},
            open=contract.heads_of(published, (depth, width), "(depth, width)"),
            assumed=assumed,
        )

    def rules(self, config, layout: Mapping[str, Any]) -> list[Rule]:
        of_network = {"t2t": t2t.Authors(), "deit": vit_timm.Timm()}[config.backbone]
        ours, theirs = "encoder/layers/features", f"blocks.{{layer}}.{_FEATURES}"
        all_rules = []
        for exit_name, name, network in zip(
            dynamic_vit.exit_names(config), NAMES, config.networks, strict=True
        ):
            of_exit = [
                *of_network.rules(network, {}),
                *pytorch.norm(f"{ours}/norm", f"{theirs}.0"),
                *pytorch.mlp(f"{ours}/mlp", f"{theirs}.1"),
            ]
            for layer, number in (("up", 0), ("down", 2)):
                of_exit += [
                    pytorch.pointwise(f"relations/{layer}", f"{_RELATIONS}.{number}"),
                    Rule(f"relations/{layer}/bias", f"{_RELATIONS}.{number}.bias"),
                ]
            all_rules += [
                dataclasses.replace(
                    rule,
                    ours=f"{exit_name}/{rule.ours}",
                    theirs=tuple(f"{name}.{theirs}" for theirs in rule.names),
                )
                for rule in of_exit
            ]
        return all_rules

    def refusal(self, config) -> str:
        for name, value in _STRUCTURE.items():
            if getattr(config, name) != value:
                return f"its authors' code has {name} = {value}, this model {getattr(config, name)}"
        epsilon = {"t2t": 1e-5, "deit": 1e-6}[config.backbone]
        if config.epsilon != epsilon:
            return (
                f"its authors' {config.backbone} networks have norms with an epsilon of {epsilon}"
            )
        return ""

    def preprocessing(self, config) -> Preprocessing:
        """Of the published models."""
        side = round(min(config.height_width) * 256 / 224)
        return torchvision_crop(config.image_size, side)


def _below(name: str, shapes: contract.Shapes) -> contract.Shapes:
    """What an exit's tensors are called in a network that is no exit."""
    tensors = {
        n.removeprefix(f"{name}."): shape for n, shape in shapes.items() if n.startswith(f"{name}.")
    }
    if "cls_token" not in tensors:
        raise KeyError(f"{name}.cls_token")
    return tensors


def _of_t2t(
    exits: list[contract.Shapes], metadata: Mapping[str, Any]
) -> tuple[tuple[cascade.Windows, ...], Size, int]:
    """Windows, image size and channels of T2T-ViTs; their windows are the published ones."""
    inputs = [names[f"{_T2T}.norm1.weight"][0] for names in exits]
    windows = cascade.PUBLISHED_SPLITS
    channels = {n / side**2 for n, (side, _, _) in zip(inputs, windows, strict=True)}
    if len(channels) > 1 or not float(*channels).is_integer():
        known = ", ".join(f"{side}x{side}" for side, _, _ in windows)
        raise CheckpointError(
            f"its exits have windows of {', '.join(map(str, inputs))} numbers, not those of {known} pixels"
        )
    side = _side(exits[-1]) * math.prod((windows[-1][1], 2, 2))
    return windows, metadata.get("image_size", side), int(*channels)


def _of_deit(
    exits: list[contract.Shapes], metadata: Mapping[str, Any]
) -> tuple[tuple[cascade.Windows, ...], Size, int]:
    """Windows, image size and channels of DeiTs, which have the least zeros around the image."""
    kernels = [names["patch_embed.proj.weight"] for names in exits]
    image_size = metadata.get("image_size", _side(exits[-1]) * kernels[-1][-1])
    height, _ = sizes.height_width(image_size)
    windows = []
    for names, (_, _, _, patch) in zip(exits, kernels, strict=True):
        rows = _side(names)
        paddings = (
            p
            for p in range(patch)
            if cascade.count_tokens("deit", height, (patch, patch, p)) == rows
        )
        windows.append((patch, patch, next(paddings, 0)))
    return tuple(windows), image_size, kernels[-1][1]


def _side(names: contract.Shapes) -> int:
    """Tokens of a side, from the positions of an exit."""
    return contract.patch_grid(names["pos_embed"][1], (1,), 1, {})[0][0]
