"""Images a second of a model with exits when images leave early, against always continuing to the last
exit; and what becomes of the time between the exits.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import objectives
from vit_jax.benchmarks import breakdown
from vit_jax.benchmarks.context import context
from vit_jax.benchmarks.step import assembled
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.compute import attend, choices
from vit_jax.config import Config
from vit_jax.data import loader, sources
from vit_jax.devices import meshes
from vit_jax.evaluation.early_exit import thresholds as solving
from vit_jax.evaluation.early_exit.inference import Inference, check_thresholds
from vit_jax.evaluation.forward import make_exit, make_forward, normalized_as
from vit_jax.models import classifier, naming, registry
from vit_jax.training import state as states

_ROUNDS = 3


def of_checkpoint(
    run: TrainedModel, config: Config, *, thresholds: Sequence[float], steps: int
) -> dict:
    """Times a trained model on images of its evaluation split, which are on the devices already.

    Args:
      run: from `loading.load_run`.
      config: the run's; `batch_size` is that of every exit.
      thresholds: how confident an image has to be to leave at each exit but the last.
      steps: batches of images, at most.

    Raises:
      ConfigError: the thresholds do not fit the model.
    """
    check_thresholds(run.model_config, thresholds)
    config = dataclasses.replace(config, data=normalized_as(config.data, run.directory))
    mesh = meshes.replica_mesh()
    source = sources.open_eval(config.data)
    with loader.eval_batches(
        source, config, meshes.batch_sharding(mesh), config.batch_size
    ) as loaded:
        batches = [
            (batch["image"], jax.device_get(batch["mask"]) > 0)
            for batch, _ in zip(loaded, range(steps), strict=False)
        ]
    definition, weights = registry.split(run.model)
    return _time(definition, run.model_config, weights, config, batches, mesh, lambda _: thresholds)


def of_config(config: ConfigDict, *, shares: Sequence[float], steps: int) -> dict:
    """Times a new model on made-up images, of which `shares` leave at each exit: thresholds are set by
    what the model says of these.

    Raises:
      ConfigError: the model has no exits, or another number of them than shares.
    """
    config = config.copy_and_resolve_references()
    config.model.head_init = "normal"  # With heads of zeros all images are equally sure.
    assembly, mesh = assembled(config)
    model_config, config = assembly.model_config, assembly.config
    check_thresholds(model_config, shares[:-1])
    with jax.set_mesh(mesh):
        weights = states.create(assembly.init, 0, assembly.abstract_state(mesh)).weights()
    random, shape = np.random.default_rng(0), assembly.abstract_batch(mesh)["image"]
    batches = [
        (
            jax.device_put(random.integers(0, 256, shape.shape, np.uint8), shape.sharding),
            np.ones(config.batch_size, bool),
        )
        for _ in range(steps)
    ]

    def choose(confidence: np.ndarray) -> tuple[float, ...]:
        return solving.with_shares(confidence, shares)

    return _time(assembly.definition, model_config, weights, config, batches, mesh, choose)


def _time(
    definition,
    model_config: classifier.ClassifierConfig,
    weights: registry.Weights,
    config: Config,
    batches: list[tuple[jax.Array, np.ndarray]],
    mesh: jax.sharding.Mesh,
    choose: Callable[[np.ndarray], Sequence[float]],
) -> dict:
    """Times all ways through the model.

    Args:
      batches: images, and which of them are none.
      choose: from confidences (E, N) to thresholds.
    """
    activation, size = objectives.activation(config.objective), config.batch_size
    forward = make_forward(definition, model_config, config.data)
    exit = make_exit(definition, model_config, config.data)
    exits = len(model_config.exit_flops)

    def confidences(weights: registry.Weights, images: jax.Array) -> jax.Array:
        return activation(forward(weights, images).exits).max(-1)

    with jax.set_mesh(mesh):
        judge = jax.jit(confidences)
        with attend.record() as attention:
            answers = [jax.device_get(judge(weights, x)) for x, _ in batches]
        confidence = np.concatenate(answers, axis=1)
        real = np.concatenate([real for _, real in batches])
        thresholds = tuple(choose(confidence[:, real]))
        whole = jax.jit(lambda weights, images: forward(weights, images).logits)
        each, carried = [], None
        for index in range(exits):
            alone = functools.partial(jax.jit(exit, static_argnums=0), index, weights)
            each.append(functools.partial(alone, batches[0][0], carried))
            _, carried = each[-1]()
    inference = Inference(
        definition, model_config, config.data, activation=activation, batch_size=size, mesh=mesh
    )

    def always_last() -> list[jax.Array]:
        return [whole(weights, images) for images, _ in batches]

    def leaving_early() -> list:
        return list(inference.answers(weights, thresholds, batches))

    # Side by side, so that what else the machine does reaches all of them.
    ways, times = [always_last, leaving_early, *each], []
    with jax.set_mesh(mesh):
        for _ in range(_ROUNDS + 1):  # The first compiles.
            times.append([breakdown.seconds(way, 1, warm_up=0)[0] for way in ways])
    last, seconds, *alone = np.median(times[1:], axis=0)
    speedup = float(np.median([before / after for before, after, *_ in times[1:]]))
    count, in_exits = int(real.sum()), float(np.dot(inference.runs, alone))
    promised = model_config.exit_flops[-1] / 2e9 / inference.gflops()
    return {
        "model": naming.full_name(model_config, config.model.name),
        "image_size": config.data.image_size,
        "dtype": model_config.dtype,
        "choices": choices.summarize(model_config, mesh, attention),
        "batch_size": size,
        "images": count,
        "thresholds": list(thresholds),
        "shares": (inference.left / inference.left.sum()).tolist(),
        "gflops": inference.gflops(),
        "images_per_second": count / seconds,
        "images_per_second_always_last": count / last,
        "speedup": speedup,
        "speedup_by_flops": promised,
        "speedup_of_promised": speedup / promised,
        "exit_seconds": list(map(float, alone)),
        "exit_runs": inference.runs,
        "padding_share": inference.padding(),
        "seconds": seconds,
        "seconds_in_exits": in_exits,
        "gathering_share": 1 - in_exits / seconds,
    } | context()
