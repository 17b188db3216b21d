"""The networks of a run, put together from trees of arrays: the model, what the objective owns, and
its teacher.

Parameters of both are one tree, so that one optimizer serves them: the model's, and the objective's
own under `objective`.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
from flax import nnx

from vit_jax.compute import choices
from vit_jax.models import classifier, registry
from vit_jax.models.lora import ADAPTERS, Adapters
from vit_jax.models.registry import Weights
from vit_jax.objectives.contract import Learner, MovingAverage, Objective, Teacher

OWN = "objective"


@dataclasses.dataclass(frozen=True)
class FixedTeacher:
    """A fixed teacher, still without its parameters.

    Attributes:
      path: of its checkpoint.
      config: its family's config.
      describe: what `Teacher` says besides the model.
      classes: their names, where its checkpoint says them.
    """

    path: str
    config: classifier.ClassifierConfig
    describe: dict
    classes: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Networks:
    """What takes part in a step, as definitions.

    Attributes:
      model_config: the family's config.
      make_objective: a family's config -> the objective for it.
      teacher: the fixed teacher, if the objective has one.
      adapters: what is trained of the model; `None`: all of it.
    """

    model_config: classifier.ClassifierConfig
    make_objective: Callable[[classifier.ClassifierConfig], Objective]
    teacher: FixedTeacher | None = None
    adapters: Adapters | None = None

    def for_devices(self) -> "Networks":
        """The same, computing in the types that suit the devices being traced for."""
        teacher = self.teacher
        if teacher:
            teacher = dataclasses.replace(
                teacher, config=choices.with_compute_dtype(teacher.config)
            )
        return dataclasses.replace(
            self, model_config=choices.with_compute_dtype(self.model_config), teacher=teacher
        )

    @functools.cached_property
    def objective(self) -> Objective:
        """The objective for the model."""
        return self.make_objective(self.model_config)

    def moving_average(self) -> MovingAverage | None:
        """The teacher that follows the student, if the objective has one."""
        source = self.objective.teacher()
        return source if isinstance(source, MovingAverage) else None

    def init(self, key: jax.Array) -> tuple[dict, dict]:
        """New parameters, and state that is not trained by its owner, `model` or `objective`; a pure
        function. Of a model with adapters these and what else is trained.
        """
        weights = registry.split(registry.build(self.model_config, rngs=nnx.Rngs(key)))[1]
        params, variables = weights.params, {"model": weights.variables}
        if self.adapters:
            new = self.adapters.init(params, jax.random.fold_in(key, 2))
            params = self.adapters.split(params)[1] | {ADAPTERS: new}
        own = self.objective.own(nnx.Rngs(jax.random.fold_in(key, 1)))
        if own is not None:
            weights = registry.split(own)[1]
            params, variables = params | {OWN: weights.params}, variables | {OWN: weights.variables}
        return params, {owner: tree for owner, tree in variables.items() if tree}

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
        fixed: Weights | None = None,
        anchor: dict | None = None,
    ) -> Learner:
        """The networks with their arrays.

        Args:
          params, variables: see `init`; with the whole model.
          step: updates made so far.
          average: the same two of a teacher that follows the student.
          fixed: of the fixed teacher.
          anchor: parameters of the model's anchor.
        """
        definition = registry.abstract(self.model_config)[0]
        model = nnx.merge(definition, model_part(params), variables.get("model", {}))
        own = None
        if OWN in params:
            definition, _ = registry.split(
                nnx.eval_shape(lambda: self.objective.own(nnx.Rngs(0)))  # of what init made
            )
            own = nnx.merge(definition, params[OWN], variables.get(OWN, {}))
        teacher = None
        if fixed is not None:
            definition = registry.abstract(self.teacher.config)[0]
            teacher = Teacher(nnx.merge(definition, *fixed), **self.teacher.describe)
        elif average is not None:
            teacher = self.learner(*average, step=step)
        earlier = None
        if anchor is not None:
            definition = registry.abstract(self.model_config)[0]
            earlier = nnx.merge(definition, anchor, variables.get("model", {}))
        return Learner(model=model, own=own, teacher=teacher, step=step, anchor=earlier)


def variables_of(learner: Learner) -> dict:
    """The state that is not trained by its owner, as it is now."""
    owners = {"model": learner.model, OWN: learner.own}
    by_owner = {
        owner: registry.split(m)[1].variables for owner, m in owners.items() if m is not None
    }
    return {owner: tree for owner, tree in by_owner.items() if tree}


def model_part(params: dict) -> dict:
    """Of the parameters of a run, those of the model, without the objective's own."""
    return {name: tree for name, tree in params.items() if name != OWN}
