"""The training state: the pytree that a step maps to the next one and a checkpoint keeps."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from vit_jax.devices import meshes
from vit_jax.models import lora
from vit_jax.models.registry import Weights
from vit_jax.objectives.contract import Learner
from vit_jax.objectives.networks import OWN, Networks, evaluated_weights, model_part
from vit_jax.training.upkeep.health import Health, healthy


@flax.struct.dataclass
class TrainState:
    """Everything that changes from step to step, and a fixed teacher.

    Attributes:
      step: int32, steps done.
      params: nested dict of float32; the objective's own under `objective`.
      opt_state: of the optax transformation.
      ema: averaged parameters, or `None`.
      health: the record of bad steps.
      variables: arrays without gradients, by owner: of `model` and `objective`, of the average (`ema`, the model's)
        and of a teacher that follows the student (`teacher`, by owner again); and the parameters of the Gram
        teacher (`anchor`), see `objectives.contract.GramTeacher`.
      teacher: parameters of a teacher that follows the student, or `None`.
      frozen_teachers: the weights of each fixed teacher; they are not saved.
      base: the frozen parameters below adapters, or `None`; it is not saved.
    """

    step: jax.Array
    params: dict
    opt_state: Any
    ema: dict | None
    health: Health
    variables: dict = flax.struct.field(default_factory=dict)
    teacher: dict | None = None
    frozen_teachers: tuple[Weights, ...] = ()
    base: dict | None = None

    def without_constants(self) -> "TrainState":
        """The state without the arrays that no step changes."""
        return self.replace(frozen_teachers=(), base=None)

    def with_constants_of(self, state: "TrainState") -> "TrainState":
        """This state with the arrays of another that no step changes."""
        return self.replace(frozen_teachers=state.frozen_teachers, base=state.base)

    def kept(self) -> list[str]:
        """The weights that are kept: of 'params', 'ema' and 'teacher'."""
        return [name for name in _TREES if getattr(self, name) is not None]

    def weights(self) -> Weights:
        """The model that is evaluated, see `evaluated_weights`."""
        name = evaluated_weights(self.kept())
        params = lora.whole(self.base, getattr(self, name))
        variables = self.variables.get("ema" if name == "ema" else "model", {})
        return Weights(model_part(params), variables)

    def module_weights(self) -> Weights:
        """The objective's part of the weights that are evaluated; empty if it has none."""
        params = getattr(self, evaluated_weights(self.kept()))
        return Weights(params.get(OWN, {}), self.variables.get(OWN, {}))

    def learner(
        self,
        networks: Networks,
        *,
        params: dict | None = None,
        variables: dict | None = None,
        averaged: bool = False,
    ) -> Learner:
        """The networks of a run with the arrays of this state.

        Args:
          networks: the run's, for the devices that are traced for.
          params, variables: arrays of model and objective to use instead of the state's, such as the variables of
            differentiation.
          averaged: use the averaged parameters, if there are any.
        """
        params = self.params if params is None else params
        variables = self.variables if variables is None else variables
        if averaged and self.ema is not None:
            params = self.ema
            variables = variables | {"model": self.weights().variables}
        teacher = None
        if self.teacher is not None:
            teacher_params = lora.whole(self.base, self.teacher)
            teacher = (teacher_params, self.variables.get("teacher"))
        gram_teacher = self.variables.get(GRAM_TEACHER)
        return networks.learner(
            lora.whole(self.base, params),
            variables,
            step=self.step,
            average=teacher,
            frozen_teachers=self.frozen_teachers,
            gram_teacher=None if gram_teacher is None else lora.whole(self.base, gram_teacher),
        )

    def parts(self) -> dict:
        """The parts of the state that are saved, by name. The model's parameters are separate from the objective's,
        so that they can be read alone.
        """
        by_name = {"step": self.step, "opt_state": self.opt_state, "health": self.health}
        for name in _TREES:
            tree = getattr(self, name) or {}
            by_name[name] = model_part(tree)
            by_name[f"{name}_{OWN}"] = tree.get(OWN)
        by_name |= {f"{owner}_variables": tree for owner, tree in self.variables.items()}
        return {name: part for name, part in by_name.items() if jax.tree.leaves(part)}

    def with_parts(self, parts: dict) -> "TrainState":
        """This state with the `parts` of a saved state of the same structure."""
        whole = [name for name in ("step", "opt_state", "health") if name in parts]
        fields = {name: parts[name] for name in whole}
        for name in _TREES:
            if name in parts:
                fields[name] = dict(parts[name])
                own = parts.get(f"{name}_{OWN}")
                if own is not None:
                    fields[name][OWN] = own
        variables = {owner: parts[f"{owner}_variables"] for owner in self.variables}
        return self.replace(**fields, variables=variables)


GRAM_TEACHER = "anchor"  # the name in `TrainState.variables`, and so in checkpoints
_TREES = ("params", "ema", "teacher")
# These trees are sharded over the mesh's `data` axis too: a step computes none of them as a whole, and needs the
# teacher's only one layer at a time.
_OVER_DATA = ("opt_state", "ema", "teacher")


def initializer(
    networks: Networks, optimizer: optax.GradientTransformation, *, ema: bool
) -> Callable[[jax.Array], TrainState]:
    """A pure function from a random key to the first state; the parameters of a fixed teacher and
    of a base below adapters are zeros.
    """

    def init(key: jax.Array) -> TrainState:
        params, variables = networks.init(key)
        teacher = None
        if networks.moving_average():
            teacher = _copies(params)
            if variables:
                variables |= {"teacher": _copies(variables)}
        if networks.objective.gram_teacher():
            variables |= {GRAM_TEACHER: _copies(model_part(params))}
        if ema and "model" in variables:
            variables |= {"ema": _copies(variables["model"])}
        opt_state = optimizer.init(params)
        average = _copies(params) if ema else None
        return TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=opt_state,
            ema=average,
            health=healthy(params),
            variables=variables,
            teacher=teacher,
            frozen_teachers=_zeros(networks.abstract_teachers()),
            base=_zeros(networks.base()),
        )

    return init


def _copies(tree: Any) -> Any:
    """Copies in separate buffers, because the buffers of the parameters are donated to the step."""
    return jax.tree.map(jnp.copy, tree)


def _zeros(like: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def abstract(
    init: Callable,
    mesh: jax.sharding.Mesh,
    *,
    fsdp_min_size: int,
    tensor_rules: Sequence[tuple[str, int]] = (),
) -> TrainState:
    """Shapes, dtypes and shardings of the state, without memory; for the last two arguments see `meshes.specs`."""
    shapes = jax.eval_shape(lambda: init(jax.random.key(0)))  # Devices may not be here.
    shardings, over_data = (
        meshes.shardings(
            shapes, mesh, fsdp_min_size=fsdp_min_size, tensor_rules=tensor_rules, over_data=over
        )
        for over in (False, True)
    )
    # Every process reads it.
    whole = jax.tree.map(lambda _: meshes.replicated(mesh), shapes.health)
    shardings = shardings.replace(
        health=whole, **{name: getattr(over_data, name) for name in _OVER_DATA}
    )
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def create(init: Callable, seed: int, like: TrainState) -> TrainState:
    """The first state, each array born in the shards of `like`: never a whole copy on one device."""
    return jax.jit(init, out_shardings=shardings_of(like))(jax.random.key(seed))


def copied(tree: Any, like: Any) -> Any:
    """A copy of a tree in separate buffers, with the shardings of `like`."""
    copy = jax.jit(_copies, out_shardings=shardings_of(like))
    return copy(tree)


def make_gather(like: TrainState) -> Callable[[TrainState], TrainState]:
    """`gather(state)`: the state with its averages sharded as the parameters are: for programs that
    compute with them many times.

    Args:
      like: shapes, dtypes and shardings of the state.
    """
    stored = shardings_of(like.params)
    averages = {"ema": like.ema, "teacher": like.teacher}
    names = [name for name, tree in averages.items() if tree and shardings_of(tree) != stored]
    if not names:
        return lambda state: state
    reshard = jax.jit(lambda trees: trees, out_shardings=dict.fromkeys(names, stored))

    def gather(state: TrainState) -> TrainState:
        trees = {name: getattr(state, name) for name in names}
        return state.replace(**reshard(trees))

    return gather


def shardings_of(like: Any) -> Any:
    """The shardings of a state or a part of one, or of its shapes, as a tree like it."""
    return jax.tree.map(lambda x: x.sharding, like)
