"""CaiT's sizes and its two kinds of blocks; against timm in tests/interchange/test_zoo.py."""

import jax
import numpy as np
import pytest

from tests.models.conftest import apply, parameters
from vit_jax.models import layout, registry

# Facts §59: parameters with 1,000 classes, at the size of the images that weights are published for.
PARAMETERS = {
    ("XXS24", 224): 11_956_264,
    ("XXS36", 224): 17_299_720,
    ("XS24", 384): 26_670_088,
    ("S24", 224): 46_916_200,
    ("S36", 384): 68_366_632,
    ("M36", 384): 271_221_352,
    ("M48", 448): 356_460_520,
}


@pytest.mark.parametrize(("size", "pixels"), PARAMETERS)
def test_sizes_have_the_published_number_of_parameters(size, pixels):
    config = registry.model_config(f"CaiT-{size}", image_size=pixels, num_classes=1000)
    shapes = jax.tree.leaves(registry.abstract(config)[1])
    assert sum(x.size for x in shapes) == PARAMETERS[size, pixels]


def test_the_class_token_changes_no_patch():
    """And of what is captured of a block it is the one that has read nothing."""
    config = registry.model_config(
        "CaiT-XXS24", image_size=(16, 24), patch=8, depth=2, width=16, mlp_dim=32, heads=2, num_classes=3,
        remat="none",
    )  # fmt: skip
    params = parameters(config)
    x = np.random.default_rng(0).uniform(-1, 1, (2, 16, 24, 3)).astype(np.float32)
    output = apply(config, params, x, capture=True)
    assert output.tokens.shape == (2, 7, 16)
    assert output.intermediates["blocks"].shape == (2, 2, 7, 16)
    attention = output.intermediates["attention"]
    assert attention.shape == (2, 2, 2, 6, 6)
    assert not layout.layouts(config)["attention"].class_token
    other = apply(config, params | {"class_token": -params["class_token"]}, x)
    np.testing.assert_array_equal(other.tokens[:, 1:], output.tokens[:, 1:])
    assert np.abs(other.logits - output.logits).max() > 1e-3
