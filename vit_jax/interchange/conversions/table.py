"""Which formats have models of a family, and what translates between their names and ours: one table, family →
format → `Conversion`. Families know nothing of it. A translation is imported when it is asked for.
"""

import operator
from collections.abc import Mapping

from vit_jax.base.lazy_table import LazyTable
from vit_jax.interchange.conversions.contract import Conversion
from vit_jax.models import registry

_PLACES = {
    "vit": {
        "official": "vit_jax.interchange.conversions.vit_flax:Official",
        "big_vision": "vit_jax.interchange.conversions.vit_flax:BigVision",
        "timm": "vit_jax.interchange.conversions.vit_timm:Timm",
        "huggingface": "vit_jax.interchange.conversions.vit_huggingface:HuggingFace",
        "authors": "vit_jax.interchange.conversions.vit_authors:Authors",
    },
    "hybrid": {
        "official": "vit_jax.interchange.conversions.hybrid:Official",
        "timm": "vit_jax.interchange.conversions.hybrid:Timm",
    },
    "mixer": {
        "official": "vit_jax.interchange.conversions.mixer:Flax",
        "big_vision": "vit_jax.interchange.conversions.mixer:Flax",
        "timm": "vit_jax.interchange.conversions.mixer:Timm",
    },
    "resnet": {
        "big_vision": "vit_jax.interchange.conversions.resnet:BigVision",
        "timm": "vit_jax.interchange.conversions.resnet:Timm",
        "huggingface": "vit_jax.interchange.conversions.resnet:HuggingFace",
    },
    "deepvit": {"authors": "vit_jax.interchange.conversions.deepvit:Authors"},
    "localvit": {"authors": "vit_jax.interchange.conversions.localvit:Authors"},
    "crossvit": {
        "authors": "vit_jax.interchange.conversions.crossvit:Authors",
        "timm": "vit_jax.interchange.conversions.crossvit:Timm",
    },
    "cait": {"timm": "vit_jax.interchange.conversions.cait:Timm"},
    "radio": {
        "timm": "vit_jax.interchange.conversions.radio:Timm",
        "huggingface": "vit_jax.interchange.conversions.radio:Transformers",
    },
    "t2t": {"authors": "vit_jax.interchange.conversions.t2t:Authors"},
    "dynamic_vit": {"authors": "vit_jax.interchange.conversions.dynamic_vit:Authors"},
    "feed_forward": {"authors": "vit_jax.interchange.conversions.feed_forward:Authors"},
    "efficientnet": {
        "timm": "vit_jax.interchange.conversions.efficientnet:Timm",
        "huggingface": "vit_jax.interchange.conversions.efficientnet:HuggingFace",
    },
}
CONVERSIONS: dict[str, LazyTable[Conversion]] = {
    family: LazyTable(places, operator.call) for family, places in _PLACES.items()
}


def conversions_of(family: registry.Family) -> Mapping[str, Conversion]:
    """A family's `Conversion` for each format that others keep its models in, {} if it has none: of the table,
    or, of a family from outside the package, of its own `conversions()`.
    """
    if hasattr(family, "conversions"):
        return family.conversions()
    ours = family.__name__.startswith("vit_jax.models.")
    return CONVERSIONS.get(registry.family_name(family), {}) if ours else {}
