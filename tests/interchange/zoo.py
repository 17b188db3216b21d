"""Every published name of timm's models of the families that are here, and every architecture without weights: built by
timm with random weights, saved as timm does, read here, and computed by both.

    python -m tests.interchange.zoo [PATTERN] [--small] [--results=FILE]

prints the table of docs/notes/2026-11-26-checkpoints.md. ViTs of more than a few layers get fewer; ResNets and
EfficientNets are compared in float64. Names that share architecture and arguments share a comparison. That all takes an
hour of two cores; results that FILE has are not computed again. With `--small` ViTs are narrow too, their images are
not square where the network allows it, each architecture is compared once, in float64 on both sides, and ResNets and
EfficientNets are skipped: six minutes of processor time.
"""

import collections
import functools
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from tests import float64, without_torchvision
from vit_jax.base.errors import UserError
from vit_jax.interchange import formats, safetensors
from vit_jax.models import published, registry

BOUND = 2e-5  # of the largest logit, or of 1
# In float64: what is left is of constants in float32.
EXACT_BOUND = 1e-6
CONVOLUTIONAL = ("ResNetV2", "EfficientNet")
FAMILIES = (
    ("DINOv3", r".*_dinov3.*|.*lingbot.*"),
    ("DINOv2, TIPS v2", r".*dinov2.*|.*tipsv2.*"),
    ("DeiT-III", r"deit3_.*"),
    ("DeiT", r"deit_.*"),
    ("NaFlexViT", r"naflexvit_.*"),
    ("SigLIP, SigLIP 2", r".*siglip.*"),
    ("CLIP, MetaCLIP, DFN", r"vit_.*_clip_.*"),
    ("EVA, EVA-02", r"eva.*"),
    ("BEiT, BEiT v2", r"beit(v2)?_.*"),
    ("BEiT-3", r"beit3_.*"),
    ("AIMv2", r"aimv2_.*"),
    ("C-RADIO, InternViT", r".*radio.*|.*intern300m.*"),
    ("Perception Encoder", r"vit_pe_.*"),
    ("Sapiens 2", r".*sapiens2.*"),
    ("RoPE-ViT", r".*rope.*naver.*"),
    ("FlexiViT", r"flexivit_.*"),
    ("hybrids", r"vit_.*_r(\d*)_s\d+_.*|.*_mci_.*"),
    ("MLP-Mixer", r"mixer_.*"),
    ("BiT", r"resnetv2_.*"),
    ("CaiT", r"cait_.*"),
    ("CrossViT", r"crossvit_.*"),
    ("EfficientNet", r"tf_efficientnet_.*"),
    (
        "ViTs of timm (registers, mean pooling, RoPE)",
        r"vit_.*(sbb|_sw_|\.sw|_reg\d|_gap_).*|test_.*",
    ),
    ("ViT, MAE and others", r".*"),
)


def family(name: str) -> str:
    """The row of the table that a name is in."""
    return next(title for title, pattern in FAMILIES if re.fullmatch(pattern, name))


def randomize(model):
    """Every tensor non-trivial, and none so large that rounding decides."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("running_var"):
                tensor.copy_(1 + 0.1 * noise.abs())
            elif name.endswith(("gamma", "norm3.weight")) or "gamma_" in name:
                # Of residuals; those of a ResNet as large as what they are added to would add up rounding.
                tensor.copy_(0.5 + 0.1 * noise)
            elif tensor.ndim == 1 and name.endswith("weight"):
                tensor.copy_(1 + 0.1 * noise)
            elif tensor.ndim < 2 or "rope" in name:
                tensor.copy_(tensor + 0.1 * noise)
            elif tensor.ndim == 3:
                tensor.copy_(0.3 * noise)
            else:
                fan_in = tensor[0].numel()
                tensor.copy_(noise / fan_in**0.5)
    return model.eval()


def build(name: str, **arguments):
    """timm's model of a published name."""
    timm_models = without_torchvision.timm_models()
    return randomize(timm_models.create_model(name, pretrained=False, **arguments))


def save(model, folder: pathlib.Path, arguments: dict) -> pathlib.Path:
    """As `timm.models.push_to_hf_hub` lays a repository out."""
    from timm.models import _hub

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    specs = {name: (value.shape, value.dtype) for name, value in tensors.items()}
    safetensors.write(folder / "model.safetensors", tensors.items(), specs, {"format": "pt"})
    _hub.save_config_for_hf(model, folder / "config.json", model_args=arguments)
    return folder


def images(config) -> np.ndarray:
    """One image for a model, float32."""
    shape = (1, *config.height_width, config.channels)
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def answer(model, x: np.ndarray) -> np.ndarray:
    """timm's logits of images (N, H, W, C), in float64: its own rounding says nothing about ours."""
    import torch

    with torch.no_grad():
        logits = model.double()(torch.from_numpy(x).permute(0, 3, 1, 2).double()).numpy()
    model.float()
    return logits


def difference(model, checkpoint, dtype: str = "float32") -> float:
    """The largest difference of logits (of features without a head), relative to the largest or to 1.

    Args:
      dtype: what ours are computed in.
    """
    x = images(checkpoint.model_config)
    expected = answer(model, x)
    params = jax.tree.map(np.asarray, checkpoint.params)
    variables = jax.tree.map(np.asarray, checkpoint.variables)
    output = program(checkpoint.model_config, dtype)(params, variables, x)
    ours = np.asarray(output.features if output.logits is None else output.logits)
    if not expected.std() > 0.01:
        raise ValueError(f"logits of {expected.std():.2g} show nothing")
    return float(np.abs(ours - expected).max() / max(1, np.abs(expected).max()))


@functools.lru_cache(maxsize=8)
def program(config, dtype: str) -> Callable:
    """What a model of `config` computes of its parameters, its variables and images."""
    definition, _ = registry.abstract(config)
    compiled = {"float32": jax.jit, "float64": float64.in_float64}[dtype]
    return compiled(lambda params, variables, x: nnx.merge(definition, params, variables)(x))


def fewer_layers(kind: str, arguments: dict) -> dict:
    """Arguments of the same network with fewer layers, where it is large."""
    if kind == "Cait":
        return {"depth": 2}
    if kind not in ("VisionTransformer", "VisionTransformerDistilled", "Eva", "Beit", "NaFlexVit"):
        return {}
    width, depth = arguments.get("embed_dim", 768), arguments.get("depth", 12)
    fewer = {"depth": min(depth, 1 if width >= 1024 else 2)}
    heads = arguments.get("num_kv_heads")
    if isinstance(heads, list | tuple):
        # Of its kinds of layers one each.
        heads = [heads[len(heads) // 2], heads[0]][: fewer["depth"]]
    if heads:
        fewer["num_kv_heads"] = heads
    return fewer


def smaller(kind: str, arguments: dict) -> dict:
    """Arguments of the same network with two narrow layers, for images that are not square if it can have any."""
    patch = arguments.get("patch_size", 16)
    if kind in ("CrossVit", "MlpMixer"):
        return {}  # timm's functions take no other sizes
    if arguments.get("embed_layer") == "ConvStem":  # without a projection to the width
        return {"depth": 1}
    stride = 32 if arguments.get("embed_layer") else patch
    size = {"img_size": [2 * stride, 3 * stride]}
    fewer = {"depth": 2, "embed_dim": 48, "num_heads": 2}
    if kind == "NaFlexVit":
        return fewer | (
            {"pos_embed_grid_size": [6, 6]} if "pos_embed_grid_size" in arguments else {}
        )
    heads = arguments.get("num_kv_heads")
    if heads:
        fewer["num_kv_heads"] = [2, 1] if isinstance(heads, list | tuple) else 1
    return fewer | size


def check(name: str, small: bool = False) -> tuple[str, float | str]:
    """('read', difference), ('refused', why) or ('different', what)."""
    architecture, _, tag = name.partition(".")
    known = published.architectures()[architecture]
    arguments = (smaller if small else fewer_layers)(known.kind, known.arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = build(name, **arguments)
        path = save(model, pathlib.Path(folder) / architecture, arguments)
        try:
            checkpoint = formats.read_checkpoint(path)
        except UserError as error:
            return "refused", str(error).replace(str(path), "it")
        expected = known.tags.get(tag)
        # A NaFlexVit has no size: here that of its table.
        if expected and (small or known.kind == "NaFlexVit"):
            expected = published.at_size(expected, checkpoint.model_config.image_size, name)
        if expected and checkpoint.preprocessing != expected:
            return "different", f"{checkpoint.preprocessing}, not {expected}"
        # Of a hundred layers of convolutions timm's own rounding is as large as the bound of others.
        exact = small or known.kind in CONVOLUTIONAL
        away = difference(model, checkpoint, "float64" if exact else "float32")
    return ("read" if away <= (EXACT_BOUND if exact else BOUND) else "different"), away


def alike(names: list[str], small: bool = False) -> dict[str, list[str]]:
    """Names by the first of those that share network and size of the images; small ones by the architecture."""
    groups = collections.defaultdict(list)
    for name in names:
        architecture, _, tag = name.partition(".")
        known = published.architectures()[architecture]
        if small:
            if known.kind not in CONVOLUTIONAL:
                groups[architecture].append(name)
            continue
        size = known.tags[tag].image_size if tag in known.tags else None
        own = known.arguments or architecture
        groups[json.dumps([known.kind, own, size], sort_keys=True)].append(name)
    return {group[0]: group for group in groups.values()}


def sweep(
    pattern: str, results: pathlib.Path | None, small: bool = False
) -> dict[str, tuple[str, float | str]]:
    """What became of each name that matches."""
    found = json.loads(results.read_text()) if results and results.exists() else {}
    without = [name for name, known in published.architectures().items() if not known.tags]
    names = [name for name in (*published.names(), *without) if re.search(pattern, name)]
    for first, group in alike(names, small).items():
        if any(name not in found for name in group):
            outcome = found.get(first) or check(first, small)
            found |= dict.fromkeys(group, outcome)
            print(first, len(group), *outcome, file=sys.stderr, flush=True)
            jax.clear_caches()
            if results:
                results.write_text(json.dumps(found, indent=0))
    return {name: tuple(found[name]) for name in names if name in found}


def table(outcomes: dict[str, tuple[str, float | str]]) -> str:
    """By family: published names, read, refused and why."""
    rows = ["| family | published | read | refused | largest difference |", "|---|--:|--:|--:|--:|"]
    reasons = collections.Counter()
    for title, _ in FAMILIES:
        mine = [outcome for name, outcome in outcomes.items() if family(name) == title]
        read = [value for what, value in mine if what == "read"]
        refused = [value for what, value in mine if what == "refused"]
        reasons.update((title, reason) for reason in refused)
        if mine:
            worst = f"{max(read):.1e}" if read else "–"
            rows.append(f"| {title} | {len(mine)} | {len(read)} | {len(refused)} | {worst} |")
    counts = collections.Counter(what for what, _ in outcomes.values())
    rows.append(f"| all | {len(outcomes)} | {counts['read']} | {counts['refused']} | |")
    lines = [f"- {title}, {n}: {reason}" for (title, reason), n in reasons.items()]
    wrong = [f"DIFFERENT {n}: {v}" for n, (what, v) in outcomes.items() if what == "different"]
    return "\n".join([*rows, "", *lines, *wrong])


def main(arguments: list[str]) -> None:
    """See above."""
    files = [a.removeprefix("--results=") for a in arguments if a.startswith("--results=")]
    patterns = [a for a in arguments if not a.startswith("--")]
    results = pathlib.Path(files[0]) if files else None
    small = "--small" in arguments
    print(table(sweep(patterns[0] if patterns else "", results, small)))


if __name__ == "__main__":
    main(sys.argv[1:])
