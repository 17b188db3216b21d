"""The networks of a run, put together from trees of arrays: the model, what the objective owns, and
its teacher.

Parameters of both are one tree, so that one optimizer serves them: the model's, and the objective's
own under `objective`.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
from flax import nnx

from vit_jax import objectives
from vit_jax.base import durations, patterns, schema, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.sizes import Size
from vit_jax.compute import choices
from vit_jax.data import views
from vit_jax.data.labels.masks import ClassTable
from vit_jax.data.labels.segments import PanopticTable
from vit_jax.models import classifier, registry
from vit_jax.models.contract import GRID, size_and_patch
from vit_jax.models.lora import ADAPTERS, Adapters
from vit_jax.models.registry import Weights
from vit_jax.objectives.contract import (
    Batch,
    Learner,
    MovingAverage,
    Objective,
    ObjectiveContext,
    Teacher,
)

OWN = "objective"


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """What the networks of a run follow from, besides its config.

    Attributes:
      num_classes: of the data; 0 where it has no labels.
      examples_per_epoch: examples in the training set; `None` if unknown, then no duration may be in epochs.
      multi_label: whether an example may have several labels.
      masks: whether labels are masks, or what their values mean; `None`: as the objective needs them.
    """

    num_classes: int
    examples_per_epoch: int | None
    multi_label: bool = False
    masks: ClassTable | bool | None = None


@dataclasses.dataclass(frozen=True)
class FixedTeacher:
    """A fixed teacher, still without its parameters.

    Attributes:
      path: of its checkpoint.
      option: of the config, that names `path`.
      config: its family's config.
      describe: what `Teacher` says besides the model.
      classes: their names, where its checkpoint says them.
    """

    path: str
    option: str
    config: classifier.ClassifierConfig
    describe: dict
    classes: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Networks:
    """What takes part in a step, as definitions.

    Attributes:
      model_config: the family's config.
      make_objective: (a family's config, those of fixed teachers) -> the objective for them.
      teachers: the fixed teachers, if the objective has such.
      adapters: what is trained of the model; `None`: all of it.
      stored: the model's config at the size of images whose positions its parameters are; `None`: `model_config`.
    """

    model_config: classifier.ClassifierConfig
    make_objective: Callable[..., Objective]
    teachers: tuple[FixedTeacher, ...] = ()
    adapters: Adapters | None = None
    stored: classifier.ClassifierConfig | None = None

    @classmethod
    def from_config(
        cls, config: Any, data: DataFacts, model_config: classifier.ClassifierConfig | None = None
    ) -> "Networks":
        """The networks of a run, without a fixed teacher, which only its checkpoint describes.

        Args:
          config: the run's, `vit_jax.config.Config`.
          data: facts about the data.
          model_config: the family's config where it is known already, such as that of a checkpoint.

        Raises:
          ConfigError: the config describes no model, or the objective does not go with it.
        """
        if model_config is None:
            model_config = model_config_of(config, data.num_classes)
        to_steps = durations_of(config, data.examples_per_epoch)
        total_steps = to_steps(config.duration, name="config.duration")
        seen, *others = (variant.views for variant in views.variants(config))
        context = functools.partial(
            ObjectiveContext,
            mean=config.data.mean,
            std=config.data.std,
            total_steps=total_steps,
            to_steps=functools.partial(to_steps, total_steps=total_steps),
            views={view.name: view.shape for view in seen},
            other_views=tuple({view.name: view.shape for view in views} for views in others),
            batch_size=config.batch_size // config.accumulate,
            num_classes=data.num_classes,
            segments=data.masks if isinstance(data.masks, PanopticTable) else None,
            multi_label=data.multi_label,
        )
        return cls(
            model_config,
            lambda model_config, teachers: objectives.make(
                config.objective, context(model_config, teachers=teachers)
            ),
            adapters=adapters_of(config),
        )

    def for_devices(self) -> "Networks":
        """The same, computing in the type that suits the devices being traced for: fixed teachers in the model's."""
        dtype = self.model_config.dtype

        def of_device(config: classifier.ClassifierConfig) -> classifier.ClassifierConfig:
            return choices.with_compute_dtype(dataclasses.replace(config, dtype=dtype))

        teachers = tuple(dataclasses.replace(t, config=of_device(t.config)) for t in self.teachers)
        model_config = of_device(self.model_config)
        return dataclasses.replace(self, model_config=model_config, teachers=teachers)

    def at_size(self, image_size: Size, patch: int = 0) -> "Networks":
        """The same for images of another size, in patches of another. The parameters stay as they are; in the program,
        their tables of positions are interpolated and the kernels of patches resized.

        Args:
          patch: in pixels; 0: as the model has it.

        Raises:
          ConfigError: patches do not divide the images, or the family has one patch size.
        """
        same_patch = patch in (0, getattr(self.model_config, "patch", 0))
        if same_patch and sizes.height_width(image_size) == self.model_config.height_width:
            return self
        from vit_jax.models.resized import config_at

        config = config_at(self.model_config, sizes.parse(image_size), patch)
        return dataclasses.replace(self, model_config=config, stored=self.model_config)

    def for_batch(self, batch: Batch) -> "Networks":
        """The same for the images of a batch, whose size or patch a schedule may have changed."""
        has_size = "image" in batch and GRID not in batch
        return self.at_size(*size_and_patch(batch["image"].shape)) if has_size else self

    @functools.cached_property
    def objective(self) -> Objective:
        """The objective for the model."""
        return self.make_objective(self.model_config, tuple(t.config for t in self.teachers))

    def moving_average(self) -> MovingAverage | None:
        """The teacher that follows the student, if the objective has one."""
        source = self.objective.teacher()
        return source if isinstance(source, MovingAverage) else None

    def starts(self) -> dict[str, int]:
        """The updates before which parameters rest, by the beginning of their names; see `Objective.starts`."""
        return {f"{OWN}/{prefix}": step for prefix, step in self.objective.starts().items()}

    def init(self, key: jax.Array) -> tuple[dict, dict]:
        """New parameters, and state that is not trained by its owner, `model` or `objective`; a pure
        function. Of a model with adapters these and what else is trained.
        """
        weights = registry.split(registry.build(self.model_config, rngs=registry.Rngs(key)))[1]
        params, variables = weights.params, {"model": weights.variables}
        if self.adapters:
            new = self.adapters.init(params, jax.random.fold_in(key, 2))
            params = self.adapters.split(params)[1] | {ADAPTERS: new}
        modules = self.objective.make_modules(registry.Rngs(jax.random.fold_in(key, 1)))
        if modules is not None:
            weights = registry.split(modules)[1]
            params, variables = params | {OWN: weights.params}, variables | {OWN: weights.variables}
        return params, {owner: tree for owner, tree in variables.items() if tree}

    def abstract_modules(self) -> Weights:
        """Shapes and dtypes of what the objective owns; empty if it owns nothing."""
        modules = nnx.eval_shape(lambda: self.objective.make_modules(registry.Rngs(0)))
        return Weights({}, {}) if modules is None else registry.split(modules)[1]

    def abstract_teachers(self) -> tuple[Weights, ...]:
        """Shapes and dtypes of the fixed teachers' weights on the devices that are traced for."""
        if not self.teachers:
            return ()
        from vit_jax.objectives import frozen_weights

        return tuple(frozen_weights.stored(t.config) for t in self.for_devices().teachers)

    def base(self) -> dict | None:
        """Shapes and dtypes of the frozen parameters below adapters; `None` where there are no adapters."""
        params = registry.abstract_weights(self.model_config)[1].params
        return self.adapters.split(params)[0] if self.adapters else None

    def learner(
        self,
        params: dict,
        variables: dict,
        *,
        step: jax.Array,
        average: tuple[dict, dict] | None = None,
        frozen_teachers: tuple[Weights, ...] = (),
        gram_teacher: dict | None = None,
    ) -> Learner:
        """The networks with their arrays.

        Args:
          params, variables: see `init`; with the whole model.
          step: updates made so far.
          average: the same two of a teacher that follows the student.
          frozen_teachers: of the fixed teachers.
          gram_teacher: parameters of the Gram teacher.
        """
        stored = self.stored or self.model_config
        definition = registry.abstract(stored)[0]
        model = nnx.merge(definition, model_part(params), variables.get("model", {}))
        if self.stored:
            from vit_jax.models import resized

            model = resized.resized(model, stored, self.model_config, resized.SCHEDULED)
            resized.spread_sines(model, stored)
        modules = None
        if OWN in params:
            definition, _ = registry.split(
                nnx.eval_shape(lambda: self.objective.make_modules(registry.Rngs(0)))
            )
            modules = nnx.merge(definition, params[OWN], variables.get(OWN, {}))
        teacher = None
        if frozen_teachers:
            teacher = tuple(map(fixed_teacher, self.teachers, frozen_teachers))
            if not isinstance(self.objective.teacher(), tuple):
                (teacher,) = teacher
        elif average is not None:
            teacher = self.learner(*average, step=step)
        earlier = None
        if gram_teacher is not None:
            definition = registry.abstract(self.model_config)[0]
            earlier = nnx.merge(definition, gram_teacher, variables.get("model", {}))
        return Learner(
            model=model, modules=modules, teacher=teacher, step=step, gram_teacher=earlier
        )

    def variables_of(self, learner: Learner, before: dict) -> dict:
        """The state that is not trained by its owner, as it is now; interpolated tables as they were `before`."""
        owners = {"model": learner.model, OWN: learner.modules}
        by_owner = {
            owner: registry.split(m)[1].variables for owner, m in owners.items() if m is not None
        }
        if self.stored and by_owner["model"]:
            from vit_jax.models import resized

            tables = resized.tables(self.stored, self.model_config, resized.SCHEDULED)
            by_owner["model"] = patterns.map_named(
                lambda name, now, old: old if name in tables else now,
                by_owner["model"],
                before["model"],
            )
        return {owner: tree for owner, tree in by_owner.items() if tree}


def fixed_teacher(teacher: FixedTeacher, weights: Weights) -> Teacher:
    """A fixed teacher with its weights."""
    definition = registry.abstract(teacher.config)[0]
    return Teacher(nnx.merge(definition, *weights), **teacher.describe)


def model_config_of(config: Any, num_classes: int) -> classifier.ClassifierConfig:
    """The family's config for data with `num_classes` classes; without a head, where the objective
    needs no labels.

    Args:
      config: the run's, `vit_jax.config.Config`.

    Raises:
      ConfigError: the config states another number, or describes no model.
    """
    options = schema.given_options(config.model)
    if not objectives.find_objective(config.objective)[0].needs_labels:
        num_classes = 0
    given = options.get("num_classes", num_classes)
    if given != num_classes:
        why = (
            f"the data has {num_classes} classes"
            if num_classes
            else f"the objective {config.objective.name!r} uses no classification head"
        )
        raise ConfigError(
            f"config.model.num_classes is {given}, but {why}; set it to {num_classes}"
        )
    name = options.pop("name")
    return registry.model_config(
        name,
        image_size=config.data.image_size,
        channels=config.data.channels,
        **options | {"num_classes": num_classes},
    )


def durations_of(config: Any, examples_per_epoch: int | None) -> Callable[..., int]:
    """A duration of a run's config in steps; of one in percent also `total_steps` must be given."""
    return functools.partial(
        durations.steps,
        batch_size=views.images_per_step(config),
        examples_per_epoch=examples_per_epoch,
    )


def adapters_of(config: Any) -> Adapters | None:
    """What a run trains of its model; `None`: all of it."""
    rank, targets, also = config.lora.lora_rank, config.lora.lora_targets, config.lora.also
    return Adapters(rank, targets, also) if rank else None


def evaluated_weights(kept: Collection[str]) -> str:
    """Which of the weights that a run keeps are evaluated, read from its checkpoints and exported: the average, if
    there is one, or else the teacher that follows the student.

    Args:
      kept: some of 'params', 'ema' (their average) and 'teacher'.
    """
    return next(name for name in ("ema", "teacher", "params") if name in kept)


def model_part(params: dict) -> dict:
    """Of the parameters of a run, those of the model, without the objective's own."""
    return {name: tree for name, tree in params.items() if name != OWN}
