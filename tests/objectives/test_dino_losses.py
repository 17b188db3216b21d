"""DINO's, iBOT's and KoLeo's losses against the official code's answers, and NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import oracles
from vit_jax.objectives.dino import losses

TEMPERATURE = 0.1
sinkhorn = jax.jit(losses.sinkhorn, static_argnames="iterations")
centred = jax.jit(losses.centred)


@functools.partial(jax.jit, static_argnums=2)
def moved_centre(centre, logits, momentum, weights=None):
    """The centre after a step of one part."""
    sums = jax.tree.map(lambda x: x[None], losses.sum_of_logits(logits, weights))
    return losses.moved_centre(centre, sums, momentum)


@pytest.fixture(scope="module")
def official(shared_data):
    """The head with the official parameters as (definition, parameters), all answers."""
    tensors, answers, _ = oracles.answers_of(shared_data, "dinov2_losses")
    head = nnx.eval_shape(lambda: losses.Head(
        16, hidden=32, bottleneck=12, prototypes=48, std=0.02, dtype=jnp.float32, rngs=nnx.Rngs(0)
    ))  # fmt: skip
    definition, state = nnx.split(head, nnx.Param)
    params = nnx.to_pure_dict(state)
    params["mlp"] = {
        i: {"kernel": tensors[f"mlp.{2 * i}.weight"].T, "bias": tensors[f"mlp.{2 * i}.bias"]}
        for i in range(3)
    }
    params["prototypes"] = {
        "kernel": tensors["last_layer.weight_v"].T,
        "scale": tensors["last_layer.weight_g"][:, 0],
    }
    return definition, jax.tree.map(jnp.asarray, params), answers


def by_crop(rows, crops):
    """(crops · B, …) rows crop after crop -> (B, crops, …)."""
    return jnp.asarray(rows).reshape(crops, -1, *rows.shape[1:]).swapaxes(0, 1)


def in_order(rows):
    """The teacher's probabilities, whose crops change places there before they are centred: (B, 2, K)."""
    return by_crop(rows, 2)[:, ::-1]


def test_head_is_that_of_the_official_code(official):
    definition, params, answers = official
    x = jnp.asarray(answers["teacher_cls"])
    head = jax.jit(lambda params, *parts: jnp.concatenate(nnx.merge(definition, params)(parts)))
    found = head(params, x[:3], x[3:])  # in parts
    np.testing.assert_allclose(found, answers["teacher_head"], atol=1e-5)


def test_kernels_of_a_head_begin_normal_and_are_not_cut_at_two_deviations():
    head = losses.Head(
        64, hidden=64, bottleneck=64, prototypes=8, std=0.02, dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    kernels = np.stack([layer.kernel[...] for layer in head.mlp])
    assert kernels.std() == pytest.approx(0.02, rel=0.03) and np.abs(kernels).max() > 0.06


def test_teacher_probabilities_are_those_of_the_official_code(official):
    _, _, answers = official
    logits = by_crop(answers["teacher_head"], 2)
    for iterations, name in ((3, "sinkhorn"), (1, "sinkhorn_1_iteration")):
        found = sinkhorn(logits, 0.04, iterations=iterations)
        np.testing.assert_allclose(found, in_order(answers[name]), atol=1e-5)
    np.testing.assert_allclose(
        sinkhorn(jnp.asarray(answers["ibot_teacher"]), 0.04),
        answers["ibot_sinkhorn"],
        atol=1e-5,
    )


def test_rows_that_only_fill_an_array_change_nothing(official):
    _, _, answers = official
    rows = answers["ibot_teacher"]
    filled = jnp.concatenate([rows, np.full((5, 48), 9.0)])
    present = jnp.arange(len(filled)) < len(rows)
    found = sinkhorn(filled, 0.04, present.astype(jnp.float32))
    np.testing.assert_allclose(found[: len(rows)], answers["ibot_sinkhorn"], atol=1e-5)
    assert not found[len(rows) :].any()
    moved = moved_centre(jnp.zeros(48), filled, 0.9, present.astype(jnp.float32))
    np.testing.assert_allclose(moved, answers["ibot_center_used_1"][0, 0], atol=1e-6)


def test_parts_of_a_batch_move_the_centre_once_each_by_its_rows():
    logits = np.random.default_rng(0).normal(size=(3, 8, 48)).astype(np.float32)
    present = np.arange(8) < np.array([[1], [8], [3]])
    sums = jax.vmap(losses.sum_of_logits)(logits, present.astype(np.float32))
    moved = losses.moved_centre(jnp.ones(48), sums, 0.9)
    np.testing.assert_allclose(moved, 0.9 + 0.1 * logits[present].mean(0), rtol=1e-5)


def test_centre_follows_the_batches_and_is_used_from_the_next_step_on(official):
    _, _, answers = official
    for start, prefix, step, steps in (
        (by_crop(answers["teacher_head"], 2)[:, ::-1].swapaxes(0, 1).reshape(12, 48), "", 0.5, 3),
        (jnp.asarray(answers["ibot_teacher"]), "ibot_", 0.3, 2),
    ):
        centre = jnp.zeros(48)
        for i in range(steps):
            logits = start + step * i
            np.testing.assert_allclose(
                centre, answers[f"{prefix}center_used_{i}"].ravel(), atol=1e-6
            )
            np.testing.assert_allclose(
                centred(logits, centre, 0.04), answers[f"{prefix}centered_{i}"], atol=1e-5
            )
            centre = moved_centre(centre, logits, 0.9)


def test_losses_and_gradients_are_those_of_the_official_code(official):
    definition, params, answers = official
    taught = in_order(answers["sinkhorn"])
    tokens = {
        name: by_crop(answers[f"student_{name}_cls"], n)
        for name, n in (("global", 2), ("local", 4))
    }

    def parts(params, tokens):
        head = nnx.merge(definition, params)
        of_global, of_local = head([tokens["global"], tokens["local"]])
        every = losses.class_token_loss(taught, of_global, [of_local], TEMPERATURE).mean()
        alone = losses.class_token_loss(taught, of_global, [], TEMPERATURE).mean()
        spread = 0.1 * losses.koleo(tokens["global"].swapaxes(0, 1)).mean(1).sum()
        return every + spread, (alone * 2 / 10, every, spread)

    (_, found), grads = jax.jit(jax.value_and_grad(parts, (0, 1), has_aux=True))(params, tokens)
    dino_global, dino, spread = found
    np.testing.assert_allclose(dino_global, answers["dino_global"], rtol=1e-5)
    np.testing.assert_allclose(dino, answers["dino_global"] + answers["dino_local"], rtol=1e-5)
    np.testing.assert_allclose(spread, answers["koleo"], rtol=1e-5)
    of_head, of_tokens = grads
    expected = {
        "last_layer.weight_v": of_head["prototypes"]["kernel"].T,
        "last_layer.weight_g": of_head["prototypes"]["scale"][:, None],
        "mlp.0.weight": of_head["mlp"][0]["kernel"].T,
        "student_global_cls": of_tokens["global"].swapaxes(0, 1).reshape(12, 16),
        "student_local_cls": of_tokens["local"].swapaxes(0, 1).reshape(24, 16),
    }
    for name, gradient in expected.items():
        exact = answers[f"grad/{name}"]
        np.testing.assert_allclose(gradient, exact, atol=1e-4 * np.abs(exact).max(), err_msg=name)


def test_patch_loss_and_its_gradient_are_those_of_the_official_code(official):
    _, _, answers = official
    masks = answers["ibot_masks"]
    most = masks.sum(1).max()
    places = np.zeros((len(masks), most), int)
    present = np.arange(most) < masks.sum(1)[:, None]
    places[present] = np.arange(masks.sum())
    taught, student = (jnp.asarray(answers[f"ibot_{x}"]) for x in ("sinkhorn", "student"))

    def loss(student):
        each = losses.patch_loss(
            taught[places], student[places], jnp.asarray(present, float), TEMPERATURE
        )
        return each.mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(student)
    np.testing.assert_allclose(value, answers["ibot_loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, answers["grad/ibot_student"], atol=1e-6)


def test_all_are_exact_in_float64():
    random = np.random.default_rng(0)
    teacher, student = random.normal(size=(2, 6, 2, 20))
    local, x = random.normal(size=(6, 3, 20)), random.normal(size=(7, 5))

    @jax.jit
    def compute(teacher, centre, student, local, x):
        found = losses.sinkhorn(teacher, 0.07)
        dino = losses.class_token_loss(found, student, [local], 0.1)
        return found, dino, losses.koleo(x), losses.centred(teacher, centre, 0.05)

    with jax.enable_x64(True):
        found, dino, koleo, centred = compute(teacher, teacher.mean((0, 1)), student, local, x)
    q = np.exp(teacher.reshape(12, 20) / 0.07).T
    q /= q.sum()
    for _ in range(3):
        q = q / q.sum(1, keepdims=True) / 20
        q = q / q.sum(0, keepdims=True) / 12
    q = (q * 12).T.reshape(6, 2, 20)
    np.testing.assert_allclose(found, q, rtol=1e-6)
    views = np.concatenate([student, local], 1) / 0.1
    logs = views - np.log(np.exp(views).sum(-1, keepdims=True))
    pairs = [(t, v) for t in range(2) for v in range(5) if t != v]
    exact = sum(-(q[:, t] * logs[:, v]).sum(-1) for t, v in pairs) / len(pairs)
    np.testing.assert_allclose(dino, exact, rtol=1e-6)
    soft = np.exp((teacher - teacher.mean((0, 1))) / 0.05)
    np.testing.assert_allclose(centred, soft / soft.sum(-1, keepdims=True), rtol=1e-6)
    exact = x / np.linalg.norm(x, axis=1, keepdims=True)
    apart = np.linalg.norm(exact[:, None] - exact, axis=-1) + np.diag(np.full(7, np.inf))
    np.testing.assert_allclose(koleo, -np.log(apart.min(1)), atol=1e-6)


def test_frozen_prototypes_get_no_gradient_and_pass_one_on(official):
    definition, params, answers = official

    def total(params, frozen):
        head = nnx.merge(definition, params)
        return jnp.square(head([jnp.asarray(answers["teacher_cls"])], frozen=frozen)[0]).sum()

    gradient = jax.jit(jax.grad(total))
    free, frozen = (gradient(params, f) for f in (False, True))
    assert not any(g.any() for g in jax.tree.leaves(frozen["prototypes"]))
    jax.tree.map(np.testing.assert_array_equal, frozen["mlp"], free["mlp"])


@pytest.mark.parametrize(("std", "alike"), [(0.02, True), (0.1, False)])
def test_biases_soon_outweigh_the_features_in_a_small_head_whose_kernels_begin_too_small(
    std, alike
):
    """After ten steps of Adam at 1e-3 in one direction."""

    @jax.jit
    def answer():
        head = losses.Head(
            64, hidden=128, bottleneck=32, prototypes=256, std=std, dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        )  # fmt: skip
        for layer in head.mlp:
            layer.bias[...] = jnp.full_like(layer.bias[...], 0.01)
        return head([jax.random.normal(jax.random.key(0), (100, 64))])[0]

    logits = np.asarray(answer())
    assert (logits.var(axis=0).mean() / np.square(logits).mean() < 0.2) == alike
