"""DeepViTs with the names of their authors' code, zhoudaquan/dvit_repo.

What no tensor tells: the heads of a model without re-attention, and how residuals and maps are scaled.
Published sizes have theirs; of others with a convolutional stem 0.5 and unscaled maps are taken.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from vit_jax.interchange.conversions import contract, pytorch
from vit_jax.interchange.conversions.rules import Constant, Rule
from vit_jax.models.preprocessing import Preprocessing, torchvision_crop
from vit_jax.models.zoo import deepvit


class Authors(contract.Conversion):
    """zhoudaquan/dvit_repo."""

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        """The DeepViT that a file holds. Without a Θ it is none, but a ViT or a hybrid."""
        thetas = [
            shapes.get(f"{_block(i)}.attn.reatten_matrix.weight") for i in range(_depth(shapes))
        ]
        if not any(thetas):
            return None
        conv_stem = "patch_embed.conv1.weight" in shapes
        width, _, patch, _ = shapes["patch_embed.proj.weight"]
        patch *= 1 + conv_stem
        first = shapes["patch_embed.conv1.weight" if conv_stem else "patch_embed.proj.weight"]
        grid, _ = contract.patch_grid(shapes["pos_embed"][1], (1,), patch, metadata)
        runs = [(bool(theta), len(list(run))) for theta, run in itertools.groupby(thetas, bool)]
        options = {
            "image_size": contract.image_size(grid, patch),
            "num_classes": shapes.get("head.bias", (0,))[0],
            "patch": patch,
            "stages": (0,) * runs[0][0] + tuple(length for _, length in runs),
            "width": width,
            "mlp_dim": shapes["blocks.0.mlp.fc1.weight"][0],
            "heads": next(theta for theta in thetas if theta)[0],
            "conv_stem": conv_stem,
            "reattention_norm": any(".attn.var_norm." in name for name in shapes),
            "channels": first[1],
        }
        return contract.DetectedModel(options | _scales(options), open=_open(options))

    def rules(self, config, layout: Mapping[str, Any]) -> list[Rule | Constant]:
        result = [
            *pytorch.patches("embedding", "patch_embed.proj"),
            Rule("class_token", "cls_token"),
            Rule("position", "pos_embed"),
            *pytorch.norm("norm", "norm"),
            *pytorch.linear("head", "head"),
        ]
        if config.conv_stem:
            for i in (1, 2):
                result += [
                    pytorch.convolution(f"embedding/stem/conv{i}", f"patch_embed.conv{i}"),
                    *pytorch.batch_norm(f"embedding/stem/norm{i}", f"patch_embed.bn{i}"),
                ]
        first = 0
        for name, (length, reattention) in config.named_stages.items():
            layers = range(first, first + length)
            result += _blocks(f"stages/{name}/layers", layers, reattention, config)
            first += length
        return result

    def refusal(self, config) -> str:
        if any(config.stages[1::2]):
            return contract.refusal_of_pooling(config)
        return "without re-attention its tensors are a plain ViT's, and would be read as one"

    def preprocessing(self, config) -> Preprocessing:
        """Of the published models."""
        side = int(min(config.height_width) / 0.9)
        return torchvision_crop(config.image_size, side)


def _block(number: int | str) -> str:
    return f"blocks.{number}"


def _depth(shapes: contract.Shapes) -> int:
    return contract.count_layers(shapes, r"blocks\.(\d+)\.")


def _blocks(ours: str, layers: range, reattention: bool, config) -> list[Rule | Constant]:
    """Of a stage, whose blocks are `layers` in their names."""
    theirs, first = _block("{layer}"), layers[0]
    result = pytorch.block(ours, theirs, config.width, config.heads, first)
    if not reattention:
        return result
    theta, matrix = f"{ours}/attention/theta", f"{theirs}.attn.reatten_matrix"
    result += [
        pytorch.pointwise(theta, matrix, first),
        Rule(f"{theta}/bias", f"{matrix}.bias", first_layer=first),
    ]
    if config.reattention_norm:
        result += pytorch.batch_norm(f"{theta}/norm", f"{theirs}.attn.var_norm", layers)
    return result


def _published(options: Mapping[str, Any]) -> dict[str, Any] | None:
    keys = ("stages", "width")
    sizes = deepvit.SIZES.values()
    return next((size for size in sizes if all(size[key] == options[key] for key in keys)), None)


def _scales(options: Mapping[str, Any]) -> dict[str, Any]:
    """How residuals and maps are scaled, as far as it is known."""
    published = _published(options) or {"residual_scale": 0.5 if options["conv_stem"] else 1.0}
    return {
        "residual_scale": published.get("residual_scale", 1.0),
        "scaled_maps": published.get("scaled_maps", False),
    }


def _open(options: Mapping[str, Any]) -> dict[str, contract.Open]:
    sure = not options["conv_stem"] or _published(options) is not None
    taken = _scales(options)
    return {
        name: contract.Open(doubt="" if sure else f"{name}={value} is taken, of no published size")
        for name, value in taken.items()
    }
