"""The thresholds of a checkpoint: solved on training images, judged on evaluation images, kept in a
file of the checkpoint's own folder, which goes where the checkpoint goes.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath

from vit_jax import objectives
from vit_jax.base import places
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.checkpoints import descriptions, reading
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.config import Config
from vit_jax.data import loader, sources
from vit_jax.data.labels.classes import with_classes
from vit_jax.data.loader import Batches
from vit_jax.devices import meshes, processes
from vit_jax.evaluation.contract import Watch
from vit_jax.evaluation.early_exit import thresholds
from vit_jax.evaluation.early_exit.inference import check_exits
from vit_jax.evaluation.forward import make_forward, normalized_as
from vit_jax.models import classifier, naming, registry
from vit_jax.objectives.supervised import to_targets

FILE, PICTURE = "exits.json", "exits.png"


class Judged(NamedTuple):
    """What E exits say of N images.

    Attributes:
      confidence: (E, N) float32, the largest probability.
      entropy: (E, N) float32, of the probabilities, negative: larger for easier images, too.
      right: (E, N) bool, whether the most probable class is one of the image's.
    """

    confidence: np.ndarray
    entropy: np.ndarray
    right: np.ndarray


def calibrate(
    run: TrainedModel, config: Config, budgets: Sequence[float], *, images: int, watch: Watch = iter
) -> dict:
    """Thresholds for each budget, and what they come to.

    Args:
      run: from `loading.load_run`.
      config: the run's, perhaps with other fields in its sections `data` and `eval`.
      budgets: mean costs of an image, in 10⁹ multiply-adds.
      images: how many training images to solve with; they are cut as in training, since the model
        knows them better than others.
      watch: see `Evaluator`.

    Returns:
      What `FILE` keeps, plain data: `exits` and `budgets` with accuracies on the evaluation images,
      costs in 10⁹ multiply-adds.

    Raises:
      ConfigError: the model has no exits, a budget is out of range, or there are fewer images than
        classes; raised before the model is used.
    """
    costs = costs_of(run.model_config)
    for budget in budgets:
        check_budget(budget, costs)
    if processes.count() > 1:
        raise ConfigError("thresholds are solved by one process: start it without the others")
    _check_writable(run.directory)
    config = dataclasses.replace(config, data=normalized_as(config.data, run.directory))
    train = with_classes(sources.open_train(config.data), run.classes)
    test = with_classes(sources.open_eval(config.data), run.classes)
    images, classes = min(images, len(train)), len(run.classes)
    if images < classes:
        raise ConfigError(
            f"{images} training images are too few to solve thresholds with: there are {classes} classes, "
            "and there should be several images of each"
        )
    mesh = meshes.replica_mesh()
    judge = _Judge(run, config, mesh)
    batch_size = config.eval.batch_size or config.batch_size
    once = dataclasses.replace(
        config, batch_size=batch_size, data=dataclasses.replace(config.data, repeats=1)
    )
    logging.info("solving on %d images of %s", images, config.data.train_split)
    cut, steps = meshes.batch_sharding(mesh), -(-images // batch_size)
    with loader.train_batches(train, once, cut, start_step=0, stop_step=steps) as batches:
        known = Judged(*(array[:, :images] for array in judge(batches, watch)))
    logging.info("judging on %s", config.data.eval_split)
    with loader.eval_batches(test, config, cut) as batches:
        judged = judge(batches, watch)
    return {
        "checkpoint": {
            "step": run.step,
            "model": naming.full_name(run.model_config, run.config.model.name),
            "mark": reading.weights_mark(run.directory),
        },
        "calibrated_on": {"split": config.data.train_split, "images": images},
        "judged_on": {"split": config.data.eval_split, "images": judged.right.shape[1]},
    } | summary(known, judged, costs, budgets)


def summary(
    known: Judged, judged: Judged, costs: Sequence[float], budgets: Sequence[float]
) -> dict:
    """What solved thresholds and others come to.

    Args:
      known: the images to solve with.
      judged: those to judge the result on.
      costs: (E,) of leaving at each exit.
      budgets: mean costs to keep to on `known`.
    """

    def judge(chosen: Sequence[float]) -> dict:
        outcome = thresholds.outcome(judged.confidence, judged.right, costs, chosen)
        return {"thresholds": list(chosen), **_plain(outcome)}

    def on_known(chosen: Sequence[float]) -> thresholds.Outcome:
        return thresholds.outcome(known.confidence, known.right, costs, chosen)

    shares = [thresholds.geometric(known.confidence, p) for p in thresholds.GEOMETRIC]
    settings = [(on_known(chosen), chosen) for chosen in shares]
    by_entropy = thresholds.solve(known.entropy, known.right, costs, budgets)
    rows = []
    solved = thresholds.solve(known.confidence, known.right, costs, budgets)
    for budget, chosen, rival in zip(budgets, solved, by_entropy, strict=True):
        known_outcome = on_known(chosen)
        entropy = thresholds.outcome(judged.entropy, judged.right, costs, rival)
        # The code leaves it to the user which of its settings keeps to a budget.
        within = [setting for setting in settings if setting[0].cost <= budget]
        official = judge(max(within)[1]) if within else None
        rows.append(
            {"budget": budget, **judge(chosen), "calibration": _plain(known_outcome)}
            | {"random": thresholds.at_random(judged.right, known_outcome.shares)}
            | {"entropy": entropy.accuracy, "geometric": official and official["accuracy"]}
        )
    alone = [
        {"gflops": cost, "accuracy": float(right.mean())}
        for cost, right in zip(costs, judged.right, strict=True)
    ]
    geometric = [
        {"p": p, **judge(chosen)} for p, chosen in zip(thresholds.GEOMETRIC, shares, strict=True)
    ]
    return {"exits": alone, "budgets": rows, "geometric": geometric}


def keep(directory: epath.Path, result: dict) -> epath.Path:
    """Writes `calibrate`'s result into a checkpoint's folder; returns the file's path."""
    path = epath.Path(directory) / FILE
    places.write_whole(path, json.dumps(result, indent=1))
    return path


def for_budget(checkpoint: epath.PathLike, budget: float) -> tuple[float, ...]:
    """The thresholds that a checkpoint keeps for a budget, without reading its weights.

    Args:
      checkpoint: see `reading.find_checkpoint`.
      budget: mean cost of an image in 10⁹ multiply-adds.

    Raises:
      ConfigError: the model has no exits, the budget is out of range, or there are no thresholds for
        it.
      CheckpointError: the file is damaged, or has thresholds of another checkpoint.
    """
    directory = reading.find_checkpoint(checkpoint)
    model_config = descriptions.stored_model_config(reading.read_description(directory))
    check_budget(budget, costs_of(model_config))
    path = directory / FILE
    solve = f"vit_jax exits --checkpoint={checkpoint} --budgets={budget:g}"
    if not path.exists():
        raise ConfigError(
            f"{directory} has no thresholds for its exits yet: find them with '{solve}'"
        )
    try:
        kept = json.loads(path.read_text())
        mark, rows = kept["checkpoint"]["mark"], kept["budgets"]
        by_budget = {row["budget"]: tuple(map(float, row["thresholds"])) for row in rows}
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error!r}): make it again with '{solve}'"
        ) from error
    if mark != reading.weights_mark(directory):
        raise CheckpointError(
            f"{path} has the thresholds of another checkpoint (step {kept['checkpoint']['step']} of a "
            f"{kept['checkpoint']['model']}): find those of this one with '{solve}'"
        )
    if budget not in by_budget:
        known = ", ".join(f"{value:g}" for value in by_budget)
        wanted = ",".join(f"{value:g}" for value in sorted([*by_budget, budget]))
        raise ConfigError(
            f"{path} has no thresholds for a budget of {budget:g}, only for {known}: find all with "
            f"'vit_jax exits --checkpoint={checkpoint} --budgets={wanted}'"
        )
    return by_budget[budget]


def costs_of(model_config: classifier.ClassifierConfig) -> tuple[float, ...]:
    """What leaving at each exit costs, in 10⁹ multiply-adds. Raises `ConfigError` without exits."""
    check_exits(model_config)
    return tuple(flops / 2e9 for flops in model_config.exit_flops)


def check_budget(budget: float, costs: Sequence[float]) -> None:
    """Raises `ConfigError` unless a budget lies between the first and the last exit's cost."""
    if not costs[0] <= budget <= costs[-1]:
        what = (
            "less than the first exit costs"
            if budget < costs[0]
            else "more than all exits together cost: no image can use it"
        )
        steps = ", ".join(f"{cost:.4g}" for cost in costs)
        raise ConfigError(
            f"a budget of {budget:g} GFLOPs (multiply-adds) an image is {what}. The exits cost {steps}; "
            "choose between the first and the last"
        )


class _Judge:
    """Runs all exits on batches of images."""

    def __init__(self, run: TrainedModel, config: Config, mesh: jax.sharding.Mesh):
        definition, self._weights = registry.split(run.model)
        self._mesh, classes = mesh, run.model_config.num_classes
        forward = make_forward(definition, run.model_config, config.data)
        activation = objectives.activation(config.objective)

        def judge(weights: registry.Weights, batch: dict) -> tuple[jax.Array, ...]:
            logits = forward(weights, batch["image"]).exits.swapaxes(0, 1)
            p = activation(logits)
            targets = to_targets(batch["label"], classes)
            right = jnp.take_along_axis(targets[:, None], logits.argmax(-1)[..., None], axis=-1)
            labelled = batch.get("mask", jnp.ones(len(logits))) * (targets.sum(-1) > 0)
            entropy = jnp.sum(p * jnp.log(jnp.maximum(p, 1e-30)), axis=-1)
            return p.max(-1), entropy, right[..., 0] > 0, labelled

        self._judge = jax.jit(judge, out_shardings=meshes.batch_sharding(mesh))

    def __call__(self, batches: Batches, watch: Watch) -> Judged:
        """What the exits say of all images; those without a label are excluded."""
        with jax.set_mesh(self._mesh):
            rows = [jax.device_get(self._judge(self._weights, batch)) for batch in watch(batches)]
        *arrays, labelled = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        return Judged(*(array[labelled > 0].T for array in arrays))


def _plain(outcome: thresholds.Outcome) -> dict:
    return {"accuracy": outcome.accuracy, "gflops": outcome.cost, "shares": list(outcome.shares)}


def _check_writable(directory: epath.Path) -> None:
    if not (directory / "description").exists():
        raise ConfigError(
            f"thresholds are kept in the folder of a checkpoint of ours, and {directory} is none: 'vit_jax convert' "
            "it with --to=orbax"
        )
    if not places.in_bucket(directory) and not os.access(directory, os.W_OK):
        raise ConfigError(f"thresholds are kept in {directory}, which cannot be written to")
