"""Names of transformers' modules, as adapters of `peft` have them: in the code of transformers 5, or of 4. Files of
models keep the names of 4 whatever wrote them.
"""

import re
from collections.abc import Iterable

from vit_jax.interchange.formats import LoadedCheckpoint

# What stands before the names of a tower, by the class that has it.
_TOWER = re.compile(
    r"(vit|deit|beit|data2vec_vision|ijepa|dinov2|dinov2_with_registers|vision_model|vision_encoder|radio_model|model)\."
)
_LAYERS = re.compile(r"((encoder\.)?layers?|blocks)\.(?=\d)")
# Of transformers 4 (the last are of TIPSv2's files), and of the code of 5.
_MODULES = (
    ("attention.attention.query", "attention.q_proj"),
    ("attention.attention.key", "attention.k_proj"),
    ("attention.attention.value", "attention.v_proj"),
    ("attention.output.dense", "attention.o_proj"),
    ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
    ("mlp.weights_out", "mlp.down_proj"),
    ("attn.proj", "attention.o_proj"),
    ("mlp.c_fc", "mlp.fc1"),
    ("mlp.c_proj", "mlp.fc2"),
    ("mlp.w3", "mlp.down_proj"),
)
# One layer of files with the outputs of several of 5.
_HALVES = ("mlp.gate_proj", "mlp.up_proj")
_FUSED = {
    "mlp.weights_in": _HALVES,
    "mlp.w12": _HALVES,
    "attn.qkv": tuple(f"attention.{name}_proj" for name in "qkv"),
}
# How the code of 5 calls the layers of a tower, by the `kind` of a layout; those of ViT and DeiT are `layers.`.
_LAYERS_OF = {
    "dinov2": "encoder.layer.",
    "dinov2_with_registers": "encoder.layer.",
    "dinov3_vit": "model.layer.",
    "clip": "encoder.layers.",
    "siglip": "encoder.layers.",
    "siglip2": "encoder.layers.",
    "tipsv2": "encoder.layer.",
    "aimv2": "encoder.layers.",
    "radio": "encoder.layer.",
}
_AS_IN_FILES = ("data2vec-vision",)  # whose code has the names of 4 still
_OF_TOWERS = ("clip", "siglip", "tipsv2", "aimv2")  # without a head, of the tower's own class
# Networks that others here have other names for, and what stands before their names in the class with a classifier; ''
# where there is none.
OF_BASES = {"data2vec-vision": "data2vec_vision.", "ijepa": "ijepa.", "tipsv2": "", "aimv2": ""}


def canonical(name: str) -> str:
    """A name of a module or tensor without what stands before a tower's, its layers as `layers.{number}`, and the
    modules as in transformers 5; the same for each way to name it.
    """
    while match := _TOWER.match(name):
        name = name[match.end() :]
    if match := _LAYERS.match(name):
        name = f"layers.{name[match.end() :]}"
    for old, new in _MODULES:
        if f".{old}." in f"{name}.":
            return f"{name}.".replace(f".{old}.", f".{new}.")[:-1]
    return name


def modules(tensor: str) -> list[list[str]]:
    """The canonical modules whose outputs make up a tensor `….weight`: one, or where a file has several in one, these
    too.
    """
    name, _, last = canonical(tensor).rpartition(".")
    if last != "weight":
        return []
    parts = _parts(name)
    return [[name], parts] if len(parts) > 1 else [[name]]


def _parts(module: str) -> list[str]:
    """The modules of the code of transformers 5 that a module of a file is."""
    fused = next((fused for fused in _FUSED if module.endswith(f".{fused}")), "")
    return [module.removesuffix(fused) + part for part in _FUSED[fused]] if fused else [module]


def in_code(name: str, whole: LoadedCheckpoint) -> str:
    """The name of a tensor in the code of transformers 5, from that in files.

    Args:
      whole: the model, in the layout of its file.
    """
    kind, prefix = whole.layout.get("kind", ""), whole.layout.get("prefix", "")
    if kind in _AS_IN_FILES:
        return name
    rest = canonical(name)
    at = prefix if name.startswith(prefix) else ""
    if kind in _OF_TOWERS and not whole.model_config.num_classes:
        at = ""
    if rest.startswith("layers."):
        return at + _LAYERS_OF.get(kind, "layers.") + rest.removeprefix("layers.")
    return at + rest


def modules_in_code(tensors: Iterable[str], whole: LoadedCheckpoint) -> list[str]:
    """The modules in the code of transformers 5 of these tensors `….weight` in files."""
    names = (in_code(name, whole).removesuffix(".weight") for name in tensors)
    return [part for name in names for part in _parts(name)]
