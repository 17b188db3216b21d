"""What `vit_jax classify` does: looks at a folder of labelled photos, measures the machine, chooses what fits the time,
trains, measures, and leaves a page. Each part is what another command runs; `commands.sh` has these commands.

The order:
1. all files are read once, and what is wrong with them is logged;
2. weights are fetched; if they cannot be had and none were named, a small model is trained from scratch;
3. features of a few photos are timed, and with that the way is chosen;
4. a linear head is fitted to the features of all photos, unless that takes much of the time;
5. the whole model is trained, if it fits;
6. the better one is judged on the held-out photos, and the page is written. Of photos with several labels thresholds
   are chosen there too, and `model` is the better one with them.

What was chosen is kept in the folder, so that the same command continues after it was stopped.
"""

import dataclasses
import json
import os
import shlex
import time
from collections.abc import Sequence

from absl import logging
from etils import epath
from ml_collections import ConfigDict

from vit_jax.base import durations, outputs, places, schema, settings
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.config import Config, config_class
from vit_jax.evaluation import classification
from vit_jax.interchange import formats, loading, orbax
from vit_jax.pictures.page import Page
from vit_jax.recipes import user_files
from vit_jax.studies import judged, linear_head, photos, report, time_budget
from vit_jax.studies.labelling import LABELLINGS, Labelling
from vit_jax.studies.photos import Photos
from vit_jax.studies.time_budget import HEAD, WHOLE
from vit_jax.training import loop
from vit_jax.training.assembly import resolve

Settings = list[tuple[str, str]]  # fields of the config and their values as text

AUTO, NONE = "auto", "none"
# Published by AugReg's authors, trained on ImageNet-21k: the larger one where there is time.
_PUBLISHED = ("vit_small_patch16_224.augreg_in21k", "vit_tiny_patch16_224.augreg_in21k")
_FINE_TUNED, _SCRATCH = "finetune:photos", "folder"
_HEAD_SHARE = (
    0.25  # of the time, beyond which a head is not fitted before the whole model is trained
)
# What was asked for, as the command line calls it.
_FLAGS = {
    "photos": "PHOTOS",
    "weights": "--weights",
    "seconds": "--time in seconds",
    "changes": "--config.…",
}
_MODELS = ("head", "run", "model")  # folders
_PLAN, _COMMANDS = "classify.json", "commands.sh"
# Of the data, what an evaluation has to know.
_OF_DATA = (
    "name", "path", "train_split", "eval_split", "holdout", "holdout_by", "holdout_from", "layout", "mask_files",
    "label_separator", "examine", "on_bad_image", "max_bad_images",
)  # fmt: skip


def classify(
    path: epath.PathLike,
    out: epath.PathLike,
    *,
    seconds: float = 600.0,
    weights: str = AUTO,
    changes: Sequence[tuple[str, str]] = (),
) -> dict:
    """Trains a classifier of labelled photos; see the top of this file.

    Args:
      path: a folder of class folders, a list of files with labels, or what `vit_jax prepare` makes.
      out: a folder, made if it is not there.
      seconds: that all of it may take; training is never shorter than a few steps.
      weights: a checkpoint of any format or a name of timm; `auto`: published ones; `none`: from scratch.
      changes: further fields of the config of the run that trains.

    Returns:
      `report`, `checkpoint`, `metric`, `held_out`, `way`, `seconds`, and `photos`: see `photos.Photos.describe`.
      `metric` is the name of the metric that compares classifiers: 'accuracy' of photos with one label each,
      'mean_average_precision' of several labels. The result has its value under that name, the one of the linear head
      as `head_accuracy` or `head_mean_average_precision` (`None` without a head), and the figures of
      `labelling.Labelling`.

    Raises:
      ConfigError: the photos cannot be classified, or `out` holds something else.
      CheckpointError: weights that were named cannot be read.
      Interrupted: a signal came; the same command continues.
    """
    began = time.monotonic()
    path = places.absolute(os.fspath(path), "PHOTOS")
    out = places.absolute(os.fspath(_outside(out, path)), "--out")
    is_new = not places.exists(out)
    folder = outputs.make_folder(out, "--out")
    if os.path.exists(weights):
        weights = os.path.abspath(weights)
    asked = {
        "photos": path,
        "weights": weights,
        "seconds": seconds,
        "changes": list(map(list, changes)),
    }
    kept = _kept(folder, asked)
    try:
        labelling = photos.find_labelling(path, _config(_FINE_TUNED, changes).data)
        given = [
            *labelling.settings,
            ("data.holdout", "0.2"),
            ("data.holdout_from", "train"),
            *changes,
        ]
        looked = photos.look(path, _config(_FINE_TUNED, given).data)
    except ConfigError:
        if is_new:
            places.remove(folder)
        raise
    for line in looked.lines():
        logging.info("%s: %s", path, line)
    photos.write(looked, folder / "photos.json")
    data = [(f"data.{name}", _text(getattr(looked.data, name))) for name in _OF_DATA]
    features = None
    if kept is None:
        chosen, features = _plan(looked, [*data, *given], weights, seconds, began)
        kept = asked | chosen
        _keep(kept, folder)
    head_metric = f"head_{labelling.metric}"
    if kept["fit_head"] and kept[head_metric] is None:
        places.remove(folder / "head")  # what an earlier start began
        if features is None:
            measured = resolve(_changed(_FINE_TUNED, kept["measured"]))
            features = linear_head.features_of(measured, len(looked.classes))
        kept[head_metric] = linear_head.fit_head(features, folder / "head")
        logging.info(
            "a linear head on the features: %s %.1f%% on %s held-out photos",
            labelling.words, 100 * kept[head_metric], f"{len(looked.test):,}",
        )  # fmt: skip
        _keep(kept, folder)
    features = None  # and the memory of its model
    best = folder / "head"
    values = {HEAD: kept[head_metric]}
    thresholds = labelling.thresholds
    if kept["kind"] == WHOLE:
        loop.train(_changed(kept["recipe"], kept["settings"]), folder / "run")
        metrics = judged.judge(folder / "run", thresholds=thresholds)
        values[WHOLE] = metrics[labelling.metric]
        if values[WHOLE] >= (values[HEAD] or 0.0):
            best = folder / "run"
    if best.name == "head":
        metrics = judged.judge(best, data, thresholds=thresholds)
    checkpoint = _with_thresholds(best, folder / "model") if thresholds else best
    spent = time.monotonic() - began
    commands = _commands(kept, labelling, folder, best, checkpoint, data)
    places.write_whole(folder / _COMMANDS, commands)
    _write_page(looked, kept, folder, best, values, commands, spent)
    return {
        "report": str(folder / "report.html"),
        "checkpoint": str(checkpoint),
        "metric": labelling.metric,
        **{name: metrics[name] for name in (labelling.metric, *labelling.figures)},
        "held_out": int(metrics["examples"]),
        "way": kept["text"],
        head_metric: kept[head_metric],
        "seconds": round(spent, 1),
        "photos": looked.describe(),
    }


def text(result: dict) -> str:
    """`classify`'s result for a person."""
    labelling = LABELLINGS[result["metric"]]
    return "\n".join(
        [
            f"{labelling.sentence(result)}, after {durations.duration_text(result['seconds'])}",
            f"report: {result['report']}",
            f"use it: vit_jax predict --checkpoint={shlex.quote(result['checkpoint'])} PHOTO …",
        ]
    )


def _outside(out: epath.PathLike, path: epath.PathLike) -> epath.PathLike:
    """`out`, unless it is inside the photos, where it would be a class."""
    inside, photos_path = os.path.realpath(out), os.path.realpath(path)
    if os.path.commonpath([inside, photos_path]) == photos_path:
        raise ConfigError(
            f"--out={out} is inside of {path}, where it would be a class: name another folder"
        )
    return out


def _kept(folder: epath.Path, asked: dict) -> dict | None:
    """What an earlier start of the same command chose."""
    kept = places.read_json(folder / _PLAN)
    if kept is None:
        for name in _MODELS:
            if (folder / name).exists():
                raise ConfigError(
                    f"--out={folder} has something called {name} already: name another folder"
                )
        return None
    for name, value in asked.items():
        if kept.get(name) != value:
            raise ConfigError(
                f"--out={folder} was made with {_FLAGS[name]} = {kept.get(name)!r}, not {value!r}: set the same, name "
                "another folder with --out, or remove it"
            )
    logging.info("continuing in %s: %s", folder, kept["text"])
    return kept


def _keep(kept: dict, folder: epath.Path) -> None:
    places.write_whole(folder / _PLAN, json.dumps(kept, indent=1) + "\n")


def _plan(
    looked: Photos, given: Settings, weights: str, seconds: float, began: float
) -> tuple[dict, linear_head.FeaturesOf]:
    """Chooses weights and the way. As JSON: `kind`, `text`, `recipe` and `settings` of the training, `weights_used`,
    `options` (each way in words and its time), `measured` (the settings of the features), `fit_head`, and the metric of
    the head, `head_accuracy` or `head_mean_average_precision`.
    """
    images, names = len(looked.train), dict(given)
    sized, lasting = "data.image_size" in names, "duration" in names
    if images < 64:  # less than a batch
        given = [("batch_size", "16"), ("accumulate", "1"), *given]
    start, size = _weights(weights, given, looked, seconds - (time.monotonic() - began))
    recipe = _FINE_TUNED if start else _SCRATCH
    if start:
        given = [("init_from", start), *([("data.image_size", str(size))] if size else []), *given]
    given = [*given, ("eval.batch_size", "32")]
    config = resolve(_changed(recipe, given))
    features = linear_head.features_of(config, len(looked.classes))
    logging.info("measuring this machine on a few photos")
    speed = features.time()
    size = config.data.image_size
    smaller = (
        None
        if sized
        else time_budget.smaller_size(size, getattr(features.model.config, "patch", None))
    )
    left = seconds - (time.monotonic() - began)
    with_head = bool(start) and linear_head.has_dense_head(features.model)
    sizes = {"batch_size": config.batch_size, "examples_per_epoch": images}
    steps = durations.steps(config.duration, **sizes)
    options = time_budget.ways(
        speed,
        [*([smaller] if smaller and start else []), size],
        images=images,
        held_out=len(looked.test),
        batch_size=config.batch_size,
        steps=steps,
        fewest=steps if lasting else time_budget.FEWEST,
        seconds=left,
        with_head=with_head,
    )
    way = time_budget.choose(options, left)
    logging.info(
        "%s are left. What there is, and how long it takes here (features of %.3g images a second):",
        durations.duration_text(max(left, 0.0)), 1 / speed.seconds_each,
    )  # fmt: skip
    for option in options:
        chosen = "  <- chosen" if option == way else ""
        logging.info("  %s: %s%s", option.text(), durations.duration_text(option.seconds), chosen)
    is_quick = way.kind == HEAD or options[0].seconds <= _HEAD_SHARE * left
    duration = () if lasting else [("duration", f"{way.steps} steps")]
    plan = {
        "kind": way.kind,
        "text": way.text(),
        "recipe": recipe,
        "settings": [*given, ("data.image_size", str(way.image_size)), *duration],
        "weights_used": start or "none: trained from scratch",
        "options": [[option.text(), durations.duration_text(option.seconds)] for option in options],
        "measured": given,
        "fit_head": with_head and is_quick,
        f"head_{looked.labelling.metric}": None,
    }
    return plan, features


def _weights(weights: str, given: Settings, looked: Photos, seconds: float) -> tuple[str, int]:
    """The weights to start from, '' for none, and the size of their images, 0 if the user sets one."""
    if weights == NONE:
        return "", 0
    for name in _PUBLISHED if weights == AUTO else (weights,):
        if name == _PUBLISHED[0] and not _is_time_for_small(given, looked, seconds):
            continue
        logging.info("weights: %s", name)
        try:
            checkpoint = formats.read_checkpoint(name)
        except (CheckpointError, ConfigError) as error:
            if weights != AUTO:
                raise
            logging.warning("%s", error)
            continue
        by_user = "data.image_size" in dict(given)
        return name, 0 if by_user else checkpoint.model_config.image_size
    logging.warning(
        "published weights cannot be had here, so that a small model is trained from scratch: its accuracy will be "
        "much lower. Fetch %s on a machine with a network, and pass --weights=FILE, in another --out", _PUBLISHED[-1],
    )  # fmt: skip
    return "", 0


def _is_time_for_small(given: Settings, looked: Photos, seconds: float) -> bool:
    """Whether a ViT-S/16 trains here on 224 pixels in the time that there is, by features of the smaller model that is
    trained from scratch.
    """
    data = [(name, value) for name, value in given if name.removeprefix("data.") in _OF_DATA]
    config = resolve(
        _changed(_SCRATCH, [*looked.labelling.settings, *data, ("eval.batch_size", "16")])
    )
    speed = linear_head.features_of(config, len(looked.classes)).time()
    work = 4 * (224 / config.data.image_size) ** 2  # of a ViT-S/16: twice as wide, on more patches
    ways = time_budget.ways(
        dataclasses.replace(speed, seconds_each=work * speed.seconds_each),
        [224],
        images=len(looked.train),
        held_out=len(looked.test),
        batch_size=64,
        steps=time_budget.FEWEST,
        seconds=seconds,
    )
    return ways[-1].seconds <= seconds


def _changed(recipe: str, given: Sequence[Sequence[str]]) -> ConfigDict:
    """The config of a recipe with other fields."""
    config = user_files.load_config(recipe)
    settings.change(config, Config, [tuple(pair) for pair in given])
    return config


def _config(recipe: str, given: Settings) -> Config:
    config = _changed(recipe, given)
    return schema.typed(config_class(config), config)


def _text(value: object) -> str:
    """A value as the command line has it."""
    return value if isinstance(value, str) else repr(value)


def _with_thresholds(best: epath.Path, path: epath.Path) -> epath.Path:
    """The checkpoint that was judged, with the thresholds of its classes, as another one at `path`."""
    places.remove(path)
    table = best / judged.FOLDER / classification.THRESHOLDS
    loading.convert(best, path, orbax.NAME, thresholds=table)
    return path


def _commands(
    kept: dict,
    labelling: Labelling,
    folder: epath.Path,
    best: epath.Path,
    checkpoint: epath.Path,
    data: Settings,
) -> str:
    """A script of the commands that do the same by hand.

    Args:
      best: the checkpoint that was judged.
      checkpoint: the checkpoint to use; it differs from `best` if it also has thresholds.
    """
    checkpoint_path = shlex.quote(str(checkpoint))
    lines = ["# What 'vit_jax classify' ran, to continue by hand.", ""]
    if kept["kind"] == WHOLE:
        fields = [
            f"--config.{name}={value}" for name, value in dict(map(tuple, kept["settings"])).items()
        ]
        train = [
            "vit_jax",
            "train",
            f"--config={kept['recipe']}",
            *fields,
            f"--workdir={folder / 'run'}",
            "--report",
        ]
        lines += ["# Trains, measures, and writes run/report/report.html.", shlex.join(train), ""]
    fields = [f"--config.{name}={value}" for name, value in data]
    if (folder / "head").exists():
        evaluator = f"--evaluators={labelling.evaluator}"
        evaluate = ["vit_jax", "evaluate", f"--checkpoint={folder / 'head'}", *fields, evaluator]
        lines += [
            f"# The linear head, which 'classify' alone fits: its {labelling.words}.",
            shlex.join(evaluate),
            "",
        ]
    if checkpoint != best:
        chosen = folder / "chosen"
        options = {"thresholds": "f1", "out": str(chosen)}
        evaluators = f"--config.eval.evaluators={(('classification', options),)!r}"
        choose = ["vit_jax", "evaluate", f"--checkpoint={best}", *fields, evaluators]
        table = f"--thresholds={chosen / classification.THRESHOLDS}"
        keep = ["vit_jax", "convert", str(best), "MODEL", "--to=orbax", table]
        lines += [
            "# Chooses thresholds by class on the held-out images, and keeps them with the model. Set "
            "--config.data.eval_split to choose them on other images.",
            shlex.join(choose),
            shlex.join(keep),
            "",
        ]
    lines += [
        "# Classes of further photos; a page to drop them on; a file for other programs.",
        f"vit_jax predict --checkpoint={checkpoint_path} PHOTO",
        f"vit_jax serve --checkpoint={checkpoint_path}",
        f"vit_jax export --checkpoint={checkpoint_path} --to=onnx --out=model.onnx",
    ]
    return "\n".join(lines) + "\n"


def _write_page(
    looked: Photos,
    kept: dict,
    folder: epath.Path,
    best: epath.Path,
    values: dict[str, float | None],
    commands: str,
    spent: float,
) -> None:
    name = os.path.basename(os.path.normpath(looked.data.path))
    title = f"{name}: photos of {len(looked.classes):,} classes"

    def add(page: Page) -> None:
        looked.add_to_page(page)
        page.heading("How it was trained")
        page.text(
            f"Weights: {kept['weights_used']}. Chosen: {kept['text']}; all took {durations.duration_text(spent)}."
        )
        page.table([["way", "time here"], *kept["options"]])
        table = [["trained", f"{looked.labelling.words} on held-out photos"]]
        for kind, value in values.items():
            if value is not None:
                table.append([kind, f"{value:.1%}"])
        page.table(table)
        page.heading("Continue by hand")
        page.commands(commands)

    if best.name == "run":
        report.report([best], folder, title=title, add=add)
        return
    page = Page(title)
    judged.add_to_page(page, best)
    add(page)
    places.write_whole(folder / "report.html", page.html())
