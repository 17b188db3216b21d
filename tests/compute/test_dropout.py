"""Dropout and stochastic depth of one array; of a model in test_encoder."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.compute import dropout


def test_dropout_and_drop_path_leave_what_has_no_key_or_no_rate():
    x = jnp.ones((2, 3))
    assert dropout.dropout(x, 0.5, None) is x and dropout.dropout(x, 0.0, jax.random.key(0)) is x
    assert dropout.drop_path(x, 0.5, None) is x
    np.testing.assert_array_equal(dropout.drop_path(x, 0.0, jax.random.key(0)), x)


def test_the_gradient_of_what_is_dropped_is_zero_and_finite():
    x = jnp.asarray([[jnp.inf, 1.0, 2.0, 3.0] * 8])
    dropped = dropout.dropout(x, 0.5, jax.random.key(3))
    gradient = jax.grad(lambda x: dropout.dropout(x, 0.5, jax.random.key(3))[:, 1:].sum())(x)
    assert not np.isnan(dropped).any()
    assert set(np.unique(gradient)) == {0, 2}


def test_the_rate_of_stochastic_depth_grows_with_depth_or_is_the_same_in_every_layer():
    rates, keys = dropout.by_depth(0.3, 4, jax.random.key(0))
    np.testing.assert_allclose(rates, [0, 0.1, 0.2, 0.3], rtol=1e-6)
    same, others = dropout.by_depth(0.3, 4, jax.random.key(0), constant=True)
    np.testing.assert_array_equal(same, np.float32(0.3))
    np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(others))
