"""ViT and DeiT of Hugging Face `transformers`, and, through `vit_towers`, its other ViTs. Classes of theirs
and what they are here:

- ViTForImageClassification: class token, linear head.
- ViTModel: no head; the pooler, where there is one, is our `representation` (both are a tanh layer).
- DeiTForImageClassificationWithTeacher: `distilled`.
- DeiTForImageClassification, DeiTModel: `distilled`, but without `distillation_head`: the token is not read.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.base.errors import CheckpointError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange.conversions import (
    pytorch,
    vit_bare,
    vit_bare_towers,
    vit_config_json,
    vit_new_towers,
    vit_options,
    vit_tower_names,
    vit_towers,
)
from vit_jax.interchange.conversions.contract import DetectedModel, HuggingFaceConversion, Shapes
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.interchange.conversions.vit_flax import (
    refusal_everywhere,
    with_class_row,
    with_learned_position,
)
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

# The names of networks in the memory of transformers 5, which state dicts of scripts have; its own files have others.
_STACK = r"^((?:vit|deit|ijepa|beit)\.)?layers\.(\d+)"
_LAYER = r"^((?:\w+\.)?encoder\.layer\.\d+)"
_IN_MEMORY = (
    (r"^(\w+\.)?shared_position_bias\.", r"\1encoder.relative_position_bias."),
    (rf"{_STACK}\.mlp\.fc1\.", r"\1encoder.layer.\2.intermediate.dense."),
    (rf"{_STACK}\.mlp\.fc2\.", r"\1encoder.layer.\2.output.dense."),
    (rf"{_STACK}\.", r"\1encoder.layer.\2."),
    (rf"{_LAYER}\.attention\.q_proj\.", r"\1.attention.attention.query."),
    (rf"{_LAYER}\.attention\.k_proj\.", r"\1.attention.attention.key."),
    (rf"{_LAYER}\.attention\.v_proj\.", r"\1.attention.attention.value."),
    (rf"{_LAYER}\.attention\.o_proj\.", r"\1.attention.output.dense."),
    (rf"{_LAYER}\.(relative_position_bias)\.", r"\1.attention.attention.\2."),
    (rf"{_LAYER}\.mlp\.down_proj\.", r"\1.mlp.weights_out."),
)
# In memory DINOv2's gate and the layer that it multiplies are two layers, in files one.
_GATE = ".mlp.gate_proj."
_GATED = ".mlp.up_proj."
_BOTH = ".mlp.weights_in."


class HuggingFace(HuggingFaceConversion):
    """ViT and DeiT; the layout of others has a `kind`."""

    model_types = ("vit", "deit", *vit_towers.DEFAULTS)
    renamed = ((r"(head\.attention\.in_proj)_(weight|bias)", r"\1.\2"), *_IN_MEMORY)

    def recognise(self, shapes: Shapes, metadata: Mapping[str, Any]) -> DetectedModel | None:
        shapes = _with_joint_gates(shapes, lambda gate, gated: (gate[0] + gated[0], *gate[1:]))
        if not metadata.get("model_type"):
            return self._recognise_bare(shapes, metadata)
        if metadata["model_type"] not in self.model_types:
            return None
        if metadata["model_type"] in vit_towers.DEFAULTS:
            return vit_towers.recognise(shapes, metadata)
        # transformers 5 has other names in its code; in files it reads and writes these.
        prefix = next((p for p in ("vit.", "deit.") if any(n.startswith(p) for n in shapes)), "")
        value = vit_config_json.USUAL | {"pooler_act": "tanh"} | dict(metadata)
        if not value["qkv_bias"]:
            raise CheckpointError(f"qkv_bias = {value['qkv_bias']} is not supported")
        pooler = shapes.get(f"{prefix}pooler.dense.bias")
        if pooler is not None and value["pooler_act"] != "tanh":
            raise CheckpointError(f"pooler_act {value['pooler_act']!r} is not supported")
        heads = [name for name in ("classifier.bias", "cls_classifier.bias") if name in shapes]
        distilled = f"{prefix}embeddings.distillation_token" in shapes
        options = vit_config_json.options(value) | {
            "num_classes": shapes[heads[0]][0] if heads else 0,
            "representation": 0 if pooler is None else pooler[0],
            "distilled": distilled,
            "distillation_head": not distilled or "distillation_classifier.bias" in shapes,
        }
        return DetectedModel(options, {"prefix": prefix}, assumed=vit_config_json.assumed(metadata))

    def _recognise_bare(self, shapes: Shapes, metadata: Mapping[str, Any]) -> DetectedModel | None:
        """Of a file without config.json; its layout keeps what tensors tell of one, `bare`."""
        of_tower = vit_bare_towers.fields(shapes, metadata)
        stated = of_tower or vit_bare.fields(shapes, metadata)
        if stated is None:
            return None
        detected = self.recognise(shapes, dict(metadata) | stated)
        if detected is None:
            return None
        layout = detected.layout | {"bare": stated}
        if of_tower:
            left_open = vit_bare_towers.left_open(of_tower)
            return dataclasses.replace(detected, layout=layout, open=left_open)
        heads, left_open = vit_options.published_heads(detected.options)
        options = detected.options | {"heads": heads}
        return dataclasses.replace(detected, options=options, layout=layout, open=left_open)

    def canonical(self, names: Iterable[str]) -> dict[str, str]:
        """Some classes of BEiT and ViT-MSN have parts of their network without the prefix of its embedding, and DINOv3
        has one before its layers alone in the memory of transformers 5.
        """
        result = super().canonical(names)
        if "embeddings.cls_token" in result:
            result = {n: re.sub(r"^model\.layer\.", "layer.", new) for n, new in result.items()}
        prefixes = ("vit.", "beit.", "data2vec_vision.")
        at = next((p for p in prefixes if f"{p}embeddings.cls_token" in result), "")
        parts = ("encoder.", "layernorm.") if at else ()
        return {name: at + new if new.startswith(parts) else new for name, new in result.items()}

    def prepared(self, tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
        """With the layers that files have."""
        return _with_joint_gates(tensors, _joined)

    def rules(self, config: PublishedViTConfig, layout: Mapping[str, Any]) -> list[Rule]:
        """Which tensors are which parameters; `prefix` is of all names but the heads': `vit.`, `deit.` or nothing."""
        if "kind" in layout:
            return vit_tower_names.rules(config, layout)
        prefix = layout["prefix"]
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

    def layout(self, config: PublishedViTConfig) -> dict:
        if kind := vit_new_towers.kind_of(config):
            return vit_new_towers.layout(config, kind)
        return {"prefix": f"{_model_type(config)}." if config.num_classes else ""}

    def refusal(self, config: PublishedViTConfig) -> str:
        if kind := vit_new_towers.kind_of(config):
            return vit_new_towers.refusal(config, kind)
        lacks = {
            f"pool={config.pool!r}": config.pool != "token",
            "registers": config.registers,
            "qk_norm": config.qk_norm,
            "tanh layer before a head": config.representation and config.num_classes,
            "tanh layer of another size than the width": config.representation
            not in (0, config.width),
            "distillation_head without classes": config.two_heads and not config.num_classes,
        }
        missing = [name for name, lacking in lacks.items() if lacking]
        if missing:
            return f"transformers' ViT and DeiT have no {', no '.join(missing)}"
        return refusal_everywhere(config)

    def expressed(
        self, config: PublishedViTConfig, params: dict
    ) -> tuple[PublishedViTConfig, dict]:
        """Positions are learned, and the class token has one."""
        if kind := vit_new_towers.kind_of(config):
            return vit_new_towers.expressed(config, params, kind)
        return with_class_row(*with_learned_position(config, params))

    def config_json(self, config: PublishedViTConfig, layout: Mapping[str, Any]) -> dict[str, Any]:
        if "kind" in layout:
            return self._of_tower(config, layout)
        kind, teacher = "DeiT" if config.distilled else "ViT", "WithTeacher" * config.two_heads
        task = f"ForImageClassification{teacher}" if config.num_classes else "Model"
        return vit_config_json.config_fields(config) | {
            "architectures": [f"{kind}{task}"],
            "model_type": _model_type(config),
            "intermediate_size": config.mlp_dim,
        }

    def _of_tower(self, config: PublishedViTConfig, layout: Mapping[str, Any]) -> dict[str, Any]:
        """`config_json` of the other ViTs; of a file that was read, what differs from its own."""
        vit_towers.check_square(config, layout["kind"])
        if "bare" in layout:
            return layout["bare"] | vit_config_json.config_fields(config)
        if "config" in layout:
            return vit_towers.changed_fields(config, layout["config"])
        return vit_new_towers.config_json(config, layout["kind"])


def _with_joint_gates(tensors: Mapping[str, Any], join: Callable[[Any, Any], Any]) -> dict:
    """Tensors, or their shapes, in which a gate and the layer that it multiplies are one, as in DINOv2's files."""
    result = dict(tensors)
    for name in tensors:
        gated = name.replace(_GATE, _GATED)
        if ".encoder.layer." in f".{name}" and _GATE in name and gated in tensors:
            result[name.replace(_GATE, _BOTH)] = join(result.pop(name), result.pop(gated))
    return result


def _joined(gate: LazyArray, gated: LazyArray) -> LazyArray:
    """Two tensors, one after the other, along their first axis."""
    shape = (gate.shape[0] + gated.shape[0], *gate.shape[1:])
    return LazyArray(
        shape, gate.dtype, lambda: np.concatenate([np.asarray(gate), np.asarray(gated)])
    )


def _model_type(config: PublishedViTConfig) -> str:
    return "deit" if config.distilled else "vit"
