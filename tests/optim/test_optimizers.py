"""The direction of each optimizer, against its formula in float64 NumPy and against torch."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from vit_jax.optim import OPTIMIZERS


def gradients(steps, shape=(3, 5)):
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(steps)]


def bf16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def adamw(p, grads, config, keep):
    m = v = np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        m = config.b1 * m + (1 - config.b1) * g
        v = config.b2 * v + (1 - config.b2) * g**2
        p = p - config.lr * (m / (1 - config.b1**t)) / (
            np.sqrt(v / (1 - config.b2**t)) + config.eps
        )
        m = keep(m)
        yield p


def nadamw(p, grads, config, keep):
    m = v = np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        m = config.b1 * m + (1 - config.b1) * g
        v = config.b2 * v + (1 - config.b2) * g**2
        ahead = (config.b1 * m + (1 - config.b1) * g) / (1 - config.b1**t)
        p = p - config.lr * ahead / (np.sqrt(v / (1 - config.b2**t)) + config.eps)
        m = keep(m)
        yield p


def sgd(p, grads, config, keep):
    m = np.zeros_like(p)
    for g in grads:
        m = config.b1 * m + g
        p = p - config.lr * m
        m = keep(m)
        yield p


def lars(p, grads, config, keep):
    m = np.zeros_like(p)
    for g in grads:
        m = config.b1 * m + 1e-3 * np.linalg.norm(p) / np.linalg.norm(g) * g
        p = p - config.lr * m
        m = keep(m)
        yield p


def lion(p, grads, config, keep):
    m = np.zeros_like(p)
    for g in grads:
        p = p - config.lr * np.sign(config.b1 * m + (1 - config.b1) * g)
        m = keep(config.b2 * m + (1 - config.b2) * g)
        yield p


def adafactor(p, grads, config, keep):
    """For parameters too small to be factored; `test_adafactor.py` has the others."""
    m = v = np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        decay = min(config.b2, 1 - t**-0.8)
        v = decay * v + (1 - decay) * (g**2 + 1e-30)
        m = config.b1 * m + (1 - config.b1) * g / np.sqrt(v)
        p = p - config.lr * m
        m = keep(m)
        yield p


def rmsprop(p, grads, config, keep):
    m, v = np.zeros_like(p), np.ones_like(p)
    for g in grads:
        v = config.b2 * v + (1 - config.b2) * g**2
        m = config.b1 * m + g / np.sqrt(v + config.eps)
        p = p - config.lr * m
        m = keep(m)
        yield p


# Without decay LAMB has no trust ratio and is Adam; `test_trust.py` has the ratio.
REFERENCES = {
    "adamw": adamw, "nadamw": nadamw, "lamb": adamw, "sgd": sgd, "lion": lion,
    "adafactor": adafactor, "rmsprop": rmsprop, "lars": lars,
}  # fmt: skip


def test_every_registered_optimizer_has_a_reference():
    elsewhere = {"schedule_free"}  # it moves the state's average too: `test_schedule_free.py`
    assert set(REFERENCES) | elsewhere == set(OPTIMIZERS)


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", REFERENCES)
def test_six_updates_equal_the_formula(kit, name, moment_dtype):
    config = kit.config(name=name, lr=0.01, b1=0.8, b2=0.9, moment_dtype=moment_dtype)
    start, grads = np.ones((3, 5), np.float32), gradients(6)
    trajectory, _ = kit.train(config, {"kernel": start}, [{"kernel": g} for g in grads])
    keep = bf16 if moment_dtype == "bfloat16" else np.asarray
    expected = REFERENCES[name](
        start.astype(np.float64), [g.astype(np.float64) for g in grads], config, keep
    )
    for ours, theirs in zip(trajectory, expected, strict=True):
        np.testing.assert_allclose(ours["kernel"], theirs, rtol=0, atol=5e-7)


@pytest.mark.parametrize("name", REFERENCES)
def test_bfloat16_is_the_first_moment_only_and_parameters_stay_float32(kit, name):
    config = kit.config(name=name, moment_dtype="bfloat16")
    params = {"kernel": np.ones((40, 33), np.float32)}
    trajectory, state = kit.train(config, params, [{"kernel": g} for g in gradients(2, (40, 33))])
    assert trajectory[-1]["kernel"].dtype == jnp.float32
    dtypes = [(x.dtype, x.shape) for x in jax.tree.leaves(state) if x.ndim]
    assert dtypes.count((jnp.bfloat16, (40, 33))) == 1
    others = dict.fromkeys(("adamw", "nadamw", "lamb", "rmsprop"), [(40, 33)]) | {
        "adafactor": [(33,), (40,)]
    }
    kept = [shape for dtype, shape in dtypes if dtype == jnp.float32]
    assert kept == others.get(name, [])


def test_adamw_equals_torch(kit):
    torch = pytest.importorskip("torch")
    config = kit.config(lr=0.01, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.3)
    start, grads = gradients(1)[0], gradients(5)
    ours = kit.train(config, {"kernel": start}, [{"kernel": g} for g in grads])[0][-1]["kernel"]
    theirs = torch.nn.Parameter(torch.tensor(start))
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    for g in grads:
        theirs.grad = torch.tensor(g)
        optimizer.step()
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_sgd_with_clipping_equals_torch(kit):
    torch = pytest.importorskip("torch")
    config = kit.config(name="sgd", lr=0.03, b1=0.9, clip=1.0)
    start, grads = (
        gradients(1)[0],
        [g * scale for g, scale in zip(gradients(5), (1, 0.01, 5, 0.1, 1), strict=True)],
    )
    ours = kit.train(config, {"kernel": start}, [{"kernel": g} for g in grads])[0][-1]["kernel"]
    theirs = torch.nn.Parameter(torch.tensor(start))
    optimizer = torch.optim.SGD([theirs], lr=0.03, momentum=0.9)
    for g in grads:
        theirs.grad = torch.tensor(g)
        torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        optimizer.step()
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adafactor"])
def test_without_momentum_nothing_is_stored_for_it(kit, name):
    config = kit.config(name=name, b1=0.0, lr=0.1)
    params, grad = {"kernel": np.ones((40, 33), np.float32)}, {"kernel": gradients(1, (40, 33))[0]}
    trajectory, state = kit.train(config, params, [grad])
    assert (40, 33) not in [x.shape for x in jax.tree.leaves(state)]
    if name == "sgd":
        np.testing.assert_allclose(trajectory[0]["kernel"], 1 - 0.1 * grad["kernel"], rtol=1e-6)
