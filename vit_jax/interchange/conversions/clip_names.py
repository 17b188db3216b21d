"""The names of OpenAI's CLIP and of open_clip, from those of transformers: the same layers, but queries, keys and
values in one tensor, and projections that are not transposed.
"""

import dataclasses
import re
from collections.abc import Iterable

from vit_jax.interchange.conversions import pytorch
from vit_jax.interchange.conversions.rules import SAME, Constant, Rule, Transform
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

KEY = "text_tower"  # of a layout, and of a header, with what tensors do not tell of one
_NAMES = (
    (r"(text|vision)_model\.", ""),
    (r"embeddings\.class_embedding", "class_embedding"),
    (r"embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"embeddings\.token_embedding", "token_embedding"),
    (r"embeddings\.patch_embedding", "conv1"),
    (r"pre_layrnorm", "ln_pre"),
    (r"post_layernorm", "ln_post"),
    (r"final_layer_norm", "ln_final"),
    (r"encoder\.layers\.", "transformer.resblocks."),
    (r"layer_norm(\d)", r"ln_\1"),
    (r"self_attn\.", "attn."),
    (r"mlp\.fc1", "mlp.c_fc"),
    (r"mlp\.fc2", "mlp.c_proj"),
)
_QKV = re.compile(r"attn\.q_proj\.(weight|bias)$")


def renamed(
    rules: Iterable[Rule | Constant], prefix: str, blocks: PublishedViTConfig
) -> list[Rule]:
    """The rules of a tower.

    Args:
      rules: those of transformers' names.
      prefix: of all names.
      blocks: of the tower.
    """
    whole = pytorch.attention("", ("",), "", blocks.width, blocks.heads)
    by_part: dict[str, Transform] = {"weight": whole[0].transform, "bias": whole[1].transform}
    result = []
    for rule in rules:
        if isinstance(rule, Constant):
            continue
        names = [_name(name) for name in rule.names]
        if match := _QKV.search(names[0]):
            part = match[1]
            joint = prefix + _QKV.sub(f"attn.in_proj_{part}", names[0])
            result.append(dataclasses.replace(rule, theirs=joint, transform=by_part[part]))
        else:
            result.append(dataclasses.replace(rule, theirs=tuple(prefix + n for n in names)))
    return result


def projection(ours: str, theirs: str) -> Rule:
    """A matrix that vectors are multiplied by from the right, as ours is."""
    return Rule(f"{ours}/kernel", theirs, SAME)


def _name(name: str) -> str:
    for pattern, new in _NAMES:
        name = re.sub(pattern, new, name)
    return name
