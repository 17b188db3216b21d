"""What is trained: the pytree that a step maps to the next one and a checkpoint keeps."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from vit_jax.base import patterns
from vit_jax.devices import meshes
from vit_jax.models import registry


@flax.struct.dataclass
class Health:
    """What bad steps did so far, whose loss or gradient was not finite or whose loss was a spike;
    kept on the devices so that watching costs no synchronisation.

    Attributes:
      first_bad_step: int32, the first of them; −1 for none.
      bad_tensors: bool (parameters,), whose gradients were not finite at the last such step, in the
        order of `patterns.names`.
      in_a_row, skipped: int32, updates left out lately and altogether.
      mean_loss: float32, running mean of the losses that were not bad.
    """

    first_bad_step: jax.Array
    bad_tensors: jax.Array
    in_a_row: jax.Array
    skipped: jax.Array
    mean_loss: jax.Array


@flax.struct.dataclass
class TrainState:
    """Everything that changes from step to step.

    Attributes:
      step: int32, steps done.
      params: nested dict of float32.
      opt_state: of the optax transformation.
      ema: averaged parameters, or `None`.
      health: see `Health`.
    """

    step: jax.Array
    params: dict
    opt_state: Any
    ema: dict | None
    health: Health


def initializer(
    model_config, optimizer: optax.GradientTransformation, *, ema: bool
) -> Callable[[jax.Array], TrainState]:
    """A pure function from a random key to the first state."""

    def init(key: jax.Array) -> TrainState:
        params = registry.initialize(model_config, key)
        return TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=optimizer.init(params),
            # A copy: the parameters' own buffers are donated to the step.
            ema=jax.tree.map(jnp.copy, params) if ema else None,
            health=Health(
                first_bad_step=jnp.int32(-1),
                bad_tensors=jnp.zeros(len(patterns.names(params)), bool),
                in_a_row=jnp.int32(0),
                skipped=jnp.int32(0),
                mean_loss=jnp.float32(0),
            ),
        )

    return init


def abstract(init: Callable, mesh: jax.sharding.Mesh, *, fsdp_min_size: int) -> TrainState:
    """Shapes, dtypes and shardings of the state, without memory."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    shardings = meshes.shardings(shapes, mesh, fsdp_min_size=fsdp_min_size)
    # Every process reads it.
    whole = jax.tree.map(lambda _: meshes.replicated(mesh), shapes.health)
    shardings = shardings.replace(health=whole)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def create(init: Callable, seed: int, like: TrainState) -> TrainState:
    """The first state, each array born in the shards of `like`: never a whole copy on one device."""
    return jax.jit(init, out_shardings=shardings_of(like))(jax.random.key(seed))


def shardings_of(like) -> Any:
    """The tree of shardings of a tree of arrays or shapes."""
    return jax.tree.map(lambda x: x.sharding, like)
