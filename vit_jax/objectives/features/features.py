"""Learning the features of one or several other models, without labels: a small model of large ones (UNIC, ECCV 2024,
naver/unic; DUNE, arXiv 2503.14405; agglomerative models, 2312.06709).

Teachers are models of any family in checkpoints of any format. They see the student's images at their own size and
normalisation; their features, after their last norm, are brought to one scale. An adaptor for each teacher makes its
features of the student's: of the whole image, its class token (of a family without one, what its head would read); and
of each patch, resized bilinearly to the teacher's grid where that is another. Adaptors are not part of the model.

Where sources differ: UNIC's features are standardised by running moments from before the batch, DUNE's by the batch's
own; here it is UNIC's. Its ladder reads the blocks' outputs as they are, all other adaptors the last norm's. Of the
probability that a teacher is dropped, see `losses.drop`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.models import classifier, layer_features, layout, registry
from vit_jax.models.contract import ModelOutput
from vit_jax.models.layer_features import LayerFeatures
from vit_jax.objectives.contract import Batch, FromCheckpoint, Learner, ObjectiveContext
from vit_jax.objectives.features import adaptors, losses
from vit_jax.objectives.features.standardize import Moments, PhiS
from vit_jax.objectives.output_term import OutputTerm

_OPTION = "config.objective.teachers"
_EQUAL = 0.9999  # cosine of two features that are the same but for rounding
KINDS = ("summary", "patches")


@dataclasses.dataclass(frozen=True)
class FeaturesOptions:
    """What `config.objective` says for learning features."""

    teachers: tuple = option((), "checkpoints of any format and family, with or without a head")
    kinds: tuple = option(KINDS, "features that are learned: summary, of the whole image; patches")
    adaptor: str = option(
        "ladder",
        "from the student's features to a teacher's: an MLP of every layer, added up; or of the last layer an MLP, a "
        "transformer block and a linear layer, or a linear layer",
        choices=adaptors.KINDS,
    )
    hidden: int = option(
        768, "hidden size of the ladder's MLPs", minimum=1, when={"adaptor": ("ladder",)}
    )
    last_hidden: int = option(
        3072, "that of the last layer's", minimum=1, when={"adaptor": ("ladder", "mlp")}
    )
    standardize: str = option(
        "moments",
        "teachers' features: by running moments of each channel; by PHI-S, a rotation and one scale; or not",
        choices=("moments", "phi_s", "none"),
    )
    momentum: tuple = option(
        (1.0, 0.001),
        "weight of a batch in the moments at the beginning and the end; a cosine between",
        minimum=0,
        maximum=1,
        length=2,
        when={"standardize": ("moments",)},
    )
    sample: int = option(
        100,
        "batches from which PHI-S is computed; until then nothing is learned",
        minimum=1,
        when={"standardize": ("phi_s",)},
    )
    cosine: float = option(
        0.5, "share of the cosine distance in the loss; the rest is smooth L1", minimum=0, maximum=1
    )
    drop: float = option(
        0.5, "probability that an image does not learn from a teacher, save from that of its largest loss",
        minimum=0, maximum=1,
    )  # fmt: skip


class FeaturesModules(nnx.Module):
    """For each teacher an adaptor, and by the kind of its features how they are standardised."""

    def __init__(self, made: Sequence[tuple[adaptors.Adaptor, dict[str, nnx.Module]]]):
        self.adaptors = nnx.List([adaptor for adaptor, _ in made])
        self.standards = nnx.List([nnx.Dict(standards) for _, standards in made])


class Features(OutputTerm):
    """The loss. Metrics: of each teacher, by its number, the mean cosine of the student's and its features."""

    Options = FeaturesOptions
    needs_labels = False

    def __init__(self, options: FeaturesOptions, context: ObjectiveContext):
        super().__init__(options, context)
        if not options.teachers:
            raise ConfigError(
                f"objective features needs teachers: set --{_OPTION}='(\"CHECKPOINT\",)'"
            )
        kinds = options.kinds
        if not kinds or set(kinds) - set(KINDS) or len(set(kinds)) < len(kinds):
            raise ConfigError(f"config.objective.kinds = {kinds}: one or both of {KINDS}")
        if "summary" in kinds and options.standardize == "moments" and context.batch_size == 1:
            raise ConfigError(
                "config.batch_size / accumulate = 1: one image has no deviation, by which features of whole images are "
                "standardised; take more images at once, or set --config.objective.standardize=phi_s"
            )
        models = dict(zip(options.teachers, context.teachers, strict=False))
        for name, config in {"the student": context.model, **models}.items():
            if "patches" in kinds and not layout.has_grid(config):
                raise ConfigError(
                    f"{name} has no grid of patches (`grid` of its family's config): set "
                    "--config.objective.kinds='(\"summary\",)'"
                )
        if "patches" in kinds:
            for name, config in models.items():
                _report_grid(name, layout.grid(config), layout.grid(context.model))
        self.layers = self._layers()

    def _layers(self) -> tuple[str, ...]:
        """The layers that adaptors read; none: the model's output."""
        if self.options.adaptor != "ladder":
            return ()
        names = tuple(layer_features.layer_names(self.context.model))
        shapes = layer_features.abstract(self.context.model, names, norm=False)
        if not names or len({layer.grid for layer in shapes}) > 1:
            raise ConfigError(
                "config.objective.adaptor=ladder adds up what all layers give, and those of the student "
                f"({', '.join(names) or 'none'}) have no grid in common: set it to mlp, linear or block"
            )
        return names

    def make_modules(self, rngs: nnx.Rngs) -> FeaturesModules:
        options, model = self.options, self.context.model
        read = layer_features.abstract(model, self.layers, norm=False)
        widths = [layer.tokens.shape[-1] for layer in read]
        heads = next(h for h in (getattr(model, "heads", 0), widths[-1] // 64, 1) if h)
        shared = dict(heads=heads if widths[-1] % heads == 0 else 1, dtype=jnp.dtype(model.dtype))
        sizes = dict(hidden=options.hidden, last_hidden=options.last_hidden)

        def make(teacher: classifier.ClassifierConfig):
            shapes = layer_features.shapes_of(teacher, lambda *x: _look(*x, options.kinds))
            outputs = {kind: x.shape[-1] for kind, x in shapes.items()}
            adaptor = adaptors.Adaptor(
                options.adaptor, widths, outputs, **shared, **sizes, rngs=rngs
            )
            return adaptor, {kind: self._standard(width) for kind, width in outputs.items()}

        return FeaturesModules([make(teacher) for teacher in self.context.teachers])

    def teacher(self) -> tuple[FromCheckpoint, ...]:
        return tuple(FromCheckpoint(path, "features", _OPTION) for path in self.options.teachers)

    def warning(self, metrics: dict[str, float]) -> str:
        equal = [
            name
            for number, name in enumerate(self.options.teachers)
            if metrics.get(f"cosine_{number}", 0) > _EQUAL
        ]
        if not equal:
            return ""
        return (
            f"The student's features are those of {' and '.join(equal)}, cosine {_EQUAL} and more: nothing is left to "
            "learn. Is it the same model (config.init_from)? Take a larger teacher, or another"
        )

    def flops(self) -> int:
        """Operations of an image's forward passes; the teachers', which have no backward pass, count a third. The
        attention of adaptors is not counted.
        """
        model, teachers = self.context.model, self.context.teachers
        total = registry.count_flops(model) + sum(map(registry.count_flops, teachers)) // 3
        if not teachers:
            return total
        modules = nnx.eval_shape(lambda: self.make_modules(nnx.Rngs(0)))
        patches = layout.grid(model) if "patches" in self.options.kinds else (1, 1)
        for path, kernel in nnx.to_flat_state(nnx.state(modules, nnx.Param)):
            if path[-1] == "kernel":
                rows = 1 if "summary" in path else patches[0] * patches[1]
                total += 2 * rows * kernel.size
        return total

    def of_output(
        self,
        learner: Learner,
        output: ModelOutput,
        layers: tuple[LayerFeatures, ...],
        batch: Batch,
        rngs: nnx.Rngs,
    ):
        images = batch["image"]
        modules = learner.modules
        layers = layers or (layer_features.last(output, self.context.model),)
        of_teachers, ready, metrics = [], jnp.bool_(True), {}
        for number, teacher in enumerate(learner.teacher):
            taught = jax.lax.stop_gradient(
                _look(teacher.model, teacher.prepare_inputs(images), self.options.kinds)
            )
            grid = layout.grid(teacher.model.config) if "patches" in taught else None
            predictions = modules.adaptors[number](layers)
            distances = []
            alike = []
            for kind, target in taught.items():
                standard = modules.standards[number].get(kind)
                ready &= standard is None or standard.is_ready
                y = predictions[kind]
                if kind == "patches":
                    y = _resized(y, layers[-1].known_grid(), grid)
                goal = target if standard is None else standard(target)
                each = losses.distance(y, goal, self.options.cosine)
                cosines = losses.cosines(y.astype(jnp.float32), goal.astype(jnp.float32))
                distances.append(each.reshape(len(images), -1).mean(1))
                alike.append(cosines.reshape(len(images), -1).mean(1))
                if standard is not None and not learner.held_out:
                    learner.observed[f"{number}_{kind}"] = standard.observe(target)
            of_teachers.append(jnp.stack(distances).mean(0))
            metrics[f"cosine_{number}"] = jnp.stack(alike).mean(0)
        loss = self._combined(jnp.stack(of_teachers), learner, rngs)
        return jnp.where(ready, loss, 0.0), metrics

    def update_state(
        self, modules: FeaturesModules, observed: dict[str, Any], step: jax.Array
    ) -> dict[str, jax.Array]:
        """Moves the statistics of the teachers' features."""
        for number, standards in enumerate(modules.standards):
            for kind, standard in standards.items():
                name = f"{number}_{kind}"
                if name in observed:
                    standard.update(observed[name], self._weight(step))
        return {}

    def _combined(self, of_teachers: jax.Array, learner: Learner, rngs: nnx.Rngs) -> jax.Array:
        """(T, B) -> (B,)."""
        if learner.held_out or len(of_teachers) == 1 or not self.options.drop:
            return of_teachers.mean(0)
        taught = losses.drop(rngs.dropout(), of_teachers, self.options.drop)
        return losses.combined(of_teachers, taught)

    def _weight(self, step: jax.Array) -> jax.Array:
        """Of a batch in the running moments."""
        begin, end = self.options.momentum
        return end + (begin - end) * (1 + jnp.cos(jnp.pi * step / self.context.total_steps)) / 2

    def _standard(self, width: int) -> Moments | PhiS | None:
        if self.options.standardize == "phi_s":
            return PhiS(width, self.options.sample)
        return Moments(width) if self.options.standardize == "moments" else None


def _look(model: nnx.Module, images: jax.Array, kinds: Sequence[str]) -> dict[str, jax.Array]:
    """A teacher's features of images: `summary` (B, D), `patches` (B, N, D)."""
    output = model(images)
    last = layer_features.last(output, model.config)
    features = {}
    if "summary" in kinds:
        features["summary"] = output.features if last.class_token is None else last.class_token
    if "patches" in kinds:
        features["patches"] = last.patches
    return features


def _resized(x: jax.Array, grid: tuple[int, int], new: tuple[int, int]) -> jax.Array:
    """Patches (B, h * w, D) at another grid, float32 where that is another."""
    if grid == new:
        return x
    maps = x.astype(jnp.float32).reshape(len(x), *grid, -1)
    resized = jax.image.resize(maps, (len(x), *new, x.shape[-1]), "linear", antialias=True)
    return resized.reshape(len(x), -1, x.shape[-1])


@functools.cache  # An objective is made for each program.
def _report_grid(teacher: str, grid: tuple[int, int], student_grid: tuple[int, int]) -> None:
    """Logs that a teacher's patches are others than the student's, once."""
    if grid != student_grid:
        logging.info(
            "%s has %d x %d patches and the student %d x %d, which are interpolated to them",
            teacher,
            *grid,
            *student_grid,
        )
