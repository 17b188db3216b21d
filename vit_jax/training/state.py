"""What is trained: the pytree that a step maps to the next one and a checkpoint keeps."""

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
      health: what bad steps did.
      variables: what no gradient reaches, by owner: of `model` and `objective`, of the average
        (`ema`, the model's) and of a teacher that follows the student (`teacher`, by owner again); and the
        parameters of the Gram teacher (`anchor`), see `objectives.contract.GramTeacher`.
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
        variables = self.variables.get("ema" if name == "ema" else "model", {})
        return Weights(model_part(lora.whole(self.base, getattr(self, name))), variables)

    def module_weights(self) -> Weights:
        """What the objective owns of the weights that are evaluated; empty if it owns nothing."""
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
          params, variables: arrays of model and objective to use instead of the state's, such as those
            that a gradient is taken of.
          averaged: use the averaged parameters, if there are any.
        """
        params = self.params if params is None else params
        variables = self.variables if variables is None else variables
        if averaged and self.ema is not None:
            params, variables = self.ema, variables | {"model": self.weights().variables}
        teacher = None
        if self.teacher is not None:
            teacher = (lora.whole(self.base, self.teacher), self.variables.get("teacher"))
        params, gram_teacher = lora.whole(self.base, params), self.variables.get(GRAM_TEACHER)
        return networks.learner(
            params,
            variables,
            step=self.step,
            average=teacher,
            frozen_teachers=self.frozen_teachers,
            gram_teacher=None if gram_teacher is None else lora.whole(self.base, gram_teacher),
        )

    def parts(self) -> dict:
        """What is saved, by name; the model's parameters apart from the objective's, so that they
        can be read alone.
        """
        by_name = {"step": self.step, "opt_state": self.opt_state, "health": self.health}
        for name in _TREES:
            tree = getattr(self, name) or {}
            by_name[name] = model_part(tree)
            by_name[f"{name}_{OWN}"] = tree.get(OWN)
        by_name |= {f"{owner}_variables": tree for owner, tree in self.variables.items()}
        return {name: part for name, part in by_name.items() if jax.tree.leaves(part)}

    def with_parts(self, parts: dict) -> "TrainState":
        """This state with what was saved as `parts` of one like it."""
        trees = {}
        for name in _TREES:
            if name in parts:
                own = parts.get(f"{name}_{OWN}")
                trees[name] = parts[name] | ({} if own is None else {OWN: own})
        variables = {owner: parts[f"{owner}_variables"] for owner in self.variables}
        rest = {name: parts[name] for name in ("step", "opt_state", "health") if name in parts}
        return self.replace(**rest, **trees, variables=variables)


GRAM_TEACHER = "anchor"  # the name in `TrainState.variables`, and so in checkpoints
_TREES = ("params", "ema", "teacher")
# Sharded over the mesh's `data` axis too: what no step computes whole, and a teacher, of which it
# needs one layer at a time.
_OVER_DATA = ("opt_state", "ema", "teacher")


def initializer(
    networks: Networks, optimizer: optax.GradientTransformation, *, ema: bool
) -> Callable[[jax.Array], TrainState]:
    """A pure function from a random key to the first state; the parameters of a fixed teacher and
    of a base below adapters are zeros.
    """

    def init(key: jax.Array) -> TrainState:
        params, variables = networks.init(key)
        # Copies: the parameters' own buffers are donated to the step.
        copied = lambda tree: jax.tree.map(jnp.copy, tree)  # noqa: E731
        teacher = None
        if networks.moving_average():
            teacher = copied(params)
            variables |= {"teacher": copied(variables)} if variables else {}
        if networks.objective.gram_teacher():
            variables |= {GRAM_TEACHER: copied(model_part(params))}
        if ema and "model" in variables:
            variables |= {"ema": copied(variables["model"])}
        return TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=optimizer.init(params),
            ema=copied(params) if ema else None,
            health=healthy(params),
            variables=variables,
            teacher=teacher,
            frozen_teachers=_zeros(networks.abstract_teachers()),
            base=_zeros(networks.base()),
        )

    return init


def _zeros(like: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def abstract(
    init: Callable,
    mesh: jax.sharding.Mesh,
    *,
    fsdp_min_size: int,
    tensor_rules: Sequence[tuple[str, int]] = (),
) -> TrainState:
    """Shapes, dtypes and shardings of the state, without memory; the last two arguments are those of
    `meshes.specs`.
    """
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
    """A copy of a tree in buffers of its own, with the shardings of `like`."""
    return jax.jit(lambda x: jax.tree.map(jnp.copy, x), out_shardings=shardings_of(like))(tree)


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
    gather = jax.jit(lambda trees: trees, out_shardings=dict.fromkeys(names, stored))
    return lambda state: state.replace(**gather({name: getattr(state, name) for name in names}))


def shardings_of(like: Any) -> Any:
    """The shardings of a state or a part of one, or of its shapes, as a tree like it."""
    return jax.tree.map(lambda x: x.sharding, like)
