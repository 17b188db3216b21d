"""Files in the layout of facebookresearch/dinov3 with random weights, and the same networks in transformers."""

import json
import re
import struct

import ml_dtypes
import numpy as np

# Depth, width, heads, hidden size of the MLPs, gates, biases of queries, keys and values; and parameters with the mask
# token and the norm of small crops, without masks and periods (reference facts §34).
RELEASED = {
    "vits16": (12, 384, 6, 1536, False, True, 21_601_152),
    "vits16plus": (12, 384, 6, 1536, True, True, 28_697_472),
    "vitb16": (12, 768, 12, 3072, False, True, 85_669_632),
    "vitl16": (24, 1024, 16, 4096, False, True, 303_154_176),
    "vith16plus": (32, 1280, 20, 5120, True, True, 840_633_600),
    "vit7b16": (40, 4096, 32, 8192, True, False, 6_716_043_264),
}
REGISTERS = 4


def shapes_of(depth, width, heads, hidden, gated, biased, *, patch=16, local_norm=False):
    """The shape of every tensor by its name."""
    found = {
        "cls_token": (1, 1, width),
        "storage_tokens": (1, REGISTERS, width),
        "mask_token": (1, width),
        "patch_embed.proj.weight": (width, 3, patch, patch),
        "patch_embed.proj.bias": (width,),
        "rope_embed.periods": (width // heads // 4,),
    }
    block = {
        "norm1.weight": (width,), "norm1.bias": (width,), "attn.qkv.weight": (3 * width, width),
        "attn.proj.weight": (width, width), "attn.proj.bias": (width,), "ls1.gamma": (width,),
        "norm2.weight": (width,), "norm2.bias": (width,), "ls2.gamma": (width,),
    }  # fmt: skip
    if biased:
        block |= {"attn.qkv.bias": (3 * width,), "attn.qkv.bias_mask": (3 * width,)}
    up, down = (("w1", "w2"), "w3") if gated else (("fc1",), "fc2")
    for name in up:
        block |= {f"mlp.{name}.weight": (hidden, width), f"mlp.{name}.bias": (hidden,)}
    block |= {f"mlp.{down}.weight": (width, hidden), f"mlp.{down}.bias": (width,)}
    for layer in range(depth):
        found |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    norms = ("norm", "local_cls_norm") if local_norm else ("norm",)
    return found | {f"{norm}.{part}": (width,) for norm in norms for part in ("weight", "bias")}


def periods(number, theta=100.0):
    """Of the rotary positions, rounded as in the released files."""
    exact = theta ** (np.arange(number) / number)
    return exact.astype(ml_dtypes.bfloat16).astype(np.float32)


def drawn(*sizes, masks="keys", **options):
    """Tensors that hide nothing; `masks` hide the biases of 'keys', or 'all' as in the released files."""
    random, found = np.random.default_rng(0), {}
    for name, shape in shapes_of(*sizes, **options).items():
        found[name] = random.normal(0, 0.3, shape).astype(np.float32)
        if "norm" in name and name.endswith("weight"):
            found[name] += 1
    found["rope_embed.periods"] = periods(len(found["rope_embed.periods"]))
    for name in [name for name in found if name.endswith("bias_mask")]:
        mask = np.repeat(np.float32([1, 0, 1] if masks == "keys" else [0, 0, 0]), sizes[1])
        bias = name.removesuffix("_mask")
        found |= {name: mask, bias: np.where(mask == 0, np.float32(0), found[bias])}
    return found


def of_transformers(tensors, heads):
    """The same network as transformers' `DINOv3ViTModel`."""
    import torch
    import transformers

    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    gated = "blocks.0.mlp.w1.weight" in tensors
    biased = "blocks.0.attn.qkv.bias" in tensors
    config = transformers.DINOv3ViTConfig(
        hidden_size=width, num_attention_heads=heads, patch_size=patch, image_size=4 * patch,
        num_hidden_layers=1 + max(int(n.split(".")[1]) for n in tensors if n.startswith("blocks.")),
        intermediate_size=tensors[f"blocks.0.mlp.{'w1' if gated else 'fc1'}.bias"].shape[0],
        use_gated_mlp=gated, hidden_act="silu" if gated else "gelu", num_register_tokens=REGISTERS,
        query_bias=biased, value_bias=biased,
    )  # fmt: skip
    own = (
        (r"^cls_token", "embeddings.cls_token"), (r"^storage_tokens", "embeddings.register_tokens"),
        (r"^patch_embed\.proj", "embeddings.patch_embeddings"), (r"^blocks\.", "layer."),
        (r"attn\.proj", "attention.o_proj"), (r"ls(\d)\.gamma", r"layer_scale\1.lambda1"),
        (r"mlp\.(fc1|w2)", "mlp.up_proj"), (r"mlp\.w1", "mlp.gate_proj"), (r"mlp\.(fc2|w3)", "mlp.down_proj"),
    )  # fmt: skip
    state = {"embeddings.mask_token": torch.from_numpy(tensors["mask_token"][None])}
    for name, tensor in tensors.items():
        if name in ("mask_token", "rope_embed.periods") or "mask" in name or "local" in name:
            continue
        if ".attn.qkv." in name:
            at, kind = re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.(\w+)", name).groups()
            parts = dict(zip("qkv", np.split(tensor, 3), strict=True))
            parts = {k: x for k, x in parts.items() if kind == "weight" or k != "k"}
            state |= {
                f"layer.{at}.attention.{part}_proj.{kind}": torch.from_numpy(x.copy())
                for part, x in parts.items()
            }
            continue
        for old, new in own:
            name = re.sub(old, new, name)
        state[name] = torch.from_numpy(tensor)
    model = transformers.DINOv3ViTModel(config)
    prefix = "model." if any(name.startswith("model.") for name in model.state_dict()) else ""
    state = {f"{prefix if name.startswith('layer.') else ''}{name}": x for name, x in state.items()}
    model.load_state_dict(state, strict=True)
    return model.eval()


def write_sparse(path, shapes, values):
    """A `.safetensors` file of float32 whose tensors are zeros that take no place, but for those in `values`."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, value in values.items():
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(np.asarray(value, np.float32).tobytes())
        file.truncate(8 + len(text) + end)
