"""Files of transformers' other ViTs without config.json: BEiT, data2vec-vision, I-JEPA, AIMv2, and the image towers of
CLIP, SigLIP and SigLIP 2. ViT itself and its closest relatives are in `vit_bare`.

Files of data2vec-vision without a prefix are taken for BEiT's, which is the same network.
"""

import math
from collections.abc import Mapping
from typing import Any

from vit_jax.interchange.conversions import contract, vit_beit

_BEITS = {"": "beit", "beit.": "beit", "data2vec_vision.": "data2vec-vision"}
_CLASSES = {"beit": "Beit", "data2vec-vision": "Data2VecVision"}
_BIASES = "relative_position_bias.relative_position_bias_table"
# Heads of published models by width.
_HEADS = {
    "beit": {768: 12, 1024: 16},
    "data2vec-vision": {768: 12, 1024: 16},
    "ijepa": {1280: 16, 1408: 16},
    "aimv2_vision_model": {1024: 8, 1536: 12, 2048: 16, 3072: 24},
    "clip_vision_model": {768: 12, 1024: 16, 1280: 16, 1408: 16, 1664: 16},
    "siglip_vision_model": {768: 12, 1024: 16, 1152: 16, 1536: 16},
    "siglip2_vision_model": {768: 12, 1024: 16, 1152: 16, 1536: 16},
}
_ACTIVATION = "quick_gelu is taken, which OpenAI's weights compute with; those of others have gelu"


def fields(shapes: contract.Shapes, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of config.json that tensors tell; `None` if the names are of none of these classes.

    The arguments and errors are described at `vit_bare.fields`.
    """
    for find in (_beit, _ijepa, _clip_or_siglip, _aim):
        stated = find(shapes, metadata)
        if stated is not None:
            return stated
    return None


def left_open(stated: Mapping[str, Any]) -> dict[str, contract.Open]:
    """How open options are that no tensor tells.

    Args:
      stated: as `fields` gives it.
    """
    kind = stated["model_type"]
    doubts = {}
    if kind == "clip_vision_model":
        doubts["activation"] = contract.Open(("quick_gelu", "gelu"), _ACTIVATION)
    if kind in _CLASSES and "num_attention_heads" in stated:
        return doubts  # its tables of biases have a column for each head
    return contract.heads_of(_HEADS[kind], stated["hidden_size"]) | doubts


def _with_heads(kind: str, stated: dict[str, Any]) -> dict[str, Any]:
    """Fields with `model_type`, and with the heads of a published model of that width, if there is one."""
    heads = _HEADS[kind].get(stated["hidden_size"])
    known = {} if heads is None else {"num_attention_heads": heads}
    return {"model_type": kind} | known | stated


def _sized(
    shapes: contract.Shapes, patches: str, rows: int, others: int, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields that the kernel of patches tells, and a table of positions.

    Args:
      patches: the kernel's name.
      rows: of the table.
      others: the number of rows that belong to no patch.
    """
    width, channels, patch, across = shapes[patches]
    grid, _ = contract.patch_grid(rows, (others,), patch, metadata)
    return {
        "hidden_size": width,
        "num_channels": channels,
        "patch_size": [patch, across],
        "image_size": contract.image_size(grid, patch),
    }


def _beit(shapes: contract.Shapes, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    at = next((p for p in _BEITS if f"{p}embeddings.cls_token" in shapes), None)
    layer = f"{at}encoder.layer.0."
    query, key = (f"{layer}attention.attention.{name}.bias" for name in ("query", "key"))
    keys_lack_biases = query in shapes and key not in shapes
    if at is None or not (f"{layer}lambda_1" in shapes or keys_lack_biases):
        return None
    kind = _BEITS[at]
    patches = f"{at}embeddings.patch_embeddings.projection.weight"
    table = shapes.get(f"{at}embeddings.position_embeddings")
    own = shapes.get(f"{layer}attention.attention.{_BIASES}")
    shared = shapes.get(f"{at}encoder.{_BIASES}")
    width, channels, patch, across = shapes[patches]
    stated: dict[str, Any] = {
        "hidden_size": width,
        "num_channels": channels,
        "patch_size": [patch, across],
        "image_size": metadata.get("image_size") or contract.USUAL_IMAGE_SIZE,
    }
    if table is not None:
        stated |= _sized(shapes, patches, table[1], 1, metadata)
    biases = own or shared
    if biases is not None:
        stated["image_size"] = vit_beit.image_size(biases[0], patch, metadata)
        stated["num_attention_heads"] = biases[1]
    # The published models with this head pool all patches, and have no norm behind the pooling.
    pretrained = "lm_head.weight" in shapes
    head = "ForImageClassification" if "classifier.bias" in shapes else "Model"
    return _with_heads(
        kind,
        stated
        | {
            "architectures": [f"{_CLASSES[kind]}{head}"],
            "num_hidden_layers": contract.count_layers(shapes, rf"{at}encoder\.layer\.(\d+)\."),
            "intermediate_size": shapes[f"{layer}intermediate.dense.weight"][0],
            "use_absolute_position_embeddings": table is not None,
            "use_relative_position_bias": own is not None,
            "use_shared_relative_position_bias": shared is not None,
            "layer_scale_init_value": 0.1 if f"{layer}lambda_1" in shapes else 0,
            "use_mean_pooling": pretrained or f"{at}layernorm.weight" not in shapes,
        },
    )


def _ijepa(shapes: contract.Shapes, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    patches = "embeddings.patch_embeddings.projection.weight"
    at = next((p for p in ("", "ijepa.") if f"{p}{patches}" in shapes), None)
    layer = f"{at}encoder.layer.0."
    position = f"{at}embeddings.position_embeddings"
    if at is None or f"{at}embeddings.cls_token" in shapes or position not in shapes:
        return None
    if f"{layer}layernorm_before.weight" not in shapes:
        return None
    head = "ForImageClassification" if "classifier.bias" in shapes else "Model"
    return _with_heads(
        "ijepa",
        _sized(shapes, f"{at}{patches}", shapes[position][1], 0, metadata)
        | {
            "architectures": [f"IJepa{head}"],
            "num_hidden_layers": contract.count_layers(shapes, rf"{at}encoder\.layer\.(\d+)\."),
            "intermediate_size": shapes[f"{layer}intermediate.dense.weight"][0],
            "qkv_bias": f"{layer}attention.attention.query.bias" in shapes,
        },
    )


def _clip_or_siglip(shapes: contract.Shapes, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    patches = "embeddings.patch_embedding.weight"
    at = next((p for p in ("", "vision_model.") if f"{p}{patches}" in shapes), None)
    layer = f"{at}encoder.layers.0."
    if at is None or f"{layer}self_attn.q_proj.weight" not in shapes:
        return None
    rows, width = shapes[f"{at}embeddings.position_embedding.weight"]
    stated: dict[str, Any] = {
        "num_hidden_layers": contract.count_layers(shapes, rf"{at}encoder\.layers\.(\d+)\."),
        "intermediate_size": shapes[f"{layer}mlp.fc1.weight"][0],
    }
    has_head = "classifier.weight" in shapes
    if f"{at}embeddings.class_embedding" in shapes:
        name = "CLIPForImageClassification" if has_head else "CLIPVisionModel"
        sized = _sized(shapes, f"{at}{patches}", rows, 1, metadata)
        return _with_heads("clip_vision_model", stated | sized | {"architectures": [name]})
    if len(shapes[f"{at}{patches}"]) == 4:
        name = "SiglipForImageClassification" if has_head else "SiglipVisionModel"
        sized = _sized(shapes, f"{at}{patches}", rows, 0, metadata)
        return _with_heads("siglip_vision_model", stated | sized | {"architectures": [name]})
    # NaFlex embeds patches by a dense layer, whose kernel has a row for each value of a square patch.
    channels = 3
    patch = math.isqrt(shapes[f"{at}{patches}"][1] // channels)
    naflex = {
        "architectures": ["Siglip2ForImageClassification" if has_head else "Siglip2VisionModel"],
        "hidden_size": width,
        "num_channels": channels,
        "patch_size": patch,
        "num_patches": rows,
    }
    return _with_heads("siglip2_vision_model", stated | naflex)


def _aim(shapes: contract.Shapes, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    patches = "embeddings.patch_embed.weight"
    at = next((p for p in ("", "vision_model.") if f"{p}{patches}" in shapes), None)
    layer = f"{at}encoder.layers.0."
    if at is None or f"{layer}rms_norm1.weight" not in shapes:
        return None
    table = shapes.get(f"{at}embeddings.position_embedding.weight")
    rows = table[0] if table is not None else 0
    return _with_heads(
        "aimv2_vision_model",
        _sized(shapes, f"{at}{patches}", rows, 0, metadata)
        | {
            "architectures": ["Aimv2VisionModel"],
            "num_hidden_layers": contract.count_layers(shapes, rf"{at}encoder\.layers\.(\d+)\."),
            "intermediate_size": shapes[f"{layer}ffn.gate_proj.weight"][0],
            "qkv_bias": f"{layer}attention.q_proj.bias" in shapes,
            "mlp_bias": f"{layer}ffn.gate_proj.bias" in shapes,
            "use_head": f"{at}head.cls_token" in shapes,
            "is_native": table is None,
        },
    )
