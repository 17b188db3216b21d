"""What `vit_jax export` does: a trained model in one file that runs without this package."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from vit_jax import objectives
from vit_jax.base import logs, places
from vit_jax.base.errors import CheckpointError, ConfigError, UserError
from vit_jax.base.outputs import file_to_write, writing
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.data import crops
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage
from vit_jax.evaluation.forward import data_of
from vit_jax.export import onnx, stablehlo
from vit_jax.export.precision import FLOAT16, FLOAT16_TOLERANCE, PRECISIONS, check_float16
from vit_jax.export.programs import BESIDE, INSIDE, RANKED, make_program
from vit_jax.interchange.formats import describe_model
from vit_jax.models import registry
from vit_jax.prediction import output_names
from vit_jax.prediction.finite import check_weights
from vit_jax.prediction.images import Named, check_one_size, find_images, read_ahead
from vit_jax.prediction.json_lines import checksum_of
from vit_jax.prediction.overrides import load_for_images

FORMATS: dict[str, ModuleType] = {"stablehlo": stablehlo, "onnx": onnx}
MADE_BY = "made_by"  # the entry of a description with the arguments of its export
_BATCH = 16  # images at a time, to compare


def export(
    path: epath.PathLike,
    out: str,
    *,
    to: str,
    batch_size: int = 0,
    normalization: str = INSIDE,
    precision: str = "float32",
    outputs: Sequence[str] = (),
    images: Sequence[str] = (),
    settings: Sequence[tuple[str, str]] = (),
    model_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes a file with the program and what there is to know to use it.

    The program takes images (B, H, W, C), cut as the description says, and gives one or several of: `probabilities`
    (B, classes), `logits` (B, classes) and `features` (B, D), the input of the head, all float32. Of a model that
    segments it gives `scores` (B, h, w, classes), and if it finds single things the probabilities of its queries'
    masks, `masks` (B, h, w, queries), and of their `classes` (B, queries, classes + 1).

    Args:
      path: of a run, or of a checkpoint of any format.
      to: one of `FORMATS`.
      batch_size: how many images it takes at a time; 0: any number.
      normalization: 'inside': it takes uint8; 'beside': float32, from which the mean is subtracted and that is
        divided by the deviation, as the description says.
      precision: one of `precision.PRECISIONS`, of the stored weights. The program computes in float32; with 'float16',
        which is for ONNX, in float16.
      outputs: see `programs.chosen_outputs`.
      images: to compare the file's answers on with the model's, see `images.find_images`; a file whose folder has
        the name of a class is an example of that.
      settings: of the run's config, see `overrides.of_images`.
      model_options: see `loading.load_run`.

    Returns:
      The description, with `compared` where there are images.

    Raises:
      ConfigError: the file cannot be written, is there and was not written with the same arguments, or it is not known
        how images are normalised.
      CheckpointError: weights are not finite.
      UserError: none of the images to compare on can be read, or answers in float16 differ by more than rounding; it
        is raised once the file is written.
    """
    check_target(out, to)
    made_by = _made_by(
        path,
        (to, batch_size, normalization, precision, *outputs),
        settings,
        model_options,
    )
    _check_same_export(out, to, made_by)
    files = find_images(images) if images else None
    run = load_for_images(path, settings, "export", model_options)
    return _export(
        run, out, made_by, to=to, batch_size=batch_size, normalization=normalization, precision=precision,
        outputs=outputs, files=files,
    )  # fmt: skip


def check_target(out: str, to: str) -> pathlib.Path:
    """The file to write. Raises `ConfigError` if it cannot be written in the format `to`."""
    target = file_to_write(out, "--out")
    writer = FORMATS[to]
    if target.suffix != writer.SUFFIX:
        raise ConfigError(f"--out={out}: name it {writer.SUFFIX}")
    writer.check_installed()
    return target


def export_run(
    run: TrainedModel,
    out: str,
    *,
    to: str,
    batch_size: int = 0,
    normalization: str = INSIDE,
    precision: str = "float32",
    outputs: Sequence[str] = (),
    files: Iterable[Named] | None = None,
) -> dict[str, Any]:
    """`export` of a model that is loaded.

    Args:
      files: images to compare all outputs of the file on with the model's.
    """
    check_target(out, to)
    made_by = _made_by(run.directory, (to, batch_size, normalization, precision, *outputs))
    _check_same_export(out, to, made_by)
    return _export(
        run, out, made_by, to=to, batch_size=batch_size, normalization=normalization, precision=precision,
        outputs=outputs, files=files,
    )  # fmt: skip


def _made_by(
    checkpoint: epath.PathLike,
    options: tuple,
    settings: Sequence[tuple[str, str]] = (),
    model_options: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """The arguments of an export, for its description. They are checksums: a published file should not tell the paths
    of the machine that wrote it.
    """
    values = output_names.command_arguments(
        checkpoint, options=options, settings=list(settings), model=dict(model_options or {})
    )
    return {name: checksum_of(value) for name, value in values.items()}


def _check_same_export(out: str, to: str, made_by: Mapping[str, str]) -> None:
    """Raises `ConfigError` if the file is there and is of another checkpoint, other options or another program."""
    target = places.locate(out, "--out")
    if not places.exists(target):
        return
    try:
        before = FORMATS[to].load_description(target).get(MADE_BY)
    except CheckpointError:  # Another program wrote it.
        before = None
    output_names.check_same_work(str(target), "--out", places.exists, before, made_by)


def _export(
    run: TrainedModel,
    out: str,
    made_by: Mapping[str, str],
    *,
    to: str,
    batch_size: int,
    normalization: str,
    precision: str,
    outputs: Sequence[str],
    files: Iterable[Named] | None,
) -> dict[str, Any]:
    """`export_run`, once the file may be written."""
    for name, value, known in (
        ("normalization", normalization, (INSIDE, BESIDE)),
        ("precision", precision, PRECISIONS),
    ):
        if value not in known:
            raise ConfigError(f"{name}={value!r}: must be {' or '.join(known)}")
    if precision == FLOAT16 and to != "onnx":
        raise ConfigError(
            f"--weights=float16 is for --to=onnx: programs of --to={to} compute in float32; set --weights=bfloat16 to "
            "store fewer bits"
        )
    target = check_target(out, to)
    output_names.check_not_checkpoint(target, run.directory, "--out")
    writer = FORMATS[to]
    data = data_of(run)
    check_one_size(data, "export")
    check_weights(run)
    if precision == FLOAT16:
        check_float16(registry.split(run.model)[1], run.directory)
    if run.objective_modules is not None:  # the model sees whole images
        data = dataclasses.replace(data, eval_crop="resize")
    dtype = FLOAT16 if precision == FLOAT16 else "float32"
    program = make_program(run, data, normalization=normalization, outputs=outputs, dtype=dtype)
    answer, weights, inside = program.answer, program.weights, normalization == INSIDE
    shape = (*crops.shape(data),)
    batch = batch_size or jax.export.symbolic_shape("batch")[0]
    like = jax.ShapeDtypeStruct((batch, *shape), np.uint8 if inside else np.float32)
    leaves = jax.tree.leaves(jax.eval_shape(answer, weights, like))
    outputs_of = {name: _sides(x.shape) for name, x in zip(program.outputs, leaves, strict=True)}
    description = _describe(run, data, like, inside, precision)
    description |= {"output": program.outputs[0], "outputs": outputs_of, MADE_BY: dict(made_by)}
    description |= {
        "how": " ".join(filter(None, (writer.how(program.outputs), program.writer_note)))
    }
    tracing = logs.with_elapsed_time(f"tracing the model and writing {target}")
    with writing(target) as partial, tracing:
        description = writer.write(partial, answer, weights, like, description, precision)
        written = None if files is None else writer.load_outputs(partial)
    if files is None:
        return description
    size = batch_size or _BATCH
    mean, std = (np.float32(x) for x in (data.mean, data.std))

    def prepared(images: np.ndarray) -> np.ndarray:
        return images if inside else (images.astype(np.float32) / 255 - mean) / std

    if precision == FLOAT16:  # compared with the model in float32
        answer = make_program(run, data, normalization=normalization, outputs=outputs).answer
    ours = jax.jit(lambda images: jax.tree.leaves(answer(weights, images)))
    compared = _compare(
        [lambda x, answers=answers: list(map(np.asarray, answers(prepared(x)))) for answers in (ours, written)],
        read_ahead(files, lambda file: file.read(data), size), size, shape, run.classes, program.outputs,
    )  # fmt: skip
    if precision == FLOAT16:
        _check_float16_answers(compared, out)
    return description | {"compared": compared}


def _check_float16_answers(compared: dict[str, Any], out: str) -> None:
    """Raises `UserError` for answers of a file that are too far from the model's."""
    difference = compared["largest_relative_difference"]
    if not difference <= FLOAT16_TOLERANCE:  # which NaN is not either
        raise UserError(
            f"{out}: answers in float16 differ from the model's by {difference:.2g} of the largest number, of which "
            f"rounding explains {FLOAT16_TOLERANCE:g}: some number is too large for float16; set --weights=bfloat16 or "
            "float32"
        )


def text(description: dict[str, Any], out: str) -> str:
    """`export`'s result for a person."""
    lines = [f"{description['model']}: {out}"]
    if compared := description.get("compared"):
        lines += [f"{name.replace('_', ' '):<28} {value:g}" for name, value in compared.items()]
    lines += [description["readable"]] if "readable" in description else []
    return "\n".join([*lines, description["how"]])


def _sides(shape: tuple) -> list:
    return [side if isinstance(side, int) else str(side) for side in shape]


def _describe(
    run: TrainedModel, data: Data, images: jax.ShapeDtypeStruct, inside: bool, precision: str
) -> dict[str, Any]:
    normalization: Any = "in the program"
    if not inside:
        normalization = {"mean": list(data.mean), "std": list(data.std), "of": "pixels / 255"}
    has_classes = bool(run.model_config.num_classes) or run.objective_modules is not None
    return {
        "model": describe_model(
            run.model_config, run.config.model.name, of_pixels=len(run.classes) if run.objective_modules else 0
        ),
        "input": {"images": _sides(images.shape), "dtype": str(images.dtype)},
        "probabilities": objectives.probabilities(run.config.objective),
        "classes": list(run.classes) if has_classes else [],
        "thresholds": list(run.config.eval.thresholds),  # of the probabilities; []: none were chosen
        "weights": precision,
        "preprocessing": {
            "color": "RGB" if len(data.mean) == 3 else f"{len(data.mean)} channels",
            "resize_and_crop": data.eval_crop,
            "eval_resize": data.eval_resize,
            "interpolation": data.interpolation,
            "max_value": data.max_value,
            "normalization": normalization,
        },
    }  # fmt: skip


def _compare(
    programs: Sequence[Callable[[np.ndarray], list[np.ndarray]]],
    batches: Iterable,
    size: int,
    shape: tuple,
    classes: Sequence[str],
    names: Sequence[str],
) -> dict[str, Any]:
    """Compares the answers of two programs: numbers by all outputs, and best classes by the first that has classes.

    Args:
      programs: images (size, H, W, C) uint8 to all outputs.
      batches: from `images.read_ahead`.
      size, shape: of a batch, and of an image.
      classes: label names.
      names: of the outputs.
    """
    count = unreadable = same = labelled = 0
    right = [0, 0]
    largest = dict.fromkeys(names, 0.0)
    magnitudes = dict.fromkeys(names, 0.0)
    known = {name: number for number, name in enumerate(classes)}
    ranked = [number for number, name in enumerate(names) if name in RANKED][:1]
    for images in batches:
        bad = [image for _, image in images if isinstance(image, BadImage)]
        for error in bad:
            logging.error("%s", error)
        unreadable += len(bad)
        good = [(file, image) for file, image in images if not isinstance(image, BadImage)]
        if not good:
            continue
        batch = np.zeros((size, *shape), np.uint8)
        batch[: len(good)] = [image for _, image in good]
        answers = [[rows[: len(good)] for rows in program(batch)] for program in programs]
        for name, ours, theirs in zip(names, *answers, strict=True):
            difference = np.abs(ours - theirs).max()
            largest[name] = float(
                np.maximum(largest[name], difference)
            )  # NaN stays, unlike by `max`
            magnitudes[name] = max(magnitudes[name], float(np.abs(ours).max()))
        count += len(good)
        if not ranked:
            continue
        best = [outputs_of_program[ranked[0]].argmax(-1) for outputs_of_program in answers]
        alike = (best[0] == best[1]).reshape(len(good), -1)  # of maps the share of pixels
        same += float(alike.mean(1).sum())
        for row, (file, _) in enumerate(good):
            label = known.get(pathlib.Path(file.name).parent.name)
            if label is not None and alike.shape[1] == 1:
                labelled += 1
                right = [r + int(b[row] == label) for r, b in zip(right, best, strict=True)]
    if not count:
        raise UserError("none of the images can be read, see above")
    comparison = {"images": count, "unreadable": unreadable}
    if ranked:
        comparison["same_best_class"] = same / count
    comparison["largest_difference"] = float(np.max([*largest.values()]))
    shares = [largest[name] / (magnitudes[name] or 1) for name in names]
    comparison["largest_relative_difference"] = float(np.max(shares))
    if len(names) > 1:
        comparison |= {f"largest_difference_of_{name}": value for name, value in largest.items()}
    if labelled:
        accuracies = {"accuracy": right[0] / labelled, "accuracy_of_the_file": right[1] / labelled}
        comparison |= {"labelled": labelled} | accuracies
    return comparison
