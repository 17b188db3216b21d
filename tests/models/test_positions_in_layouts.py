"""Every kind of positions in every layout of images: right, or refused by its name. A kind that is added later is tried
too.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.conftest import parameters
from tests.models.test_native_sizes import TINY, draw, padded
from vit_jax.base.errors import ConfigError
from vit_jax.models import positions, registry, resized
from vit_jax.models.embeddings import interpolate

INTERPOLATED = ("learned", "learned2d", "factorized", "sincos2d", "fixed2d")


def model_of(kind: str):
    config = registry.model_config("ViT-B/16", **TINY | {"position": kind, "depth": 1})
    definition, weights = registry.abstract(config)[0], parameters(config)
    variables = registry.split(registry.build(config, rngs=nnx.Rngs(0)))[1].variables
    return config, nnx.merge(definition, weights, variables)


def result_or_refusal(function: Callable, *arguments) -> tuple[np.ndarray | None, str]:
    try:
        return np.asarray(jax.jit(function)(*arguments)), ""
    except ConfigError as error:
        return None, str(error)


@pytest.mark.parametrize("kind", positions.KINDS)
def test_images_at_their_own_sizes_have_the_positions_of_their_grid(kind):
    config, model = model_of(kind)
    (image,) = draw([config.grid])
    whole = np.asarray(jax.jit(lambda x: model(x).logits)(image[None]))
    batch = padded([image], [config.grid], 4, 15)
    logits, refusal = result_or_refusal(lambda batch: model(batch).logits, batch)
    if refusal:
        assert kind in refusal
    else:
        np.testing.assert_allclose(logits, whole, atol=1e-5)


@pytest.mark.parametrize("kind", positions.KINDS)
def test_a_schedule_of_sizes_spreads_the_positions_over_fewer_patches(kind):
    config, model = model_of(kind)
    target = resized.config_at(config, (8, 12))
    try:
        resized.check_resized(config, target, resized.SCHEDULED)
    except ConfigError as error:
        assert "position" in str(error)
        return
    small = resized.resized(model, config, target, resized.SCHEDULED)
    resized.spread_sines(small, config)
    before, found = (x.positions(jnp.dtype("float32")) for x in (model, small))
    if kind in INTERPOLATED:
        prefix = before.shape[1] - np.prod(config.grid)
        expected = interpolate(
            np.asarray(before),
            target.grid,
            method=resized.SCHEDULED,
            prefix=prefix,
            old_grid=config.grid,
        )
        np.testing.assert_allclose(found, expected, atol=1e-5)
    else:
        # No parameter depends on the grid.
        assert kind in ("none", "coordinates", "transformer_xl")
