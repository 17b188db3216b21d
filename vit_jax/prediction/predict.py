"""Class names and probabilities of images, from a checkpoint directory alone. Which images these
are is in `images.py`.
"""

import collections
import csv
import dataclasses
import functools
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from vit_jax import objectives
from vit_jax.base import logs, outputs, stopping
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage
from vit_jax.devices import meshes
from vit_jax.evaluation import decisions
from vit_jax.evaluation.early_exit.inference import Inference, check_thresholds
from vit_jax.evaluation.forward import data_of, make_forward
from vit_jax.models import registry
from vit_jax.prediction import finite
from vit_jax.prediction.images import (
    Compiled,
    Named,
    check_all_read,
    native_size,
    read_ahead,
)

_PICTURED = 400  # images on one sheet
_STOPPED = (
    "stopped; what is printed is whole: to continue, pass the names of the images that are not in it, as files or by "
    "standard input"
)


# Batches, and which of their rows are images, to the probabilities and numbers of the best classes, (rows, topk) each.
Rank = Callable[[Iterable[tuple[np.ndarray, np.ndarray]]], Iterator[tuple[np.ndarray, np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The most probable classes of an image, best first.

    Attributes:
      file: its name, as `images.Named` has it.
      names: of the classes.
      probabilities: in [0, 1]; softmax, or independent sigmoids for a model trained with sigmoid
        loss.
      image: (H, W, C) uint8 as the model saw it.
      decided: for each class whether it is at or above its threshold; () if the model has no thresholds.
    """

    file: str
    names: tuple[str, ...]
    probabilities: tuple[float, ...]
    image: np.ndarray = dataclasses.field(repr=False)
    decided: tuple[bool, ...] = ()


def predict(
    run: TrainedModel,
    files: Iterable[Named],
    *,
    topk: int,
    batch_size: int,
    thresholds: Sequence[float] = (),
    best: Compiled | None = None,
) -> Iterator[Prediction | BadImage]:
    """Classifies images in batches, as they come; what cannot be read comes back as its `BadImage`, in
    place.

    Args:
      run: from `loading.load_run`.
      files: images, see `images.find_images`.
      topk: how many classes of each; of a model with thresholds (`config.eval.thresholds`) also all classes at or above
        theirs.
      batch_size: images at a time.
      thresholds: how probable the best class has to be for an image to leave at each exit but the
        last, of a model with exits; none: all images go through to the last one.
      best: from `make_best`, to use again what was compiled before.

    Raises:
      ConfigError: it is not known how images are normalised, the model has no head, or the thresholds do not fit it.
      CheckpointError: an answer of the model is not finite.
    """
    check_head(run)
    best = best or make_best(run)
    cuts = decisions.stated_thresholds(run.config, len(run.classes))
    weights = registry.split(run.model)[1]

    def make_ranking(rows: int, count: int) -> Rank:
        if thresholds:
            return _make_early_classifier(run, best.data, count, rows, thresholds)
        return functools.partial(
            map, lambda batch: jax.device_get(best.function(weights, batch[0], count))
        )

    def check(file: str, probabilities: np.ndarray) -> None:
        finite.check_answers(run, [file], probabilities[None])

    yield from rank_files(
        files,
        best,
        make_ranking,
        run.classes,
        batch_size=batch_size,
        check=check,
        topk=topk,
        cuts=cuts,
    )


def rank_files(
    files: Iterable[Named],
    compiled: Compiled,
    make_ranking: Callable[[int, int], Rank],
    classes: Sequence[str],
    *,
    batch_size: int,
    check: Callable[[str, np.ndarray], None],
    topk: int,
    cuts: np.ndarray | None,
) -> Iterator[Prediction | BadImage]:
    """The best classes of images, batch by batch, whatever computes them.

    Args:
      compiled: how images are read and made a batch; its function is not called.
      make_ranking: from the number of rows of all batches, and how many classes to rank, to a function that does so.
      classes: label names.
      check: raises for probabilities of an image that are no answer.
      topk: see `predict`.
      cuts: the thresholds of the classes, (classes,), of which all are ranked then; `None`: there are none.
    """
    read = read_ahead(files, compiled.read, batch_size)
    held = collections.deque()
    first = list(itertools.islice(read, 1))
    rows = len(first[0]) if first else 0
    count = min(topk, len(classes)) if cuts is None else len(classes)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for images in itertools.chain(first, read):
            held.append(images)
            yield compiled.batch(images, rows)

    for answers in make_ranking(rows, count)(batches()):
        answered = zip(*answers, strict=True)
        for file, image in held.popleft():
            if isinstance(image, BadImage):
                yield image
                continue
            probabilities, numbers = next(answered)
            check(file.name, probabilities)
            decided = np.empty(0, bool)
            if cuts is not None:
                listed, decided = decisions.listed(probabilities, cuts[numbers], topk)
                numbers = numbers[listed]
                probabilities = probabilities[listed]
            yield Prediction(
                file.name,
                tuple(classes[number] for number in numbers),
                tuple(map(float, probabilities)),
                image,
                tuple(decided.tolist()),
            )


def check_head(run: TrainedModel) -> None:
    """Raises `ConfigError` for a model without a head."""
    if run.objective_modules is not None:
        raise ConfigError(
            f"{run.directory}: the model segments: pass --out=FOLDER for the masks of images (in Python run.segment)"
        )
    if not run.model_config.num_classes:
        raise ConfigError(
            f"{run.directory}: the model has no head, and so no classes to predict: fine-tune it, or use its features "
            "(--features --out=FILE.npz, run.features in Python)"
        )


def make_best(
    run: TrainedModel,
    logits_of: Callable[[np.ndarray], np.ndarray] | None = None,
    native_tokens: int | None = None,
) -> Compiled:
    """A function of weights, images and `topk` that gives the probabilities and numbers of the best classes, (B, topk)
    each.

    Args:
      logits_of: what computes the logits of images instead of XLA, with weights of its own.
      native_tokens: each image is seen at the size and aspect of its own that so many patches allow, see
        `data.native_sizes`; 0: all are seen at one size; `None`: as the run was trained.

    Raises:
      ConfigError: see `images.native_size`.
    """
    definition, data = registry.split(run.model)[0], data_of(run)
    activation = objectives.activation(run.config.objective)
    if logits_of:
        ranked = jax.jit(
            lambda logits, topk: jax.lax.top_k(activation(logits), topk), static_argnums=1
        )
        return Compiled(data, lambda _, images, topk: ranked(logits_of(images), topk))
    native = native_size(run, data, native_tokens)
    forward = make_forward(definition, run.model_config, data)

    @functools.partial(jax.jit, static_argnums=2)
    def best(
        weights: registry.Weights, images: jax.Array, topk: int
    ) -> tuple[jax.Array, jax.Array]:
        return jax.lax.top_k(activation(forward(weights, images).logits), topk)

    return Compiled(data, best, native)


def _make_early_classifier(
    run: TrainedModel, data: Data, topk: int, batch_size: int, thresholds: Sequence[float]
) -> Callable[[Iterable[tuple[np.ndarray, np.ndarray]]], Iterator[tuple[np.ndarray, np.ndarray]]]:
    """From batches of images (B, H, W, C), and which rows are images, to what `make_best` gives, batch by batch;
    images leave at exits.
    """
    definition, weights = registry.split(run.model)
    activation = objectives.activation(run.config.objective)
    check_thresholds(run.model_config, thresholds)
    inference = Inference(
        definition, run.model_config, data, activation=activation, batch_size=batch_size, mesh=meshes.replica_mesh(),
    )  # fmt: skip
    of_logits = jax.jit(lambda logits: jax.lax.top_k(activation(logits), topk))

    def classify(batches: Iterable) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for answers in inference.answers(weights, thresholds, batches):
            yield jax.device_get(of_logits(answers.logits))
        logging.info("%s", inference.text())

    return classify


def predict_files(
    run: TrainedModel,
    files: Iterable[Named],
    *,
    topk: int,
    batch_size: int,
    form: str,
    picture: epath.Path | None = None,
    thresholds: Sequence[float] = (),
    best: Compiled | None = None,
) -> None:
    """Prints predictions as `text`, `csv`, `json` (one list, on the last line) or `jsonl` (an object a line), each as
    soon as it is made. The memory it takes does not grow with the number of images. Of an image all or nothing is
    printed, and a list is closed, when SIGINT or SIGTERM comes.

    Args:
      run: from `loading.load_run`.
      files: images, see `images.find_images`.
      picture: a file to draw the first images and their classes into, from `outputs.file_to_write`.
      thresholds, best: see `predict`.

    Raises:
      ConfigError: it is not known how images are normalised, or the model has no head.
      UserError: some image could not be read; raised after all others were predicted.
      Interrupted: SIGINT or SIGTERM came.
    """
    check_head(run)
    results = predict(
        run, files, topk=topk, batch_size=batch_size, thresholds=thresholds, best=best
    )
    print_results(results, form, picture)


def print_results(
    results: Iterable[Prediction | BadImage], form: str, picture: epath.Path | None = None
) -> None:
    """`predict_files` of predictions as they come."""
    tiles = []
    good = bad = 0

    def predictions() -> Iterator[Prediction]:
        nonlocal good, bad
        for result in results:
            if isinstance(result, BadImage):
                bad += 1
                logging.error("%s", result)
                continue
            good += 1
            if picture and good <= _PICTURED:
                caption = f"{result.names[0]} {result.probabilities[0]:.0%}"
                tiles.append((result.image, caption))
            yield result

    with stopping.keeping(lambda: _STOPPED):
        _PRINTERS[form](predictions())
    if tiles:
        from vit_jax.prediction.picture import draw_sheet

        with outputs.writing(picture) as partial:
            draw_sheet(tiles, partial)
        logging.info("picture: %s, with %d of %d images", picture, len(tiles), good)
    check_all_read(good, bad)


def _print_text(predictions: Iterable[Prediction]) -> None:
    for p in predictions:
        rows = [f"  {q:7.2%}  {logs.printable(n)}" for n, q in _answers(p)] or ["  none"]
        _print("\n".join([logs.printable(p.file), *rows]))


def _print_csv(predictions: Iterable[Prediction]) -> None:
    def line(*cells: Any) -> str:
        csv.writer(text := io.StringIO(), lineterminator="").writerow(map(outputs.as_cell, cells))
        return text.getvalue()

    _print(line("file", "rank", "class", "probability"), end="\r\n")
    for p in predictions:
        file = logs.printable(p.file)
        rows = [
            line(file, rank, logs.printable(name), f"{probability:.6f}")
            for rank, (name, probability) in enumerate(_answers(p), 1)
        ] or [line(file, "", "", "")]
        _print("\r\n".join(rows), end="\r\n")


def _print_json(predictions: Iterable[Prediction]) -> None:
    before = "["
    try:
        for p in predictions:
            with stopping.delayed():
                print(f"{before}{_as_json(p)}", end="", flush=True)
                before = ", "
    except KeyboardInterrupt:
        _print("[]" if before == "[" else "]")
        raise
    _print("[]" if before == "[" else "]")


def _print_json_lines(predictions: Iterable[Prediction]) -> None:
    for p in predictions:
        _print(_as_json(p))


def _as_json(p: Prediction) -> str:
    rows = zip(p.names, p.probabilities, strict=True)
    classes: list[dict[str, Any]] = [{"class": name, "probability": q} for name, q in rows]
    for place, is_decided in enumerate(p.decided):
        classes[place]["decided"] = is_decided
    return json.dumps({"file": logs.printable(p.file), "predictions": classes})


def _answers(p: Prediction) -> list[tuple[str, float]]:
    """The listed classes and their probabilities, of a model with thresholds those that are decided for."""
    rows = list(zip(p.names, p.probabilities, strict=True))
    return list(itertools.compress(rows, p.decided)) if p.decided else rows


def _print(text: str, end: str = "\n") -> None:
    """Prints a text as a whole: a signal waits."""
    with stopping.delayed():
        print(text, end=end, flush=True)


_PRINTERS = {
    "text": _print_text,
    "csv": _print_csv,
    "json": _print_json,
    "jsonl": _print_json_lines,
}
