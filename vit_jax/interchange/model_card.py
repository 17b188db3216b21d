"""The model card of a model on the hub: what it is, what it learned from, how good it is, how to use it. No
path of this machine, and nothing of its owner, is in it.
"""

import hashlib
import itertools
import operator
import re
from collections.abc import Iterator
from typing import Any

from etils import epath

from vit_jax.base import schema, sizes
from vit_jax.checkpoints.evaluations import metrics_of
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.config import Config, config_class
from vit_jax.data import crops, sources
from vit_jax.interchange import formats

# Of a run's config what others need to train the same, without where and how it ran.
_SECTIONS = ("model", "optim", "augment", "objective", "data")
_FIELDS = ("seed", "batch_size", "accumulate", "duration")
_OF_THIS_MACHINE = {"path", "cache", "threads", "read_ahead", "teacher"}
_MOST_OF_A_KIND = (
    5  # rows of metrics such as iou/CLASS; of more only the lowest and the highest are named
)
_MOST_NAMES = 10  # of classes of pixels
_SEGMENTATION = "image-segmentation"
_PLACE = re.compile(r"://|(^|[:=,\s'\"])(/|~|\.{1,2}/)")
_LIBRARIES = {"timm": "timm", "huggingface": "transformers"}
# The last line of a card: of what is above it, so that a card which somebody edited is known.
_MARK = "<!-- written by vit_jax, sha256 of this card: {} -->\n"


def make_card(
    run: TrainedModel,
    checkpoint: formats.LoadedCheckpoint,
    repository: str,
    *,
    format: str,
    license: str,
) -> str:
    """The text of a model card: Markdown with a head in YAML.

    Args:
      run, checkpoint, repository, license: see `pushing.push`.
      format: the layout of the weights.
    """
    config = schema.typed(config_class(run.config), run.config)
    parts = [
        _head(run, format, license),
        f"# {repository.partition('/')[2]}",
        f"{_described(run, config)}. {_origin(run, config)}",
        *_section("Intended use", _use(run)),
        *_section("Evaluation", _metrics(run)),
        *_section("Images", _preprocessing(checkpoint)),
        *_section("How to use it", _code(repository, format, bool(run.model_config.num_classes))),
        *_section("Recipe", _recipe(run, config)),
        *_section("License", f"{license or 'Not stated by the authors of this model.'}"),
    ]
    return _marked("\n\n".join(parts) + "\n\n")


def is_ours(card: str) -> bool:
    """Whether `make_card` wrote a card, and nobody edited it."""
    return card == _marked("".join(card.splitlines(keepends=True)[:-1]))


def _marked(text: str) -> str:
    return text + _MARK.format(hashlib.sha256(text.encode()).hexdigest())


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", text] if text else []


def _described(run: TrainedModel, config: Config) -> str:
    if run.objective_modules is None:
        return formats.describe_model(run.model_config, config.model.name)
    text = formats.describe_model(run.model_config, config.model.name, of_pixels=len(run.classes))
    return f"The encoder of a model that segments images: {text}"


def _head(run: TrainedModel, format: str, license: str) -> str:
    task = "image-classification" if run.model_config.num_classes else "image-feature-extraction"
    also = [] if run.objective_modules is None else [f"- {_SEGMENTATION}"]
    lines = ["---", f"library_name: {_LIBRARIES[format]}", f"pipeline_tag: {task}"]
    lines += [f"license: {license}"] if license else []
    return "\n".join(
        [*lines, "tags:", f"- {task}", *also, f"- {_LIBRARIES[format]}", "- vit_jax", "---"]
    )


def _origin(run: TrainedModel, config: Config) -> str:
    """What the model learned from, as far as it is known."""
    if not run.step:
        return "Converted with vit_jax from a checkpoint of another origin, whose data is not known here."
    data = "a folder of images" if _is_private(config.data.name) else f"`{config.data.name}`"
    start = ", starting from another checkpoint" if config.init_from else ""
    return f"Trained with vit_jax for {run.step:,} steps of {config.batch_size:,} images on {data}{start}."


def _is_private(data: str) -> bool:
    """Whether a data set is the user's own, for which the name of a kind of files stands."""
    return data in sources.OPENERS and not data.startswith("digits")


def _use(run: TrainedModel) -> str:
    if run.objective_modules is not None:
        names = ", ".join(run.classes[:_MOST_NAMES])
        more = ", …" if len(run.classes) > _MOST_NAMES else ""
        return (
            f"Features of images, for other models to learn from. Its task was {_SEGMENTATION}: each pixel is of one "
            f"of {len(run.classes):,} classes ({names}{more}). The head that tells them apart is not in this "
            "repository, since this layout has no place for it."
        )
    if not run.model_config.num_classes:
        return "Features of images, for other models to learn from."
    count = run.model_config.num_classes
    return (
        f"Classifying images into the {count:,} classes it was trained on. It gives one of these for any image, "
        "also for those of none of them; measure it on images like yours before you rely on it."
    )


def _metrics(run: TrainedModel) -> str:
    """A table of the metrics of this very checkpoint; '' if it was not evaluated."""
    if not run.step:
        return ""
    evaluation = metrics_of(epath.Path(run.directory), run.step)
    metrics = {n: x for n, x in evaluation.items() if isinstance(x, int | float)}
    if not metrics:
        return ""
    head = "On held-out images of its data" + (
        ", with the head" if run.objective_modules is not None else ""
    )
    return "\n".join([f"{head}:", "", "| metric | value |", "|---|--:|", *_rows(metrics)])


def _rows(metrics: dict[str, float]) -> Iterator[str]:
    """The rows of a table of metrics, many of one kind (iou/CLASS) in one row."""
    kinds = {name: name.rpartition("/")[0] for name in metrics}
    for kind, names in itertools.groupby(metrics, kinds.get):
        names = list(names)
        if not kind or len(names) <= _MOST_OF_A_KIND:
            yield from (f"| {name} | {metrics[name]:.4g} |" for name in names)
        else:
            values = [metrics[name] for name in names]
            yield f"| {kind} of {len(names)} classes | {min(values):.4g} to {max(values):.4g} |"


def _preprocessing(checkpoint: formats.LoadedCheckpoint) -> str:
    prepared = checkpoint.preprocessing
    if not prepared:
        return "It is not known how images were normalised."
    return (
        f"{sizes.size_text(prepared.image_size)} pixels ({crops.describe_crop(prepared)}), mean "
        f"{_numbers(prepared.mean)}, deviation {_numbers(prepared.std)} of pixels in [0, 1]."
    )


def _numbers(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{value:.4g}" for value in values) + ")"


def _code(repository: str, format: str, has_head: bool) -> str:
    lines = ["import vit_jax", f'run = vit_jax.load_run("hf://{repository}")']
    lines.append('run("image.jpg")' if has_head else 'run.features("image.jpg")')
    if format == "timm":
        lines += [
            "",
            "import timm",
            f'model = timm.create_model("hf-hub:{repository}", pretrained=True)',
        ]
    else:
        name = "AutoModelForImageClassification" if has_head else "AutoModel"
        lines += [
            "",
            f"from transformers import {name}",
            f'model = {name}.from_pretrained("{repository}")',
        ]
    return "\n".join(["```python", *lines, "```"])


def _recipe(run: TrainedModel, config: Config) -> str:
    """What of the run's config differs from the defaults, without what belongs to one machine."""
    if not run.step:
        return ""
    fields = "\n".join(f"config.{name} = {value!r}" for name, value in _settings(config))
    return f"What differs from `vit_jax.default_config()`:\n\n```python\n{fields}\n```"


def _settings(config: Config) -> Iterator[tuple[str, Any]]:
    for name, option in schema.walk(type(config)):
        section, _, field = name.rpartition(".")
        if name not in _FIELDS and section not in _SECTIONS or field in _OF_THIS_MACHINE:
            continue
        value = operator.attrgetter(name)(config)
        if name == "data.name" and _is_private(value):
            continue
        if value != option.default and not _names_a_place(value):
            yield name, value


def _names_a_place(value: Any) -> bool:
    """Whether a path or an address is in a value."""
    if isinstance(value, str):
        return bool(_PLACE.search(value))
    if isinstance(value, dict):
        return any(map(_names_a_place, value.values()))
    return isinstance(value, tuple | list) and any(map(_names_a_place, value))
