"""Adapters as `peft` keeps them, for the ViTs of transformers: a folder of `adapter_config.json` and
`adapter_model.safetensors`. Written are the adapters and the head; read is the whole model, base and adapters merged.

Of what peft has beside plain LoRA, DoRA and ranks that differ by layer are read. Names of modules are in `peft_names`.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from vit_jax.base import patterns, schema
from vit_jax.base.errors import CheckpointError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange import (
    answers,
    file_header,
    formats,
    peft_names,
    pytorch,
    safetensors,
    tensors_by_name,
)
from vit_jax.interchange.checkpoint_file import CheckpointFile
from vit_jax.interchange.conversions import translation
from vit_jax.interchange.conversions.contract import HuggingFaceConversion
from vit_jax.interchange.conversions.rules import Constant, Rule
from vit_jax.interchange.formats import LoadedCheckpoint, ReadOptions
from vit_jax.models import lora, registry
from vit_jax.models.lora import SLOTS, A, B

NAME = "peft"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_HUGGINGFACE = "huggingface"
_PART = re.compile(r"(.*)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")
_HEADS = ("classifier.weight", "cls_classifier.weight")
_PLAIN = {
    "bias": "none",
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "lora_bias": False,
}
# Fields of which other values give the adapters another meaning, which is not read.
_KNOWN = {
    "peft_type": "LORA",
    "bias": "none",
    "lora_bias": False,
    "fan_in_fan_out": False,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_qalora": False,
    "use_bdlora": None,
    "kasa_config": None,
}
# Values of `init_lora_weights` that leave the base's weights as they are.
_BASE_STAYS = (True, False, None, "gaussian", "eva", "orthogonal")

Edit = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class _InTransformers:
    """A model as transformers has it.

    Attributes:
      checkpoint: the model.
      conversion, table: which tensors are which parameters.
    """

    checkpoint: LoadedCheckpoint
    conversion: HuggingFaceConversion
    table: list[Rule | Constant]

    @functools.cached_property
    def arrays(self) -> dict:
        """All parameters, nested."""
        return patterns.union(self.checkpoint.params, self.checkpoint.variables)

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its tensors, by their names in files."""
        specs = translation.specs(self.table, self.arrays)
        return {name: shape for name, (shape, _) in specs.items()}


def recognises(file: CheckpointFile) -> bool:
    """Whether this is a folder that peft wrote."""
    return file.container == "folder" and (file.path / CONFIG).exists()


def read(file: CheckpointFile, request: ReadOptions) -> LoadedCheckpoint:
    """The base model that the folder names, with the adapters added, and with what was trained beside them."""
    adapter_config, path = pytorch.read_json(file.path / CONFIG), file.path
    _check(adapter_config, path)
    options = {"hints": request.hints, "allow_nonfinite": request.allow_nonfinite}
    base = formats.read_checkpoint(
        adapter_config["base_model_name_or_path"], **options, **request.overrides
    )
    saved, metadata = safetensors.read(path / WEIGHTS)
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in saved.items()}
    headed = bool(tensors.keys() & {*_HEADS})
    # MAE's network has its classifier in transformers' ViT.
    is_mae = base.layout.get("kind") == "vit_mae"
    source = dataclasses.replace(base, layout={}) if headed and is_mae else base
    model = _in_transformers(source, path)
    edits, rest = _edits(model, tensors, adapter_config, path)
    names = {peft_names.canonical(name): name for name in model.shapes}
    trained = {peft_names.canonical(name): tensor for name, tensor in rest.items()}
    trained = {names.get(name, name): tensor for name, tensor in trained.items()}
    target = _with_head(model, trained) if headed else model
    shapes = {name: tuple(tensor.shape) for name, tensor in trained.items()}
    unknown = sorted(f"{n} {shape}" for n, shape in shapes.items() if target.shapes.get(n) != shape)
    if unknown or not edits:
        raise CheckpointError(
            f"{path}: there is no place in {formats.describe_model(base.model_config)} for "
            f"{', '.join(unknown[:3]) or 'any of its tensors'}"
        )
    weights = _merged(model, target, edits, trained, path)
    # The base may be a checkpoint of a run. The model is not what that run trained.
    whole = dataclasses.replace(
        target.checkpoint, params=weights.params, variables=weights.variables, extras={}, objective=None, run=None
    )  # fmt: skip
    return _as_stated(whole, json.loads(metadata.get(pytorch.METADATA, "{}")), path)


def _as_stated(
    checkpoint: LoadedCheckpoint, stated: Mapping[str, Any], path: epath.Path
) -> LoadedCheckpoint:
    """The model with what `file_header.header` gave, in place of what the base says."""
    if not stated:
        return checkpoint
    prepared, classes = stated.get("preprocessing"), stated.get("classes")
    return dataclasses.replace(
        checkpoint,
        classes=tuple(classes) if classes else None,
        preprocessing=file_header.preprocessing_of(prepared) if prepared else None,
        probabilities=stated.get("probabilities", ""),
        settings=answers.known_settings(stated.get(answers.KEY, {}), path),
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
    model = _as_base(checkpoint, path)
    whole, new = model.checkpoint, checkpoint.adapters
    tensors, leaves = {}, patterns.named(new.adapters)
    modules, left = set(), {name.rpartition("/")[0] for name in leaves}
    for name, places in _places(model):
        if name not in left:
            continue
        left.remove(name)
        a, b = (np.asarray(leaves[f"{name}/{part}"], np.float32) for part in (A, B))
        rank = a.shape[-1]
        for number, names in enumerate(places):
            one_a, one_b = (a[number], b[number]) if patterns.is_stacked(name) else (a, b)
            # The two modules of a gated layer have the same A.
            parts = one_b.reshape(rank, len(names), -1)
            for at, part in zip(names, parts.swapaxes(0, 1), strict=True):
                tensors[f"{_PREFIX}{at}.lora_A.weight"] = one_a.reshape(-1, rank).T
                tensors[f"{_PREFIX}{at}.lora_B.weight"] = part.T
                modules.add(at.rpartition(".")[2])
    if left:
        raise CheckpointError(
            f"{path} is not written: transformers has no layer for {', '.join(sorted(left))}"
        )
    also = (rule for rule in model.table if isinstance(rule, Rule) and rule.ours in new.also)
    trained_names = {name for rule in also for name in _names(rule, model)}
    saved = {n: x for n, x in tensors_by_name.arrays(whole, model.conversion) if n in trained_names}
    saved = {peft_names.in_code(name, whole): x for name, x in saved.items()}
    tensors |= {f"{_PREFIX}{name}": array for name, array in saved.items()}
    described = _PLAIN | {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "target_modules": sorted(modules),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in saved}) or None, "fan_in_fan_out": False,
        "base_model_name_or_path": new.base, "inference_mode": True,
    }  # fmt: skip
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    with pytorch.NewFolder(path) as folder:
        specs = {name: (array.shape, array.dtype) for name, array in tensors.items()}
        statements = json.dumps(file_header.header(checkpoint, {}))
        metadata = {"format": "pt", pytorch.METADATA: statements}
        safetensors.write(folder / WEIGHTS, tensors.items(), specs, metadata)
        (folder / CONFIG).write_text(json.dumps(described, indent=2))


def _in_transformers(checkpoint: LoadedCheckpoint, path: epath.Path) -> _InTransformers:
    """A model as transformers has it: as it was read, if that was from such a folder."""
    layout = checkpoint.layout
    as_it_was = layout.get("format") == _HUGGINGFACE and "kind" in layout
    conversion = tensors_by_name.conversion_of(
        checkpoint.model_config, _HUGGINGFACE, path, as_it_was=as_it_was
    )
    whole = tensors_by_name.expressed(checkpoint, conversion, _HUGGINGFACE)
    return _InTransformers(
        whole, conversion, list(conversion.rules(whole.model_config, whole.layout))
    )


def _as_base(checkpoint: LoadedCheckpoint, path: epath.Path) -> _InTransformers:
    """A run with adapters as transformers has it: a new file, or, of a network that new files are not of, its base.

    Raises:
      CheckpointError: transformers has no class for it, or that of the base computes another model.
    """
    config, new = checkpoint.model_config, checkpoint.adapters
    base = formats.read_checkpoint(new.base, hints=vars(config))
    kind = base.layout.get("kind", "")
    if kind not in peft_names.OF_BASES:
        return _in_transformers(dataclasses.replace(checkpoint, layout={}), path)
    to_orbax = "write the merged model, --to=orbax"
    prefix = peft_names.OF_BASES[kind] if config.num_classes else ""
    if not prefix and (config.num_classes or new.also):
        raise CheckpointError(
            f"{path} is not written: transformers has no classifier with the network of {new.base} ({kind}), and peft "
            f"would not find {', '.join(new.also)}: {to_orbax}"
        )
    source = _in_transformers(base, path)
    known = dataclasses.replace(base.model_config, num_classes=0)
    if config.num_classes:
        shapes = {
            "weight": (config.num_classes, config.pooled_width),
            "bias": (config.num_classes,),
        }
        head = {f"classifier.{name}": np.broadcast_to(0, shape) for name, shape in shapes.items()}
        known = _with_head(source, head).checkpoint.model_config
    roles = ("structure", "convention", "size")
    options = (f.name for f in schema.options(type(config)) if f.metadata.get("role") in roles)
    if other := [name for name in options if getattr(config, name) != getattr(known, name)]:
        theirs = ", ".join(f"{name}={getattr(known, name)!r}" for name in other)
        raise CheckpointError(
            f"{path} is not written: transformers' class for {new.base} ({kind}) computes {theirs}, and this model has "
            f"{', '.join(f'{name}={getattr(config, name)!r}' for name in other)}: {to_orbax}"
        )
    layout = base.layout | {"prefix": prefix, "renamed": {}, "dtypes": {}}
    whole = dataclasses.replace(checkpoint, layout=layout)
    return _InTransformers(whole, source.conversion, list(source.conversion.rules(config, layout)))


def _with_head(model: _InTransformers, trained: Mapping[str, LazyArray]) -> _InTransformers:
    """The model with the classifier that was trained beside the adapters: it reads what transformers' class does."""
    checkpoint, config = model.checkpoint, model.checkpoint.model_config
    stated = checkpoint.layout.get("config", {})
    stated = stated | model.conversion.config_json(config, checkpoint.layout)
    # What a pooler gives no classifier reads.
    shapes = {name: shape for name, shape in model.shapes.items() if "pooler.dense" not in name}
    shapes |= {name: tuple(tensor.shape) for name, tensor in trained.items()}
    detected = model.conversion.recognise(shapes, stated)
    config = formats.configure(type(config), vars(config), detected.options)
    layout = checkpoint.layout | detected.layout
    classes = checkpoint.classes
    classes = classes if len(classes or ()) == config.num_classes else None
    # As a new file is named, since transformers has another class for it.
    new = dataclasses.replace(checkpoint, model_config=config, classes=classes, layout={})
    like = patterns.union(*registry.abstract_weights(config)[1])
    new.params, new.variables = like, {}
    return _InTransformers(new, model.conversion, list(model.conversion.rules(config, layout)))


def _merged(
    model: _InTransformers,
    target: _InTransformers,
    edits: Mapping[str, list[Edit]],
    trained: Mapping[str, LazyArray],
    path: epath.Path,
) -> registry.Weights:
    """All arrays of the target: the base's with its edits, and those that were trained as a whole."""
    rules = {rule.ours: rule for rule in target.table if isinstance(rule, Rule)}
    old, like = patterns.named(model.arrays), registry.abstract_weights(target.checkpoint.model_config)[1]  # fmt: skip
    edits = dict(edits) | {
        name: [lambda _, tensor=tensor: np.asarray(tensor, np.float32)]
        for name, tensor in trained.items()
    }

    def merge(name: str, leaf) -> Any:
        rule, now = rules[name], old.get(name)
        names = _names(rule, target, leaf)
        if now is None or now.shape != leaf.shape:
            new = {n: trained[n] for n in names if n in trained}
            return patterns.named(translation.to_ours([rule], new, {name: leaf}, source=path))[name]
        return translation.edited(rule, now, edits) if edits.keys() & {*names} else now

    arrays = patterns.map_named(merge, patterns.union(*like))
    return tensors_by_name.divided(arrays, like)


def _names(rule: Rule, model: _InTransformers, leaf: Any = None) -> list[str]:
    """All tensors of a rule; of one whose parameter the model does not have none."""
    leaf = patterns.named(model.arrays).get(rule.ours) if leaf is None else leaf
    if leaf is None:
        return []
    layers = range(leaf.shape[0]) if patterns.is_stacked(rule.ours) and rule.by_layer else None
    return list(rule.names) if layers is None else [n for i in layers for n in rule.names_of(i)]


def _edits(
    model: _InTransformers,
    tensors: Mapping[str, LazyArray],
    adapter_config: Mapping[str, Any],
    path: epath.Path,
) -> tuple[dict[str, list[Edit]], dict[str, LazyArray]]:
    """What the adapters do to each tensor of the base, and the tensors of the folder that are no adapters of it."""
    rest, groups = {}, {}
    for name, tensor in tensors.items():
        match = _PART.fullmatch(name)
        if match is None:
            rest[name] = tensor
        else:
            groups.setdefault(match[1], {})[match[2]] = tensor
    modules = {
        module: (name, number, len(parts))
        for name in model.shapes
        for parts in peft_names.modules(name)
        for number, module in enumerate(parts)
    }
    edits: dict[str, list[Edit]] = {}
    for module, parts in groups.items():
        place = modules.get(peft_names.canonical(module))
        if place is None:
            rest |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
            continue
        name, number, count = place
        rows, columns = model.shapes[name][0] // count, math.prod(model.shapes[name][1:])
        rank = parts["lora_A"].shape[0] if "lora_A" in parts else 0
        wanted = {"lora_A": rank * columns, "lora_B": rows * rank}
        wanted |= {"lora_magnitude_vector": rows} if adapter_config.get("use_dora") else {}
        if {part: math.prod(tensor.shape) for part, tensor in parts.items()} != wanted:
            shapes = ", ".join(f"{part} {tuple(x.shape)}" for part, x in parts.items())
            raise CheckpointError(
                f"{path}: the adapter of {module} has {shapes}; expected are {', '.join(wanted)} of a layer of "
                f"{columns} inputs and {rows} outputs, with use_dora = {bool(adapter_config.get('use_dora'))}"
            )
        edit = functools.partial(
            _add, parts=parts, scale=_scale(adapter_config, module, rank), number=number, count=count
        )  # fmt: skip
        edits.setdefault(name, []).append(edit)
    return edits, rest


def _add(
    weight: np.ndarray, parts: Mapping[str, LazyArray], scale: float, number: int, count: int
) -> np.ndarray:
    """A weight (outputs, …) with an adapter added to part `number` of `count` of its rows."""
    a, b = (np.asarray(parts[name], np.float32) for name in ("lora_A", "lora_B"))
    changed = weight.reshape(count, -1, math.prod(weight.shape[1:])).copy()
    product = b.reshape(-1, len(a)) @ a.reshape(len(a), -1)
    part = changed[number] + np.float32(scale) * product
    if "lora_magnitude_vector" in parts:  # DoRA (arXiv 2402.09353, Eq. 5)
        magnitudes = np.asarray(parts["lora_magnitude_vector"], np.float32).reshape(-1, 1)
        part *= magnitudes / np.linalg.norm(part, axis=1, keepdims=True)
    changed[number] = part
    return changed.reshape(weight.shape)


def _scale(adapter_config: Mapping[str, Any], module: str, rank: int) -> float:
    """What the product of a module's adapter is multiplied by: alpha / rank, or alpha / √rank."""
    alpha = adapter_config.get("lora_alpha", 8)
    for pattern, value in (adapter_config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    return alpha / (math.sqrt(rank) if adapter_config.get("use_rslora") else rank)


def _places(model: _InTransformers) -> Iterator[tuple[str, list[list[str]]]]:
    """The layers that can have an adapter; and for each of a stack its modules in the code of transformers."""
    rules = {rule.ours: rule for rule in model.table if isinstance(rule, Rule)}
    for name, target in lora.targets(model.arrays):
        rule = rules.get(target.kernel)
        if rule is None:
            continue
        count = target.a[0] if patterns.is_stacked(name) else 1
        theirs = [
            peft_names.modules_in_code(rule.names_of(n), model.checkpoint) for n in range(count)
        ]
        if target.slot is None:
            yield name, theirs
        elif len(theirs[0]) == len(SLOTS):
            yield name, [[names[target.slot]] for names in theirs]


def _check(adapter_config: dict[str, Any], path: epath.Path) -> None:
    """Raises `CheckpointError` unless these are adapters that are added to kernels."""
    for name, value in _KNOWN.items():
        if adapter_config.get(name, value) not in (value, None):
            raise CheckpointError(
                f"{path / CONFIG}: {name} = {adapter_config[name]!r} is not supported, only {value!r}"
            )
    init = adapter_config.get("init_lora_weights", True)
    if init not in _BASE_STAYS:
        raise CheckpointError(
            f"{path / CONFIG}: init_lora_weights = {init!r} changed the base's weights, which are not in the folder: "
            "save the merged model with peft's merge_and_unload"
        )
    if not adapter_config.get("base_model_name_or_path"):
        raise CheckpointError(
            f"{path / CONFIG}: base_model_name_or_path is empty: set it to the base, a file of any format or hf://OWNER/NAME"
        )
