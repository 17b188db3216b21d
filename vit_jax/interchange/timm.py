"""Checkpoints of timm: state dicts of ViT, DeiT, hybrid, MLP-Mixer and BiT, as a file or a folder.

What a file alone cannot tell, and what is then taken unless an override or config.json says it:

- heads: those of the published size of that depth and width, else one per 64 channels;
- activation: exact GELU, with which timm computes ViT, DeiT and Mixer, also where the weights come
  from code with the tanh one (not so for some SigLIP models: say `activation="gelu_tanh"`); layer
  norms have 1e-6;
- the image size of a ResNet: 224.

Files that we write say all this in their metadata. Where ResNets normalise, timm adds other epsilons
than the code that the weights come from: 1e-8 to the variance of kernels, and in hybrids 1e-5 to that
of groups. With kernels of standard deviation 0.01 that changes logits by 2e-5 (BiT) or 1e-4 (hybrids)
of their size.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from etils import epath

from vit_jax.checkpoints.reading import CheckpointError
from vit_jax.interchange import adapt, pytorch, rules, safetensors, timm_names
from vit_jax.interchange.formats import Foreign, Preprocessing, configure, how_to_accept
from vit_jax.models import hybrid, mixer, registry, resnet, vit

NAME = "timm"
CANNOT_TELL = ("heads",)
USUAL_IMAGE_SIZE = 224
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "gelu_erf": "gelu"}
_STATED = ("heads", "activation", "epsilon", "image_size")
# timm builds a hybrid's ResNet in the function of that name.
_HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
_MIXERS = ("s32", "s16", "b32", "b16", "l32", "l16")
_BITS = ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")


def recognises(path) -> bool:
    """Whether this is a file of PyTorch, or a folder whose config.json names an architecture of timm."""
    path = epath.Path(path)
    if path.is_dir():
        config = path / "config.json"
        return config.exists() and isinstance(pytorch.read_json(config).get("architecture"), str)
    return safetensors.begins_as_safetensors(path) or pytorch.begins_as_pickle(path)


def read(path, **overrides) -> Foreign:
    """See `formats.read`; `layout` keeps the types of tensors that are not float32."""
    path = epath.Path(path)
    if path.is_dir():
        said = pytorch.read_json(path / "config.json")
        tensors, stated = pytorch.read_folder(path), _stated(said)
        classes = said.get("label_names")
        preprocessing = _preprocessing(said.get("pretrained_cfg", said))
    else:
        tensors, metadata = pytorch.read(path)
        stated = json.loads(metadata.get("vit_jax", "{}"))
        classes, preprocessing = stated.pop("classes", None), stated.pop("preprocessing", None)
        preprocessing = preprocessing and Preprocessing(**_tuples(preprocessing))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    config_class, recognised = _recognise(shapes, path)
    if config_class in (mixer.Config, resnet.Config):
        # Said by the ViT that the file is loaded into, see CANNOT_TELL; that this is none, is told there.
        overrides.pop("heads", None)
    known = {
        name: value for name, value in stated.items() if name in config_class.__dataclass_fields__
    }
    config = configure(config_class, recognised | known, overrides)
    params = rules.to_ours(
        timm_names.table(config), tensors, registry.abstract(config)[1], source=path
    )
    layout = {"format": NAME, "dtypes": pytorch.other_dtypes(tensors)}
    preprocessing = preprocessing or _usual_preprocessing(config)
    return Foreign(config, params, tuple(classes) if classes else None, preprocessing, layout)


def write(foreign: Foreign, path) -> None:
    """Writes a `.safetensors` file, or a folder for `timm.create_model("local-dir:FOLDER", pretrained=True)`.

    Raises:
      CheckpointError: timm would compute the model with other numbers, or has no such model.
    """
    path = epath.Path(path)
    if path.suffix in (".pth", ".pt", ".bin"):
        raise CheckpointError(
            f"{path} is not written: pickles can run code. Name it .safetensors, which timm reads too"
        )
    foreign = adapt.with_learned_position(foreign)
    config = foreign.model_config
    _refuse_what_timm_lacks(config, path)
    dtypes = foreign.layout.get("dtypes", {}) if foreign.layout.get("format") == NAME else {}
    stated = {name: getattr(config, name) for name in _STATED if hasattr(config, name)}
    if foreign.classes:
        stated["classes"] = list(foreign.classes)
    if foreign.preprocessing:
        stated["preprocessing"] = vars(foreign.preprocessing)
    metadata = {"vit_jax": json.dumps(stated)}
    if path.suffix == ".safetensors":
        if getattr(config, "activation", "gelu") != "gelu":
            raise CheckpointError(
                f"{path} is not written: a file cannot tell timm of the activation {config.activation!r}, and it takes "
                "the exact GELU. Write a folder, whose config.json tells it. "
                + how_to_accept("activation", "gelu")
            )
        pytorch.write(path, timm_names.table(config), foreign.params, dtypes, metadata)
        return
    description = _description(foreign)
    with pytorch.NewFolder(path) as folder:
        pytorch.write(
            folder / pytorch.WEIGHTS, timm_names.table(config), foreign.params, dtypes, metadata
        )
        (folder / "config.json").write_text(json.dumps(description, indent=2))


def _recognise(shapes: Mapping[str, tuple], path) -> tuple[type, dict]:
    """A family's config class and its options."""
    try:
        if "stem.proj.weight" in shapes:
            return mixer.Config, _mixer(shapes)
        if "stem.conv.weight" in shapes:
            return resnet.Config, _resnet(shapes)
        if any(name.startswith("patch_embed.backbone.") for name in shapes):
            return hybrid.Config, _hybrid(shapes)
        return vit.Config, _vit(shapes, 1)
    except (KeyError, ValueError) as error:
        first = ", ".join(sorted(shapes)[:3]) or "nothing"
        raise CheckpointError(
            f"{path} holds no ViT, DeiT, hybrid, Mixer or BiT with timm's names: it lacks {error} (it has {first}, …). "
            "Of a Hugging Face model give the folder with its config.json"
        ) from error


def _vit(shapes: Mapping[str, tuple], stride: int) -> dict:
    width, _, patch, _ = shapes["patch_embed.proj.weight"]
    mlp_dim = shapes["blocks.0.mlp.fc1.weight"][0]
    depth = _count(shapes, r"blocks\.(\d+)\.")
    distilled = "dist_token" in shapes
    has_class = "cls_token" in shapes
    placed = has_class + distilled
    rows = shapes["pos_embed"][1]
    of_class = has_class and _is_square(rows - placed)
    side = math.isqrt(rows - (placed if of_class else 0))
    if side**2 != rows - (placed if of_class else 0):
        raise CheckpointError(
            f"pos_embed of {rows} rows is no square grid: only square images are supported"
        )
    sizes = {(d, w): heads for d, w, _, heads in vit.SIZES.values()}
    return {
        "image_size": side * patch * stride,
        "num_classes": shapes.get("head.bias", (0,))[0],
        "patch": patch,
        "depth": depth,
        "width": width,
        "mlp_dim": mlp_dim,
        "heads": sizes.get((depth, width), max(width // 64, 1)),
        "pool": "map" if "attn_pool.latent" in shapes else "token" if has_class else "mean",
        "representation": shapes.get("pre_logits.fc.bias", (0,))[0],
        "position_of_class": of_class,
        "distilled": distilled,
        "registers": shapes["reg_token"][1] if "reg_token" in shapes else 0,
        "qk_norm": "blocks.0.attn.q_norm.weight" in shapes,
        "activation": "gelu",
    }


def _hybrid(shapes: Mapping[str, tuple]) -> dict:
    prefix = "patch_embed.backbone."
    inner = {
        name.removeprefix(prefix): shape
        for name, shape in shapes.items()
        if name.startswith(prefix)
    }
    options = {"units": _units(inner), "width_factor": _root(inner)[0] / 64}
    stride = resnet.Config(USUAL_IMAGE_SIZE, **options, preactivation=False).stride
    return _vit(shapes, stride) | options


def _resnet(shapes: Mapping[str, tuple]) -> dict:
    return {
        "image_size": USUAL_IMAGE_SIZE,
        "num_classes": shapes.get("head.fc.bias", (0,))[0],
        "units": _units(shapes),
        "width_factor": _root(shapes)[0] / 64,
        "preactivation": True,
        "root_zeros": True,
    }


def _mixer(shapes: Mapping[str, tuple]) -> dict:
    width, _, patch, _ = shapes["stem.proj.weight"]
    token_mlp_dim, tokens = shapes["blocks.0.mlp_tokens.fc1.weight"]
    return {
        "image_size": math.isqrt(tokens) * patch,
        "num_classes": shapes.get("head.bias", (0,))[0],
        "patch": patch,
        "depth": _count(shapes, r"blocks\.(\d+)\."),
        "width": width,
        "mlp_dim": shapes["blocks.0.mlp_channels.fc1.weight"][0],
        "token_mlp_dim": token_mlp_dim,
        "activation": "gelu",
    }


def _root(shapes: Mapping[str, tuple]) -> tuple[int, ...]:
    return shapes["stem.conv.weight"] if "stem.conv.weight" in shapes else shapes["conv.weight"]


def _units(shapes: Mapping[str, tuple]) -> tuple[int, ...]:
    stages = _count(shapes, r"stages\.(\d+)\.")
    return tuple(_count(shapes, rf"stages\.{stage}\.blocks\.(\d+)\.") for stage in range(stages))


def _count(names, pattern: str) -> int:
    return 1 + max(
        (int(match[1]) for match in map(re.compile(pattern).match, names) if match), default=-1
    )


def _is_square(number: int) -> bool:
    return number >= 1 and math.isqrt(number) ** 2 == number


def _stated(said: dict) -> dict:
    """Options that a folder's config.json says and the tensors do not."""
    args = said.get("model_args", {})
    stated = {}
    if "num_heads" in args:
        stated["heads"] = args["num_heads"]
    if "act_layer" in args:
        if args["act_layer"] not in _ACTIVATIONS:
            raise CheckpointError(
                f"the activation {args['act_layer']!r} is not supported; {', '.join(_ACTIVATIONS)} are"
            )
        stated["activation"] = _ACTIVATIONS[args["act_layer"]]
    return stated


def _preprocessing(said: dict) -> Preprocessing | None:
    """What a config.json's `pretrained_cfg` says of images."""
    if not {"mean", "std", "input_size"} <= said.keys():
        return None
    size, mean, std = said["input_size"][-1], tuple(said["mean"]), tuple(said["std"])
    if said.get("crop_mode") == "squash":
        return Preprocessing(size, mean, std, "resize")
    # As timm rounds, but for what is lost between our division and this one.
    resized = math.floor(size / said.get("crop_pct", 0.875) + 1e-6)
    return Preprocessing(size, mean, std, "central", resized)


def _usual_preprocessing(config) -> Preprocessing | None:
    """Of the published models; `None` for a plain ViT, which may come from Google or from DeiT."""
    size = config.image_size
    if getattr(config, "distilled", False):
        return Preprocessing(size, IMAGENET_MEAN, IMAGENET_STD, "central", math.floor(size / 0.9))
    if type(config) is vit.Config:
        return None
    if isinstance(config, mixer.Config):
        return Preprocessing(size, eval_crop="central", eval_resize=math.floor(size / 0.875))
    return Preprocessing(size)


def _refuse_what_timm_lacks(config, path) -> None:
    """Raises `CheckpointError` for a model that timm would compute with other numbers, or not at all."""
    if isinstance(config, resnet.Config) and not config.preactivation:
        raise CheckpointError(
            f"{path} is not written: of ResNets v1 timm has those in hybrids only"
        )
    for name, value in (("epsilon", 1e-6), ("root_zeros", True)):
        if getattr(config, name, value) != value:
            raise CheckpointError(
                f"{path} is not written: timm computes with {name} = {value!r}, "
                f"this model with {getattr(config, name)!r}. " + how_to_accept(name, value)
            )
    if isinstance(config, mixer.Config) and config.activation != "gelu":
        raise CheckpointError(
            f"{path} is not written: timm computes Mixers with the exact GELU, this model with {config.activation!r}. "
            + how_to_accept("activation", "gelu")
        )
    if getattr(config, "distilled", False) and (not config.distillation_head or config.registers):
        raise CheckpointError(
            f"{path} is not written: timm's distilled models read both tokens and have no registers"
        )
    if getattr(config, "registers", 0) and config.prefix:
        raise CheckpointError(
            f"{path} is not written: in timm registers have a position when the class token has one; "
            "here they have none"
        )


def _description(foreign: Foreign) -> dict:
    """The config.json of a folder."""
    config = foreign.model_config
    architecture, args = _architecture(config)
    prepared = foreign.preprocessing or Preprocessing(config.image_size)
    share = 1.0 if prepared.eval_crop == "resize" else prepared.image_size / prepared.eval_resize
    pretrained = {
        "input_size": [3, config.image_size, config.image_size],
        "mean": list(prepared.mean),
        "std": list(prepared.std),
        "crop_pct": share,
        "crop_mode": "squash" if prepared.eval_crop == "resize" else "center",
        "interpolation": "bilinear",
        "num_classes": config.num_classes,
    }
    description = {
        "architecture": architecture,
        "num_classes": config.num_classes,
        "model_args": args,
    }
    if foreign.classes:
        description["label_names"] = list(foreign.classes)
    return description | {"pretrained_cfg": pretrained}


def _architecture(config) -> tuple[str, dict[str, Any]]:
    """A model's name in timm, and its arguments where they are not those of that name."""
    if isinstance(config, resnet.Config):
        name = (
            next((d for d, units in resnet.UNITS.items() if units == config.units), "?")
            + f"x{config.width_factor:g}"
        )
        if name not in _BITS:
            raise CheckpointError(
                f"timm has no BiT-R{name}, only {', '.join(_BITS)}: write a .safetensors file"
            )
        return f"resnetv2_{name}_bit", {}
    if isinstance(config, mixer.Config):
        sizes = {(depth, width): size for size, (depth, width, *_) in mixer.SIZES.items()}
        name = f"{sizes.get((config.depth, config.width), '?')}{config.patch}".lower()
        if name not in _MIXERS:
            raise CheckpointError(
                f"timm has no Mixer of depth {config.depth}, width {config.width} and patch {config.patch}, only "
                f"{', '.join(_MIXERS)}: write a .safetensors file"
            )
        ratios = [_ratio(hidden, config.width) for hidden in (config.token_mlp_dim, config.mlp_dim)]
        return f"mixer_{name}_224", {"img_size": config.image_size, "mlp_ratio": ratios}
    args = {
        "img_size": config.image_size,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": _ratio(config.mlp_dim, config.width),
        "class_token": config.pool == "token",
        "global_pool": {"token": "token", "mean": "avg", "map": "map"}[config.pool],
        "fc_norm": False,
        "no_embed_class": not config.prefix,
        "reg_tokens": config.registers,
        "qk_norm": config.qk_norm,
        "act_layer": config.activation,
    }
    if config.representation:
        raise CheckpointError(
            "timm has had no layer before the head since version 0.8: write a .safetensors file"
        )
    if isinstance(config, hybrid.Config):
        if config.units not in _HYBRIDS or config.width_factor != 1:
            raise CheckpointError(
                f"timm has no hybrid with units {config.units}: write a .safetensors file"
            )
        return _HYBRIDS[config.units], args | ({} if config.units else {"patch_size": config.patch})
    name = "deit_base_distilled_patch16_224" if config.distilled else "vit_base_patch16_224"
    return name, args | {"patch_size": config.patch}


def _ratio(hidden: int, width: int) -> float:
    """The factor that timm multiplies `width` with and rounds down, to get `hidden`."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def _tuples(fields: dict) -> dict:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
