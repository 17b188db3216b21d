"""Where a step's time goes: its parts timed as programs of their own. The step as a whole is timed in
`benchmark`.

The parts do not add up to the step: alone, none overlaps or shares memory with another. What the
step does beyond them (augmentation, embedding, residuals, guards) is reported as `other`, which is
negative where the whole is faster than its parts.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from vit_jax import objectives
from vit_jax.base.errors import UserError
from vit_jax.compute import choices
from vit_jax.devices import meshes
from vit_jax.models import registry
from vit_jax.objectives.supervised import cross_entropy
from vit_jax.training.assembly import Assembly
from vit_jax.training.state import TrainState


def breakdown(
    assembly: Assembly, mesh: jax.sharding.Mesh, state: TrainState, batch: dict, steps: int
) -> dict[str, float]:
    """Median seconds a step spends in `attention`, `mlp` and `norms` of all blocks (forward and
    backward), the `loss` with its head, the `optimizer`, and the batch's `transfers` to the devices.

    Raises:
      UserError: the model has no encoder of blocks.
    """
    config = choices.with_compute_dtype(assembly.model_config)
    model = nnx.merge(
        registry.for_devices(assembly.definition, assembly.model_config), *state.weights()
    )
    if not hasattr(model, "encoder"):
        raise UserError(
            f"{assembly.config.model.name} has no Transformer blocks: no breakdown of its step"
        )
    passes = assembly.config.accumulate
    images = count_images(batch) // passes
    shape = (images, config.tokens, config.width)
    x = jax.device_put(
        jax.random.normal(jax.random.key(0), shape, jnp.dtype(config.dtype)),
        meshes.batch_sharding(mesh),
    )
    definition, stacked = nnx.split(model.encoder.layers)
    block = nnx.merge(definition, jax.tree.map(lambda p: p[0], stacked))
    times = config.depth * passes
    norms = 1 if config.parallel else 2

    def median(function: Callable, *arguments) -> float:
        compiled = jax.jit(function).lower(*arguments).compile()
        return statistics.median(seconds(lambda: compiled(*arguments), steps))

    def there_and_back(module, call, x):
        definition, parameters = nnx.split(module)

        def total(parameters, x):
            out = call(nnx.merge(definition, parameters), x)
            return jnp.sum(out * jax.lax.stop_gradient(x), dtype=jnp.float32)

        return median(jax.grad(total, argnums=(0, 1)), parameters, x)

    labels = jnp.zeros((images, config.num_classes)).at[:, 0].set(1)
    features = x[:, 0].astype(jnp.float32)

    def loss(kernel, features):
        return cross_entropy(
            features @ kernel, labels, objectives.loss(assembly.config.objective)
        ).mean()

    def update(params, opt_state, gradient):
        updates, opt_state = assembly.optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    on_host = jax.device_get(batch)
    sharding = meshes.batch_sharding(mesh)
    return {
        "attention": times * there_and_back(block.attention, lambda module, x: module(x)[0], x),
        "mlp": times * there_and_back(block.mlp, lambda module, x: module(x), x),
        "norms": (norms * times + passes)
        * there_and_back(block.attention_norm, lambda module, x: module(x), x),
        "loss": passes
        * median(
            jax.grad(loss, argnums=(0, 1)), jnp.zeros((config.width, config.num_classes)), features
        ),
        "optimizer": median(update, state.params, state.opt_state, state.params),
        "transfers": statistics.median(seconds(lambda: jax.device_put(on_host, sharding), steps)),
    }


def count_images(batch: dict[str, jax.Array]) -> int:
    """The images of a batch, which need not be `config.batch_size` where `config.data.native_budget` is set."""
    return len(next(iter(batch.values())))


def seconds(run: Callable, steps: int, warm_up: int = 2) -> list[float]:
    """Wall times of `run()`, each until its result is there."""
    return seconds_in_turn([run], steps, warm_up)[0]


def seconds_in_turn(runs: Sequence[Callable], steps: int, warm_up: int = 2) -> list[list[float]]:
    """Of each of several, `seconds`, measured one after the other, again and again."""
    times = [[] for _ in runs]
    for i in range(warm_up + steps):
        for run, its_times in zip(runs, times, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(run())
            if i >= warm_up:
                its_times.append(time.perf_counter() - began)
    return times
