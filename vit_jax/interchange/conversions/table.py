"""Which formats have models of a family, and what translates between their names and ours: one table, family →
format → `Conversion`. Families know nothing of it.
"""

from vit_jax.interchange.conversions import (
    crossvit,
    deepvit,
    dynamic_vit,
    efficientnet,
    feed_forward,
    hybrid,
    localvit,
    mixer,
    resnet,
    t2t,
    vit_authors,
    vit_flax,
    vit_huggingface,
    vit_timm,
)
from vit_jax.interchange.conversions.contract import Conversion
from vit_jax.models import registry

CONVERSIONS: dict[str, dict[str, Conversion]] = {
    "vit": {
        "official": vit_flax.Official(),
        "big_vision": vit_flax.BigVision(),
        "timm": vit_timm.Timm(),
        "huggingface": vit_huggingface.HuggingFace(),
        "authors": vit_authors.Authors(),
    },
    "hybrid": {"official": hybrid.Official(), "timm": hybrid.Timm()},
    "mixer": {"official": mixer.Flax(), "big_vision": mixer.Flax(), "timm": mixer.Timm()},
    "resnet": {
        "big_vision": resnet.BigVision(),
        "timm": resnet.Timm(),
        "huggingface": resnet.HuggingFace(),
    },
    "deepvit": {"authors": deepvit.Authors()},
    "localvit": {"authors": localvit.Authors()},
    "crossvit": {"authors": crossvit.Authors(), "timm": crossvit.Timm()},
    "t2t": {"authors": t2t.Authors()},
    "dynamic_vit": {"authors": dynamic_vit.Authors()},
    "feed_forward": {"authors": feed_forward.Authors()},
    "efficientnet": {"timm": efficientnet.Timm(), "huggingface": efficientnet.HuggingFace()},
}


def conversions_of(family: registry.Family) -> dict[str, Conversion]:
    """A family's `Conversion` for each format that others keep its models in, {} if it has none: of the table,
    or, of a family from outside the package, of its own `conversions()`.
    """
    if hasattr(family, "conversions"):
        return family.conversions()
    ours = family.__name__.startswith("vit_jax.models.")
    return CONVERSIONS.get(registry.family_name(family), {}) if ours else {}
