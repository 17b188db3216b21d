"""Tensors of a file that are no part of the model: which names readers skip, each with the reason.

A tensor of positions is skipped only where its values are compared with what the model computes, or where it is another
network's. tests/interchange/test_skips.py lists all of them.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base.errors import CheckpointError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.models.classifier import ClassifierConfig

_POSITIONS = re.compile(
    r"(^|[._/])(pos|pos_emb\w*|posemb\w*|position\w*|rope\w*|rotary\w*|periods|(inv_)?freqs?(_\w+)?|"
    r"rel(ative)?_pos\w*)($|[._/])"
)


class Skip(NamedTuple):
    """What readers skip.

    Attributes:
      pattern: of whole names, without what stands before all names of the model.
      reason: why the model is the same without it.
      network: the other network that it belongs to; '' where it is the model's own.
      computed: (tensor's values, the model's config) -> what the model computes in its place: a file
        with other values is refused.
    """

    pattern: str
    reason: str
    network: str = ""
    computed: Callable[[np.ndarray, ClassifierConfig], np.ndarray] | None = None


def is_about_positions(name: str) -> bool:
    """Whether a tensor has to do with places of tokens, by its name.

    >>> [is_about_positions(n) for n in ("pos_embed", "rope_embed.periods", "decoder_pos_embed", "proj.weight")]
    [True, True, True, False]
    """
    return bool(_POSITIONS.search(name))


def matching(skips: Iterable[Skip | str], names: Iterable[str]) -> dict[str, Skip]:
    """The names that are skipped, each with the first `Skip` that matches it. A pattern alone may stand for one."""
    skips = [Skip(item, "its family skips it") if isinstance(item, str) else item for item in skips]
    by_name = {n: next((s for s in skips if re.fullmatch(s.pattern, n)), None) for n in names}
    return {name: skip for name, skip in by_name.items() if skip}


def text(skipped: Mapping[str, Skip]) -> str:
    """Those names with their reasons: 'mask_token (stands for …)'."""
    by_skip: dict[Skip, list[str]] = {}
    for name, skip in skipped.items():
        by_skip.setdefault(skip, []).append(name)
    return "; ".join(f"{', '.join(names)} ({skip.reason})" for skip, names in by_skip.items())


def check_computed(
    skipped: Mapping[str, Skip],
    tensors: Mapping[str, LazyArray],
    config: ClassifierConfig,
    source: Any,
) -> None:
    """Raises `CheckpointError` where the model computes something else in place of a tensor that is skipped."""
    for name, skip in skipped.items():
        if skip.computed is None:
            continue
        values = np.asarray(tensors[name])
        expected = skip.computed(values, config)
        if values.shape != expected.shape or not np.allclose(values, expected, rtol=1e-5, atol=0):
            raise CheckpointError(
                f"{source}: {name} has other values than the model computes in its place: {skip.reason}. The model "
                "would see other places"
            )
