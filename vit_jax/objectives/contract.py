"""What an objective is: what is learned, and all that it needs besides the model.

An objective may own parameters (a mask token, a decoder, projection heads), which are trained,
decayed, sharded and saved as the model's are, under the name `objective/…`; and have a teacher, of
which no gradient is taken. Neither is part of the model that is evaluated, converted or fine-tuned.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base import patterns
from vit_jax.base.sizes import Size, height_width
from vit_jax.data.labels.segments import PanopticTable
from vit_jax.models import registry
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.registry import Weights

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ObjectiveContext:
    """What an objective knows of its run.

    Attributes:
      model: the family's config; a headless one unless the objective needs labels.
      mean, std: of images, which are normalised by them: pixels are `image * std + mean` in [0, 1].
      total_steps: length of the run.
      to_steps: a duration of the config in steps.
      views: (count, H, W, C) by name in a batch, of an example's views if there are several.
      batch_size: examples that a loss is computed of at once, on all devices together.
      num_classes: of the data; 0 where it has no labels.
      segments: what panoptic masks mean; `None` where labels are none.
      other_views: as `views`, with the other sizes that they have in some steps (`config.data.view_sizes`).
      teachers: the family's config of each fixed teacher; empty before their checkpoints are read.
      multi_label: whether an example may have several labels, or none.
    """

    model: ClassifierConfig
    mean: tuple[float, ...]
    std: tuple[float, ...]
    total_steps: int
    to_steps: Callable[[str], int]
    views: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    batch_size: int = 0
    num_classes: int = 0
    segments: PanopticTable | None = None
    other_views: tuple[Mapping[str, tuple[int, ...]], ...] = ()
    teachers: tuple[ClassifierConfig, ...] = ()
    multi_label: bool = False


@dataclasses.dataclass(frozen=True)
class FromCheckpoint:
    """A teacher that stays as it is: the model in a checkpoint of any readable format.

    Attributes:
      path: of the checkpoint.
      gives: what is learned from it: 'logits', of the classes of the data, or 'features', of any model.
      option: of the config, that names `path`.
    """

    path: str
    gives: str = "logits"
    option: str = "config.objective.teacher"


@dataclasses.dataclass(frozen=True)
class MovingAverage:
    """A teacher that is a moving average of the model and of the objective's own parameters.

    Attributes:
      momentum: step -> m in [0, 1]; after each update, teacher = m teacher + (1 - m) student.
    """

    momentum: Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class GramTeacher:
    """Earlier weights of the model, which are saved with the run; refreshed by those of a teacher that follows.

    Attributes:
      option: of the config, that names `path`.
      path: of the checkpoint that it begins with; '': with what the model begins with.
      is_due: step -> whether it is refreshed before that step.
    """

    option: str
    path: str
    is_due: Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A fixed teacher in use, at its own image size and normalisation.

    Attributes:
      model: with its parameters.
      image_size: of its images.
      mean, std: by which its images are normalised.
      student_mean, student_std: by which those that it is given are.
    """

    model: nnx.Module
    image_size: Size
    mean: tuple[float, ...]
    std: tuple[float, ...]
    student_mean: tuple[float, ...]
    student_std: tuple[float, ...]

    def logits(self, images: jax.Array) -> jax.Array:
        """Its logits (B, classes) float32 for the student's images (B, H, W, C)."""
        return self.model(self.prepare_inputs(images)).logits

    def prepare_inputs(self, images: jax.Array) -> jax.Array:
        """The student's images (B, H, W, C) as it sees them: resized bilinearly, antialiased where they shrink, and
        normalised by its own mean and std, in the dtype of its computation.
        """
        mean, std, own_mean, own_std = (
            jnp.array(x, jnp.float32)
            for x in (self.student_mean, self.student_std, self.mean, self.std)
        )
        pixels = images.astype(jnp.float32) * std + mean
        shape = (images.shape[0], *height_width(self.image_size), images.shape[-1])
        if shape != images.shape:
            pixels = jax.image.resize(pixels, shape, "linear", antialias=True)
        return ((pixels - own_mean) / own_std).astype(self.model.config.dtype)


@flax.struct.dataclass
class Learner:
    """What an objective works with inside a compiled step.

    Attributes:
      model: the model.
      modules: the result of `Objective.make_modules`, or `None`.
      teacher: a `Teacher`, or several of them, or for a moving average a `Learner`, or `None`.
      step: int32, updates made before this one.
      gram_teacher: the model with the weights of a `GramTeacher`, or `None`.
      held_out: whether images are measured by the loss that nothing is learned from.
      observed: the batch's observations for `Objective.update_state`: a dict that the objective fills with arrays.
    """

    model: nnx.Module
    modules: nnx.Module | None
    teacher: Any
    step: jax.Array
    gram_teacher: nnx.Module | None = None
    held_out: bool = flax.struct.field(pytree_node=False, default=False)
    observed: dict[str, Any] = flax.struct.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class SavedObjective:
    """What a checkpoint of any format holds of the objective that its model was trained with.

    Attributes:
      kind: the objective's class.
      options: those of its options that the checkpoint states.
      read: gives its own parameters, and what is not trained; arrays are read when they are used.
    """

    kind: type["Objective"]
    options: Mapping[str, Any]
    read: Callable[[], Weights]


# Members of `Objective` that were renamed: a class that still has one is refused, since nothing would read it.
_OLD_NAMES = {
    "own": "make_modules",
    "own_modules": "make_modules",
    "own_from": "continue_from",
    "own_answers": "predicts_with_modules",
    "own_judged": "evaluates_with_modules",
    "anchor": "gram_teacher",
}


class Objective:
    """Base of all objectives; made once for a run, and once for each compiled program.

    Attributes:
      Options: its frozen dataclass of options.
      needs_labels: whether examples must have labels. If not, existing labels go unused and the
        model has no head.
      mixes: whether images and targets may be mixed, by mixup and cutmix.
      needs_views: whether it learns from several views of each image (`config.data.views`), which
        batches to train on then have in place of `image`: (B, count, H, W, C) each, by the names in
        `ObjectiveContext.views`.
      needs_masks: whether labels must be masks, (B, H, W) uint8 or uint16; what moves pixels of an image moves all
        targets with it.
      takes_native: whether `image` may be a `contract.PatchBatch`, images at sizes of their own.
      predicts_with_modules: whether a trained model answers by what the objective owns too, so that evaluation and
        prediction load that with it.
      evaluates_with_modules: whether evaluators need what the objective owns, where the model answers without it.
      evaluator: the evaluator of runs that name none; '': `accuracy` with labels, `loss` without.
    """

    Options: ClassVar[type]
    needs_labels: ClassVar[bool] = True
    mixes: ClassVar[bool] = True
    needs_views: ClassVar[bool] = False
    needs_masks: ClassVar[bool] = False
    takes_native: ClassVar[bool] = False
    predicts_with_modules: ClassVar[bool] = False
    evaluates_with_modules: ClassVar[bool] = False
    evaluator: ClassVar[str] = ""

    def __init__(self, options: Any, context: ObjectiveContext):
        """Raises `ConfigError` for what does not fit together."""
        self.options, self.context = options, context

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for old, new in _OLD_NAMES.items():
            if old in vars(cls):
                raise TypeError(
                    f"the objective {cls.__name__} defines {old}, which nothing reads: rename it, it is {new} now"
                )

    @classmethod
    def variant(cls, options: Any) -> type["Objective"]:
        """Itself, or the subclass for these options."""
        return cls

    @classmethod
    def resolve(cls, config: Any, options: Any) -> Any:
        """The config of a run with all that follows from the objective's options.

        Args:
          config: the run's, with its data resolved.
          options: of the class `Options`.

        Raises:
          ConfigError: something of the config does not go with the objective.
        """
        return config

    def make_modules(self, rngs: nnx.Rngs) -> nnx.Module | None:
        """Its own parameters, and state that no gradient reaches (any other `nnx.Variable`)."""
        return None

    def continue_from(
        self, saved: SavedObjective, like: Weights
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """What of it continues with the arrays of a checkpoint: by default those of the same objective, name and
        shape. Arrays of one layer, such as kernel and bias, do so together.

        Args:
          saved: what the checkpoint holds.
          like: what `make_modules` made, or shapes; parameters, and what is not trained.

        Returns:
          The checkpoint's arrays by their names in `like`, in its shapes; and by the names of all others, which are
          re-initialised, why.
        """
        new = patterns.named(patterns.union(*like))
        if not isinstance(self, saved.kind):
            return {}, dict.fromkeys(new, f"the checkpoint's objective is {saved.kind.__name__}")
        old, reset = patterns.named(patterns.union(*saved.read())), {}
        for name, leaf in new.items():
            if name not in old:
                reset[name] = "not in the checkpoint"
            elif tuple(old[name].shape) != tuple(leaf.shape):
                reset[name] = (
                    f"{tuple(old[name].shape)} in the checkpoint, {tuple(leaf.shape)} here"
                )
        for name in new:
            layer = name.rpartition("/")[0]
            partner = next((n for n in reset if layer and n.rpartition("/")[0] == layer), None)
            if partner and name not in reset:
                reset[name] = f"with {partner}"
        return {name: old[name] for name in new if name not in reset}, reset

    @classmethod
    def conversions(cls) -> Mapping[str, Any]:
        """How formats of others keep what it owns, beside the model: an `ObjectiveConversion` of
        `interchange.conversions.contract` for each. Those of the package's own objectives are listed there.
        """
        return {}

    def teacher(self) -> FromCheckpoint | tuple[FromCheckpoint, ...] | MovingAverage | None:
        """Where its teacher comes from, or its teachers."""
        return None

    def gram_teacher(self) -> GramTeacher | None:
        """Earlier weights of the model that it needs beside its teacher."""
        return None

    def targets(self, batch: Batch) -> Batch:
        """What is to be learned, made from a batch of the loader: float32 (B, …) each, mixed by
        mixup and cutmix as the images are; with `needs_masks` maps (B, H, W).
        """
        return {}

    def __call__(
        self, learner: Learner, batch: Batch, rngs: nnx.Rngs
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of a batch, or of one part of it.

        State of `learner.model` and `learner.own` may be changed in place. With `config.accumulate` it then moves with
        each part. State that moves once a step is left to `update_state`, for which `learner.observed` gets the
        observations of the part.

        Args:
          learner: the model and what else takes part.
          batch: `image` (B, H, W, C), augmented and normalised, in the compute dtype, or views; and
            what `targets` gave. A held-out batch always has `image`.
          rngs: randomness, the stream `dropout`.

        Returns:
          The loss (B,) float32 and metrics, each (B,).
        """
        raise NotImplementedError

    def check_effects(self) -> None:
        """Raises `ConfigError` for options that have no effect in a run of this length. Only new runs are checked."""

    def starts(self) -> Mapping[str, int]:
        """The steps before which some of its own parameters rest, by the beginning of their names: they have no updates
        and no decay, and the counts of their optimizer begin there.
        """
        return {}

    def update_state(
        self, modules: nnx.Module | None, observed: dict[str, Any], step: jax.Array
    ) -> dict[str, jax.Array]:
        """Moves state once, after all parts of a step's batch; called if `__call__` has observed something.

        Args:
          modules: the objective's module from `make_modules`, changed in place.
          observed: the arrays in `learner.observed` after `__call__`, stacked over the parts: (parts, …) each.
          step: int32, updates made before this one.

        Returns:
          Metrics, float32 scalars.
        """
        return {}

    def warning(self, metrics: dict[str, float]) -> str:
        """What to warn the user of, by the means of a run's metrics since the last time; '': nothing."""
        return ""

    def flops(self) -> int:
        """Operations of one image's forward pass: matrix products only, a multiply-add counted as
        2. A training step counts as three of them.
        """
        return registry.count_flops(self.context.model)
