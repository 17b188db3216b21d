"""From a config to the parts of a run: its sections are filled in and checked (`resolve`), then model, objective,
optimizer and step are put together.

Needs no devices and no data, only a few numbers about the data; training, planning, benchmarks and
tests all start here.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import optax
from etils import epath
from flax import nnx
from ml_collections import ConfigDict

from vit_jax import objectives, optim
from vit_jax.base import schema
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.config import Config, config_class
from vit_jax.data import batches
from vit_jax.data.labels.masks import ClassTable
from vit_jax.devices import meshes
from vit_jax.models import classifier, registry
from vit_jax.objectives.contract import FromCheckpoint
from vit_jax.objectives.networks import (
    DataFacts,
    FixedTeacher,
    Networks,
    durations_of,
    evaluated_weights,
)
from vit_jax.optim.options import is_of_matrices, takes_two_gradients
from vit_jax.training import guards, sections
from vit_jax.training import state as states
from vit_jax.training.step import make_train_step
from vit_jax.training.zero import placement

if TYPE_CHECKING:
    from vit_jax.optim.matrices import Matrices
    from vit_jax.training.phases import Phase


@dataclasses.dataclass(frozen=True)
class Outline:
    """What follows from a config and a few numbers about its data, while no model is built.

    Attributes:
      config: the run's.
      model_config: the family's config.
      networks: the model, the objective and, in an `Assembly`, its teacher.
      num_classes, multi_label, masks: of the data, see `outline`.
      total_steps: length of the run.
      to_steps: a duration of the config in steps; `name`: of its field, for messages.
    """

    config: Config
    model_config: classifier.ClassifierConfig
    networks: Networks
    num_classes: int
    multi_label: bool
    masks: ClassTable | bool
    total_steps: int
    to_steps: Callable[..., int]

    @property
    def step_flops(self) -> int:
        """Operations of a training step, with images of `config.data.image_size` in the costliest number of patches:
        one forward pass of every image and two more for its gradient, all twice in sharpness-aware training; see
        `Objective.flops`.
        """
        if self.config.data.native_tokens or self.config.data.patch_sizes:
            from vit_jax.training import phases

            return max(alone.step_flops for alone in phases.split_run(self))
        return self.passes * self.networks.objective.flops()

    @property
    def passes(self) -> int:
        """Of an image's forward pass that a step counts as, for all its images together."""
        gradients = 2 if takes_two_gradients(self.config.optim) else 1
        return 3 * gradients * self.config.batch_size

    def phases(self) -> "tuple[Phase, ...]":
        """The steps of a run with `config.data.size_schedule`, by the size of their images."""
        from vit_jax.training.phases import find_phases

        return find_phases(self.config.data, self.networks, self.total_steps, self.passes)

    def flops(self, first: int = 0, stop: int | None = None) -> int:
        """Operations of the steps `first` to `stop` - 1, from 0; by default of the whole run."""
        stop = self.total_steps if stop is None else stop
        if self.config.data.size_schedule:
            return sum(phase.flops(first, stop) for phase in self.phases())
        if self.config.data.native_tokens or self.config.data.patch_sizes:
            from vit_jax.training import phases

            return phases.flops_of_steps(self, first, stop)
        return self.step_flops * (stop - first)

    @property
    def keeps_average(self) -> bool:
        """Whether the run keeps an average of its weights."""
        return optim.keeps_average(self.config.optim.name, self.config.optim.ema)

    @property
    def evaluated(self) -> str:
        """Which weights are evaluated and saved as the model: 'params', 'ema' or 'teacher'."""
        follows = self.networks.moving_average() is not None
        kept = {"params": True, "ema": self.keeps_average, "teacher": follows}
        return evaluated_weights([name for name, is_kept in kept.items() if is_kept])


@dataclasses.dataclass(frozen=True)
class Assembly(Outline):
    """The parts of a run.

    Attributes:
      definition: the model without its parameters.
      optimizer, learning_rate: see `optim.make`.
      init: random key -> first state.
      train_step: (state, batch) -> (state, metrics), not compiled.
    """

    definition: nnx.GraphDef
    optimizer: optax.GradientTransformation
    learning_rate: Callable
    init: Callable
    train_step: Callable

    def matrices(self) -> "Matrices | None":
        """The parameters that the optimizer treats as matrices; `None` if it is not one of matrices."""
        if not is_of_matrices(self.config.optim.name):
            return None
        from vit_jax.optim import matrices

        params, _ = jax.eval_shape(self.networks.init, jax.random.key(0))
        return matrices.find(self.config.optim, params, self.model_config.inputs)

    def abstract_state(self, mesh: jax.sharding.Mesh) -> states.TrainState:
        """Shapes, dtypes and shardings of the state on a mesh."""
        return states.abstract(self.init, mesh, **placement(self.networks, self.config).rules)

    def abstract_batch(self, mesh: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch of the run, on a mesh; where images have several sizes, that of the largest images."""
        all_batches = self.abstract_batches(mesh)
        return max(all_batches, key=lambda batch: sum(x.size / len(x) for x in batch.values()))

    @property
    def tells_classes(self) -> bool:
        """Whether the model tells classes apart, by its head or by what the objective owns."""
        return bool(self.model_config.num_classes) or self.networks.objective.predicts_with_modules

    def abstract_batches(self, mesh: jax.sharding.Mesh) -> list[dict[str, jax.ShapeDtypeStruct]]:
        """The batches of the run, on a mesh: one of each shape."""
        cut, labels = meshes.batch_sharding(mesh), (self.num_classes, self.multi_label, self.masks)
        return [
            {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut) for n, x in spec.items()}
            for spec in batches.specs(self.config, *labels)
        ]


def make_mesh(config: Config, devices: list | None = None) -> jax.sharding.Mesh:
    """The mesh of a run over `devices`, by default all of them. With local checkpoints it holds each
    shard of the state twice, on different hosts, so that a lost host's are not lost.

    Raises:
      ConfigError: `config.mesh` does not fit the devices.
    """
    return meshes.make_mesh(vars(config.mesh), devices, copies=2 if config.checkpoint.local else 1)


def resolve(config: ConfigDict, workdir: epath.PathLike | None = None) -> Config:
    """The config that a run is made of: settings that it leaves to the checkpoint are filled in, paths are made
    absolute, fields get their types, and all is checked that can be checked without data and devices.

    Args:
      config: from a recipe and flags; not changed.
      workdir: where the run may have been begun; it keeps what it took from the checkpoint then.

    Raises:
      ConfigError: something is wrong with it.
      CheckpointError: the checkpoint to start from cannot be read.
    """
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"config is of the type {type(config).__name__}: pass that of a recipe, vit_jax.load_config('digits')"
        )
    config = sections.fill_from_checkpoint(config, workdir)
    resolved = schema.typed(config_class(config), config)
    for resolve_section in sections.RESOLVERS:
        resolved = resolve_section(resolved, workdir)
    return resolved


def outline(
    config: Config,
    *,
    num_classes: int,
    examples_per_epoch: int | None,
    multi_label: bool = False,
    masks: ClassTable | bool | None = None,
) -> Outline:
    """The outline of a run.

    Args:
      config: from `assembly.resolve`.
      num_classes: classes of the data; 0 where it has no labels.
      examples_per_epoch: examples in the training set; `None` if unknown, then no duration may be
        in epochs.
      multi_label: whether an example may have several labels.
      masks: whether labels are masks, or what their values mean; by default as the objective needs them.

    Raises:
      ConfigError: the config does not go with the data.
    """
    has_views = bool(config.data.views)
    objective, _ = objectives.find_objective(config.objective)
    masks = objective.needs_masks if masks is None else masks
    guards.check_masks(config, objective, masks)
    if objective.needs_labels:
        guards.check_labels(config, num_classes, multi_label)
    if has_views != objective.needs_views:
        needs = "takes one view of an image" if has_views else "needs several views of each image"
        raise ConfigError(
            f"the objective {config.objective.name!r} {needs}, and config.data.views = {config.data.views}"
        )
    mixed = config.augment.mixup or config.augment.cutmix
    if mixed and not objective.mixes:
        raise ConfigError(
            f"the objective {config.objective.name!r} cannot learn from mixed images: set "
            "config.augment.mixup and cutmix to 0"
        )
    data = DataFacts(num_classes, examples_per_epoch, multi_label, masks)
    networks = Networks.from_config(config, data)
    if config.data.size_schedule or config.data.patch_sizes:
        from vit_jax.training import phases

        phases.check_phases(config, networks)
    to_steps = durations_of(config, examples_per_epoch)
    total_steps = to_steps(config.duration, name="config.duration")
    return Outline(
        config,
        networks.model_config,
        networks,
        num_classes,
        multi_label,
        masks,
        total_steps,
        functools.partial(to_steps, total_steps=total_steps),
    )


def assemble(config: Config, **data: Any) -> Assembly:
    """Puts a run together.

    Args:
      config: from `assembly.resolve`.
      **data: numbers about the data, see `outline`.

    Raises:
      ConfigError: the parts do not fit together, or the data.
      CheckpointError: the teacher's checkpoint cannot be read.
    """
    made = outline(config, **data)
    model_config = made.model_config
    networks = dataclasses.replace(made.networks, teachers=_fixed_teachers(made.networks, config))
    if gram_teacher := networks.objective.gram_teacher():
        from vit_jax.training.gram_teachers import check_gram_teacher

        check_gram_teacher(gram_teacher, networks)
    params, _ = jax.eval_shape(networks.init, jax.random.key(0))
    optimizer, learning_rate = optim.make(
        config.optim,
        params,
        total_steps=made.total_steps,
        to_steps=made.to_steps,
        layers=model_config.layers,
        inputs=model_config.inputs,
        starts=networks.starts(),
    )
    return Assembly(
        **vars(made) | {"networks": networks},
        definition=registry.abstract(model_config)[0],
        optimizer=optimizer,
        learning_rate=learning_rate,
        init=states.initializer(networks, optimizer, ema=made.keeps_average),
        train_step=make_train_step(networks, optimizer, learning_rate, config),
    )


def _fixed_teachers(networks: Networks, config: Config) -> tuple[FixedTeacher, ...]:
    """The teachers that the objective takes from checkpoints, still without their weights."""
    sources = networks.objective.teacher()
    if isinstance(sources, FromCheckpoint):
        sources = (sources,)
    if not isinstance(sources, tuple):
        return ()
    return tuple(_fixed_teacher(source, networks, config) for source in sources)


def _fixed_teacher(source: FromCheckpoint, networks: Networks, config: Config) -> FixedTeacher:
    from vit_jax.interchange import formats

    try:
        checkpoint = formats.read_checkpoint(source.path)
    except CheckpointError as error:
        advice = "; for a teacher pass --model to 'vit_jax convert', and name what it writes"
        advice = advice if "--model=" in str(error) else ""
        raise CheckpointError(f"the teacher: {error}{advice}") from error
    both = checkpoint.model_config, networks.model_config
    guards.check_teacher(source.path, *both, gives=source.gives)
    prepared = checkpoint.preprocessing
    if prepared is None:
        raise ConfigError(
            f"the teacher {source.path} does not state how its images are normalised: convert it with "
            "'vit_jax convert', and set --config.data.mean and --config.data.std there"
        )
    describe = {
        "image_size": checkpoint.model_config.image_size,
        "mean": prepared.mean,
        "std": prepared.std,
        "student_mean": config.data.mean,
        "student_std": config.data.std,
    }
    classes = checkpoint.classes if source.gives == "logits" else None
    return FixedTeacher(source.path, source.option, checkpoint.model_config, describe, classes)
