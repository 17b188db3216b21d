"""ViT-5 (arXiv 2602.08071) with the names of its authors' code, wangf3014/ViT-5: timm's names of ViTs, and
in each block the frequencies of the rotations of patches and of registers.

That code has the registers behind the patches, ours before them, which changes no result. What no
tensor contains: the grid that the rotations were trained on, `rope_grid`. It is that of the table of positions in
files of the published sizes of pre-training; others may be fine-tuned, their tables interpolated, and are asked for it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import contract, vit_options, vit_timm
from vit_jax.interchange.conversions.rules import Constant, Rule
from vit_jax.models.preprocessing import Preprocessing, torchvision_crop
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

_PATCHES, _REGISTERS = "blocks.{layer}.attn.rope.freqs", "blocks.{layer}.attn.rope_reg.freqs"
# Patches of a side that the published models were pre-trained with, by width: 224 pixels and 192.
_PRETRAINED = {384: 14, 768: 12, 1024: 12}
# What all of its networks have.
_STRUCTURE = {
    "position": "learned", "position_at": "auto", "position_of_class": False, "position_of_registers": False,
    "rope": "axial", "rope_offset": 0.0, "norm": "rms", "norm_after": False, "norm_residual": False, "qk_norm": True,
    "qkv_bias": False,
    "projection_bias": True, "layer_scale": "all", "gated_mlp": False, "attention_inner_norm": False,
    "mlp_inner_norm": False, "patch_bias": True, "patch_norm": False, "pre_norm": False, "pool": "token",
    "last_norm": "tokens", "representation": 0, "distilled": False, "parallel": False, "block_branches": 0,
    "differential": False, "weighted_layers": False, "crop_to_patches": False,
}  # fmt: skip


class Authors(vit_timm.Timm):
    """wangf3014/ViT-5."""

    conventions = {"activation": "gelu", "epsilon": 1e-6}

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        frequencies = shapes.get(_PATCHES.format(layer=0))
        if frequencies is None:
            return None
        options = vit_options.from_tensors(shapes)
        rows, pixels = shapes["pos_embed"][1], options["patch"]
        if options["width"] % (4 * frequencies[0]):
            raise CheckpointError(
                f"{_PATCHES.format(layer=0)} has {frequencies[0]} frequencies, for heads of {4 * frequencies[0]} "
                f"channels, which do not divide the width {options['width']}"
            )
        grid, _ = contract.patch_grid(rows, (0,), pixels, metadata)
        rotated = _REGISTERS.format(layer=0) in shapes
        options |= _STRUCTURE | {
            **vit_timm.image_options(grid, pixels, metadata),
            "heads": options["width"] // (4 * frequencies[0]),
            "rope_theta": 10_000.0,
            "rope_grid": grid,
            "rope_registers": 100.0 if rotated else 0.0,
            **{name: options[name] for name in ("qkv_bias", "qk_norm", "layer_scale")},
            **self.conventions,
        }
        return contract.DetectedModel(
            options,
            self.layout(None),
            {"rope_grid": _open_grid(grid, options["width"])},
            assumed=tuple(self.conventions),
        )

    def rules(self, config: PublishedViTConfig, layout: Mapping[str, Any]) -> list[Rule | Constant]:
        places = [(_PATCHES, "rope_theta")]
        places += [(_REGISTERS, "rope_registers")] if config.rope_registers else []
        size = config.width // config.heads // 4
        return super().rules(config, layout) + [
            Constant(
                name.format(layer=layer),
                (getattr(config, option) ** (-np.arange(size) / size)).astype(np.float32),
                option,
            )
            for layer in range(config.depth)
            for name, option in places
        ]

    def layout(self, config: PublishedViTConfig | None) -> dict[str, Any]:
        return {"layer_scale": "gamma", "qkv": "fused", "mlp": "", "rope_columns_first": False}

    def refusal(self, config: PublishedViTConfig) -> str:
        other = {n: getattr(config, n) for n, v in _STRUCTURE.items() if getattr(config, n) != v}
        if bool(config.registers) != bool(config.rope_registers):
            other["rope_registers"] = config.rope_registers
        listed = ", ".join(f"{name}={value!r}" for name, value in other.items())
        if not other:
            return ""
        return (
            "of ViTs the authors' format has DINOv3, CLIP, SigLIP and ViT-5, of which this model is none (from ViT-5 "
            f"it differs in {listed}): convert with --to=timm"
        )

    def expressed(
        self, config: PublishedViTConfig, params: dict
    ) -> tuple[PublishedViTConfig, dict]:
        """As it is: `refusal` lets nothing else pass."""
        return config, params

    def preprocessing(self, config: PublishedViTConfig) -> Preprocessing:
        """That of DeiT-III, which it builds on: the smaller side fits the image exactly."""
        side = min(config.height_width)
        return torchvision_crop(config.image_size, side)


def _open_grid(grid: tuple[int, int], width: int) -> contract.Open:
    """How open it is which grid the rotations were trained on."""
    side = _PRETRAINED.get(width)
    known = dict.fromkeys([grid, *((n, n) for n in _PRETRAINED.values())])
    if grid == (side, side):
        return contract.Open(tuple(known))
    published = f" The published models of width {width} have ({side}, {side})." if side else ""
    ask = (
        f"rope_grid: the grid of patches that its rotations were trained on, '{grid}' unless it was fine-tuned at "
        f"another size.{published}"
    )
    return contract.Open(tuple(known), ask=ask)
