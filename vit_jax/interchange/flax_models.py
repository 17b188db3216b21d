"""Which model a file of vision_transformer, big_vision or BiT holds: told from names and shapes.

What such a file cannot tell, and what is then taken (an override says otherwise):

- the image size of a ResNet or of a ViT with sine-cosine positions: 224, or the next smaller
  multiple of the patch;
- activation and epsilon: all these code bases have the tanh GELU and layer norms with 1e-6; BiT's
  details follow its style.

Not told apart, because the tensors are the same: big_vision's `pool_type="gap"` and its models
  without pooling.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from absl import logging

from vit_jax.checkpoints.reading import CheckpointError
from vit_jax.interchange import flax_names, npz, rules
from vit_jax.interchange.formats import Foreign, configure, how_to_accept
from vit_jax.models import hybrid, mixer, registry, resnet, vit

USUAL_IMAGE_SIZE = 224
_CONVENTIONS = {"activation": "gelu_tanh", "epsilon": 1e-6, "root_zeros": False}
_PREACTIVATION_NORMS = ("norm-pre-head/scale", "resnet/group_norm/gamma")


def read(path, format: str, preprocessing, overrides: dict) -> Foreign:
    """A checkpoint of one of these code bases.

    Args:
      path: of an `.npz` file.
      format: its name, for the layout.
      preprocessing: image size -> `Preprocessing`.
      overrides: see `formats.read`.

    Raises:
      CheckpointError: the file is damaged or does not hold one whole model.
    """
    everything = npz.read(path)
    prefix = flax_names.find_prefix(everything)
    mine = {name: name.removeprefix(prefix) for name in everything if name.startswith(prefix)}
    other = [name for name in everything if name not in mine]
    if other:
        logging.info(
            "%s: %d tensors beside '%s' (optimizer state, text tower) are left out",
            path,
            len(other),
            prefix,
        )
    canonical = flax_names.canonical(mine.values())
    tensors = {canonical[short]: everything[name] for name, short in mine.items()}
    reshaped = {name: list(t.shape) for name, t in tensors.items() if _has_idle_axes(name, t)}
    tensors |= {name: _squeezed(tensors[name]) for name in reshaped}
    layout = flax_names.layout_of(tensors) | {
        "format": format,
        "prefix": prefix,
        "renamed": {new: old for old, new in canonical.items() if new != old},
        "reshaped": reshaped,
    }
    try:
        config_class, recognised = _recognise(tensors, layout)
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} looks like a model of {format}, but {error} is missing or has another shape"
        ) from error
    config = configure(config_class, recognised, overrides)
    params = rules.to_ours(
        flax_names.rules(config, layout), tensors, registry.abstract(config)[1], source=path
    )
    return Foreign(config, params, preprocessing=preprocessing(config.image_size), layout=layout)


def write(foreign: Foreign, path, layout: Mapping[str, Any]) -> None:
    """Writes a checkpoint with the names that `layout` says.

    Raises:
      CheckpointError: the names have no place for a parameter; nothing is written.
    """
    arrays = rules.to_theirs(
        flax_names.rules(foreign.model_config, layout), foreign.params, dtypes=layout["dtypes"]
    )
    renamed, reshaped = layout["renamed"], layout.get("reshaped", {})
    npz.write(
        path,
        (
            (layout["prefix"] + renamed.get(name, name), x.reshape(reshaped.get(name, x.shape)))
            for name, x in arrays
        ),
    )


def refuse_other_conventions(foreign: Foreign, path, code: str) -> None:
    """Raises `CheckpointError` for a model that `code` would compute with other numbers."""
    config = foreign.model_config
    for name, value in _CONVENTIONS.items():
        if getattr(config, name, value) != value:
            raise CheckpointError(
                f"{path} is not written: {code} computes with {name} = {value!r}, this model "
                f"with {getattr(config, name)!r}. " + how_to_accept(name, value)
            )


def _recognise(tensors: Mapping[str, Any], layout: dict) -> tuple[type, dict]:
    """A family's config class and its options."""
    shape = {name: tensor.shape for name, tensor in tensors.items()}
    if layout["resnet"] == "tensorflow" or (
        "embedding/kernel" not in shape and "stem/kernel" not in shape
    ):
        return resnet.Config, _resnet(shape) | {"image_size": USUAL_IMAGE_SIZE}
    if "stem/kernel" in shape:
        return mixer.Config, _mixer(shape)
    if "conv_root/kernel" in shape:
        backbone = _resnet(shape)
        options = {name: backbone[name] for name in ("units", "width_factor")}
        stride = resnet.Config(USUAL_IMAGE_SIZE, **options).stride
        return hybrid.Config, _vit(shape, layout, stride) | options
    return vit.Config, _vit(shape, layout, 1)


def _vit(shape: Mapping[str, tuple], layout: dict, stride: int) -> dict:
    """Options of a ViT whose patches are counted in `stride` pixels."""
    _, attention, mlp = flax_names.NUMBERS[layout["numbers"]]
    block = "Transformer/encoderblock" + ("" if layout["scanned"] else "_0")
    *layers, width, heads, _ = shape[
        f"{block}/MultiHeadDotProductAttention_{attention}/query/kernel"
    ]
    patch, across, _, _ = shape["embedding/kernel"]
    if patch != across:
        raise CheckpointError(f"patches of {patch}x{across} pixels: only square ones are supported")
    pool = "map" if f"{layout['pooling']}probe" in shape else "token" if "cls" in shape else "mean"
    options = {
        "num_classes": shape.get("head/bias", (0,))[0],
        "patch": patch,
        "depth": layers[0] if layers else _count(shape, r"Transformer/encoderblock_(\d+)/"),
        "width": width,
        "mlp_dim": shape[f"{block}/MlpBlock_{mlp}/Dense_0/kernel"][-1],
        "heads": heads,
        "pool": pool,
        "representation": shape.get("pre_logits/bias", (0,))[0],
    }
    if layout["position"] is None:
        size = USUAL_IMAGE_SIZE // (patch * stride) * patch * stride
        return options | {"position": "sincos2d", "position_of_class": False, "image_size": size}
    rows = shape[layout["position"]][1]
    # 2 rows are a class row and one patch, 1 row is one patch.
    of_class = pool == "token" and _is_square(rows - 1) and rows > 1
    side = math.isqrt(rows - of_class)
    if side**2 != rows - of_class:
        raise CheckpointError(
            f"a position embedding of {rows} rows is no square grid: only square ones are supported"
        )
    return options | {"position_of_class": of_class, "image_size": side * patch * stride}


def _mixer(shape: Mapping[str, tuple]) -> dict:
    patch, _, _, width = shape["stem/kernel"]
    tokens, token_mlp_dim = shape["MixerBlock_0/token_mixing/Dense_0/kernel"]
    return {
        "image_size": math.isqrt(tokens) * patch,
        "num_classes": shape.get("head/bias", (0,))[0],
        "patch": patch,
        "depth": _count(shape, r"MixerBlock_(\d+)/"),
        "width": width,
        "mlp_dim": shape["MixerBlock_0/channel_mixing/Dense_0/kernel"][1],
        "token_mlp_dim": token_mlp_dim,
    }


def _resnet(shape: Mapping[str, tuple]) -> dict:
    root = next(
        shape[name] for name in flax_names.ROOTS if name in shape and shape[name][:2] == (7, 7)
    )
    units = {}
    for name in shape:
        if match := re.search(r"block(\d+)/unit(\d+)/", name):
            stage, unit = map(int, match.groups())
            units[stage] = max(units.get(stage, 0), unit)
    head = shape.get("head/bias") or shape.get("resnet/head/conv2d/bias") or (0,)
    return {
        "num_classes": head[0],
        "units": tuple(units[stage] for stage in sorted(units)),
        "width_factor": root[-1] / 64,
        "preactivation": any(name in shape for name in _PREACTIVATION_NORMS),
    }


def _count(names, pattern: str) -> int:
    return 1 + max(int(match[1]) for match in map(re.compile(pattern).match, names) if match)


def _has_idle_axes(name: str, tensor) -> bool:
    """Whether it is of a Mixer's MLP and has axes of length 1 beside its own (the first files)."""
    return "_mixing/" in name and len(tensor.shape) > (2 if name.endswith("kernel") else 1)


def _squeezed(tensor: rules.Lazy) -> rules.Lazy:
    shape = tuple(size for size in tensor.shape if size > 1)
    return rules.Lazy(shape, tensor.dtype, lambda: tensor.read().reshape(shape))


def _is_square(number: int) -> bool:
    return math.isqrt(number) ** 2 == number
