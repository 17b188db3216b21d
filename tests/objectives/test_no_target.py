"""A batch in which nothing is to be learned has a loss of 0, and its gradient is 0."""

import jax
import numpy as np
import pytest

from tests.training.test_states_in_parts import teacher  # noqa: F401
from tests.training.tiny_objectives import NEEDS, assembled, drawn_batch
from vit_jax.data.labels.masks import IGNORED

# By objective: other fields of the config, and what of a batch says that nothing counts.
WITHOUT_TARGETS = {
    "segmentation": ({}, {"label": IGNORED}),
    "linear": ({"objective.name": "segmentation", "objective.head": "linear"}, {"label": IGNORED}),
    "multilevel": (
        {"objective.name": "segmentation", "objective.head": "multilevel", "objective.layers": (0, 1)},
        {"label": IGNORED},
    ),
}  # fmt: skip
ALWAYS = {
    "supervised": "without a class all classes are wrong for sigmoids, and softmax refuses such images",
    "masked_patches": "each image has corrupted patches: a share of 0 is refused",
    "dino": "the teacher answers to each image; and some patches are masked: a share of 0 is refused",
    "mae": "each image has hidden patches: a ratio that leaves none is refused",
    "distill": "the teacher answers to each image",
    "features": "the teachers answer to each image",
    "image_text": "each image has its text, an empty one too, and those of others",
    "sum": "its terms are objectives of this table",
}


def test_every_objective_is_tried_or_has_a_reason():
    tried = {fields.get("objective.name", name) for name, (fields, _) in WITHOUT_TARGETS.items()}
    assert tried | ALWAYS.keys() == NEEDS.keys() and not tried & ALWAYS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_TARGETS)
def test_a_batch_without_targets_weighs_nothing(name, teacher):  # noqa: F811
    fields, values = WITHOUT_TARGETS[name]
    objective = fields.get("objective.name", name)
    assembly = assembled(objective, teacher, fields | {"optim.weight_decay": 0.0})
    batch = drawn_batch(assembly, np.random.default_rng(0))
    for key, value in values.items():
        batch[key] = np.full_like(batch[key], value)
    state = jax.jit(assembly.init)(jax.random.key(0))
    _, metrics = jax.jit(assembly.train_step)(state, batch)
    assert metrics["loss"] == 0 and metrics["gradient_norm"] == 0
