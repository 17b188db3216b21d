"""A tiny run of every objective, and a few steps of it on drawn images; for tests that compare states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import patterns
from vit_jax.config import default_config
from vit_jax.data import batches
from vit_jax.training.assembly import Assembly, assemble, resolve

CLASSES, EXAMPLES, STEPS = 3, 80, 6
MODEL = {
    "model.name": "ViT-mu/8", "model.width": 16, "model.depth": 2, "model.heads": 2, "model.mlp_dim": 24,
    "data.image_size": 16, "data.mean": (0.5,) * 3, "data.std": (0.5,) * 3, "data.interpolation": "bilinear",
    "augment.flip": False, "batch_size": 8, "duration": f"{STEPS} steps", "optim.clip": 0.0, "optim.lr": 0.01,
    "optim.schedule": "constant", "optim.name": "sgd", "optim.b1": 0.0,
}  # fmt: skip
TOKENS = {
    "objective.tokenizer": "bytes", "objective.text_length": 8, "objective.vocabulary": 259,
    "objective.text_end": 1, "objective.text_pad": 0,
}  # fmt: skip
# What each objective needs besides; {teacher} is a checkpoint of the same model with a head.
NEEDS = {
    "supervised": {"model.head_init": "normal"},
    "mae": {"objective.width": 16, "objective.depth": 1, "objective.heads": 2},
    "masked_patches": {},
    "dino": {
        "data.views": ({}, {}), "objective.prototypes": 12, "objective.head_hidden": 16, "objective.bottleneck": 8,
        "objective.head_std": 0.3, "objective.temperature_warmup": "2 steps", "objective.frozen_prototypes": "0 steps",
        "objective.momentum": (0.75, 1.0),
    },
    "distill": {"model.head_init": "normal", "objective.teacher": "{teacher}"},
    "features": {
        "objective.teachers": ("{teacher}",), "objective.hidden": 8, "objective.last_hidden": 8, "objective.drop": 0.0,
    },
    "image_text": TOKENS | {"objective.text_depth": 1},
    "sum": TOKENS | {
        "objective.terms": (("image_text", {"text_depth": 1}), ("masked_patches", {})),
    },
    "segmentation": {
        "objective.queries": 4, "objective.blocks": 1, "objective.segments": 3, "objective.points": 64,
    },
}  # fmt: skip


def assembled(name: str, teacher, fields: dict) -> Assembly:
    """A tiny run of an objective with these fields besides."""
    config = default_config()
    config.update_from_flattened_dict(MODEL)
    config.objective.name = fields.get("objective.name", name)
    needs = NEEDS[name] | {field: x for field, x in fields.items() if field != "objective.name"}
    filled = {
        field: _with_teacher(value, str(teacher))
        for field, value in needs.items()
        if value is not None
    }
    config.update_from_flattened_dict(filled)
    facts = {"num_classes": CLASSES, "examples_per_epoch": EXAMPLES}
    return assemble(resolve(config), **facts)


def _with_teacher(value, teacher: str):
    if isinstance(value, tuple):
        return tuple(_with_teacher(part, teacher) for part in value)
    if isinstance(value, dict):
        return {name: _with_teacher(part, teacher) for name, part in value.items()}
    return teacher if value == "{teacher}" else value


def drawn_batch(assembly: Assembly, random: np.random.Generator) -> dict[str, np.ndarray]:
    """A batch of drawn images with labels, masks or texts, as the run takes them."""
    config, made = assembly.config, {}
    spec = batches.spec(
        config, num_classes=assembly.num_classes, multi_label=assembly.multi_label, masks=assembly.masks
    )  # fmt: skip
    for name, like in spec.items():
        highest = 256 if name.startswith("image") else CLASSES
        if name == "tokens":
            highest = 200
        made[name] = random.integers(0, highest, like.shape).astype(like.dtype)
    return made


def stepped(assembly: Assembly, steps: int) -> dict[str, np.ndarray]:
    """Every array of the state by name after some steps. Noise is added to what all parts begin with: zeros would keep
    others from learning.
    """
    random = np.random.default_rng(0)
    draw = functools.partial(_noisy, np.random.default_rng(1))
    init = jax.jit(assembly.init)
    state = init(jax.random.key(0))
    params = draw(state.params)
    same = lambda tree: jax.tree.map(jnp.asarray, params) if tree is not None else None  # noqa: E731
    state = state.replace(
        params=jax.tree.map(jnp.asarray, params),
        ema=same(state.ema),
        teacher=same(state.teacher),
        base=None if state.base is None else draw(state.base),
        frozen_teachers=draw(state.frozen_teachers),
    )
    step = jax.jit(assembly.train_step)
    for _ in range(steps):
        state, _ = step(state, drawn_batch(assembly, random))
    return {name: np.asarray(x) for name, x in patterns.named(state.parts()).items()}


def _noisy(random: np.random.Generator, tree):
    def add(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x + 0.3 * random.standard_normal(x.shape).astype(np.float32)

    return jax.tree.map(add, tree)
