"""Accuracy where images leave early."""

import collections
import dataclasses
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from vit_jax import objectives
from vit_jax.base.schema import option
from vit_jax.data import loader
from vit_jax.devices import meshes
from vit_jax.evaluation.accuracy import Accuracy, no_sums
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel, Watch
from vit_jax.evaluation.early_exit.inference import Inference, check_exits, check_thresholds
from vit_jax.evaluation.logits import LabelOptions


@dataclasses.dataclass(frozen=True)
class EarlyExitOptions(LabelOptions):
    """What `early_exit` takes."""

    thresholds: tuple = option(
        (), "how probable the best class has to be to leave at each exit but the last"
    )


class EarlyExit(Accuracy):
    """The metrics of `accuracy`, of the logits of the exit that each image leaves at; `gflops`, the
    10⁹ multiply-adds of an image in the mean, and `exit1` and so on, the shares that leave there.
    """

    Options = EarlyExitOptions
    low_is_good = ("loss", "gflops")
    _inference: Inference | None = None

    def __init__(self, options: EarlyExitOptions, context: EvalContext):
        super().__init__(options, context)
        check_thresholds(context.model_config, options.thresholds)

    def metrics(self) -> tuple[str, ...]:
        exits = check_exits(self.context.model_config)
        return (*super().metrics(), "gflops", *(f"exit{n}" for n in range(1, exits + 1)))

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        config, context = self.config, self.context
        self._inference = inference = self._inference or Inference(
            context.definition,
            context.model_config,
            config.data,
            activation=objectives.activation(config.objective),
            batch_size=config.eval.batch_size or config.batch_size,
            mesh=mesh,
        )
        step = self._step = self._step or jax.jit(
            self._added, out_shardings=meshes.replicated(mesh)
        )
        unanswered, sums = collections.deque(), no_sums(mesh)
        with loader.eval_batches(self.source, config, meshes.batch_sharding(mesh)) as batches:

            def images() -> Iterator:
                for batch in watch(batches):
                    real = jax.device_get(batch["mask"]) > 0
                    unanswered.append({name: batch[name] for name in ("label", "mask")})
                    yield batch["image"], real

            for answers in inference.answers(trained.weights, self.options.thresholds, images()):
                logits = jax.device_put(answers.logits, inference.sharding)
                sums = step(logits, unanswered.popleft(), sums)
        shares = inference.left / max(inference.left.sum(), 1)
        metrics = self._means(sums) | {"gflops": inference.gflops()}
        return metrics | {f"exit{n}": float(share) for n, share in enumerate(shares, start=1)}
