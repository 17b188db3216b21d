"""DINOv3 (arXiv 2508.10104) with the names of its authors' code, facebookresearch/dinov3: timm's names of
ViTs, but for the registers, the gated MLPs and what follows.

- `rope_embed.periods`: of the rotary positions, theta^(k / (C/4)). Their number tells the channels C of a head.
  Released files have them rounded to bfloat16. They are compared with those that `rope_theta` gives, and the
  model computes with the exact ones, as those of transformers and timm do.
- `bias_mask`: what biases of queries, keys and values are multiplied by. Keys have none: 1, 0, 1. In the files
  released from S to H+ all of it is 0, as the biases are (facebookresearch/dinov3, issues 58 and 195).
- `mask_token`, `local_cls_norm`: pre-training alone reads them. They are kept, to write the file again.
- `linear_head`: its classifier, which reads the class token beside the mean of the patches; then the names of the
  network begin with `backbone.`.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from absl import logging

from vit_jax.base.errors import CheckpointError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange.conversions import contract, vit_flax, vit_options, vit_timm
from vit_jax.interchange.conversions.rules import Constant, Rule, Transform, chain
from vit_jax.models import published
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

# A block's number within a chunk of blocks, as they are saved in training.
CHUNKS = (r"^((?:backbone\.)?blocks)\.\d+\.(\d+)\.", r"\1.\2.")
_PERIODS, _REGISTERS, _HEAD = "rope_embed.periods", "storage_tokens", "linear_head"
_QKV = "blocks.{layer}.attn.qkv"
_MASK = f"{_QKV}.bias_mask"
_WRAPPED = "backbone."  # before all names of a network that has the authors' classifier
_THETA = 100.0
_HEADS = {
    192: 3,
    384: 6,
    768: 12,
    1024: 16,
    1280: 20,
    4096: 32,
}  # by width (192: EUPE), where the periods are missing
# From timm's names to the authors'.
_NAMES = ((r"^reg_token$", _REGISTERS),)
_GATED = (
    (r"\.mlp\.fc1_g\.", ".mlp.w1."),
    (r"\.mlp\.fc1_x\.", ".mlp.w2."),
    (r"\.mlp\.fc2\.", ".mlp.w3."),
)
# Options in which it differs from the ViT of 2020.
_PARTS = (
    "layer_scale", "gated_mlp", "rope", "rope_theta", "key_bias", "crop_to_patches", "keep_class_token",
)  # fmt: skip
# Of the released files' names to timm's; and the authors' own name of a model, which is that trained on photos.
_RELEASED = r"dinov3_vit(s|b|l|h|7b)16(plus)?(?:_pretrain_([a-z0-9]+)|(?=\.|$))"
_PHOTOS = "lvd1689m"
_SIZES = {"s": "small", "b": "base", "l": "large", "h": "huge", "7b": "7b"}


class DINOv3(vit_timm.Timm):
    """facebookresearch/dinov3; its ConvNeXts are not here."""

    conventions = {}
    renamed = (CHUNKS,)

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        wrapped = f"{_HEAD}.weight" in shapes and f"{_WRAPPED}cls_token" in shapes
        prefix = _WRAPPED if wrapped else ""
        mine = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
        masked = _MASK.format(layer=0) in mine
        of_dinov3 = masked or _PERIODS in mine or _REGISTERS in mine
        if not of_dinov3 or "pos_embed" in mine or f"{_QKV.format(layer=0)}.weight" not in mine:
            return None
        of_timm = vit_timm.Timm().canonical(mine)
        options = vit_options.from_tensors({of_timm[name]: shape for name, shape in mine.items()})
        width = options["width"]
        heads, left_open = _HEADS.get(width), contract.heads_of(_HEADS, width)
        if _PERIODS in mine:
            heads, left_open = _heads(mine[_PERIODS][0], width), {}
        options |= {
            "image_size": metadata.get("image_size")
            or metadata.get("wanted_size")
            or contract.USUAL_IMAGE_SIZE,
            "heads": heads,
            "rope": "centred",
            "rope_theta": _THETA,
            "activation": "silu" if options["gated_mlp"] else "gelu",
            "epsilon": 1e-5,
            "pool": "token",
            "key_bias": options["key_bias"] and not (masked and options["qkv_bias"]),
        }
        if f"{_HEAD}.bias" in shapes:
            options |= {"pool": "token_mean", "num_classes": shapes[f"{_HEAD}.bias"][0]}
        layout = self._layout(options["gated_mlp"], prefix) | {
            "masked": masked,
            "local_norm": "local_cls_norm.weight" in mine,
        }
        unsaid = () if _PERIODS in mine else ("heads", "rope_theta")
        unsaid += () if "image_size" in metadata else ("image_size",)
        return contract.DetectedModel(
            options, layout, left_open, assumed=("activation", "epsilon", *unsaid)
        )

    def rules(self, config: PublishedViTConfig, layout: Mapping[str, Any]) -> list[Rule | Constant]:
        """Which tensors are which parameters. Of `layout`, `prefix` is of all names but the head's; `masked` and
        `local_norm` are what a file has.
        """
        at, width, size = layout["prefix"], config.width, config.width // config.heads // 4
        all_rules: list[Rule | Constant] = []
        for rule in super().rules(config, layout):
            if rule.ours == "encoder/layers/attention/qkv/bias" and not config.key_bias:
                theirs, transform = (f"{at}{_QKV}.bias",), chain(_WITHOUT_KEYS, rule.transform)
                rule = dataclasses.replace(rule, theirs=theirs, transform=transform)
            else:
                names = tuple(_named(name, config, at) for name in rule.names)
                rule = dataclasses.replace(rule, theirs=names)
            all_rules.append(rule)
        periods = (config.rope_theta ** (np.arange(size) / size)).astype(np.float32)
        mask = np.repeat(np.float32([1, 0, 1]), width)
        norm = {"weight": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}
        return [
            *all_rules,
            Constant(f"{at}mask_token", np.zeros((1, width), np.float32)),
            Constant(f"{at}{_PERIODS}", periods, "rope_theta", rounded=True),
            *(
                Constant(f"{at}{_MASK.format(layer=layer)}", mask)
                for layer in range(config.depth if layout["masked"] else 0)
            ),
            *(
                Constant(f"{at}local_cls_norm.{name}", value)
                for name, value in (norm.items() if layout["local_norm"] else ())
            ),
        ]

    def layout(self, config: PublishedViTConfig) -> dict[str, Any]:
        prefix = _WRAPPED if config.num_classes else ""
        masked = config.qkv_bias and not config.key_bias
        return self._layout(config.gated_mlp, prefix) | {"masked": masked, "local_norm": False}

    def _layout(self, gated: bool, prefix: str) -> dict[str, Any]:
        return {
            "prefix": prefix,
            "layer_scale": "ls",
            "qkv": "fused",
            "mlp": "separate" if gated else "",
            "rope_columns_first": False,
        }

    def prepared(self, tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
        """Biases multiplied by their masks, as the authors' code does."""
        products = dict(tensors)
        for name in tensors:
            if not name.endswith(".bias_mask"):
                continue
            bias = name.removesuffix("_mask")
            if bias not in tensors:
                raise CheckpointError(f"{name} is a mask, and there is no {bias} that it is for")
            products[bias] = _masked(bias, tensors[bias], tensors[name])
        return products

    def refusal(self, config: PublishedViTConfig) -> str:
        # Without a head no tensor depends on what is read off the tokens, which the file's header keeps.
        pools = ("token_mean",) if config.num_classes else ("token", "token_mean", "mean")
        activation = "silu" if config.gated_mlp else "gelu"
        lacks = {
            f"pool={config.pool!r} {'with' if config.num_classes else 'without'} a head": config.pool
            not in pools,
            "network without a class token": not config.has_class_token,
            f"{config.position} positions": config.position != "none",
            f"activation={config.activation!r} with gated_mlp={config.gated_mlp}": config.activation
            != activation,
            f"epsilon={config.epsilon:g}, only 1e-05": config.epsilon != 1e-5,
            f"layer_scale={config.layer_scale!r}": config.layer_scale == "attention",
            "distillation token": config.distilled,
            "tanh layer": config.representation,
            "parallel blocks": config.parallel,
            "qk_norm": config.qk_norm,
            "norms without biases": not config.norm_bias,
            "weighted_layers": config.weighted_layers,
        }
        missing = [part for part, lacking in lacks.items() if lacking]
        missing += vit_flax.parts_beside(config, _PARTS)
        return f"DINOv3's own code has no {', no '.join(missing)}" if missing else ""

    def expressed(
        self, config: PublishedViTConfig, params: dict
    ) -> tuple[PublishedViTConfig, dict]:
        """As it is: `refusal` lets nothing else pass."""
        if config.pool == "mean":
            logging.info(
                "the features of DINOv3's own code are the class token; this model's are the mean of the patches "
                "(pool=mean), which its file's header keeps for vit_jax"
            )
        return config, params

    def preprocessing(self, config: PublishedViTConfig) -> None:
        """Photos and satellite images have their own, see `preprocessing_named`."""
        return

    def preprocessing_named(
        self, parts: Iterable[str], config: PublishedViTConfig
    ) -> contract.Preprocessing | None:
        for part in reversed(list(parts)):
            if match := re.search(_RELEASED, part):
                size, plus, tag = match.groups()
                name = f"vit_{_SIZES[size]}{'_plus' if plus else ''}_patch16_dinov3"
                known = published.preprocessing(name, tag or _PHOTOS)
                return known and published.at_size(known, config.image_size, part)
        return None


def _heads(periods: int, width: int) -> int:
    """Those of which each has four channels for a period."""
    if not periods or width % (4 * periods):
        raise CheckpointError(
            f"{_PERIODS} has {periods} periods, for heads of {4 * periods} channels, which do not divide the width "
            f"{width}"
        )
    return width // (4 * periods)


def _named(name: str, config: PublishedViTConfig, at: str) -> str:
    """A tensor's name from timm's."""
    if name.startswith("head.") and config.pool == "token_mean":
        return name.replace("head.", f"{_HEAD}.")
    for old, new in (*_NAMES, *(_GATED if config.gated_mlp else ())):
        name = re.sub(old, new, name)
    return f"{at}{name}"


def _masked(name: str, bias: LazyArray, mask: LazyArray) -> LazyArray:
    def read() -> np.ndarray:
        values, keep = np.asarray(bias), np.asarray(mask)
        lost = np.count_nonzero(values[keep == 0])
        if lost:
            logging.info(
                "%s: %d values that its mask sets to 0 are read as 0, and written so", name, lost
            )
        product = (values * keep).astype(bias.dtype)
        return np.where(keep == 0, np.where(values == 0, values, 0), product).astype(bias.dtype)

    return LazyArray(bias.shape, bias.dtype, read)


def _drop_keys(arrays: list[np.ndarray]) -> list[np.ndarray]:
    query, key, value = np.split(arrays[0], 3)
    if np.any(key):
        raise CheckpointError(
            "biases of keys are neither 0 nor set to 0 by a bias_mask: read the file with "
            "--model=key_bias=True, or key_bias=True in Python"
        )
    return [query, value]


# Theirs is (3D,) with zeros for keys; ours, to which the next transform joins these, has those of queries and values.
_WITHOUT_KEYS = Transform(
    _drop_keys, lambda xs: [np.concatenate([xs[0], np.zeros_like(xs[0]), xs[1]])]
)
