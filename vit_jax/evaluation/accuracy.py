"""Accuracy and loss over a whole data set: every example counted once, whatever the batch size or
the number of hosts.
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax import objectives
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints.reading import Run
from vit_jax.data import loader, sources
from vit_jax.devices import meshes
from vit_jax.evaluation.logits import make_logits
from vit_jax.models import registry
from vit_jax.models.registry import Weights
from vit_jax.objectives.supervised import cross_entropy, to_targets

SUMMED = ("accuracy", "top5_accuracy", "loss", "examples")


def make_eval_step(
    definition: nnx.GraphDef, model_config, config, mesh: jax.sharding.Mesh
) -> Callable:
    """The compiled `eval_step(weights, sums, batch) -> sums` that adds one batch, with `image`,
    `label` and `mask`, to the sums over a data set.

    An example with several labels counts as right if the best class is one of them; one with no
    label at all is left out (ImageNet-ReaL's rule, arXiv 2006.07159).

    Args:
      config: the run's; `data.mean`, `data.std` and the loss are used.
    """
    top = min(5, model_config.num_classes)
    loss = objectives.probabilities(config.objective)
    logits_of = make_logits(definition, model_config, config.data)

    def eval_step(weights: Weights, sums: dict, batch: dict) -> dict[str, jax.Array]:
        logits = logits_of(weights, batch["image"])
        targets = to_targets(batch["label"], model_config.num_classes)
        mask = batch["mask"] * (targets.sum(-1) > 0)
        best = jax.lax.top_k(logits, top)[1]
        right = jnp.take_along_axis(targets, best, axis=1) > 0
        new = (right[:, 0], right.any(axis=1), cross_entropy(logits, targets, loss), 1)
        return {n: sums[n] + jnp.sum(v * mask) for n, v in zip(SUMMED, new, strict=True)}

    return jax.jit(eval_step, out_shardings=meshes.replicated(mesh))


def evaluate(
    eval_step: Callable, weights: Weights, batches: Iterable[dict], mesh: jax.sharding.Mesh
) -> dict[str, float]:
    """Means over all examples, `accuracy`, `top5_accuracy`, `loss`; and their number `examples`."""
    # Each step waits for the sums of the one before: programs with collectives must not overtake
    # each other, and on simulated devices nothing else keeps them in line.
    zero, whole = np.zeros((), np.float32), meshes.replicated(mesh)
    sums = {n: jax.make_array_from_callback((), whole, zero.__getitem__) for n in SUMMED}
    for batch in batches:
        sums = eval_step(weights, sums, batch)
    totals = {name: float(value) for name, value in jax.device_get(sums).items()}
    count = totals.pop("examples")
    means = {name: total / max(count, 1) for name, total in totals.items()}
    return means | {"examples": int(count)}


def evaluate_run(run: Run, config) -> dict[str, float]:
    """Evaluates a trained model on `config.data.eval_split`.

    Args:
      run: from `reading.load_run`.
      config: the run's, or one with other fields in its section `data`.
    """
    source = sources.open_eval(config.data)
    if len(source.classes) != run.model_config.num_classes:
        raise ConfigError(
            f"the checkpoint has {run.model_config.num_classes} classes, {config.data.name} {config.data.eval_split!r} "
            f"has {len(source.classes)}"
        )
    mesh = meshes.replica_mesh()
    definition, weights = registry.split(run.model)
    eval_step = make_eval_step(definition, run.model_config, config, mesh)
    with (
        jax.set_mesh(mesh),
        loader.eval_batches(source, config, meshes.batch_sharding(mesh)) as batches,
    ):
        return evaluate(eval_step, weights, batches, mesh)
