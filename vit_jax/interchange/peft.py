"""Adapters as `peft` keeps them, for ViT and DINOv2 of transformers: a folder of `adapter_config.json` and
`adapter_model.safetensors`. Written are the adapters and the head; read is the whole model, base and adapters merged.

Modules are named as in transformers 5; those of transformers 4 are read too.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from etils import epath

from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange import formats, pytorch, safetensors, tensors_by_name
from vit_jax.interchange.checkpoint_file import CheckpointFile
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.interchange.formats import LoadedCheckpoint, ReadOptions
from vit_jax.models import lora
from vit_jax.models.lora import SLOTS, A, B

NAME = "peft"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_HUGGINGFACE = "huggingface"
_KINDS = ("", "dinov2", "dinov2_with_registers")  # of `layout`; '' is ViT
# In files of models, which have transformers 4's names, and in the code of transformers 5.
_MODULES = (
    ("attention.attention.query", "attention.q_proj"),
    ("attention.attention.key", "attention.k_proj"),
    ("attention.attention.value", "attention.v_proj"),
    ("attention.output.dense", "attention.o_proj"),
    ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
)
# What other values of these fields of peft's mean is not known here.
_PLAIN = {
    "bias": "none",
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "lora_bias": False,
}


def recognises(file: CheckpointFile) -> bool:
    """Whether this is a folder that peft wrote."""
    return file.container == "folder" and (file.path / CONFIG).exists()


def read(file: CheckpointFile, request: ReadOptions) -> LoadedCheckpoint:
    """The base model that the folder names, with the adapters added, and with the head beside them."""
    adapter_config = pytorch.read_json(file.path / CONFIG)
    _check(adapter_config, file.path)
    options = {"hints": request.hints, "allow_nonfinite": request.allow_nonfinite}
    base = formats.read_checkpoint(
        adapter_config["base_model_name_or_path"], **options, **request.overrides
    )
    tensors = {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in safetensors.read(file.path / WEIGHTS)[0].items()
    }
    alpha, rank = adapter_config.get("lora_alpha", 8), adapter_config["r"]
    scale = alpha / (math.sqrt(rank) if adapter_config.get("use_rslora") else rank)
    params = dict(base.params)
    if "classifier.weight" in tensors:
        base, params = _with_head(base, params, tensors, file.path)
    table, whole = _rules(base, file.path)
    tensors = {_renamed(name, whole): tensor for name, tensor in tensors.items()}
    adapters: dict = {}
    for layer, places in _places(table, params, whole):
        pairs = [
            [tensors.pop(f"{at}.{kind}.weight", None) for kind in ("lora_A", "lora_B")]
            for at in places
        ]
        if any(part is not None for pair in pairs for part in pair):
            lora.place(adapters, layer.name, _ours(layer, pairs, scale, file.path))
    if tensors or not adapters:
        raise CheckpointError(
            f"{file.path}: there is no place in {formats.describe_model(base.model_config)} for "
            f"{', '.join(sorted(tensors)[:3]) or 'any of its tensors'}"
        )
    return dataclasses.replace(
        base, params=lora.adapted(params, adapters, lora.add_lazily), extras={}, objective=None
    )


def write(checkpoint: LoadedCheckpoint, path: epath.PathLike) -> None:
    """Writes a new folder for `PeftModel.from_pretrained(MODEL, folder)`.

    Raises:
      CheckpointError: the source has no adapters, or transformers has no such model.
    """
    path = epath.Path(path)
    if not checkpoint.adapters:
        raise CheckpointError(
            f"{path} is not written: peft's format holds adapters, and the source is a whole model. Convert a run with "
            "--config.lora.lora_rank, or write --to=huggingface"
        )
    table, whole = _rules(checkpoint, path)
    params, new = patterns.union(checkpoint.params, checkpoint.variables), checkpoint.adapters
    tensors, leaves = {}, patterns.named(new.adapters)
    modules, left = set(), {name.rpartition("/")[0] for name in leaves}
    for layer, places in _places(table, params, whole):
        if layer.name not in left:
            continue
        left.remove(layer.name)
        a, b = (np.asarray(leaves[f"{layer.name}/{part}"], np.float32) for part in (A, B))
        for number, at in enumerate(places):
            one_a, one_b = (a[number], b[number]) if layer.stacked else (a, b)
            rank = a.shape[-1]
            tensors[f"{_PREFIX}{at}.lora_A.weight"] = one_a.reshape(-1, rank).T
            tensors[f"{_PREFIX}{at}.lora_B.weight"] = one_b.reshape(rank, -1).T
            modules.add(at.rpartition(".")[2])
    if left:
        raise CheckpointError(
            f"{path} is not written: transformers has no layer for {', '.join(sorted(left))}"
        )
    conversion = tensors_by_name.conversion_of(checkpoint.model_config, _HUGGINGFACE, path)
    theirs = {n for rule in table if rule.ours in new.also for n in rule.names}
    saved = {n: x for n, x in tensors_by_name.arrays(whole, conversion) if n in theirs}
    tensors |= {f"{_PREFIX}{name}": array for name, array in saved.items()}
    described = _PLAIN | {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "target_modules": sorted(modules),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in saved}) or None, "fan_in_fan_out": False,
        "base_model_name_or_path": new.base, "inference_mode": True,
    }  # fmt: skip
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    with pytorch.NewFolder(path) as folder:
        specs = {name: (array.shape, array.dtype) for name, array in tensors.items()}
        safetensors.write(folder / WEIGHTS, tensors.items(), specs, {"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(described, indent=2))


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A layer that can have an adapter; see `lora.Target`."""

    name: str
    stacked: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def _rules(model: LoadedCheckpoint, path: epath.Path) -> tuple[list[Rule], LoadedCheckpoint]:
    """Where the parameters of a model are in transformers, and the model as it has it."""
    conversion = tensors_by_name.conversion_of(model.model_config, _HUGGINGFACE, path)
    whole = tensors_by_name.expressed(
        dataclasses.replace(model, layout={}), conversion, _HUGGINGFACE
    )
    if (kind := whole.layout.get("kind", "")) not in _KINDS:
        raise CheckpointError(
            f"{path}: adapters of peft are supported for transformers' ViT and DINOv2 only, and transformers would "
            f"have this model as {kind!r}"
        )
    return list(conversion.rules(whole.model_config, whole.layout)), whole


def _places(
    table: list[Rule], params: dict, whole: LoadedCheckpoint
) -> Iterator[tuple[_Layer, list[str]]]:
    """The layers of a model, and their modules, one for each of a stack."""
    rules = {rule.ours: rule for rule in table}
    for name, target in lora.targets(params):
        rule = rules.get(target.kernel)
        if rule is None or (target.slot is not None and len(rule.names) != len(SLOTS)):
            continue
        stacked = patterns.is_stacked(name)
        count = target.a[0] if stacked else 1
        layer = _Layer(name, stacked, target.a[stacked:-1], target.b[stacked + 1 :])
        theirs = [rule.names_of(number)[target.slot or 0] for number in range(count)]
        yield layer, [_renamed(name, whole).removesuffix(".weight") for name in theirs]


def _ours(layer: _Layer, pairs: list, scale: float, path: epath.Path) -> dict[str, np.ndarray]:
    """An adapter of ours from peft's tensors; layers of the stack without one get zeros."""
    rank = next(pair[0].shape[0] for pair in pairs if pair[0] is not None)
    shapes = (rank, math.prod(layer.inputs)), (math.prod(layer.outputs), rank)
    zeros = [np.zeros(shape, np.float32) for shape in shapes]
    pairs = [zeros if pair == [None, None] else pair for pair in pairs]
    for pair in pairs:
        if None in pair or [tuple(x.shape) for x in pair] != list(shapes):
            raise CheckpointError(f"{path}: the tensors of {layer.name} are not of shapes {shapes}")
    a = [np.asarray(x, np.float32).T.reshape(*layer.inputs, rank) for x, _ in pairs]
    b = [
        np.asarray(x, np.float32).T.reshape(rank, *layer.outputs) * np.float32(scale)
        for _, x in pairs
    ]
    return {A: np.stack(a), B: np.stack(b)} if layer.stacked else {A: a[0], B: b[0]}


def _with_head(
    base: LoadedCheckpoint, params: dict, tensors: dict[str, LazyArray], path: epath.Path
) -> tuple[LoadedCheckpoint, dict]:
    """The model with the classifier that was trained beside the adapters."""
    weight, bias = tensors.pop("classifier.weight"), tensors.pop("classifier.bias")
    new = {"num_classes": weight.shape[0], "representation": 0}
    config = formats.configure(type(base.model_config), vars(base.model_config), new)
    if weight.shape[1] != config.width or config.pool != "token":
        raise CheckpointError(
            f"{path}: its classifier reads {weight.shape[1]} numbers, and that of the base's model {config.width}"
        )
    head = {"kernel": np.asarray(weight, np.float32).T, "bias": np.asarray(bias, np.float32)}
    params = {name: tree for name, tree in params.items() if name != "representation"} | {
        "head": head
    }
    classes = base.classes if len(base.classes or ()) == config.num_classes else None
    return dataclasses.replace(base, model_config=config, classes=classes), params


def _check(adapter_config: dict[str, Any], path: epath.Path) -> None:
    """Raises `CheckpointError` unless these are adapters that are added to kernels."""
    for name, value in {"peft_type": "LORA", **_PLAIN}.items():
        if adapter_config.get(name, value) not in (value, None):
            raise CheckpointError(
                f"{path / CONFIG}: {name} = {adapter_config[name]!r} is not supported, only {value!r}"
            )
    if not adapter_config.get("base_model_name_or_path"):
        raise CheckpointError(
            f"{path / CONFIG}: base_model_name_or_path is empty: set it to the base, a file of any format or hf://OWNER/NAME"
        )


def _renamed(name: str, whole: LoadedCheckpoint) -> str:
    """The name of a tensor in transformers 5, from that in 4 or 5."""
    for old, new in _MODULES:
        if f".{old}." in name:
            name = name.replace(f".{old}.", f".{new}.")
            break
    if whole.layout.get("kind"):  # DINOv2, whose stack is called as it was
        return name
    return re.sub(r"^(vit\.)?encoder\.layer\.", r"\1layers.", name)
