"""LAMB and NAdamW against timm's, and the trust ratios of LAMB and LARS against their formulas in float64."""

import jax
import numpy as np
import pytest

from tests import without_torchvision
from vit_jax.base.errors import ConfigError

DECAYS = ((".*kernel", 1.0),)
# Exact in float32, in which 1 - 0.999 is wrong by 1e-5 of itself.
EXACT_DECAY = {"b1": 0.5, "b2": 0.5}


def tree(shapes, seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("name, theirs", [("lamb", "Lamb"), ("nadamw", "NAdamW")])
def test_ten_updates_equal_timms(kit, name, theirs):
    torch = pytest.importorskip("torch")
    optimizers = without_torchvision.imported("timm.optim")
    shapes = {"kernel": (6, 5), "bias": (5,)}
    start, gradients = tree(shapes, 0), [tree(shapes, seed) for seed in range(1, 11)]
    config = kit.config(
        name=name, lr=0.02, b1=0.85, b2=0.95, eps=1e-6, weight_decay=0.3, clip=1.0,
        weight_decay_rules=DECAYS,
    )  # fmt: skip
    ours = kit.train(config, start, gradients)[0][-1]
    params = {key: torch.nn.Parameter(torch.tensor(value)) for key, value in start.items()}
    groups = [
        {"params": [params["kernel"]], "weight_decay": 0.3},
        {"params": [params["bias"]], "weight_decay": 0.0},
    ]
    optimizer = getattr(optimizers, theirs)(groups, lr=0.02, betas=(0.85, 0.95), eps=1e-6)
    for gradient in gradients:
        for key, value in gradient.items():
            params[key].grad = torch.tensor(value)
        if theirs == "NAdamW":  # LAMB's own clipping is to 1 too
            torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
    for key in shapes:
        np.testing.assert_allclose(ours[key], params[key].detach().numpy(), rtol=1e-5, atol=1e-6)


def test_each_layer_of_a_stack_has_a_ratio_and_what_does_not_decay_has_none(kit):
    params = kit.vit()
    gradient = kit.vit(seed=1)
    fields = dict(lr=0.1, eps=1e-6, weight_decay=0.2, weight_decay_rules=DECAYS)
    config = kit.config(name="lamb", **fields, **EXACT_DECAY)
    ours = kit.train(config, params, [gradient])[0][0]

    def expected(p, g, decay):
        p, g = p.astype(np.float64), g.astype(np.float64)
        direction = g / (np.abs(g) + 1e-6) + decay * p
        ratio = np.linalg.norm(p) / np.linalg.norm(direction) if decay else 1.0
        return p - 0.1 * ratio * direction

    layers = [x["encoder"]["layers"]["mlp"]["up"] for x in (params, gradient, ours)]
    for layer in range(3):
        p, g, found = (x["kernel"][layer] for x in layers)
        np.testing.assert_allclose(found, expected(p, g, 0.2), rtol=1e-5, atol=1e-6)
        p, g, found = (x["bias"][layer] for x in layers)
        np.testing.assert_allclose(found, expected(p, g, 0), rtol=1e-5, atol=1e-6)
    head = [x["head"]["kernel"] for x in (params, gradient, ours)]
    np.testing.assert_allclose(head[2], expected(*head[:2], 0.2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weight_decay", [0.2, 0.0])
def test_six_updates_of_lars_equal_the_formula(kit, weight_decay):
    """m = b1 m + 0.001 |p| / |g + d p| (g + d p); p = p - lr m (You et al. 2017, Algorithm 1), with a decay of 0 too.
    Biases have no ratio, as in the linear probes of MoCo v3 and MAE.
    """
    start, gradients = kit.vit(), [kit.vit(seed=seed) for seed in range(1, 7)]
    config = kit.config(
        name="lars", lr=3.0, b1=0.9, weight_decay=weight_decay, clip=0.0, weight_decay_rules=DECAYS
    )
    ours = kit.train(config, start, gradients)[0]

    def expected(p, gradients, decay, scaled):
        p, m = p.astype(np.float64), 0.0
        for g in gradients:
            u = g.astype(np.float64) + decay * p
            ratio = 1e-3 * np.linalg.norm(p) / np.linalg.norm(u) if scaled else 1.0
            m = 0.9 * m + ratio * u
            p = p - 3.0 * m
        return p

    def up(tree, name):
        return tree["encoder"]["layers"]["mlp"]["up"][name]

    for name, decay in (("kernel", weight_decay), ("bias", 0.0)):
        for layer, p in enumerate(up(start, name)):
            wanted = expected(p, [up(g, name)[layer] for g in gradients], decay, name == "kernel")
            found = up(ours[-1], name)[layer]
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
            assert np.abs(found - p).max() > 1e-3


def test_a_parameter_of_zeros_is_updated_without_a_ratio(kit):
    start = {"kernel": np.zeros((4, 3), np.float32)}
    config = kit.config(name="lamb", lr=0.1, weight_decay=0.2, **EXACT_DECAY)
    found = kit.train(config, start, [{"kernel": np.ones((4, 3), np.float32)}])[0][0]
    np.testing.assert_allclose(found["kernel"], -0.1, rtol=1e-5)


def test_frozen_parameters_stay_and_have_no_state(kit):
    params = kit.vit()
    config = kit.config(name="lamb", lr=0.1, weight_decay=0.2, freeze=("encoder/.*",))
    trajectory, state = kit.train(config, params, [kit.vit(seed=1)])
    for ours, before in zip(
        jax.tree.leaves(trajectory[0]["encoder"]), jax.tree.leaves(params["encoder"]), strict=True
    ):
        np.testing.assert_array_equal(ours, before)
    assert not any(leaf.shape[:1] == (3,) for leaf in jax.tree.leaves(state) if leaf.ndim)


@pytest.mark.parametrize(
    "fields",
    [
        dict(weight_decay_by="schedule"),
        dict(weight_decay_by="gradient"),
        dict(weight_decay_end=0.1),
    ],
)
def test_a_decay_that_cannot_be_inside_is_refused(kit, fields):
    for name in ("lamb", "lars"):
        config = kit.config(name=name, weight_decay=0.2, **fields)
        with pytest.raises(ConfigError, match="weight_decay_by"):
            kit.make(config, kit.vit())
