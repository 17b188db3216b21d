"""The objective's own loss on held-out examples, for objectives that need no labels."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from vit_jax.base.errors import ConfigError
from vit_jax.data import loader, sources
from vit_jax.data.augmentation.augment import prepared
from vit_jax.devices import meshes
from vit_jax.evaluation.contract import (
    EvalContext,
    EvaluatedModel,
    Evaluator,
    EvaluatorOptions,
    Watch,
)
from vit_jax.models import batch_norm

_NEEDS_TRAINING = "config.eval.evaluators: 'loss' needs what the objective owns, which only a run that is training has"


class Loss(Evaluator):
    """`loss`, and what else the objective measures: means over the evaluated examples, which are
    cut as for evaluation and not augmented. What the objective draws at random is the same each time.
    """

    Options = EvaluatorOptions
    low_is_good = ("loss", "*_loss")  # the second: each term of a sum

    def __init__(self, options: EvaluatorOptions, context: EvalContext):
        super().__init__(options, context)
        if context.networks is None:
            raise ConfigError(_NEEDS_TRAINING)
        self.config = dataclasses.replace(context.config, data=self.data())
        self.source = sources.open_eval(self.config.data)
        self._step = None

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        if trained.state is None:
            raise ConfigError(_NEEDS_TRAINING)
        self._step = self._step or jax.jit(self._sums, out_shardings=meshes.replicated(mesh))
        totals: dict[str, float] = {}
        with loader.eval_batches(self.source, self.config, meshes.batch_sharding(mesh)) as batches:
            for number, batch in enumerate(watch(batches)):
                sums = jax.device_get(self._step(trained.state, batch, number))
                totals = {n: totals.get(n, 0.0) + float(value) for n, value in sums.items()}
        count = totals.pop("examples")
        means = {name: total / max(count, 1) for name, total in totals.items()}
        return {"loss": means.pop("loss"), **means, "examples": int(count)}

    def main_metric(self) -> str:
        return "loss"

    def _sums(self, state, batch: dict, number: jax.Array) -> dict[str, jax.Array]:
        on_devices, data = self.context.networks.for_devices(), self.config.data
        # An example's loss may not depend on others of its batch, some of which only fill it.
        model_config = batch_norm.with_fixed_statistics(on_devices.model_config)
        on_devices = dataclasses.replace(on_devices, model_config=model_config)
        objective, learner = on_devices.objective, state.learner(on_devices, averaged=True)
        learner = learner.replace(held_out=True)
        dtype = jnp.dtype(on_devices.model_config.dtype)
        images = prepared(batch["image"], data, dtype)
        key = jax.random.fold_in(jax.random.key(self.config.seed), number)
        given = {"image": images, **objective.targets(batch)}
        loss, metrics = objective(learner, given, nnx.Rngs(dropout=key))
        sums = {n: jnp.sum(x * batch["mask"]) for n, x in (metrics | {"loss": loss}).items()}
        return sums | {"examples": batch["mask"].sum()}
