"""What timm's tensors, names and arguments together say about a ViT, as options of ours.

Tensors tell most of it. The rest (heads, activation, which of several poolings, rotary positions, …)
a published architecture or a config.json tells, and where there is neither, all published models that
have such tensors, if these agree. Where they do not, the user has to give them.
"""

import functools
from collections.abc import Mapping
from typing import Any

from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import vit_beit, vit_naflex
from vit_jax.interchange.conversions.contract import Open, Shapes, count_layers
from vit_jax.interchange.conversions.vit_arguments import (
    ACTIVATIONS,
    BEIT,
    EVA,
    KINDS,
    NAFLEX,
    NOT_IN_TENSORS,
    OF_NAFLEX,
    POOLS,
    VIT,
    Options,
    from_arguments,
)
from vit_jax.models import published

_SIZES = ("depth", "width", "mlp_dim", "patch")
# Sizes of what is re-initialised, and of what is interpolated.
_FITTED = ("num_classes", "channels", "image_size", "representation")
_SHOWN = 3  # names in a sentence


def from_tensors(shapes: Shapes) -> Options:
    """The options that a ViT's tensors tell, but its positions and the size of its images."""
    width, channels, patch, across = shapes["patch_embed.proj.weight"]
    if patch != across:
        raise CheckpointError(f"patches of {patch}x{across} pixels: only square ones are supported")
    block, attention = "blocks.0", "blocks.0.attn"
    has_class = "cls_token" in shapes
    separate = f"{attention}.q_proj.weight" in shapes
    qv = f"{attention}.q_bias" in shapes
    if separate:
        biased, of_keys = (f"{attention}.{n}_proj.bias" in shapes for n in "qk")
    else:
        biased, of_keys = qv or f"{attention}.qkv.bias" in shapes, not qv
    down = shapes[f"{block}.mlp.fc2.weight"][1]
    gate = f"{block}.mlp.fc1_g.weight" in shapes
    gated = gate or shapes[f"{block}.mlp.fc1.weight"][0] == 2 * down
    scales = [any(f"{block}.{n}" in shapes for n in (f"gamma_{i}", f"ls{i}.gamma")) for i in (1, 2)]
    pooled, tokens = "fc_norm.weight" in shapes, "norm.weight" in shapes
    if pooled and tokens:
        raise CheckpointError("norms of both the tokens and what is pooled are not supported")
    options = {
        "num_classes": shapes.get("head.bias", (0,))[0],
        "channels": channels,
        "patch": patch,
        "depth": count_layers(shapes, r"blocks\.(\d+)\."),
        "width": width,
        "mlp_dim": down,
        "representation": shapes.get("pre_logits.fc.bias", (0,))[0],
        "distilled": "dist_token" in shapes,
        "registers": shapes["reg_token"][1] if "reg_token" in shapes else 0,
        "norm": "layer" if f"{block}.norm1.bias" in shapes else "rms",
        "qk_norm": f"{attention}.q_norm.weight" in shapes,
        "attention_inner_norm": f"{attention}.norm.weight" in shapes,
        "mlp_inner_norm": f"{block}.mlp.norm.weight" in shapes,
        "qkv_bias": biased,
        "key_bias": of_keys if biased else True,
        "projection_bias": f"{attention}.proj.bias" in shapes,
        "parallel": f"{block}.norm2.weight" not in shapes,
        "block_branches": count_layers(shapes, r"blocks\.0\.attns\.(\d+)\."),
        "differential": f"{attention}.lambda_q1" in shapes,
        "gated_mlp": gated,
        "layer_scale": {(True, True): "all", (True, False): "attention"}.get(tuple(scales), "none"),
        "patch_bias": "patch_embed.proj.bias" in shapes,
        "patch_norm": "patch_embed.norm.weight" in shapes,
        "pre_norm": "norm_pre.weight" in shapes,
        "last_norm": "pooled" if pooled else "tokens" if tokens else "none",
        "position": "learned" if "pos_embed" in shapes else "none",
    }
    if vit_beit.bias_table(shapes):
        options |= vit_beit.options_from_tensors(shapes)
    if "pos_embed_x" in shapes:
        options |= {"position": "factorized"}
    if "attn_pool.latent" in shapes:
        hidden = shapes["attn_pool.mlp.fc1.bias"][0]
        options |= {"pool": "map", "map_mlp_dim": 0 if hidden == down else hidden}
    elif not has_class:
        options |= {"pool": "mean"}
    if "rope.freqs" in shapes:
        options |= {"rope": "mixed"}
    return options


def _class_of(shapes: Shapes) -> str:
    """timm's class that alone has such names; '' where several have them."""
    if vit_naflex.is_naflex(shapes):
        return NAFLEX
    if vit_beit.bias_table(shapes):
        return BEIT
    if any(f"blocks.0.{n}" in shapes for n in ("gamma_1", "attn.q_bias", "attn.q_proj.weight")):
        return EVA
    return VIT if "blocks.0.ls1.gamma" in shapes else ""


def settled(
    tensor_options: Options, shapes: Shapes, metadata: Mapping[str, Any]
) -> tuple[Options, dict[str, Open], tuple[str, ...]]:
    """The options that tensors do not tell, those of them that are open, and those that are assumed.

    Args:
      tensor_options: what the tensors tell.
      shapes: of the tensors as the file has them.
      metadata: see `TimmConversion`.

    Raises:
      CheckpointError: the metadata contradicts the tensors, or is not supported.
    """
    own = {name: metadata[name] for name in NOT_IN_TENSORS if name in metadata}
    options, left, compared = _from_metadata(tensor_options, shapes, metadata)
    options |= own
    if not vit_naflex.is_naflex(shapes):
        options = {n: value for n, value in options.items() if n not in OF_NAFLEX}
    every = tensor_options | options
    assumed = (n for n in compared if n not in own and n in options and _matters(n, every))
    return options, {n: ask for n, ask in left.items() if n not in own}, tuple(assumed)


def _matters(name: str, options: Options) -> bool:
    """Whether an option changes a result."""
    if name.startswith("rope_"):
        return options["rope"] != "none"
    needed = {"map_heads": ("map",), "pool_prefix": ("map", "mean")}
    return name not in needed or options["pool"] in needed[name]


def _from_metadata(
    tensor_options: Options, shapes: Shapes, metadata: Mapping[str, Any]
) -> tuple[Options, dict[str, Open], tuple[str, ...]]:
    """As `settled`, of a file that is not ours; the last are the options found by comparison."""
    named = metadata.get("architecture", "")
    known = published.architectures().get(named)
    arguments = {n: v for n, v in metadata.items() if n not in _NO_ARGUMENTS}
    if known or _stated(arguments):
        kind = known.kind if known else _kind(arguments)
        if kind not in KINDS:
            raise CheckpointError(
                f"the tensors are those of a ViT, but {named} is a {kind} of timm"
            )
        options = from_arguments(kind, (known.arguments if known else {}) | arguments)
        _compare(tensor_options, options, "cls_token" in shapes, named)
        return (
            {name: options[name] for name in NOT_IN_TENSORS if name not in tensor_options},
            {},
            (),
        )
    return _by_comparison(tensor_options, shapes, arguments)


def arguments_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """timm's arguments that `metadata` has, with those of the published model that it names."""
    known = published.architectures().get(metadata.get("architecture", ""))
    stated = {n: v for n, v in metadata.items() if n not in _NO_ARGUMENTS}
    return (known.arguments if known else {}) | stated


# What `metadata` has that is no argument of timm's class.
_NO_ARGUMENTS = {
    "architecture",
    "tag",
    "image_size",
    "wanted_size",
    "written_here",
    "table_corners",
    *NOT_IN_TENSORS,
}
# Arguments without which little of a model is known.
_STATING = {"embed_dim", "num_heads"}


def _stated(arguments: Mapping[str, Any]) -> bool:
    return arguments.keys() >= _STATING


def _kind(arguments: Mapping[str, Any]) -> str:
    if any(name.startswith("pos_embed_") for name in arguments):
        return NAFLEX
    if any(name.endswith("rel_pos_bias") for name in arguments):
        return BEIT
    of_eva = any(name.startswith(("use_", "rope_", "swiglu", "num_reg")) for name in arguments)
    return EVA if of_eva else VIT


def _compare(tensor_options: Options, options: Options, has_class: bool, named: str) -> None:
    """Raises `CheckpointError` where tensors and metadata contradict each other."""
    metadata = options | {"class_token": options["pool"] == "token" or options["keep_class_token"]}
    from_file = tensor_options | {"class_token": has_class}
    for name in metadata.keys() & from_file.keys() - {
        *_FITTED,
        *NOT_IN_TENSORS,
        "map_mlp_dim",
        "last_norm",
    }:
        if metadata[name] != from_file[name]:
            raise CheckpointError(
                f"{named or 'config.json'} says {name}={metadata[name]!r}, the tensors have {from_file[name]!r}: "
                "this is another model than its name or config.json says"
            )


def _by_comparison(
    tensor_options: Options, shapes: Shapes, arguments: Mapping[str, Any]
) -> tuple[Options, dict[str, Open], tuple[str, ...]]:
    """What all published models with such tensors have in common; of what they have not, the likeliest. The
    few `arguments` that a config.json says come first.
    """
    metadata = {
        ours: names.get(arguments[theirs], arguments[theirs])
        for theirs, ours, names in _SAID_ALONE
        if theirs in arguments
    }
    from_file = {n: v for n, v in tensor_options.items() if n not in (*_FITTED, *NOT_IN_TENSORS)}
    has_class = "cls_token" in shapes
    from_file |= {"class": has_class, "map": tensor_options.get("pool") == "map"}
    from_file |= {"eva": of_class == EVA} if (of_class := _class_of(shapes)) else {}
    from_file |= {"naflex": of_class == NAFLEX, "beit": of_class == BEIT}
    alike = _published_with(from_file)
    if not alike:
        alike = _published_with({n: v for n, v in from_file.items() if n not in _SIZES})
        # Those of another size tell neither heads nor the grid that rotations are for, if they have one.
        alike = [
            (name, o | {"heads": None, "rope_grid": None if o["rope_grid"] else ()})
            for name, o in alike
        ]
    likeliest = {"pool": "token" if has_class else "mean"}
    options, left = {}, {}
    for name, usual in NOT_IN_TENSORS.items():
        if name in tensor_options or name in metadata:
            continue
        values: dict[Any, list[str]] = {}
        for architecture, other in alike:
            values.setdefault(other[name], []).append(architecture)
        options[name] = next(iter(values), likeliest.get(name, usual))
        usual_doubt = (
            "activation",
            "pool",
            *(("rope",) if tensor_options["position"] == "none" else ()),
        )
        unknown = not alike and name in usual_doubt
        if len(values) > 1 or options[name] is None or unknown:
            left[name] = Open(ask=_ask(name, values))
    return options | metadata, left, tuple(options)


# Arguments that also a config.json of an unknown architecture says, and our names of them and of their values.
_SAID_ALONE = (
    ("num_heads", "heads", {}),
    ("act_layer", "activation", ACTIVATIONS),
    ("global_pool", "pool", POOLS),
)


def _published_with(from_file: Options) -> list[tuple[str, Options]]:
    """The published ViTs with such options."""
    return [
        (name, o) for name, o in _known() if all(o[n] == v for n, v in from_file.items() if n in o)
    ]


def published_heads(options: Options) -> tuple[int | None, dict[str, Open]]:
    """The heads of the published ViTs of such sizes, and how open they are: asked for where there are none, or several.

    Args:
      options: of a ViT with a class token; its heads are assumed.
    """
    usual = {"gated_mlp": False, "rope": "none", "layer_scale": "none", "block_branches": 0}
    sizes = {name: options[name] for name in ("depth", "width", "mlp_dim")} | {"class": True}
    sizes |= {name: options.get(name, value) for name, value in usual.items()}
    values: dict[Any, list[str]] = {}
    for architecture, other in _published_with(sizes):
        values.setdefault(other["heads"], []).append(architecture)
    if len(values) == 1:
        return next(iter(values)), {}
    return None, {"heads": Open(ask=_ask("heads", values))}


def check_supported(architecture: str) -> None:
    """Raises `CheckpointError` for a ViT of timm that cannot be computed here."""
    known = published.architectures().get(architecture)
    if known and known.kind in KINDS and not vit_naflex.is_cropping(known.arguments):
        from_arguments(known.kind, known.arguments)


def supported(architecture: str) -> bool:
    """Whether an architecture of timm can be computed here."""
    try:
        check_supported(architecture)
    except CheckpointError:
        return False
    return True


@functools.cache
def _known() -> list[tuple[str, Options]]:
    """Every ViT of timm that can be computed here, with its options."""
    all_options = []
    for name, known in published.architectures().items():
        if known.kind not in KINDS:
            continue
        try:
            options = from_arguments(known.kind, known.arguments)
        except CheckpointError:
            continue
        has_class = options["pool"] == "token" or options["keep_class_token"]
        from_file = {"class": has_class, "map": options["pool"] == "map", "eva": known.kind == EVA}
        from_file |= {"naflex": known.kind == NAFLEX, "beit": known.kind == BEIT}
        all_options.append((name, options | from_file))
    return all_options


def _ask(name: str, values: Mapping[Any, list[str]]) -> str:
    known = [(v, names) for v, names in values.items() if v is not None]
    if len(known) < 2:
        return f"{name} (no model with such tensors is published)"
    listed = " or ".join(f"{value!r} ({', '.join(names[:_SHOWN])})" for value, names in known)
    return f"{name}: published models with such tensors have {listed}"
