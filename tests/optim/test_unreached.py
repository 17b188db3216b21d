"""Options of the optimizer reach what they name, adapters too, and the log names those that reach nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax import optim
from vit_jax.base import patterns
from vit_jax.models import lora, registry
from vit_jax.optim import multipliers
from vit_jax.optim.options import Optim
from vit_jax.optim.unreached import find_unreached

MODEL = registry.model_config("ViT-mu/8", image_size=8, num_classes=3, depth=3)
WHOLE = registry.abstract_weights(MODEL)[1].params
ADAPTERS = lora.Adapters(2, (".*",), ("head/.*",))
ADAPTED = ADAPTERS.trained_like(WHOLE)
HEAD = ("(?!head/).*",)  # a pattern of all but the head


def shapes_of(params) -> dict[str, tuple[int, ...]]:
    return {name: param.shape for name, param in patterns.named(params).items()}


def unreached(params, **options) -> list[str]:
    return find_unreached(Optim(**options), shapes_of(params), MODEL.layers, MODEL.inputs)


def kernel_of(name: str) -> str:
    """The kernel that the matrix of an adapter belongs to, by the model's parameters."""
    (kernel,) = set(lora.kernel_names(name)) & set(patterns.names(WHOLE))
    return kernel


def test_adapters_have_the_rates_and_the_decay_of_their_kernels():
    config = Optim(
        layer_decay=0.5,
        weight_decay=0.1,
        weight_decay_rules=((".*/qkv/kernel", 2.0), (".*/mlp/.*", 0.0), (".*kernel", 1.0)),
    )
    of_kernels, of_adapters = (
        (
            multipliers.learning_rates(config, shapes_of(params), MODEL.layers, MODEL.inputs),
            multipliers.weight_decays(config, shapes_of(params)),
        )
        for params in (WHOLE, ADAPTED)
    )
    matrices = [name for name in patterns.names(ADAPTED) if name.startswith("adapters/")]
    assert {kernel_of(name).split("/")[-2] for name in matrices} >= {"qkv", "out", "up", "down"}
    for name in matrices:
        kernel = kernel_of(name)
        expected, rate = of_kernels[0][kernel], of_adapters[0][name]
        np.testing.assert_array_equal(np.ravel(rate), np.ravel(expected))
        assert of_adapters[1][name] == of_kernels[1][kernel], name
    assert of_adapters[0]["head/kernel"] == 1.0


def test_an_adapter_is_updated_by_the_rate_of_its_layer_and_decays():
    config = Optim(
        name="sgd", lr=1.0, b1=0.0, clip=0.0, schedule="constant", layer_decay=0.5, weight_decay=0.1
    )
    params = jax.tree.map(lambda x: jnp.ones(x.shape), ADAPTED)
    how = {"layers": MODEL.layers, "inputs": MODEL.inputs}
    optimizer, _ = optim.make(config, params, total_steps=10, to_steps=lambda _: 0, **how)
    zeros = optax.tree.zeros_like(params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    decayed = patterns.named(updates)
    a = decayed["adapters/encoder/layers/mlp/up/lora_a"]
    np.testing.assert_allclose(a[:, 0, 0], -0.1 * np.array([0.125, 0.25, 0.5]), rtol=1e-6)
    assert not decayed["head/bias"].any()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"weight_decay": 0.1, "weight_decay_rules": ()}, "config.optim.weight_decay = 0.1"),
        ({"weight_decay": 0.1, "freeze": (".*kernel",)}, "config.optim.weight_decay = 0.1"),
        ({"weight_decay_rules": ((".*", 1.0),)}, "config.optim.weight_decay_rules"),
        ({"weight_decay_by": "schedule"}, "config.optim.weight_decay_by"),
        ({"layer_decay": 0.5, "freeze": HEAD}, "config.optim.layer_decay"),
        ({"lr_rules": (("position", 2.0),), "freeze": HEAD}, "config.optim.lr_rules"),
        ({"lr_rules": ((".*", 2.0), ("head/.*", 3.0))}, "config.optim.lr_rules"),
        ({"late": ("position",), "freeze": HEAD}, "config.optim.late"),
    ],
    ids=str,
)
def test_an_option_that_changes_no_trained_parameter_is_named(options, field):
    (sentence,) = unreached(WHOLE, **options)
    assert sentence.startswith(field)


def test_only_the_layers_that_are_trained_count_for_layer_wise_decay():
    frozen = ("embedding/.*", "position", "class_token", "encoder/layers[:2]/.*")
    assert unreached(WHOLE, layer_decay=0.5, freeze=frozen) == []


@pytest.mark.parametrize("params", [WHOLE, ADAPTED], ids=["whole", "adapters"])
def test_nothing_is_said_of_options_that_reach_something(params):
    rules = (("head/.*", 10.0), (".*", 1.0))
    assert unreached(params, layer_decay=0.9, weight_decay=0.1, lr_rules=rules) == []
    assert unreached(params) == []
