"""Model names to models. A new family is one module with `Config`, `Model`, `VARIANTS` and
`options_from_name`, added to the table below, or registered by a recipe with `register`. If others have it
too, its translations are in `conversions/table.py`. A family is imported when a name of it is asked for.
"""

import dataclasses
import difflib
import functools
import itertools
import math
import re
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import jax
from flax import nnx

from vit_jax.base import schema, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.lazy_table import LazyTable
from vit_jax.base.schema import likeliest, nearest, option
from vit_jax.base.sections import NamedSection
from vit_jax.base.sizes import Size
from vit_jax.compute import choices
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.contract import ModelOutput

# A module, or a class, with what is listed above.
Family = ModuleType | type

# Of each family in this package its module, and how the names of its models begin: a regular expression.
_ZOO = {
    "vit": ("vit_jax.models.zoo.vit_zoo", "(ViT|DeiT)-"),
    "hybrid": ("vit_jax.models.zoo.hybrid", r"R\d*\+"),
    "mixer": ("vit_jax.models.zoo.mixer", "Mixer-"),
    "resnet": ("vit_jax.models.zoo.resnet", "(BiT|ResNet)-"),
    "deepvit": ("vit_jax.models.zoo.deepvit", "DeepViT-"),
    "localvit": ("vit_jax.models.zoo.localvit", "LocalViT-"),
    "crossvit": ("vit_jax.models.zoo.crossvit", "CrossViT-"),
    "t2t": ("vit_jax.models.zoo.t2t", "T2T-ViT"),
    "cait": ("vit_jax.models.zoo.cait", "CaiT-"),
    "radio": ("vit_jax.models.zoo.radio", "C-RADIO"),
    "dynamic_vit": ("vit_jax.models.zoo.dynamic_vit", "DVT-"),
    "feed_forward": ("vit_jax.models.zoo.feed_forward", "FF-"),
    "efficientnet": ("vit_jax.models.zoo.efficientnet", "EfficientNet-"),
    "axial_vit": ("vit_jax.models.zoo.axial_vit", "Axial-ViT-"),
    "axial_resnet": ("vit_jax.models.zoo.axial_resnet", "AxialResNet-"),
}
FAMILIES: LazyTable[Family] = LazyTable({name: place for name, (place, _) in _ZOO.items()})
GUESTS: list[Family] = []  # from outside the package; asked after those


@dataclasses.dataclass
class Name:
    """Which model it is; its other options default to what the name says."""

    name: str = option("ViT-B/16", "model: see 'vit_jax models'")


# Members of a family's `Config` that were renamed: a family that still has one is refused, since nothing would read it.
_OLD_NAMES = {
    "fit": "fit_parameter", "at_size": "options_for_image_size", "starts_anew": "reset_patterns",
    "knows_places": "knows_positions", "placed_tokens": "tokens_with_position",
}  # fmt: skip


class Section(NamedSection):
    """`config.model`: the options of the family that it names, of no family those that all have."""

    TITLE, NAME = "Model", Name

    @classmethod
    def class_named(cls, name: str) -> type:
        family = find_family(name)
        return family.Config if family else ClassifierConfig

    @classmethod
    def classes(cls) -> tuple[type, ...]:
        return tuple(config_classes())


def register(family: Family) -> None:
    """Adds a family from outside the package; before the recipe names a model of it.

    Raises:
      ConfigError: its `Config` has a member by the name of an earlier version, which nothing reads.
    """
    for old, new in _OLD_NAMES.items():
        member = getattr(family.Config, old, None)
        if callable(member) or isinstance(member, property):
            raise ConfigError(
                f"the model family {family_name(family)} defines Config.{old}: rename it, it is {new} now"
            )
    if family not in GUESTS:
        GUESTS.append(family)


def families() -> Iterator[Family]:
    """Every family, imported one by one."""
    return itertools.chain(FAMILIES.values(), GUESTS)


def config_classes() -> list[type]:
    """The option dataclass of every family."""
    return [family.Config for family in families()]


def variants() -> list[str]:
    """Every listed model name."""
    return [name for family in families() for name in family.VARIANTS]


def fitted_options() -> list[str]:
    """The options that loaded parameters can be fitted to, by interpolation or by a new start."""
    fitted = [
        f.name for cls in config_classes() for f in schema.options(cls) if f.metadata["fitted"]
    ]
    return list(dict.fromkeys(["image_size", "channels", *fitted]))


def model_config(
    name: str, *, image_size: Size | str | None = None, channels: int = 3, **options
) -> ClassifierConfig:
    """The config of a model: what its name says, then `options`.

    Args:
      image_size: pixels of a side, or (height, width), or "HEIGHTxWIDTH"; by default what the name
        says, or 224.
      channels: of the images.

    Raises:
      ConfigError: unknown name or option, or sizes that do not fit together.
    """
    family = family_named(name)
    if "pretrained" in options:
        raise ConfigError(
            f"model {name}: 'pretrained' is no option; vit_jax.load(CHECKPOINT) gives a model with weights, "
            "CHECKPOINT being a file, a run or hf://timm/NAME ('vit_jax models --published' lists them)"
        )
    named = family.options_from_name(name)
    checked = schema.checked_options(family.Config, options, f"model {name}", "model.")
    if image_size is not None:
        checked["image_size"] = sizes.parse(image_size)
    return family.Config(**({"image_size": 224} | named | checked | {"channels": channels}))


def family_named(name: str) -> Family:
    """The family of a model's name.

    Raises:
      ConfigError: there is none.
    """
    family = find_family(name)
    if family is None:
        ours = variants()
        hint = _published_hint(name)
        hint = (
            hint or (not likeliest(name, ours) and _nearest_published(name)) or nearest(name, ours)
        )
        raise ConfigError(
            f"unknown model {name!r}{hint}; a family of your own needs --register=FILE.py"
        )
    return family


def _published_hint(name: str) -> str:
    """What to do with a name of timm's; '' for any other."""
    from vit_jax.models import published

    architecture, tag = published.named_in([name])
    if not architecture:
        return ""
    tag = tag or next(iter(published.architectures()[architecture].tags), "")
    place = f"hf://timm/{architecture}.{tag}".rstrip(".")
    return (
        f"; it is a name of timm's: vit_jax.load({place!r}) in Python, or --config.init_from={place} "
        "for weights with their model"
    )


def _nearest_published(name: str) -> str:
    """The names of timm's that are most like one; '' if none is."""
    from vit_jax.models import published

    close = difflib.get_close_matches(name, published.architectures(), cutoff=0.75)
    return f"; timm has {', '.join(close)}, to be read from hf://timm/NAME" if close else ""


def is_known(name: str) -> bool:
    """Whether a family has a model of this name, with sizes that are listed or not."""
    return find_family(name) is not None


def find_family(name: str) -> Family | None:
    """The family of a model's name, the only one that is imported; `None` if there is none."""
    likely = (FAMILIES[family] for family, (_, begin) in _ZOO.items() if re.match(begin, name))
    families = itertools.chain(likely, GUESTS)
    return next((family for family in families if family.options_from_name(name) is not None), None)


def family_of(config: ClassifierConfig) -> Family:
    """The family that a config belongs to."""
    for family in (*FAMILIES.imported(), *GUESTS):
        # Not isinstance: one family's config may extend another's.
        if type(config) is family.Config:
            return family
    raise TypeError(f"{type(config)} is the config of no model family")


def family_name(family: Family) -> str:
    """What to call a family, which is a module or a class: 'vit'."""
    return getattr(family, "NAME", family.__name__.split(".")[-1])


class _Stream(nnx.RngStream):
    """The keys of Flax's, which writes `count[...] += 1`: that asks the count for its sharding, and of a traced one
    the refusal, which nobody reads, lists all operations before it. A CrossViT is traced in half the time.
    """

    def __call__(self) -> jax.Array:
        count = self.count.get_value()
        key = jax.random.fold_in(self.key.get_value(), count)
        self.count.set_value(count + 1)
        return key


class Rngs(nnx.Rngs):
    """`nnx.Rngs` for making networks: the same keys, traced faster."""

    def __init__(self, default: int | jax.Array):
        super().__init__(default)
        for name, stream in list(self.items()):
            setattr(self, name, _Stream(stream.key.get_value(), tag=name))


def build(config: ClassifierConfig, *, rngs: nnx.Rngs) -> nnx.Module:
    """The model of a family's config, its parameters drawn from `rngs`."""
    return family_of(config).Model(config, rngs=rngs)


def create_model(
    name: str, *, image_size: Size | str | None = None, seed: int = 0, **options
) -> nnx.Module:
    """A new model by name, e.g. `create_model("ViT-B/16", num_classes=10, image_size=384,
    pool="mean", dtype="bfloat16")`.
    """
    return build(model_config(name, image_size=image_size, **options), rngs=Rngs(seed))


class Weights(NamedTuple):
    """All arrays of a model, as nested dicts.

    Attributes:
      params: what is trained, float32.
      variables: what no gradient reaches, such as running statistics; {} in most models.
    """

    params: dict
    variables: dict


def split(model: nnx.Module) -> tuple[nnx.GraphDef, Weights]:
    """A model as its definition and its arrays; `nnx.merge(definition, *weights)` is the way back."""
    definition, params, variables = nnx.split(model, nnx.Param, ...)
    return definition, Weights(nnx.to_pure_dict(params), nnx.to_pure_dict(variables))


def abstract(config: ClassifierConfig) -> tuple[nnx.GraphDef, dict]:
    """Definition and parameter shapes of a model, without memory: (graphdef, nested dict of
    `ShapeDtypeStruct`).
    """
    definition, weights = abstract_weights(config)
    return definition, weights.params


def abstract_weights(config: ClassifierConfig) -> tuple[nnx.GraphDef, Weights]:
    """As `abstract`, with the shapes of what is not trained too."""
    definition, weights = _abstract(config, jax.config.jax_enable_x64)
    return definition, jax.tree.map(lambda x: x, weights)  # Dicts of the caller's own.


@functools.lru_cache(maxsize=64)
def _abstract(config: ClassifierConfig, _: bool) -> tuple[nnx.GraphDef, Weights]:
    """Tracing takes 0.2 s and more, and a run asks some six times."""
    definition, weights = split(nnx.eval_shape(lambda: build(config, rngs=Rngs(0))))
    # Without the sharding that a mesh in the context would give them.
    return definition, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)


def for_devices(definition: nnx.GraphDef, config: ClassifierConfig) -> nnx.GraphDef:
    """`definition`, of `config`, computing in the dtype that suits the devices being traced for."""
    of_device = choices.with_compute_dtype(config)
    return definition if of_device == config else abstract(of_device)[0]


def initialize(config: ClassifierConfig, key: jax.Array) -> dict:
    """New parameters as a nested dict of float32 arrays; pure, to be jitted with shardings so that
    they are born where they live.
    """
    return split(build(config, rngs=Rngs(key)))[1].params


def count_flops(config: ClassifierConfig) -> int:
    """Operations of one image's forward pass, by the formula of its family, or else counted in its program: matrix
    products and convolutions only, a multiply-add counted as 2.
    """
    counted = config.flops()
    return _count_in_program(config) if counted is None else counted


@functools.lru_cache(maxsize=64)
def _count_in_program(config: ClassifierConfig) -> int:
    definition, weights = abstract_weights(config)

    def forward(weights: Weights, image: jax.Array) -> ModelOutput:
        return nnx.merge(definition, *weights)(image)

    from vit_jax.compute import flops

    image = jax.ShapeDtypeStruct((1, *config.height_width, config.channels), config.dtype)
    return flops.count(jax.make_jaxpr(forward)(weights, image))


def count_parameters(config: ClassifierConfig) -> int:
    """Exact number of parameters, without building the model."""
    _, parameters = abstract(config)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameters))
