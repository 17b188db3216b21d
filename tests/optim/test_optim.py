"""What all optimizers share: clipping, learning rates by name and layer, weight decay, freezing;
Polyak averaging.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.repeats import slow_unless
from vit_jax import optim
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.models import registry
from vit_jax.optim.multipliers import learning_rates


def flat(tree):
    return dict(
        zip(
            patterns.names(tree),
            [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)],
            strict=True,
        )
    )


def test_the_whole_chain_equals_the_formula_in_float64(kit):
    """Plain SGD with everything on: clipping without the frozen, warm-up, rules, layer decay and
    weight decay.
    """
    config = kit.config(
        name="sgd", b1=0.0, lr=0.1, schedule="linear", warmup="2", lr_end=0.01, clip=1.0, weight_decay=0.2,
        weight_decay_rules=(("head/kernel", 3.0), (".*kernel", 1.0)), lr_rules=(("head/.*", 5.0),),
        layer_decay=0.5, freeze=("position",),
    )  # fmt: skip
    params, grads = kit.vit(), [kit.vit(seed) for seed in (1, 2, 3, 4)]
    trajectory, _ = kit.train(config, params, grads)

    # Layers are 0 (inputs), 1, 2, 3 and 4 (the rest): 0.5^(4 - l).
    layers = np.array([0.5**3, 0.5**2, 0.5])
    p = flat(params)
    for t, (gradient, ours) in enumerate(zip(grads, trajectory, strict=True)):
        gradient = flat(gradient)
        relative = [0, 0.5, 1, 0.1 + 0.9 * 7 / 8][t]
        norm = np.sqrt(sum((g**2).sum() for name, g in gradient.items() if name != "position"))
        for name, g in gradient.items():
            if name == "position":
                continue
            rate = 0.1 * relative * (5.0 if name.startswith("head") else 1.0)
            if name.startswith(("embedding", "class_token")):
                rate *= 0.5**4
            elif "layers" in name:
                rate *= layers.reshape(3, *[1] * (g.ndim - 1))
            decay = 0.2 * (
                3.0 if name == "head/kernel" else 1.0 if name.endswith("kernel") else 0.0
            )
            p[name] = p[name] - rate * (g / max(norm, 1.0) + decay * p[name])
        for name, value in flat(ours).items():
            np.testing.assert_allclose(
                value, p[name], rtol=0, atol=1e-6, err_msg=f"{name} after update {t}"
            )


def test_decay_by_schedule_ignores_the_learning_rate_and_its_rules(kit):
    """big_vision: update = -schedule (lr u + wd p); wd 0.1 lr there is wd 0.1 in papers."""
    params, zero = kit.vit(), jax.tree.map(np.zeros_like, kit.vit())
    rules = (("head/.*", 7.0),)
    common = dict(name="sgd", lr=1e-3, schedule="linear", lr_rules=rules)
    bv, _ = kit.train(
        kit.config(**common, weight_decay=0.04, weight_decay_by="schedule"), params, [zero, zero]
    )
    papers, _ = kit.train(
        kit.config(**common, weight_decay=40.0, weight_decay_by="lr"), params, [zero, zero]
    )
    shrunk = (1 - 0.04) * (1 - 0.04 * 0.9)
    for name in ("embedding/kernel", "encoder/layers/mlp/up/kernel"):
        np.testing.assert_allclose(flat(bv[-1])[name], shrunk * flat(params)[name], rtol=1e-6)
        np.testing.assert_allclose(flat(papers[-1])[name], shrunk * flat(params)[name], rtol=1e-6)
    np.testing.assert_allclose(
        flat(bv[-1])["head/kernel"], shrunk * flat(params)["head/kernel"], rtol=1e-6
    )
    faster = (1 - 7 * 0.04) * (1 - 7 * 0.04 * 0.9)
    np.testing.assert_allclose(
        flat(papers[-1])["head/kernel"], faster * flat(params)["head/kernel"], rtol=1e-6
    )


def test_decay_by_gradient_is_the_decay_of_a_loss_with_a_squared_norm(kit):
    """It goes through momentum and second moment, and is multiplied by the rate of each parameter."""
    params, gradients = kit.vit(), [kit.vit(1), kit.vit(2)]
    rules = dict(lr_rules=(("head/.*", 7.0),), name="rmsprop", lr=1e-2, eps=1e-3)
    config = kit.config(
        **rules, weight_decay=0.3, weight_decay_by="gradient", freeze=("pool/probe",)
    )
    found, _ = kit.train(config, params, gradients)
    optimizer, _ = kit.make(kit.config(**rules, freeze=("pool/probe",)), params)
    expected, state = params, jax.jit(optimizer.init)(params)

    @jax.jit
    def step(gradient, state, params):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for gradient in gradients:
        penalised = flat(gradient)
        for name, p in flat(expected).items():
            if name.endswith("kernel"):
                penalised[name] = penalised[name] + 0.3 * p
        tree = jax.tree.unflatten(jax.tree.structure(gradient), list(penalised.values()))
        expected, state = jax.device_get(step(tree, state, expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found[-1], expected)


def test_decay_goes_to_its_end_by_a_cosine(kit):
    """Without gradients a parameter shrinks by lr times the decay of its step."""
    params = {"layer": {"kernel": jnp.ones((2, 2))}}
    zero = jax.tree.map(jnp.zeros_like, params)
    config = kit.config(
        name="sgd", b1=0.0, lr=0.5, schedule="constant", weight_decay=0.04, weight_decay_end=0.4
    )
    optimizer, _ = optim.make(config, params, total_steps=4, to_steps=lambda _: 0)
    state, exact = optimizer.init(params), 1.0
    for t in range(4):
        updates, state = optimizer.update(zero, state, params)
        params = optax.apply_updates(params, updates)
        exact *= 1 - 0.5 * (0.4 + (0.04 - 0.4) * (1 + np.cos(np.pi * t / 4)) / 2)
        np.testing.assert_allclose(params["layer"]["kernel"], exact, rtol=1e-6)


def test_by_default_only_kernels_decay(kit):
    params, zero = kit.vit(), jax.tree.map(np.zeros_like, kit.vit())
    after = flat(kit.train(kit.config(weight_decay=0.5), params, [zero])[0][-1])
    changed = [
        name for name, before in flat(params).items() if not np.array_equal(after[name], before)
    ]
    assert changed == [name for name in flat(params) if name.endswith("kernel")]


def test_with_warmup_the_first_update_changes_nothing(kit):
    config = kit.config(warmup="2 steps", weight_decay=0.1)
    trajectory, _ = kit.train(config, kit.vit(), [kit.vit(1), kit.vit(2)])
    jax.tree.map(np.testing.assert_array_equal, trajectory[0], kit.vit())
    assert not np.array_equal(trajectory[1]["head"]["bias"], kit.vit()["head"]["bias"])


# These look at whole tensors or keep other averages; the others are of each entry alone, as AdamW is.
OF_TENSORS = ("adamw", "lamb", "lars", "adafactor", "schedule_free")


@pytest.mark.parametrize("name", slow_unless(OF_TENSORS, optim.OPTIMIZERS))
def test_stacked_layers_move_as_separate_ones_would(kit, name):
    config = kit.config(name=name, clip=1.0, weight_decay=0.1, lr=0.1)

    def apart(tree):
        layers = tree["encoder"]["layers"]
        blocks = {f"block{i}": jax.tree.map(lambda x: x[i], layers) for i in range(3)}  # noqa: B023
        return tree | {"encoder": {"norm": tree["encoder"]["norm"]} | blocks}

    grads = [kit.vit(1), kit.vit(2)]
    stacked, _ = kit.train(config, kit.vit(), grads)
    separate, _ = kit.train(config, apart(kit.vit()), [apart(g) for g in grads])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), apart(stacked[-1]), separate[-1]
    )


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_frozen_parameters_stay_and_have_no_state(kit, name):
    everything_but_the_head = ("(?!head/).*",)
    config = kit.config(name=name, freeze=everything_but_the_head, weight_decay=0.1, clip=1.0)
    gradient = kit.vit(1)
    gradient["position"] = np.full_like(
        gradient["position"], np.nan
    )  # must reach neither the norm nor the parameter
    trajectory, state = kit.train(config, kit.vit(), [gradient, gradient])
    after = trajectory[-1]
    for parameter, before in flat(kit.vit()).items():
        assert np.array_equal(flat(after)[parameter], before) != parameter.startswith("head/"), (
            parameter
        )
    assert np.isfinite(after["head"]["kernel"]).all()
    assert {x.shape for x in jax.tree.leaves(state)} <= {(), (4, 7), (7,)}


@pytest.mark.parametrize("name", slow_unless(OF_TENSORS, optim.OPTIMIZERS))
def test_frozen_layers_of_a_stack_stay_and_others_learn_as_without_them(kit, name):
    """Their gradients, not finite here, reach neither the norm of clipping nor another layer."""
    config = kit.config(name=name, freeze=("encoder/layers[:2]/.*",), weight_decay=0.1, clip=1.0)
    before, gradient = flat(kit.vit()), kit.vit(1)
    jax.tree.map(lambda x: x[:2].fill(np.nan), gradient["encoder"]["layers"])
    after = flat(kit.train(config, kit.vit(), [gradient, gradient])[0][-1])
    for parameter, array in after.items():
        assert np.isfinite(array).all(), parameter
        moved = array != before[parameter]
        if "/layers/" in parameter:
            assert not moved[:2].any(), parameter
            moved = moved[2:]
        assert moved.any(), parameter


def test_clipping_leaves_small_gradients_and_zero_turns_it_off(kit):
    gradient = {"kernel": np.array([3.0, 4.0], np.float32)}
    for clip, expected in ((1.0, [0.6, 0.8]), (10.0, [3, 4]), (0.0, [3, 4])):
        config = kit.config(name="sgd", lr=1.0, clip=clip)
        after = kit.train(config, {"kernel": np.zeros(2, np.float32)}, [gradient])[0][-1]["kernel"]
        np.testing.assert_allclose(-after, expected, rtol=1e-6)


def test_mae_layer_decay_of_vit_l(kit):
    """d = 0.75, 24 layers: 0.75^25 for the inputs, 0.75^(24 - i) for block i, 1 for the last norm
    and the head.
    """
    params = jax.tree.map(np.ones_like, kit.vit(depth=24))
    config = kit.config(name="sgd", lr=1.0, layer_decay=0.75)
    after = kit.train(config, jax.tree.map(np.zeros_like, params), [params])[0][-1]
    moved = {name: -x for name, x in flat(after).items()}
    for name in ("embedding/kernel", "embedding/bias", "class_token", "position"):
        np.testing.assert_allclose(moved[name], 0.75**25, rtol=1e-6)
    for name in ("encoder/layers/attention/qkv/kernel", "encoder/layers/mlp/up/bias"):
        per_layer = moved[name].reshape(24, -1)
        np.testing.assert_allclose(
            per_layer,
            np.repeat([[0.75 ** (24 - i)] for i in range(24)], per_layer.shape[1], 1),
            rtol=1e-6,
        )
    for name in ("encoder/norm/scale", "pool/probe", "head/kernel", "head/bias"):
        np.testing.assert_allclose(moved[name], 1)


def test_abstract_parameters_are_enough_to_make_and_initialise(kit):
    abstract = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, kit.vit()))
    optimizer, _ = kit.make(
        kit.config(layer_decay=0.9, freeze=("position",), moment_dtype="bfloat16"), abstract
    )
    state = jax.eval_shape(optimizer.init, abstract)
    updates, after = jax.eval_shape(optimizer.update, abstract, state, abstract)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    assert jax.tree.map(lambda x: (x.shape, x.dtype), updates) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract
    )


def test_make_returns_the_learning_rate_over_time(kit):
    _, lr = kit.make(kit.config(lr=3e-3, schedule="cosine", warmup="20%"), kit.vit())
    np.testing.assert_allclose(
        [lr(0), lr(1), lr(2), lr(6), lr(10)], [0, 1.5e-3, 3e-3, 1.5e-3, 0], rtol=1e-6, atol=1e-10
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(name="adam"), "config.optim.name = 'adam' is not an optimizer; did you mean 'adamw'"),
        (
            dict(freeze=("haed/.*",)),
            "config.optim.freeze: the pattern 'haed/.[*]' matches no parameter.*head/",
        ),
        (dict(freeze=(".*",)), "leaves no parameter to train"),
        (dict(lr_rules=(("encodr/.*", 0.1),)), "config.optim.lr_rules.*encoder/"),
        (dict(weight_decay_rules=((".*kernels", 1.0),)), "config.optim.weight_decay_rules.*kernel"),
    ],
)
def test_wrong_fields_are_errors_that_name_them(kit, fields, message):
    with pytest.raises(ConfigError, match=message):
        kit.make(kit.config(**fields), kit.vit())


def test_layer_decay_without_layers_is_an_error(kit):
    with pytest.raises(
        ConfigError,
        match="layer_decay needs a model that says .* exactly one stack of them .found: none.",
    ):
        kit.make(kit.config(layer_decay=0.9), {"head": {"kernel": np.zeros((2, 2), np.float32)}})


def test_late_parameters_do_not_move_in_the_warmup_of_the_others(kit):
    fields = dict(name="sgd", warmup="3 steps", late=("(?!head/).*",), late_warmup="2 steps")
    params = {
        "encoder": {"kernel": np.ones(2, np.float32)},
        "head": {"kernel": np.ones(2, np.float32)},
    }
    trajectory, _ = kit.train(kit.config(**fields, b1=0.0, lr=0.1), params, [params] * 6)
    moved = [[1 - float(p[name]["kernel"][0]) for p in trajectory] for name in params]
    rates = [[0, 0, 0, 0, 0.05, 0.1], [0, 0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.1]]
    np.testing.assert_allclose(moved, np.cumsum(rates, axis=1), rtol=1e-5)


def test_no_option_of_the_schema_is_unread(kit):
    class Spy:
        def __init__(self, config):
            # `ema` is read by the train step, which calls `ema_update`.
            self.config, self.read = config, {"ema"}

        def __getattr__(self, name):
            self.read.add(name)
            return getattr(self.config, name)

        __getitem__ = __getattr__

    read = set()
    for options in (
        {},
        {"schedule": "staircase", "boundaries": ("50%",)},
        {"schedule": "polynomial", "late": ("embedding/.*",)},
        {"name": "adamuon"},
        {"name": "shampoo"},
        {"name": "soap"},
    ):
        spy = Spy(kit.config(**options))
        optimizer, learning_rate = kit.make(spy, kit.vit())
        state = optax.chain(optimizer).init(kit.vit())
        jax.eval_shape(optax.chain(optimizer).update, kit.vit(), state, kit.vit())
        learning_rate(1)
        read |= spy.read
    assert read == set(kit.config())


def test_ema_follows_the_formula_and_forgets_the_start(kit):
    ema = {"kernel": np.zeros(3, np.float32)}
    expected = np.zeros(3)
    for count in range(5):
        params = {"kernel": np.arange(3, dtype=np.float32) + count}
        ema = optim.ema_update(ema, params, 0.35, count)
        d = min(0.35, (1 + count) / (10 + count))  # 0.1, 0.18, 0.25, 0.31, then the cap
        expected = d * expected + (1 - d) * params["kernel"]
        np.testing.assert_allclose(ema["kernel"], expected, rtol=1e-6)
    assert ema["kernel"].dtype == jnp.float32


def test_ema_of_a_constant_is_that_constant_bit_for_bit(kit):
    params = kit.vit()
    jax.tree.map(
        np.testing.assert_array_equal, optim.ema_update(params, params, 0.9999, 10**6), params
    )


def test_layer_decay_counts_through_several_stacks(kit):
    config = registry.model_config("BiT-R26x1", units=(2, 1, 3))
    assert list(config.layers.values()) == [1, 1, 1, 1, 2]
    shapes = {
        "backbone/root/conv/kernel": (7, 7, 3, 64),
        "backbone/stages/1/first/conv1/kernel": (1, 1, 64, 64),
        "backbone/stages/1/layers/conv1/kernel": (1, 1, 1, 256, 64),
        "backbone/stages/3/layers/norm1/scale": (2, 1024),
        "norm/scale": (1024,),
        "objective/layers/kernel": (4, 2, 2),
    }
    found = learning_rates(kit.config(layer_decay=0.5), shapes, config.layers)
    assert found["backbone/root/conv/kernel"] == 0.5**7
    assert found["backbone/stages/1/first/conv1/kernel"] == 0.5**6
    np.testing.assert_array_equal(found["backbone/stages/1/layers/conv1/kernel"].ravel(), [0.5**5])
    np.testing.assert_array_equal(found["backbone/stages/3/layers/norm1/scale"], [[0.25], [0.5]])
    assert found["norm/scale"] == found["objective/layers/kernel"] == 1


def test_layer_decay_counts_the_layers_of_each_exit_by_themselves(kit):
    config = registry.model_config("DVT-T2T-ViT-12", depth=3)
    shapes = {
        "exit_1/embedding/project/kernel": (576, 256),
        "exit_1/encoder/layers/mlp/up/kernel": (3, 256, 512),
        "exit_2/class_token": (1, 1, 256),
        "exit_2/encoder/layers/mlp/up/kernel": (3, 256, 512),
        "exit_2/relations/up/kernel": (12, 36),
        "exit_2/head/kernel": (256, 1000),
    }
    found = learning_rates(kit.config(layer_decay=0.5), shapes, config.layers)
    found = {name: np.ravel(value).tolist() for name, value in found.items()}
    assert found == {
        "exit_1/embedding/project/kernel": [0.5**4],
        "exit_1/encoder/layers/mlp/up/kernel": [0.5**3, 0.5**2, 0.5],
        "exit_2/class_token": [0.5**4],
        "exit_2/encoder/layers/mlp/up/kernel": [0.5**3, 0.5**2, 0.5],
        "exit_2/relations/up/kernel": [1.0],
        "exit_2/head/kernel": [1.0],
    }


_WITH_INPUTS = {
    "class_position": ("FF-Ti/16", {}),
    "root_norm/scale": ("AxialResNet-50", {}),
    "pre_norm/bias": ("ViT-mu/16", {"pre_norm": True}),
    "patch_norm/scale": ("ViT-mu/16", {"patch_norm": True}),
    "rope": ("ViT-mu/16", {"rope": "mixed", "position": "none", "width": 32, "heads": 2}),
    "class_token/small": ("CrossViT-Ti", {}),
    "embedding/backbone/root/norm/scale": ("R+ViT-Ti/16", {}),
}


@pytest.mark.parametrize("name, model", _WITH_INPUTS.items(), ids=_WITH_INPUTS)
def test_what_comes_before_the_layers_has_the_slowest_rate(kit, name, model):
    config = registry.model_config(model[0], num_classes=3, **model[1])
    shapes = {n: x.shape for n, x in patterns.named(registry.abstract(config)[1]).items()}
    found = learning_rates(kit.config(layer_decay=0.5), shapes, config.layers, config.inputs)
    assert found[name] == 0.5 ** (sum(config.layers.values()) + 1)


@pytest.mark.parametrize("family", list(registry.families()), ids=registry.family_name)
def test_no_family_leaves_a_parameter_before_its_layers_at_the_full_rate(kit, family):
    """Only norms, pooling and heads, which follow the layers, have it."""
    config = registry.model_config(family.VARIANTS[0], num_classes=3)
    shapes = {n: x.shape for n, x in patterns.named(registry.abstract(config)[1]).items()}
    found = learning_rates(kit.config(layer_decay=0.5), shapes, config.layers, config.inputs)
    full = [n for n, rate in found.items() if np.ndim(rate) == 0 and rate == 1]
    after = r"(exit_\d/)?(encoder/)?(norm|head|pool|top|top_norm|features|relations)(/.*)?"
    assert full and all(re.fullmatch(after, n) for n in full)
