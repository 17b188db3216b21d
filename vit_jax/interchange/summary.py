"""What `vit_jax show` says of a checkpoint of any format; weights are not read."""

import dataclasses
from collections.abc import Sequence

from etils import epath

from vit_jax.base import logs, places, schema
from vit_jax.checkpoints import descriptions, reading
from vit_jax.checkpoints.evaluations import metrics_of
from vit_jax.checkpoints.lora import adapters_in
from vit_jax.data import crops
from vit_jax.data.labels import imagenet
from vit_jax.interchange import formats, loading, remote
from vit_jax.models import naming, registry

_SHOWN_CLASSES = 10
_ANSWERS = {
    "softmax": "softmax: an image is of one class",
    "sigmoid": "sigmoid: an image may be of several classes, or of none",
}


def summarize(path: epath.PathLike, *, classes: Sequence[str] = (), **overrides) -> dict:
    """What a checkpoint is, as plain data.

    Args:
      path: a run's workdir, its checkpoints folder, one checkpoint, or a file or folder of any
        format in `formats`.
      classes: their names in the order of the logits, where the file does not say them.
      **overrides: options of its model, see `formats.read_checkpoint`.

    Returns:
      `path`, `format`, `model_name` (see `naming.full_name`), `model` (its nearest name and all
      options), `parameters`, `classes` (`None` where the file does not say), `probabilities`
      (softmax or sigmoid; `None` without a head), `settings` (options that answers depend on),
      `preprocessing` (`None` where the file does not say), `assumed` (values that no file contains,
      by name: options of the model, fields of the preprocessing, how classes are named). Of a run
      also `step`, `metrics` (of this checkpoint's evaluation, if it had one), `best`, `data`,
      `training_examples`, `init_from`, `adapters` and `versions`.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged.
    """
    name, checkpoint = formats.detect(path), formats.read_checkpoint(path, **overrides)
    if classes:
        checkpoint = loading.with_classes(checkpoint, tuple(classes), path)
    path = path if remote.is_remote(path) else places.locate(path)
    config, prepared = checkpoint.model_config, checkpoint.preprocessing
    summary = {
        "path": str(path),
        "format": name,
        "model_name": naming.full_name(config, checkpoint.called),
        "model": {
            "name": naming.nearest_name(config, checkpoint.called),
            **dataclasses.asdict(config),
        },
        "parameters": registry.count_parameters(config),
        "classes": None if checkpoint.classes is None else list(checkpoint.classes),
        "probabilities": formats.probabilities_of(checkpoint) if config.num_classes else None,
        "settings": checkpoint.settings,
        "preprocessing": prepared and dataclasses.asdict(prepared),
        "assumed": assumed(checkpoint),
    }
    if name == "orbax":
        folder = reading.find_checkpoint(path)
        description = reading.read_description(folder)
        summary |= _of_run(folder, description)
    return summary


def shapes(path: epath.PathLike, **overrides) -> registry.Weights:
    """The arrays of a checkpoint's model without their values; arguments as of `summarize`."""
    return registry.abstract_weights(formats.read_checkpoint(path, **overrides).model_config)[1]


def parameter_table(weights: registry.Weights) -> str:
    """Names, shapes, dtypes and sizes of a model's arrays, as CLU lays them out."""
    from clu import parameter_overview

    return "\n\n".join(
        f"{kind}:\n{parameter_overview.get_parameter_overview(tree, include_stats=False)}"
        for kind, tree in weights._asdict().items()
        if tree
    )


def assumed(checkpoint: formats.LoadedCheckpoint) -> dict:
    """The values of a checkpoint that no file contains, by their names."""
    config, prepared = checkpoint.model_config, checkpoint.preprocessing
    values = {name: getattr(config, name) for name in checkpoint.assumed if hasattr(config, name)}
    if prepared and "preprocessing" in checkpoint.assumed:
        values |= {n: x for n, x in dataclasses.asdict(prepared).items() if n != "image_size"}
    if config.num_classes and (checkpoint.classes is None or "classes" in checkpoint.assumed):
        of_imagenet = config.num_classes == imagenet.COUNT
        values["classes"] = "the names of ImageNet-1k's" if of_imagenet else "numbers"
    return values


def text(summary: dict) -> str:
    """`summarize`'s result for a person."""
    rows = [("checkpoint", f"{summary['path']} ({summary['format']})"), ("model", _model(summary))]
    rows += [("", _options(summary["model"])), ("classes", _classes(summary["classes"]))]
    if summary["probabilities"]:
        rows.append(("probabilities", _ANSWERS[summary["probabilities"]]))
    rows.append(("images", _images(summary["preprocessing"])))
    rows += [("", f"config.{name} = {value!r}") for name, value in summary["settings"].items()]
    if summary["assumed"]:
        rows.append(("assumed", _assumed(summary["assumed"])))
    if "step" in summary:
        rows += _rows_of_run(summary)
    return "\n".join(f"{name:<14}{value}" for name, value in rows)


def _of_run(folder: epath.Path, description: dict) -> dict:
    config, step = description["config"], descriptions.step_of(folder, description)
    best = description.get("best")
    in_run = folder.parent.name == reading.FOLDER
    # The last evaluation may have been made after the newest checkpoint was saved.
    if in_run and step == reading.saved_steps(folder.parent)[-1]:
        best = reading.best_evaluation(folder.parent.parent)
    adapters = adapters_in(description)
    return {
        "path": str(folder),
        "step": step,
        "metrics": metrics_of(folder, step) or None,
        "best": best,
        "data": {n: config["data"][n] for n in ("name", "path", "train_split", "eval_split")},
        "training_examples": description["training_examples"],
        "init_from": config["init_from"],
        "adapters": adapters and dataclasses.asdict(adapters),
        "weights": descriptions.parts_to_use(description)[0],
        "versions": description["versions"],
    }


def _model(summary: dict) -> str:
    """Its name and size."""
    return f"{summary['model_name']}, {summary['parameters']:,} parameters"


def _options(model: dict) -> str:
    """The options that say what the model is, not how it is computed or trained: its sizes, activation and epsilon, and
    of the others those that are not as usual.
    """
    config_class = type(registry.model_config(model["name"]))
    usual = {f.name: f.default for f in schema.options(config_class)}
    names = schema.with_role(config_class, "size", "structure", "convention")
    shown = {*schema.with_role(config_class, "size"), "pool", "activation", "epsilon"}
    listed = (n for n in names if n in model and (n in shown or model[n] != usual[n]))
    return ", ".join(f"{name} {model[name]}" for name in listed)


def _classes(classes: list[str] | None) -> str:
    if classes is None:
        return "the file does not say which"
    more = ", …" if len(classes) > _SHOWN_CLASSES else ""
    return f"{len(classes):,}: {', '.join(classes[:_SHOWN_CLASSES])}{more}" if classes else "none"


def _images(prepared: dict | None) -> str:
    if prepared is None:
        return "the file does not say how they are normalised"
    crop = crops.describe_crop(formats.Preprocessing(**prepared))
    return (
        f"{prepared['image_size']} pixels ({crop}), mean {prepared['mean']}, std {prepared['std']}"
    )


def _assumed(values: dict) -> str:
    """What no file contains."""
    listed = ", ".join(f"{name} {value}" for name, value in values.items())
    return (
        f"{listed} (no file contains them; --model=OPTION=VALUE and --config.data.FIELD set others)"
    )


def _figure(value: float | None) -> str:
    """A number of a file, in which one that is not finite is null."""
    return "nan" if value is None else logs.number_text(value)


def _rows_of_run(summary: dict) -> list[tuple[str, str]]:
    data, best = summary["data"], summary["best"]
    rows = [("step", f"{summary['step']:,}")]
    if summary["metrics"]:
        metrics = "  ".join(f"{n} {_figure(v)}" for n, v in summary["metrics"].items())
        rows.append(("metrics", metrics))
    if best:
        rows.append(("best", f"{best['metric']} {best['value']:.4g} at step {best['step']:,}"))
    where = f" ({data['path']})" if data["path"] else ""
    trained = f"{data['train_split']}, {summary['training_examples']:,} images"
    rows.append(("data", f"{data['name']}{where}: {trained}; evaluated on {data['eval_split']}"))
    if summary["weights"] != "params":
        kind = {"ema": "averaged parameters", "teacher": "the teacher's"}
        rows.append(("weights", kind[summary["weights"]]))
    if adapters := summary["adapters"]:
        targets = ", ".join(adapters["targets"])
        rows.append(
            ("adapters", f"rank {adapters['rank']}, of {targets} of the model it started from")
        )
    rows.append(("started from", summary["init_from"] or "nothing"))
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    return [*rows, ("trained with", versions)]
