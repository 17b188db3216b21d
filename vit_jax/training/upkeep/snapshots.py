"""What a run looks like from inside, at the steps that config.log says: the images as the model sees them, and
histograms of parameters, gradients and updates.

Computed by programs beside the training step, which stays as it is. They are dispatched ahead like
steps, and read where the host waits for the devices anyway.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import patterns
from vit_jax.data.labels.masks import IGNORED
from vit_jax.data.labels.segments import classes_of
from vit_jax.data.options import Data
from vit_jax.devices import meshes
from vit_jax.objectives.contract import Batch
from vit_jax.training.assembly import Assembly
from vit_jax.training.gradient import make_gradient
from vit_jax.training.inputs import prepare_inputs, seed_key
from vit_jax.training.state import TrainState
from vit_jax.training.upkeep.writers import Histogram, MetricWriter

IMAGES = 8  # of a batch
BINS = 30


class _Due(NamedTuple):
    """Something that is computed at some steps, and how it is written."""

    every: int
    compute: Callable
    write: Callable[[MetricWriter, int, dict], None]


class Snapshots:
    """Those that `config.log` asks for; at step 1 too, so that the images can be looked at soon."""

    def __init__(self, assembly: Assembly, mesh: jax.sharding.Mesh, classes: Sequence[str] = ()):
        """`classes` are names."""
        log, whole = assembly.config.log, meshes.replicated(mesh)
        wanted = [
            (log.images, make_images, functools.partial(_write_images, classes)),
            (log.histograms, make_histograms, _write_histograms),
        ]
        self._due = [
            _Due(every, jax.jit(make(assembly), out_shardings=whole), write)
            for duration, make, write in wanted
            if (every := assembly.to_steps(duration))
        ]
        self._pending: list[tuple[_Due, int, dict]] = []

    def compile(self, state: TrainState, batch: Batch) -> None:
        """Has the programs compiled, before the first step."""
        self._due = [
            due._replace(compute=due.compute.lower(state, batch).compile()) for due in self._due
        ]

    def before(self, step: int, state: TrainState, batch: Batch) -> None:
        """Has the devices compute what is due at this step, from the state before it. Waits for nothing."""
        for due in self._due:
            if step == 1 or step % due.every == 0:
                self._pending.append((due, step, due.compute(state, batch)))

    def write(self, writer: MetricWriter) -> None:
        """Reads and writes what was computed since the last time."""
        for due, step, values in self._pending:
            due.write(writer, step, jax.device_get(values))
        self._pending.clear()


def make_images(assembly: Assembly) -> Callable[[TrainState, Batch], dict[str, jax.Array]]:
    """`images(state, batch)`: the first images of the step as the model sees them, augmented, mixed and
    permuted, as pixels (n, H, W, 1 or 3) uint8; of several views the first. With masks `labels` too: those of the
    step and what the model, as it is evaluated, predicts, (2, n, H, W) uint8.
    """
    from vit_jax.evaluation import maps

    networks, config = assembly.networks, assembly.config
    map_network = maps.make_map_network(networks)

    def images(state: TrainState, batch: Batch) -> dict[str, jax.Array]:
        seed = seed_key(config)
        inputs, targets, _ = prepare_inputs(networks.for_devices(), state, batch, config, seed)
        first = next(iter(inputs.values()))
        first = (first if first.ndim == 4 else first[:, 0])[:IMAGES]
        shown = {"images": pixels(first, config.data)}
        if networks.objective.needs_masks and networks.objective.predicts_with_modules:
            labels = classes_of(targets["label"][:IMAGES]).astype(jnp.uint8)
            scores, *_ = map_network(state.weights(), state.module_weights(), first)
            scores = jax.image.resize(scores, (*labels.shape, scores.shape[-1]), "linear")
            shown["labels"] = jnp.stack([labels, scores.argmax(-1).astype(jnp.uint8)])
        return shown

    return images


def pixels(images: jax.Array, data: Data) -> jax.Array:
    """Normalised images (n, H, W, C) as (n, H, W, 1 or 3) uint8; of other channels the first is shown."""
    mean, std = (jnp.array(values, jnp.float32) for values in (data.mean, data.std))
    shown = 255 * (images.astype(jnp.float32) * std + mean)
    shown = shown if images.shape[-1] == 3 else shown[..., :1]
    return jnp.clip(jnp.round(shown), 0, 255).astype(jnp.uint8)


def make_histograms(assembly: Assembly) -> Callable[[TrainState, Batch], dict]:
    """`histograms(state, batch)`: of every parameter, its gradient and its update in this step, by
    'parameters/NAME' and so on.
    """
    gradient_of = make_gradient(assembly.networks, assembly.learning_rate, assembly.config)

    def histograms(state: TrainState, batch: Batch) -> dict[str, dict[str, jax.Array]]:
        grads, _, _ = gradient_of(state, batch)
        updates, _ = assembly.optimizer.update(grads, state.opt_state, state.params)
        trees = {"parameters": state.params, "gradients": grads, "updates": updates}
        return {
            f"{kind}/{name}": histogram(values)
            for kind, tree in trees.items()
            for name, values in patterns.named(tree).items()
        }

    return histograms


def histogram(values: jax.Array) -> dict[str, jax.Array]:
    """`counts` (BINS,) int32 between `edges` (BINS + 1,), equally far apart from the smallest to the largest
    value, `sum` and `sum_squares`. Only sums over the array, so that one that is sharded over devices stays so.
    """
    values = values.astype(jnp.float32)
    edges = jnp.linspace(values.min(), values.max(), BINS + 1)
    below = jax.vmap(lambda edge: jnp.sum(values < edge, dtype=jnp.int32))(edges[1:-1])
    return {
        "counts": jnp.diff(below, prepend=0, append=values.size),
        "edges": edges,
        "sum": values.sum(),
        "sum_squares": jnp.square(values).sum(),
    }


def with_masks(images: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """Each image beside itself with its mask and with what is predicted, and a legend, (n, H, W', 3) uint8.

    Args:
      images, labels: see `make_images`.
      classes: names.
    """
    from vit_jax.pictures import masks

    colors, seen = masks.palette(len(classes)), np.unique(labels)
    legend = masks.legend([(classes[i], tuple(colors[i])) for i in seen.tolist() if i != IGNORED])
    nothing = np.full(labels.shape[1:], IGNORED, np.uint8)
    sheets = [
        masks.side_by_side(
            [*(masks.overlay(image, masks.layer(x, colors)) for x in layers), legend]
        )
        for image, *layers in zip(images, nothing, *labels, strict=True)
    ]
    return np.stack([np.asarray(sheet) for sheet in sheets])


def _write_images(classes: Sequence[str], writer: MetricWriter, step: int, values: dict) -> None:
    images = values["images"]
    if "labels" in values:
        images = with_masks(images, values["labels"], classes)
    writer.write_images(step, {"images": images})


def _write_histograms(writer: MetricWriter, step: int, by_name: dict[str, dict]) -> None:
    histograms = {name: Histogram(**values) for name, values in by_name.items()}
    writer.write_histograms(step, histograms)
