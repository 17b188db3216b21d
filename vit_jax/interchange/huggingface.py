"""Folders of Hugging Face `transformers`: ViT and DeiT, as `save_pretrained` writes them.

`config.json` says sizes, heads, activation and epsilon (by default exact GELU and 1e-12), `model.safetensors` has the
tensors, `preprocessor_config.json` says how images are prepared. Classes of theirs and what they are here:

- ViTForImageClassification: class token, linear head.
- ViTModel: no head; the pooler, where there is one, is our `representation` (both are a tanh layer).
- DeiTForImageClassificationWithTeacher: `distilled`.
- DeiTForImageClassification, DeiTModel: `distilled`, but without `distillation_head`: the token is not read.
"""

import json
import re

from etils import epath

from vit_jax.checkpoints.reading import CheckpointError
from vit_jax.interchange import adapt, pytorch, rules
from vit_jax.interchange.formats import Foreign, Preprocessing, configure
from vit_jax.interchange.rules import Rule
from vit_jax.models import registry, vit

NAME = "huggingface"
CANNOT_TELL = ()
CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
_FAMILIES = ("vit", "deit")
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_WRITTEN_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
# What transformers takes where config.json says nothing.
_DEFAULTS = {
    "image_size": 224,
    "patch_size": 16,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "num_channels": 3,
    "qkv_bias": True,
    "pooler_act": "tanh",
}


def recognises(path) -> bool:
    """Whether this is a folder whose config.json names a ViT or DeiT, or its `model.safetensors`."""
    config = _folder(path) / CONFIG
    return config.exists() and pytorch.read_json(config).get("model_type") in _FAMILIES


def read(path, **overrides) -> Foreign:
    """See `formats.read`; `layout` keeps `config.json` and the types of tensors that are not float32."""
    folder = _folder(path)
    said = pytorch.read_json(folder / CONFIG)
    tensors = pytorch.read_folder(folder)
    # transformers 5 has other names in its code; in files it reads and writes these.
    prefix = next((p for p in ("vit.", "deit.") if any(name.startswith(p) for name in tensors)), "")
    config = configure(vit.Config, _recognise(said, tensors, prefix, folder), overrides)
    like = registry.abstract(config)[1]
    params = rules.to_ours(table(config, prefix), tensors, like, source=folder)
    processor = folder / PROCESSOR
    preprocessing = None
    if processor.exists():
        preprocessing = _preprocessing(pytorch.read_json(processor), config.image_size)
    layout = {
        "format": NAME,
        "prefix": prefix,
        "config": said,
        "dtypes": pytorch.other_dtypes(tensors),
    }
    return Foreign(config, params, _classes(said, config.num_classes), preprocessing, layout)


def write(foreign: Foreign, path) -> None:
    """Writes a new folder for `from_pretrained`.

    Raises:
      CheckpointError: transformers has no such model.
    """
    path = epath.Path(path)
    _refuse_what_transformers_lacks(foreign.model_config, path)
    own = foreign.layout.get("format") == NAME
    foreign = adapt.with_class_row(adapt.with_learned_position(foreign))
    config = foreign.model_config
    architecture, model_type = _architecture(config)
    prefix = f"{model_type}." if config.num_classes else ""
    dtypes = foreign.layout["dtypes"] if own else {}
    said = (foreign.layout["config"] if own else {}) | _config(foreign, architecture, model_type)
    with pytorch.NewFolder(path) as folder:
        pytorch.write(folder / pytorch.WEIGHTS, table(config, prefix), foreign.params, dtypes, {})
        (folder / CONFIG).write_text(json.dumps(said, indent=2))
        if foreign.preprocessing:
            processor = _processor(foreign.preprocessing)
            (folder / PROCESSOR).write_text(json.dumps(processor, indent=2))


def table(config: vit.Config, prefix: str) -> list[Rule]:
    """The rules of a model.

    Args:
      config: of the model.
      prefix: of all names but the heads': `vit.`, `deit.` or nothing.
    """
    ours, theirs = "encoder/layers", f"{prefix}encoder.layer.{{layer}}"
    attention = f"{theirs}.attention.attention"
    qkv = tuple(f"{attention}.{name}" for name in ("query", "key", "value"))
    head = "cls_classifier" if config.two_heads else "classifier"
    return [
        Rule("class_token", f"{prefix}embeddings.cls_token"),
        Rule("distillation_token", f"{prefix}embeddings.distillation_token"),
        Rule("position", f"{prefix}embeddings.position_embeddings"),
        pytorch.convolution("embedding", f"{prefix}embeddings.patch_embeddings.projection"),
        Rule("embedding/bias", f"{prefix}embeddings.patch_embeddings.projection.bias"),
        *pytorch.norm(f"{ours}/attention_norm", f"{theirs}.layernorm_before"),
        *pytorch.attention(
            f"{ours}/attention",
            qkv,
            f"{theirs}.attention.output.dense",
            config.width,
            config.heads,
        ),
        *pytorch.norm(f"{ours}/mlp_norm", f"{theirs}.layernorm_after"),
        *pytorch.linear(f"{ours}/mlp/up", f"{theirs}.intermediate.dense"),
        *pytorch.linear(f"{ours}/mlp/down", f"{theirs}.output.dense"),
        *pytorch.norm("encoder/norm", f"{prefix}layernorm"),
        *pytorch.linear("representation", f"{prefix}pooler.dense"),
        *pytorch.linear("head", head),
        *pytorch.linear("head_distilled", "distillation_classifier"),
    ]


def _folder(path) -> epath.Path:
    path = epath.Path(path)
    return path.parent if path.name == pytorch.WEIGHTS else path


def _recognise(said: dict, tensors: dict, prefix: str, folder) -> dict:
    """Options of the config."""
    value = _DEFAULTS | said
    if value["hidden_act"] not in _ACTIVATIONS:
        raise CheckpointError(
            f"{folder}: hidden_act {value['hidden_act']!r} is not supported; "
            f"{', '.join(_ACTIVATIONS)} are"
        )
    for name in ("num_channels", "qkv_bias"):
        if value[name] != _DEFAULTS[name]:
            raise CheckpointError(f"{folder}: {name} = {value[name]} is not supported")
    pooler = tensors.get(f"{prefix}pooler.dense.bias")
    if pooler is not None and value["pooler_act"] != "tanh":
        raise CheckpointError(f"{folder}: pooler_act {value['pooler_act']!r} is not supported")
    heads = [name for name in ("classifier.bias", "cls_classifier.bias") if name in tensors]
    distilled = f"{prefix}embeddings.distillation_token" in tensors
    return {
        "image_size": value["image_size"],
        "num_classes": tensors[heads[0]].shape[0] if heads else 0,
        "patch": value["patch_size"],
        "depth": value["num_hidden_layers"],
        "width": value["hidden_size"],
        "mlp_dim": value["intermediate_size"],
        "heads": value["num_attention_heads"],
        "pool": "token",
        "representation": 0 if pooler is None else pooler.shape[0],
        "distilled": distilled,
        "distillation_head": not distilled or "distillation_classifier.bias" in tensors,
        "activation": _ACTIVATIONS[value["hidden_act"]],
        "epsilon": value["layer_norm_eps"],
    }


def _classes(said: dict, count: int) -> tuple[str, ...] | None:
    """The label names, unless they are those that stand for none."""
    names = {int(index): name for index, name in (said.get("id2label") or {}).items()}
    given = sorted(names) == list(range(count))
    if not count or not given or all(re.fullmatch(r"LABEL_\d+", n) for n in names.values()):
        return None
    return tuple(names[i] for i in range(count))


def _preprocessing(said: dict, image_size: int) -> Preprocessing:
    """What preprocessor_config.json says, older and newer."""
    mean, std = said.get("image_mean", (0.5,) * 3), said.get("image_std", (0.5,) * 3)
    if said.get("do_normalize") is False:
        mean, std = (0.0,) * 3, (1.0,) * 3
    if not said.get("do_center_crop"):
        return Preprocessing(image_size, tuple(mean), tuple(std), "resize")
    size = said.get("size", 256)
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size["height"]
    return Preprocessing(image_size, tuple(mean), tuple(std), "central", size)


def _processor(preprocessing: Preprocessing) -> dict:
    """preprocessor_config.json."""
    size = preprocessing.image_size
    common = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
        "resample": 2,
        "rescale_factor": 1 / 255,
    }
    square = {"height": size, "width": size}
    if preprocessing.eval_crop == "resize":
        return common | {"image_processor_type": "ViTImageProcessor", "size": square}
    # ViT's processor cannot crop.
    return common | {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": preprocessing.eval_resize},
        "do_center_crop": True,
        "crop_size": square,
    }


def _refuse_what_transformers_lacks(config, path) -> None:
    if type(config) is not vit.Config:
        family = type(config).__module__.split(".")[-1]
        raise CheckpointError(
            f"{path} is not written: of a {family} model this format has nothing; timm's has"
        )
    lacks = {
        f"pool={config.pool!r}": config.pool != "token",
        "registers": config.registers,
        "qk_norm": config.qk_norm,
        "tanh layer before a head": config.representation and config.num_classes,
        "tanh layer of another size than the width": config.representation not in (0, config.width),
        "distillation_head without classes": config.two_heads and not config.num_classes,
    }
    found = [name for name, there in lacks.items() if there]
    if found:
        raise CheckpointError(
            f"{path} is not written: transformers' ViT and DeiT have no {', no '.join(found)}"
        )


def _architecture(config: vit.Config) -> tuple[str, str]:
    """Name of the class, and `model_type`."""
    kind, model_type = ("DeiT", "deit") if config.distilled else ("ViT", "vit")
    if not config.num_classes:
        return f"{kind}Model", model_type
    return f"{kind}ForImageClassification{'WithTeacher' * config.two_heads}", model_type


def _config(foreign: Foreign, architecture: str, model_type: str) -> dict:
    """What config.json says of the model; the rest of one that was read stays."""
    config = foreign.model_config
    said = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "float32",
        "image_size": config.image_size,
        "patch_size": config.patch,
        "num_channels": 3,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": _WRITTEN_ACTIVATIONS[config.activation],
        "layer_norm_eps": config.epsilon,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "qkv_bias": True,
    }
    if config.num_classes:
        names = foreign.classes or [f"LABEL_{i}" for i in range(config.num_classes)]
        said["id2label"] = {str(i): name for i, name in enumerate(names)}
        said["label2id"] = {name: i for i, name in enumerate(names)}
    return said
