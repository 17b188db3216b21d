"""Files of transformers' ViTs without their config.json: what tensors tell of it, in its words.

ViT, DeiT, DINOv2, DINOv2 with registers, DINOv3 and MAE. Their names are no other network's. What tensors do not tell
is transformers' default of that class, except the heads: those of the published models of that size, or asked for.
"""

from collections.abc import Mapping
from typing import Any

from vit_jax.interchange.conversions import contract, vit_new_timm, vit_towers

_PREFIXES = ("", "vit.", "deit.", "dinov2.", "dinov2_with_registers.", "model.")


def fields(shapes: contract.Shapes, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of config.json that tensors tell; `None` if the names are of none of these classes.

    Args:
      shapes, metadata: see `Conversion.recognise`.

    Raises:
      KeyError: it seems to be one of them, but lacks a tensor.
      CheckpointError: the shape of the grid of patches is not known.
    """
    at = next((p for p in _PREFIXES if f"{p}embeddings.cls_token" in shapes), None)
    if at is None:
        return None
    stated = _dinov3(shapes, at) or _bert(shapes, at)
    if stated is None:
        return None
    width, channels, patch, across = shapes[_patches(shapes, at)]
    stated |= {"hidden_size": width, "num_channels": channels, "patch_size": [patch, across]}
    table = shapes.get(f"{at}embeddings.position_embeddings")
    if table is not None:
        tokens = 2 if stated["model_type"] == "deit" else 1
        grid, _ = contract.patch_grid(table[1], (tokens,), patch, metadata)
        stated["image_size"] = contract.image_size(grid, patch)
    return stated


def _patches(shapes: contract.Shapes, at: str) -> str:
    """The kernel that embeds patches."""
    kernel = f"{at}embeddings.patch_embeddings.weight"
    return kernel if kernel in shapes else f"{at}embeddings.patch_embeddings.projection.weight"


def _dinov3(shapes: contract.Shapes, at: str) -> dict[str, Any] | None:
    layer = f"{at}layer.0."
    if f"{layer}attention.q_proj.weight" not in shapes or f"{layer}norm1.weight" not in shapes:
        return None
    gated = f"{layer}mlp.gate_proj.weight" in shapes
    biases = {f"{n}_bias": f"{layer}attention.{n[0]}_proj.bias" for n in ("query", "key", "value")}
    biases |= {
        "proj_bias": f"{layer}attention.o_proj.bias",
        "mlp_bias": f"{layer}mlp.down_proj.bias",
    }
    return {
        "model_type": "dinov3_vit",
        "architectures": ["DINOv3ViTModel"],
        "num_hidden_layers": contract.count_layers(shapes, rf"{at}layer\.(\d+)\."),
        "intermediate_size": shapes[f"{layer}mlp.up_proj.weight"][0],
        "use_gated_mlp": gated,
        **({"hidden_act": "silu"} if gated else {}),
        "num_register_tokens": shapes.get(f"{at}embeddings.register_tokens", (1, 0))[1],
        **{name: tensor in shapes for name, tensor in biases.items()},
    }


def _bert(shapes: contract.Shapes, at: str) -> dict[str, Any] | None:
    """Those whose names continue BERT's."""
    layer = f"{at}encoder.layer.0."
    if f"{at}embeddings.position_embeddings" not in shapes or _patches(shapes, at) not in shapes:
        return None
    common = {
        "num_hidden_layers": contract.count_layers(shapes, rf"{at}encoder\.layer\.(\d+)\."),
        "qkv_bias": f"{layer}attention.attention.query.bias" in shapes,
    }
    if f"{layer}layer_scale1.lambda1" in shapes:
        return common | _dinov2(shapes, at, layer)
    if f"{layer}layernorm_before.weight" not in shapes:
        return None
    heads = {"classifier.bias", "cls_classifier.bias"} & set(shapes)
    kind, name = "vit", "ViTForImageClassification" if heads else "ViTModel"
    if f"{at}embeddings.distillation_token" in shapes:
        teacher = "WithTeacher" if "distillation_classifier.bias" in shapes else ""
        kind, name = "deit", f"DeiTForImageClassification{teacher}" if heads else "DeiTModel"
    elif "decoder.decoder_embed.weight" in shapes:
        kind, name = "vit_mae", "ViTMAEForPreTraining"
    hidden = shapes[f"{layer}intermediate.dense.weight"][0]
    return common | {"model_type": kind, "architectures": [name], "intermediate_size": hidden}


def _dinov2(shapes: contract.Shapes, at: str, layer: str) -> dict[str, Any]:
    registers = shapes.get(f"{at}embeddings.register_tokens")
    name = "Dinov2WithRegisters" if registers else "Dinov2"
    width = shapes[f"{at}embeddings.cls_token"][-1]
    gated = f"{layer}mlp.weights_in.weight" in shapes
    hidden = shapes[f"{layer}mlp.{'weights_out' if gated else 'fc2'}.weight"][1]
    ratio: float = 4
    if hidden != (vit_towers.gated_size(4 * width) if gated else 4 * width):
        ratio = vit_new_timm.ratio(hidden * 3 // 2 if gated else hidden, width)
    head = "ForImageClassification" if "classifier.bias" in shapes else "Model"
    return {
        "model_type": "dinov2_with_registers" if registers else "dinov2",
        "architectures": [f"{name}{head}"],
        "use_swiglu_ffn": gated,
        "mlp_ratio": int(ratio)
        if ratio == int(ratio)
        else ratio,  # transformers takes integers alone
        **({"num_register_tokens": registers[1]} if registers else {}),
    }
