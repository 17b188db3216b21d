"""Every kind of positions in every layout of images: right, or refused by its name. A kind that is added later is tried
too.
"""

from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.conftest import parameters
from tests.models.test_native_sizes import TINY, draw, padded
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.inspection import positions as inspected
from vit_jax.models import positions, registry, resized
from vit_jax.models.embeddings import interpolate

INTERPOLATED = ("learned", "learned2d", "factorized", "sincos2d", "fixed2d")


class Fourier(positions.ComputedPosition):
    """Learned 2-D Fourier features, as a user would add them."""

    def variables(self, rngs: nnx.Rngs) -> nnx.Module:
        return Frequencies(self.config.width, rngs)

    def values(self, variables, rows, columns, height, width):
        down = (rows + 0.5) / height
        across = (columns + 0.5) / width
        of_down, of_across = variables.frequencies[...]
        return jnp.sin(down[..., None] * of_down + across[..., None] * of_across)


class Frequencies(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.frequencies = nnx.Param(3 * jax.random.normal(rngs.params(), (2, width)))


@pytest.fixture
def fourier():
    positions.register("fourier", Fourier)
    yield
    del positions.KINDS["fourier"]


def model_of(kind: str, **options):
    options = TINY | {"position": kind, "depth": 1} | options
    config = registry.model_config("ViT-B/16", **options)
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


@pytest.mark.parametrize("place", ["stem", "shared", "layers"])
def test_a_computed_kind_with_parameters_is_learned_where_it_is_added(fourier, place):
    config, model = model_of("fourier", position_at=place, depth=2)
    assert config.position_place == place
    weights = registry.split(model)[1]
    named = {name for name in patterns.names(weights.params) if "frequencies" in name}
    in_layers = "encoder/layers/position/frequencies"
    assert named == {in_layers if place == "layers" else "position/frequencies"}
    (image,) = draw([config.grid])
    native = padded([image], [config.grid], 4, 15)
    if place == "stem":
        whole = jax.jit(lambda x: model(x).logits)(image[None])
        np.testing.assert_allclose(jax.jit(lambda x: model(x).logits)(native), whole, atol=1e-5)

    def loss(params):
        return nnx.merge(nnx.split(model)[0], params, weights.variables)(image[None]).logits[0, 0]

    gradient = patterns.named(jax.jit(jax.grad(loss))(weights.params))
    (name,) = named
    assert np.abs(gradient[name]).min() > 0
    tables = list(inspected.tables(SimpleNamespace(weights=weights, config=config)))
    assert len(tables) == (2 if place == "layers" else 1)
    frequencies = np.asarray(patterns.named(weights.params)[name]).reshape(-1, 2, config.width)
    rows, columns = np.divmod(np.arange(12), 4)
    for (label, what, table, grid), (down, across) in zip(tables, frequencies, strict=True):
        angles = (rows[:, None] + 0.5) / 3 * down + (columns[:, None] + 0.5) / 4 * across
        assert label.startswith("fourier positions") and (what, grid) == ("patches", config.grid)
        np.testing.assert_allclose(table, np.sin(angles), atol=1e-5)
