"""Families against their formulas in float64: the logits, and the gradient of every parameter. The formulas
are in the tests of the families; CrossViT, T2T and Dynamic ViT have tests of their own.
"""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models import (
    oracles,
    test_axial,
    test_deepvit,
    test_efficientnet,
    test_feed_forward,
    test_localvit,
)
from tests.models.conftest import parameters, statistics
from tests.repeats import slow_unless
from vit_jax.models import registry


def images(config):
    shape = (3, *config.height_width, 3)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def deepvit_forward(*arguments):
    return test_deepvit.forward(*arguments)[0]


# The config, the formula in float64, and whether statistics are those of the batch.
LOCALVIT, DEEPVIT = test_localvit.forward, deepvit_forward
SLOPES = {
    "axial_vit": (test_axial.vit(), test_axial.vit_forward, None),
    "axial_resnet": (test_axial.resnet(), test_axial.resnet_forward, None),
    "feed_forward": (test_feed_forward.tiny(remat="full"), test_feed_forward.forward, None),
} | {
    f"{name}, {'trained' if training else 'evaluated'}": (config, forward, training)
    for name, config, forward in (
        ("deepvit", test_deepvit.tiny(), DEEPVIT),
        (
            "deepvit without norm, slow",
            test_deepvit.tiny(reattention_norm=False, residual_scale=0.5),
            DEEPVIT,
        ),
        (
            "deepvit S",
            test_deepvit.tiny(conv_stem=True, scaled_maps=True, residual_scale=0.5),
            DEEPVIT,
        ),
        ("efficientnet", test_efficientnet.tiny(), test_efficientnet.forward),
        ("localvit", test_localvit.tiny(), LOCALVIT),
        ("localvit eca, slow", test_localvit.tiny(gate="eca"), LOCALVIT),
        ("localvit eca_hard", test_localvit.tiny(gate="eca_hard"), LOCALVIT),
        ("localvit relu6, slow", test_localvit.tiny(gate="none", activation="relu6"), LOCALVIT),
    )
    for training in (False, True)
}


# Statistics of batches are those of other DeepViTs, and LocalViTs, too.
SLOW = ("deepvit S, evaluated", "localvit eca_hard, trained")


@pytest.mark.parametrize(
    "case", slow_unless([c for c in SLOPES if "slow" not in c and c not in SLOW], SLOPES)
)
def test_logits_and_the_gradient_of_every_parameter_are_those_of_float64(case):
    config, forward, training = SLOPES[case]
    params, variables, x = parameters(config), statistics(config), images(config)
    mode = () if training is None else (training,)

    def exact(params):
        return forward(config, oracles.in_float64(params, variables), x.astype(np.float64), *mode)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def learn(params, weights):
        model = nnx.merge(registry.abstract(config)[0], params, variables)
        logits = model(x, deterministic=not training, rngs=nnx.Rngs(dropout=0)).logits
        return (logits * weights).sum(), logits

    oracles.check_gradient(learn, exact, params)
