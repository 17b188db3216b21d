"""my_optimizer.py: gradients whitened along the shorter side of each matrix (ASGO, arXiv 2503.20762)."""

import jax.numpy as jnp
import optax

from vit_jax.extend import (
    Matrices,
    OptimConfig,
    Stack,
    apply_to_stacks_with_state,
    load_config,
    map_named,
    matmul_float32,
    one_by_one,
    register_preconditioner,
    stack_name,
    with_muon_norm,
)


def one_sided(config: OptimConfig, matrices: Matrices) -> optax.GradientTransformation:
    def init(params):
        counts = {
            shape: sum(map(matrices.count, names)) for shape, names in matrices.stacks().items()
        }
        return {
            stack_name((m, n)): {"moment": jnp.zeros((count, m, m))}
            for (m, n), count in counts.items()
        }

    def inverse_root(moment):
        values, vectors = jnp.linalg.eigh(moment)
        values = jnp.maximum(values, 1e-6 * values[..., -1:]) + 1e-30
        return matmul_float32(vectors * values[..., None, :] ** -0.5, vectors.mT)

    def whiten(arrays: Stack) -> Stack:
        g, b2 = arrays["x"], config.matrix_b2
        moment = b2 * arrays["moment"] + (1 - b2) * matmul_float32(g, g.mT)
        return {"x": matmul_float32(one_by_one(inverse_root)(moment), g), "moment": moment}

    def update(gradients, state, params=None):
        whitened, state = apply_to_stacks_with_state(whiten, gradients, state, matrices)
        # As large as AdamW's updates, so that its learning rate can stay.
        directions = map_named(lambda name, u: with_muon_norm(config, matrices, name, u), whitened)
        return directions, state

    return optax.GradientTransformation(init, update)


register_preconditioner("one_sided", one_sided)


def get_config():
    config = load_config("digits")
    config.optim.name = "one_sided"
    return config
