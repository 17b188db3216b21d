"""Which losses count as spikes, whatever their sign."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import Spike
from vit_jax.training.upkeep.health import examine, healthy

GRADS = {"kernel": jnp.ones(3)}
MEMORY = 5


@jax.jit
def health_after(losses):
    """The number of bad steps before each of these losses, and after the last."""
    spike = Spike(factor=3.0, memory=MEMORY)

    def step(health, numbered):
        number, loss = numbered
        return examine(health, number, loss, GRADS, spike), health.skipped

    numbered = (jnp.arange(len(losses)), losses)
    health, before = jax.lax.scan(step, healthy(GRADS), numbered)
    return jnp.append(before, health.skipped)


def spikes(losses) -> list[int]:
    """The positions of the losses that count as spikes."""
    return np.flatnonzero(np.diff(health_after(jnp.asarray(losses, jnp.float32)))).tolist()


@pytest.mark.parametrize("mean", [2.0, -5.0, 0.0], ids=["above", "below", "around"])
def test_a_steady_loss_of_any_sign_is_no_spike_and_one_far_above_it_is(mean):
    losses = mean + np.random.default_rng(0).uniform(-1, 1, 40)
    assert spikes(losses) == []
    losses[30] = 100.0
    assert spikes(losses) == [30]
    losses[30] = -100.0
    assert spikes(losses) == []


def test_a_loss_above_0_is_a_spike_from_the_factor_times_its_mean_on():
    assert spikes([2.0] * 8 + [5.9]) == []
    assert spikes([2.0] * 8 + [6.1]) == [8]
    assert spikes([2.0] * (MEMORY - 1) + [6.1]) == []  # still too early to know


def test_a_state_with_the_mean_of_losses_below_0_goes_on():
    old = healthy(GRADS).replace(mean_loss=jnp.float32(-5))
    spike = Spike(factor=3.0, memory=MEMORY)
    new = examine(old, jnp.int32(50), jnp.float32(-4), GRADS, spike)
    assert new.skipped == 0
    assert 4 < new.mean_loss < 5
