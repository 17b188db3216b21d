"""Every model name with what it costs, as `vit_jax models` prints it. The models themselves are in
their families' files, as are the accuracies that were published.
"""

import dataclasses
import fnmatch
import functools
import inspect
import re
from collections.abc import Sequence

from vit_jax.base import logs
from vit_jax.base.errors import ConfigError
from vit_jax.interchange.conversions import vit_arguments, vit_naflex, vit_options
from vit_jax.models import published, registry
from vit_jax.models.zoo import vit_zoo

SIZES = ("depth", "width", "mlp_dim", "heads")
COLUMNS = ("name", "image_size", "tokens", "parameters", "gflops", *SIZES)
_PREPARED = ("image_size", "eval_crop", "eval_resize", "interpolation", "mean", "std")
PUBLISHED = ("name", "model", "family", "depth", "width", *_PREPARED, "source")


def list_models(pattern: str = "*", *, pretrained: bool = False) -> list[str]:
    """The names of models that match a pattern.

    >>> vit_jax.list_models("ViT-*/16")
    >>> vit_jax.list_models("ViT-*/16", pretrained=True)   # names of timm, for load_run, load and create_model

    Args:
      pattern: of names, with * and ?; of published weights also of the model that they belong to.
      pretrained: published weights, by their names in timm, instead of models without weights.
    """
    if not pretrained:
        return fnmatch.filter(registry.variants(), pattern)
    return [
        row["name"]
        for row in published_table()
        if fnmatch.fnmatchcase(row["name"], pattern) or fnmatch.fnmatchcase(row["model"], pattern)
    ]


def model_rows(
    image_size: int | None = None, names: Sequence[str] = (), *, parameters: bool = True
) -> list[dict]:
    """A row for every model, by counting alone: no memory, no devices.

    Args:
      image_size: side of the images in pixels, by default that which a model was published with. A
        model that it does not fit is counted at the next smaller one that does.
      names: of the models, by default all that are listed.
      parameters: whether they are counted, for which each network is traced: a tenth of a second and more.

    Returns:
      Dicts of `COLUMNS`: parameters with a linear head of 1,000 classes; gflops of one image's
      forward pass, a multiply-add counted as 2; tokens with the class token. `None` where a family
      has no such size, and for what is not counted.

    Raises:
      ConfigError: the images are too small for some model, or there is no model of some name.
    """
    names = names or registry.variants()
    with logs.with_elapsed_time(f"counting the parameters of {len(names)} models", after=2.0):
        return [_row(name, _fitting(name, image_size), parameters) for name in names]


def text(rows: list[dict]) -> str:
    """The rows as an aligned table, with a heading and what was counted."""
    counted = "GFLOPs are those of one forward pass, a multiply-add counted as 2. "
    if all(row["parameters"] is None for row in rows):
        columns = tuple(column for column in COLUMNS if column != "parameters")
        counted += "For parameters name a model, or set --parameters."
    else:
        columns = COLUMNS
        counted += "Parameters are those with a linear head of 1,000 classes."
    return "\n".join([*_aligned(rows, columns), "", counted])


def published_table() -> list[dict]:
    """A row for every published name of other people's weights that is known to work.

    Returns:
      Dicts of `PUBLISHED`: the size of the images, and how they are prepared, as in `config.data`.
    """
    return [
        {
            "name": f"{name}.{tag}" if tag else name,
            "model": _model_name(name, known),
            "family": _family(known),
            "depth": known.arguments.get("depth", 12)
            if known.kind in vit_arguments.KINDS
            else None,
            "width": (
                known.arguments.get("embed_dim", 768) if known.kind in vit_arguments.KINDS else None
            ),
            "source": f"hf://timm/{name}.{tag}" if tag else f"hf://timm/{name}",
        }
        | {field: getattr(prepared, field) for field in _PREPARED}
        for name, known in published.architectures().items()
        if vit_options.supported(name)
        for tag, prepared in known.tags.items()
    ]


def published_text(rows: list[dict]) -> str:
    """The rows of `published_table` as an aligned table."""
    lines = _aligned(rows, PUBLISHED)
    return "\n".join(
        [*lines, "", "Names of timm, read from a repository, a folder, or a file of that name."]
    )


# By timm's classes, those that are no ViTs.
_FAMILY = {
    "CrossVit": "crossvit",
    "Cait": "cait",
    "MlpMixer": "mixer",
    "ResNetV2": "resnet",
    "EfficientNet": "efficientnet",
}


# Published names of other families than ViT, and the models that they are of.
_MODELS = (
    (r"mixer_([bls])(\d+)_", lambda size, patch: f"Mixer-{size.upper()}/{patch}"),
    (r"resnetv2_(\d+)x(\d+)_bit", lambda depth, width: f"BiT-R{depth}x{width}"),
    (
        r"crossvit_(\d+)(_dagger)?_",
        lambda size, dagger: f"CrossViT-{size}{'-dagger' if dagger else ''}",
    ),
    (r"crossvit_(tiny|small|base)_", lambda size: f"CrossViT-{_CROSSVIT[size]}"),
    (r"cait_(\w+?)_", lambda size: f"CaiT-{size.upper()}"),
    (
        r"naflexvit_(\w+)_patch16_radio_(v\d)",
        lambda size, version: f"C-RADIO{version}-{_RADIO[size]}/16",
    ),
    (r"tf_efficientnet_(b[0-7]|l2)", lambda size: f"EfficientNet-{size.upper()}"),
)
_RADIO = {"base": "B", "large": "L", "huge": "H", "giant": "g", "so400m": "So400m"}
_CROSSVIT = {"tiny": "Ti", "small": "S", "base": "B"}


def _model_name(name: str, known: published.Architecture) -> str:
    """The name for `create_model` of the model that a published one is, or is nearest to; '' if none has its sizes."""
    for pattern, named in _MODELS:
        if match := re.match(pattern, name):
            return named(*match.groups())
    sizes = known.arguments.get("depth", 12), known.arguments.get("embed_dim", 768)
    size = _vit_sizes().get(sizes)
    if known.kind not in vit_arguments.KINDS or not size:
        return ""
    if _on_resnet(known):
        resnet = re.search(r"_r(\d*)_s(\d+)_", name)
        return f"R{resnet[1]}+ViT-{size}/{resnet[2]}" if resnet else ""
    return f"ViT-{size}/{known.arguments.get('patch_size', 16)}"


@functools.cache
def _vit_sizes() -> dict[tuple[int, int], str]:
    """Depth and width of the listed ViTs to what they are called: 'B'."""
    named = {
        name: vit_zoo.options_from_name(name)
        for name in vit_zoo.VARIANTS
        if name.startswith("ViT-")
    }
    return {
        (options["depth"], options["width"]): name.removeprefix("ViT-").partition("/")[0]
        for name, options in reversed(named.items())
    }


def _family(known: published.Architecture) -> str:
    if vit_naflex.is_cropping(known.arguments):
        return "radio"
    return _FAMILY.get(known.kind) or ("hybrid" if _on_resnet(known) else "vit")


def _on_resnet(known: published.Architecture) -> bool:
    return known.arguments.get("embed_layer") == "ResNet"


def _aligned(rows: list[dict], columns: tuple[str, ...]) -> list[str]:
    """The lines of a table, its first column to the left."""
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    cells.insert(0, [column.replace("_", " ") for column in columns])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for name, *numbers in cells:
        numbers = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *numbers]))
    return lines


def page(rows: list[dict]) -> str:
    """docs/models.md, of the rows of `model_rows`: what a small model of every family reaches on digits; then of
    every family what it is (the first paragraph of its module's docstring), and its models.
    """
    by_name = {row["name"]: row for row in rows}
    parts = [_INTRODUCTION, "\n".join(_smoke(list(registry.families())))]
    for family in registry.families():
        text = inspect.getdoc(family) or registry.family_name(family)
        parts += [
            f"## {text.partition(' (')[0]}",
            text.partition("\n\n")[0],
            "\n".join([
                "| name | parameters, M | ImageNet, % |",
                "|---|--:|--:|",
                *(_published(by_name[name], family) for name in family.VARIANTS),
            ]),
        ]  # fmt: skip
    return "\n\n".join(part for part in parts)


_INTRODUCTION = """# Models

Made by `vit_jax models --markdown`. `vit_jax models` prints tokens, sizes and GFLOPs, and with `--parameters` exact
counts (as here, with a head of 1,000 classes). Images have 224 pixels unless it is stated. ImageNet is the published
top-1 % of networks trained on ImageNet-1k (EfficientNets: students of Noisy Student), not measured here. Sources, and
what differs from them, stand in a family's file in `vit_jax/models/zoo/`.

Small models on digits were measured: accuracy on 359 test images, and processor time of a run with compilation, on one
core while the other was busy; some runs as a whole, others for a few steps."""


def _smoke(families: Sequence[registry.Family]) -> list[str]:
    """A table of small models on digits; a family of the user's need not state one."""
    rows = [family.SMOKE for family in families if hasattr(family, "SMOKE")]
    return [
        "| on digits: configs/… | accuracy, % | seconds |",
        "|---|--:|--:|",
        *(f"| `{recipe}` | {accuracy} | {seconds} |" for recipe, accuracy, seconds in rows),
    ]


def _published(row: dict, family: registry.Family) -> str:
    size = "" if row["image_size"] == 224 else f" ({row['image_size']} px)"
    accuracy = getattr(family, "ACCURACY", {}).get(row["name"])
    cells = [row["parameters"] and f"{row['parameters'] / 1e6:.1f}", accuracy and f"{accuracy:.1f}"]
    return f"| {row['name']}{size} | {' | '.join(map(_cell, cells))} |"


def _fitting(name: str, image_size: int | None):
    """The model's config at the largest size up to `image_size` that it takes; which these are, its
    family knows.
    """
    published = registry.model_config(name)
    if image_size is None:
        return published
    refusal = None
    for size in range(image_size, 0, -1):
        # As it is, or else as its weights are used at another resolution.
        for options in ({}, published.options_for_image_size(size)):
            try:
                return registry.model_config(name, image_size=size, **options)
            except ConfigError as error:
                refusal = refusal or error
    raise ConfigError(f"{name}: no size up to {image_size} fits: {refusal}")


def _row(name: str, config, parameters: bool) -> dict:
    sizes = dataclasses.asdict(config)
    return {
        "name": name,
        "image_size": config.image_size,
        "tokens": config.tokens,
        "parameters": registry.count_parameters(config) if parameters else None,
        "gflops": round(registry.count_flops(config) / 1e9, 2),
    } | {size: sizes.get(size) for size in SIZES}


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else value or "-"
