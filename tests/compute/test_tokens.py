"""Tokens in parts."""

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.compute import choices, tokens


def parts(count, implementation="auto"):
    cut = tokens.cut(jnp.zeros((1, count, 8)), implementation=implementation, head_size=8)
    return [part.shape[1] for part in cut] if isinstance(cut, tuple) else count


def test_on_tpus_tokens_that_begin_another_tile_are_a_part_of_their_own(monkeypatch):
    assert parts(257) == 257
    monkeypatch.setattr(choices, "platform", lambda: "tpu")
    assert parts(257) == [256, 1]
    assert parts(261, "xla") == [256, 5]
    for count in (5, 128, 197, 256):
        assert parts(count) == count


def test_kernels_take_whole_tokens(monkeypatch):
    monkeypatch.setattr(choices, "platform", lambda: "tpu")
    assert parts(257, "splash") == 257
    assert parts(2049) == 2049  # splash by itself


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_what_is_cut_is_joined_again(monkeypatch, platform):
    monkeypatch.setattr(choices, "platform", lambda: platform)
    x = jnp.arange(2 * 257 * 3.0).reshape(2, 257, 3)
    cut = tokens.cut(x, implementation="auto", head_size=8)
    assert tokens.count(cut) == 257
    np.testing.assert_array_equal(tokens.join(cut), x)
