"""C-RADIOs: transformers' RadioModel, whose files have the names of the authors', and timm's NaFlexVits of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import (
    contract,
    pytorch,
    vit_arguments,
    vit_config_json,
    vit_flax,
    vit_naflex,
    vit_new_timm,
    vit_options,
)
from vit_jax.interchange.conversions.rules import Constant, Rule, Transform, joined, reshaped
from vit_jax.interchange.conversions.skips import Skip
from vit_jax.models.preprocessing import Preprocessing
from vit_jax.models.zoo.radio import VARIANTS, RadioConfig, options_from_name

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Options in which a C-RADIO differs from the ViT of 2020.
_PARTS = (
    "layer_scale", "patch_bias", "last_norm", "native_resize", "native_aspect", "position_of_class", "crop_to_patches",
)  # fmt: skip
_ROOT = "radio_model."
_GENERATOR, _CONDITIONER = f"{_ROOT}model.patch_generator", f"{_ROOT}input_conditioner"
# What transformers takes where config.json says nothing.
_USUAL = vit_config_json.USUAL | {
    "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "mlp_ratio": 4.0, "layer_norm_eps": 1e-6,
    "max_img_size": 2048, "num_cls_tokens": 3, "num_registers": 7, "summary_idxs": (0, 1), "use_swiglu_ffn": False,
    "layerscale_value": 1.0, "video_temporal_patch_size": None, "norm_mean": MEAN, "norm_std": STD,
}  # fmt: skip


# Fields of the authors' own config.json that change features, and that transformers' RadioModel does not read.
_OF_AUTHORS = ("vitdet_window_size", "feature_normalizer_config", "inter_feature_normalizer_config")
_FILMS = Skip(r".*\.video_embedder\.weight", "embeds frames of films", "the part for films")
# How timm's NaFlexVit resizes positions: by default, and in a C-RADIO, whose corners may stay in place or not.
_RESIZED = {
    "pos_embed_antialias": True, "pos_embed_interp_mode": "bicubic", "pos_embed_ar_preserving": False,
    "pos_embed_align_corners": False,
}  # fmt: skip
_CROPPED = {
    "pos_embed_antialias": False, "pos_embed_interp_mode": "bilinear", "pos_embed_ar_preserving": True,
    "pos_embed_align_corners": True,
}  # fmt: skip


def _blocks(config: RadioConfig, theirs: str, scale: str) -> list[Rule]:
    """The rules of all blocks."""
    ours = "encoder/layers"
    return [
        *pytorch.block(ours, theirs, config.width, config.heads),
        Rule(f"{ours}/attention_scale/scale", f"{theirs}.{scale.format(1)}"),
        Rule(f"{ours}/mlp_scale/scale", f"{theirs}.{scale.format(2)}"),
    ]


def _lacking(config: RadioConfig) -> list[str]:
    """What neither library's C-RADIO has of a model."""
    lacks = {
        f"pool={config.pool!r}": config.pool != "token",
        f"last_norm={config.last_norm!r}": config.last_norm != "none",
        f"activation={config.activation!r}": config.activation != "gelu",
        f"epsilon={config.epsilon:g}": config.epsilon != 1e-6,
        "layer_scale of attention alone": config.layer_scale == "attention",
        "tanh layer": config.representation,
        "qk_norm": config.qk_norm,
        "parallel blocks": config.parallel,
        "weighted_layers": config.weighted_layers,
        "norms without biases": not config.norm_bias,
    }
    missing = [name for name, lacking in lacks.items() if lacking]
    return missing + vit_flax.parts_beside(config, _PARTS)


def _from_arguments(
    options: Mapping[str, Any], metadata: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, contract.Open]]:
    """What tensors do not tell of timm's C-RADIOs, and what is left open.

    Args:
      options: what the tensors tell.
      metadata: see `contract.TimmConversion`.

    Raises:
      CheckpointError: timm's arguments are of a network that is not here.
    """
    arguments = vit_options.arguments_of(metadata)
    if "embed_dim" in arguments or "pos_embed_antialias" in arguments:
        resized = {name: arguments.pop(name, usual) for name, usual in _RESIZED.items()}
        if resized | {"pos_embed_align_corners": True} != _CROPPED:
            listed = ", ".join(f"{name}={value!r}" for name, value in resized.items())
            raise CheckpointError(f"timm's NaFlexVit with {listed} is not supported")
        known = vit_arguments.from_arguments(vit_arguments.NAFLEX, arguments)
        known = {name: known[name] for name in ("heads", "activation", "epsilon")}
        return known | {"table_corners": resized["pos_embed_align_corners"]}, {}
    of_size = {(o["depth"], o["width"]): o["heads"] for o in map(options_from_name, VARIANTS)}
    heads = of_size.get((options["depth"], options["width"]))
    known = {"heads": heads, "activation": "gelu", "epsilon": 1e-6, "table_corners": False}
    ask = "table_corners: published C-RADIOs have True (v3-B, v3-H) or False (others)"
    left_open = {"table_corners": contract.Open((True, False), ask=ask)}
    if heads is None:
        left_open["heads"] = contract.Open(ask="heads (no C-RADIO of such sizes is published)")
    stated = {name: metadata[name] for name in known if name in metadata}
    return known | stated, {n: left for n, left in left_open.items() if n not in stated}


class Transformers(contract.HuggingFaceConversion):
    """RadioModel."""

    model_types = ("radio",)
    renamed = ((r"\.ls([12])\.(grandma|gamma)$", r".layer_scale\1.lambda1"),)

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        kernel = f"{_GENERATOR}.embedder.weight"
        if metadata.get("model_type") != "radio":
            if kernel in shapes:
                raise CheckpointError(
                    "a C-RADIO without the config.json of transformers' RadioModel, which says how many of its tokens "
                    "are class tokens: save it with save_pretrained there, or take timm's (naflexvit_*_radio_*)"
                )
            return None
        value = _USUAL | dict(metadata)
        if value["use_swiglu_ffn"]:
            raise CheckpointError("use_swiglu_ffn = true of a C-RADIO is not supported")
        for name in _OF_AUTHORS:
            if value.get(name):
                raise CheckpointError(
                    f"config.json says {name} = {value[name]}, which is not supported: the authors' code computes with "
                    f"it, transformers' RadioModel without. To get RadioModel's numbers, remove {name} there"
                )
        value["intermediate_size"] = int(value["hidden_size"] * value["mlp_ratio"])
        options = vit_config_json.options(value)
        rows = shapes[f"{_GENERATOR}.pos_embed"][1]
        scaled = f"{_ROOT}model.blocks.0.layer_scale1.lambda1" in shapes
        if not scaled and value["layerscale_value"] != 1:
            raise CheckpointError(
                f"config.json says layerscale_value = {value['layerscale_value']}, and the file has no LayerScale that "
                "it would begin with: only 1 is supported"
            )
        options |= {
            "image_size": metadata.get("processor_size") or options["image_size"],
            "num_classes": 0,
            "qkv_bias": value["qkv_bias"],
            "layer_scale": "all" if scaled else "none",
            "class_tokens": value["num_cls_tokens"],
            "registers": value["num_registers"],
            "summary": tuple(value["summary_idxs"]),
            "table_side": value["max_img_size"] // options["patch"],
        }
        if rows != options["table_side"] ** 2:
            raise CheckpointError(
                f"config.json says max_img_size = {value['max_img_size']} pixels, whose table of positions has "
                f"{options['table_side'] ** 2} rows, and the file's has {rows}"
            )
        assumed = vit_config_json.assumed(metadata, {"mlp_ratio": "mlp_dim"})
        return contract.DetectedModel(options, self.layout(), left_out=(_FILMS,), assumed=assumed)

    def rules(self, config: RadioConfig, layout: Mapping[str, Any]) -> list[Rule | Constant]:
        sides = (config.patch,) * 2
        theirs = (config.width, config.channels * config.patch**2)
        kernel = Transform(
            lambda xs: [x.reshape(-1, config.channels, *sides).transpose(2, 3, 1, 0) for x in xs],
            lambda xs: [x.transpose(3, 2, 0, 1).reshape(theirs) for x in xs],
        )
        tokens = config.class_tokens + config.registers
        summary = np.asarray(config.summary, np.int64)
        mean, std = (np.asarray(x, np.float32).reshape(3, 1, 1) for x in (MEAN, STD))
        return [
            Rule("embedding/kernel", f"{_GENERATOR}.embedder.weight", kernel),
            Rule("position", f"{_GENERATOR}.pos_embed"),
            Rule(
                "class_token",
                f"{_GENERATOR}.cls_token.token",
                reshaped((1, tokens, config.width), (tokens, config.width)),
            ),
            *_blocks(config, f"{_ROOT}model.blocks.{{layer}}", "layer_scale{}.lambda1"),
            Constant(f"{_ROOT}summary_idxs", summary, "summary"),
            Constant(f"{_CONDITIONER}.norm_mean", mean, "data.mean", rounded=True),
            Constant(f"{_CONDITIONER}.norm_std", std, "data.std", rounded=True),
        ]

    def layout(self, config: RadioConfig | None = None) -> dict[str, Any]:
        """The same for all."""
        return {"kind": "radio", "prefix": ""}

    def refusal(self, config: RadioConfig) -> str:
        missing = _lacking(config)
        missing += [f"table_corners={config.table_corners}"] * config.table_corners
        missing += ["head"] * bool(config.num_classes)
        missing += ["images of other channels"] * (config.channels != 3)
        name = "transformers' RadioModel"
        return f"{name} has no {', no '.join(missing)}; convert with --to=timm" if missing else ""

    def expressed(self, config: RadioConfig, params: dict) -> tuple[RadioConfig, dict]:
        """Without a bias of patches: positions have it, which are means of rows of their table."""
        if not config.patch_bias:
            return config, params
        embedding = dict(params["embedding"])
        bias = np.asarray(embedding.pop("bias"))
        params = params | {
            "embedding": embedding,
            "position": np.asarray(params["position"]) + bias,
        }
        return dataclasses.replace(config, patch_bias=False), params

    def preprocessing(self, config: RadioConfig) -> Preprocessing:
        """The network normalises by itself."""
        return Preprocessing(config.image_size, MEAN, STD, "resize", interpolation="bicubic")

    def config_json(self, config: RadioConfig, layout: Mapping[str, Any]) -> dict[str, Any]:
        return vit_config_json.config_fields(config) | {
            "architectures": ["RadioModel"],
            "model_type": "radio",
            "mlp_ratio": vit_new_timm.ratio(config.mlp_dim, config.width),
            "max_img_size": config.table_side * config.patch,
            "num_cls_tokens": config.class_tokens,
            "num_registers": config.registers,
            "summary_idxs": list(config.summary),
            "norm_mean": list(MEAN),
            "norm_std": list(STD),
        }


class Timm(contract.TimmConversion):
    """NaFlexVit with one class token, and positions that are resized without antialiasing."""

    file_conventions = {"activation": "gelu", "epsilon": 1e-6}
    renamed = vit_naflex.RENAMED

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if not vit_naflex.is_cropped(shapes, metadata):
            return None
        plain, grid = vit_naflex.as_vit(shapes)
        options = vit_options.from_tensors(plain)
        if grid is None or len(set(grid)) > 1 or options["last_norm"] != "none":
            raise CheckpointError(
                "timm's NaFlexVit with positions that are resized without antialiasing is read with a square table of "
                "them, and without a last norm"
            )
        own = ("position", "distilled", "pool", "patch_norm", "map_mlp_dim")
        options = {name: value for name, value in options.items() if name not in own}
        known, left_open = _from_arguments(options, metadata)
        size = metadata.get("image_size") or metadata.get("wanted_size") or 512
        kind = {"class_tokens": 1, "summary": (0,), "table_side": grid[0], "image_size": size}
        return contract.DetectedModel(options | known | kind, vit_naflex.layout(), left_open)

    def rules(self, config: RadioConfig, layout: Mapping[str, Any]) -> list[Rule]:
        side, tokens = config.table_side, {"cls_token": 1}
        tokens |= {"reg_token": config.registers} if config.registers else {}
        table = reshaped((1, side**2, config.width), (1, side, side, config.width))
        return [
            Rule("embedding/kernel", vit_naflex.KERNEL, pytorch.flat_patches(config)),
            Rule("embedding/bias", "patch_embed.proj.bias"),
            Rule("position", "pos_embed", table),
            Rule("class_token", tuple(tokens), joined(1, list(tokens.values()))),
            *_blocks(config, "blocks.{layer}", "ls{}.gamma"),
            *pytorch.linear("head", "head"),
        ]

    def layout(self, config: RadioConfig) -> dict[str, Any]:
        return vit_naflex.layout()

    def refusal(self, config: RadioConfig) -> str:
        missing = _lacking(config)
        if config.summary != (0,):
            missing.append(f"summary={config.summary}, only of the first class token")
        return f"timm's C-RADIOs have no {', no '.join(missing)}" if missing else ""

    def expressed(self, config: RadioConfig, params: dict) -> tuple[RadioConfig, dict]:
        """One class token and a bias of patches."""
        registers = config.registers + config.class_tokens - 1
        changed = dataclasses.replace(config, class_tokens=1, registers=registers, patch_bias=True)
        if not config.patch_bias:
            bias = {"bias": np.zeros(config.width, np.float32)}
            params = params | {"embedding": params["embedding"] | bias}
        return changed, params

    def architecture(self, config: RadioConfig, layout: Mapping[str, Any]) -> tuple[str, dict]:
        return "naflexvit_base_patch16_radio_v3", {
            "patch_size": config.patch,
            "embed_dim": config.width,
            "depth": config.depth,
            "num_heads": config.heads,
            "mlp_ratio": vit_new_timm.ratio(config.mlp_dim, config.width),
            "qkv_bias": config.qkv_bias,
            "init_values": config.layer_scale_init if config.layer_scale == "all" else 0,
            "reg_tokens": config.registers,
            "pos_embed_grid_size": [config.table_side] * 2,
            "pos_embed_align_corners": config.table_corners,
        }
