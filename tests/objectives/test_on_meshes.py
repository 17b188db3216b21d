"""Learning without labels on eight simulated devices: what is learned does not depend on how they are used."""

import functools

import jax
import numpy as np
import pytest

from tests.objectives.test_dino import tiny
from tests.objectives.test_sharp import mae
from tests.training.test_step import MESHES
from vit_jax.data import batches
from vit_jax.devices import meshes
from vit_jax.recipes.user_files import load_config
from vit_jax.training import state as states
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.step_programs import compile_train_step


def with_texts(recipe: str, **changes):
    """A recipe of images and texts, tiny."""
    config = load_config(recipe)
    config.data.image_size, config.model.name, config.model.depth = 16, "ViT-mu/8", 1
    config.model.update(dict(width=32, heads=2, mlp_dim=64))
    config.objective.update(dict(text_length=8, vocabulary=259, text_end=1, text_pad=0))
    config.duration = "8 steps"
    config.update_from_flattened_dict(changes)
    return config


SUM = ("image_text", {"text_depth": 1}), ("masked_patches", {"weight": 0.25, "start": "1 steps"})
DINO_TXT = {
    "model.pool": "token", "objective.image_blocks": 1, "objective.text_depth": 1,
    "optim.freeze": ("(?!objective/).*",),
}  # fmt: skip
METHODS = {
    "sum": (functools.partial(with_texts, "sum:smoke"), {"objective.terms": SUM}),
    "texts for a frozen tower": (functools.partial(with_texts, "image_text:smoke"), DINO_TXT),
    "mae": (mae, {}),
    "dino, centre": (tiny, {}),
    "dino, sinkhorn": (tiny, {"objective.centering": "sinkhorn", "objective.two_heads": True}),
}
COMMON = {
    "batch_size": 8, "mesh.fsdp_min_size": 64, "optim.lr": 1e-3, "optim.warmup": "0 steps",
    # Where there is no gradient Adam divides rounding errors by their own size.
    "optim.eps": 1e-4,
}  # fmt: skip


def learned(assembly, sizes, images):
    """(metrics, state that is learned) of two steps on a mesh of these sizes."""
    mesh = meshes.make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    like = assembly.abstract_state(mesh)
    with jax.set_mesh(mesh):
        step = compile_train_step(assembly.train_step, states.shardings_of(like), mesh)
        state = states.create(assembly.init, 0, like)
        batch = jax.device_put(images, meshes.batch_sharding(mesh))
        for _ in range(2):
            state, metrics = step(state, batch)
    return jax.device_get((metrics, (state.params, state.teacher, state.variables)))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_steps_are_the_same_on_every_mesh(method):
    make, changes = METHODS[method]
    config = make(**COMMON | changes)
    if make is tiny:
        # With so few hidden units the usual kernels are too small: gradients would be in the thousands.
        config.objective.update({"frozen_prototypes": "0 steps", "head_std": 0.3})
    assembly = assemble(resolve(config), num_classes=0, examples_per_epoch=64)
    random, spec = np.random.default_rng(0), batches.spec(assembly.config, num_classes=0)
    images = {n: random.integers(0, 256, x.shape, x.dtype) for n, x in spec.items()}
    one, tree = learned(assembly, dict(data=1, fsdp=1, tensor=1), images)
    for sizes in MESHES.values():
        several, other = learned(assembly, sizes, images)
        for metric, value in one.items():
            np.testing.assert_allclose(several[metric], value, 1e-4, 1e-5, err_msg=metric)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), tree, other)
