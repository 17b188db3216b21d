"""Adapters of any model: which layers they are on, and what they change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.conftest import parameters
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.models import lora, registry
from vit_jax.models.classifier import HEADS
from vit_jax.models.lora import ADAPTERS, A, Adapters, B

ALL = (".*",)
ONE_OF_EACH = (
    "ViT-B/16", "R50+ViT-B/16", "Mixer-B/16", "DeepViT-S", "LocalViT-T", "T2T-ViT-7", "EfficientNet-B0",
)  # fmt: skip


def shapes(name: str, **options) -> dict:
    return registry.abstract_weights(registry.model_config(name, **options))[1].params


def size(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_rank_16_on_query_and_value_of_vit_b_has_the_published_number_of_parameters():
    found = Adapters(16, (".*/query", ".*/value"), (HEADS,))
    params = shapes("ViT-B/16", num_classes=101)
    assert list(found.chosen(params)) == [
        f"encoder/layers/attention/{name}" for name in ("query", "value")
    ]
    assert size(found.trained_like(params)) == 667_493


@pytest.mark.parametrize("heads", [HEADS, "head(_distilled)?/.*"])  # that of an earlier version
def test_a_model_without_a_head_has_adapters_alone(heads):
    params = registry.abstract(registry.model_config("ViT-mu/16", num_classes=0))[1]
    base, trained = Adapters(2, ALL, (heads,)).split(params)
    assert patterns.names(base) == patterns.names(params) and not jax.tree.leaves(trained)


@pytest.fixture(scope="module")
def model():
    """A small ViT, its parameters, and adapters of all its layers whose products are not zero."""
    config = registry.model_config(
        "ViT-mu/16", image_size=32, num_classes=3, depth=2, width=8, heads=2, mlp_dim=12
    )
    definition, params = registry.abstract(config)[0], parameters(config)
    found = Adapters(2, ALL, (HEADS,))
    base, trained = found.split(params)
    new = found.init(params, jax.random.key(0))
    random = np.random.default_rng(0)
    new = jax.tree.map(lambda x: jnp.float32(random.standard_normal(x.shape)), new)
    return definition, params, base, trained | {ADAPTERS: new}


def test_new_adapters_change_nothing(model):
    _, params, base, trained = model
    found = Adapters(2, ALL, (HEADS,))
    new = trained | {ADAPTERS: found.init(params, jax.random.key(1))}
    assert np.abs(new[ADAPTERS]["encoder"]["layers"]["attention"]["key"][A]).min() > 0
    jax.tree.map(np.testing.assert_array_equal, lora.whole(base, new), params)


def test_query_key_and_value_have_an_adapter_each_in_one_parameter(model):
    _, params, base, trained = model
    merged, new = lora.whole(base, trained), trained[ADAPTERS]["encoder"]["layers"]["attention"]
    x = np.random.default_rng(1).standard_normal((2, 5, 8))  # of two layers
    for slot, name in enumerate(("query", "key", "value")):
        a, b = np.float64(new[name][A]), np.float64(new[name][B])
        kernel = np.float64(params["encoder"]["layers"]["attention"]["qkv"]["kernel"])[:, :, slot]
        unmerged = np.einsum("lnd,ldhc->lnhc", x, kernel)
        unmerged += np.einsum("lnr,lrhc->lnhc", np.einsum("lnd,ldr->lnr", x, a), b)
        ours = np.float64(merged["encoder"]["layers"]["attention"]["qkv"]["kernel"])[:, :, slot]
        np.testing.assert_allclose(np.einsum("lnd,ldhc->lnhc", x, ours), unmerged, atol=1e-5)


def test_heads_are_inputs_of_the_output_layer(model):
    _, params, base, trained = model
    new = trained[ADAPTERS]["encoder"]["layers"]["attention"]["out"]
    assert new[A].shape == (2, 2, 4, 2) and new[B].shape == (2, 2, 8)
    expected = params["encoder"]["layers"]["attention"]["out"]["kernel"] + np.einsum(
        "lhcr,lrd->lhcd", new[A], new[B]
    )
    merged = lora.whole(base, trained)["encoder"]["layers"]["attention"]["out"]["kernel"]
    np.testing.assert_allclose(merged, expected, atol=1e-5)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_family_can_be_adapted(name):
    params, found = shapes(name), Adapters(4, ALL, (HEADS,))
    base, _ = found.split(params)
    merged = jax.eval_shape(lora.whole, base, found.trained_like(params))
    assert merged == params
    kernels = {target.kernel for target in found.chosen(params).values()}
    assert kernels and not any(patterns.matching((HEADS,), kernels))


@pytest.mark.parametrize(
    "targets, message", [((".*/querry",), "querry"), ((), "lora_targets is empty")]
)
def test_a_pattern_that_matches_no_layer_is_an_error(targets, message):
    with pytest.raises(ConfigError, match=message):
        Adapters(4, targets, (HEADS,)).chosen(shapes("ViT-B/16"))
    with pytest.raises(ConfigError, match="config.lora.also"):
        Adapters(4, ALL, ("haed/.*",)).chosen(shapes("ViT-B/16"))
