"""Accuracy and loss of a model at each of several patch sizes: what a FlexiViT is judged by."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.data import loader, patch_sizes
from vit_jax.data.augmentation import augment
from vit_jax.data.options import Data
from vit_jax.devices import meshes
from vit_jax.evaluation.accuracy import METRICS, Accuracy, no_sums
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel, Watch
from vit_jax.evaluation.forward import make_forward
from vit_jax.evaluation.logits import LabelOptions
from vit_jax.models import registry, resized
from vit_jax.objectives.contract import FromCheckpoint
from vit_jax.objectives.distill import divergence
from vit_jax.objectives.networks import fixed_teacher


@dataclasses.dataclass(frozen=True)
class PatchSizesOptions(LabelOptions):
    """What it takes."""

    sizes: tuple = option((), "of patches, in pixels; (): those of config.data.patch_sizes")


class PatchSizes(Accuracy):
    """`SIZE/accuracy`, `SIZE/top5_accuracy` and `SIZE/loss` for each patch size, and the number of `examples`. While a
    model learns from a fixed teacher's logits, `SIZE/teacher_kl` too: KL(teacher ‖ model) in nats. Images are read
    once. Kernel and positions are resized as in training, see `models.resized`.
    """

    Options = PatchSizesOptions
    high_is_good = ("*/accuracy", "*/top5_accuracy")
    low_is_good = ("*/loss", "*/teacher_kl")
    by_engine = False

    def __init__(self, options: PatchSizesOptions, context: EvalContext):
        """Raises `ConfigError` if a size does not divide the images, or the model has one patch size."""
        super().__init__(options, context)
        data = self.config.data
        wanted = dataclasses.replace(data, patch_sizes=options.sizes or data.patch_sizes)
        if not wanted.patch_sizes:
            raise ConfigError(
                "config.eval.evaluators: patch_sizes: set the option 'sizes', for config.data.patch_sizes is ()"
            )
        if data.image_size != context.model_config.image_size:
            raise ConfigError(
                "config.eval.evaluators: patch_sizes: data: image_size has to be the model's"
            )
        self.sizes = tuple(patch_sizes.find_sizes(wanted))
        self.targets = [self._target(size, data) for size in self.sizes]
        self._steps = None
        source = context.networks and context.networks.objective.teacher()
        self._taught = isinstance(source, FromCheckpoint) and source.gives == "logits"

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        whole = meshes.replicated(mesh)
        self._steps = self._steps or [
            jax.jit(functools.partial(self._sums, target), out_shardings=whole)
            for target in self.targets
        ]
        teacher = trained.state.frozen_teachers[0] if self._taught else None
        zero = no_sums(mesh)
        zero |= {"teacher_kl": zero["loss"]} if self._taught else {}
        sums = [zero for _ in self.sizes]
        with loader.eval_batches(self.source, self.config, meshes.batch_sharding(mesh)) as batches:
            for batch in watch(batches):
                sums = [
                    step(trained.weights, teacher, batch, sums_of_size)
                    for step, sums_of_size in zip(self._steps, sums, strict=True)
                ]
        metrics = {}
        for size, sums_of_size in zip(self.sizes, sums, strict=True):
            *means, (_, examples) = self._means(sums_of_size).items()
            metrics |= {f"{size}/{name}": value for name, value in means}
        return metrics | {"examples": examples}

    def metrics(self) -> tuple[str, ...]:
        names = [name for name in METRICS if name != "examples"]
        names += ["teacher_kl"] if self._taught else []
        return (*(f"{size}/{name}" for size in self.sizes for name in names), "examples")

    def main_metric(self) -> str:
        return f"{self.sizes[0]}/accuracy"

    def _target(self, size: int, data: Data):
        """The family's config with patches of this size."""
        model = self.context.model_config
        target = resized.config_at(model, data.image_size, size)
        resized.check_resized(model, target, resized.SCHEDULED)
        return target

    def _sums(
        self,
        target,
        weights: registry.Weights,
        teacher: registry.Weights | None,
        batch: dict,
        sums: dict,
    ) -> dict:
        """`sums` with those of a batch, by the model with the patches of `target`."""
        context = self.context
        model = nnx.merge(context.definition, *weights)
        if target != context.model_config:
            model = resized.resized(model, context.model_config, target, resized.SCHEDULED)
            resized.spread_sines(model, context.model_config)
        definition, fitted = registry.split(model)
        forward = make_forward(definition, target, self.config.data)
        logits = forward(fitted, batch["image"]).logits
        added = self._added(logits, batch, sums)
        if teacher is not None:
            networks, data = context.networks.for_devices(), self.config.data
            taught = fixed_teacher(networks.teachers[0], teacher).logits(
                augment.prepared(batch["image"], data, networks.model_config.dtype)
            )
            apart = jnp.sum(divergence(taught, logits) * self._counted(batch))
            added["teacher_kl"] = sums["teacher_kl"] + apart
        return added
