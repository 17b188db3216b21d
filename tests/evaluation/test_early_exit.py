"""Images leave early: the answers of the full forward pass, in their order, whatever the batches."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tests.evaluation import toy_exits
from tests.models.conftest import parameters
from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data
from vit_jax.devices import meshes
from vit_jax.evaluation.early_exit import inference as module
from vit_jax.evaluation.early_exit import thresholds
from vit_jax.evaluation.early_exit.inference import Inference, check_thresholds
from vit_jax.evaluation.forward import make_forward
from vit_jax.models import registry

DATA = Data(mean=(0.5,) * 3, std=(0.25,) * 3)


@pytest.fixture(scope="module")
def toy():
    """(definition, weights, config) of the toy family."""
    config = toy_exits.Config(image_size=8, num_classes=5, head_init="normal")
    definition, weights = registry.split(toy_exits.Model(config, rngs=nnx.Rngs(3)))
    # Heads of 0.02 would be sure of nothing.
    weights.params["heads"] = jax.tree.map(lambda x: 40 * x, weights.params["heads"])
    return definition, weights, config


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setattr(registry, "GUESTS", [toy_exits])


def some_images(count):
    return np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), np.uint8)


@functools.cache
def forward(definition, config):
    return jax.jit(make_forward(definition, config, DATA))


def in_full(toy, images):
    """Logits of every exit (E, N, classes), by a program for few images and one for many."""
    definition, weights, config = toy
    more = (64 if len(images) <= 64 else 384) - len(images)
    padded = np.concatenate([images, np.zeros((more, *images.shape[1:]), np.uint8)])
    return np.asarray(forward(definition, config)(weights, padded).exits)[:, : len(images)]


@pytest.fixture(scope="module")
def inference(toy):
    """`inference(batch_size, devices)`, each compiled once for all tests."""

    @functools.cache
    def make(batch_size, devices, activation=jax.nn.softmax):
        mesh = meshes.make_mesh({"data": -1, "fsdp": 1, "tensor": 1}, jax.devices()[:devices])
        return Inference(
            toy[0], toy[2], DATA, activation=activation, batch_size=batch_size, mesh=mesh
        )

    return make


def batched(images, size, there=None):
    """Batches with padding at the end; `there` says which images are."""
    there = np.ones(len(images), bool) if there is None else there
    for start in range(0, len(images), size):
        part, real = images[start : start + size], there[start : start + size]
        padding = size - len(part)
        yield (
            np.concatenate([part, np.zeros((padding, *part.shape[1:]), np.uint8)]),
            np.concatenate([real, np.zeros(padding, bool)]),
        )


def answered(one, toy, thresholds, batches):
    weights = jax.device_put(toy[1], meshes.replicated(one._mesh))
    logits, exits = zip(*one.answers(weights, thresholds, batches), strict=True)
    return np.concatenate(logits), np.concatenate(exits)


@pytest.mark.parametrize(
    ("count", "batch_size", "devices"), [(45, 8, 1), (7, 1, 1), (5, 16, 1), (45, 8, 4), (21, 3, 4)]
)
def test_answers_are_those_of_the_full_forward_at_the_exit_an_image_leaves_at(
    toy, inference, count, batch_size, devices
):
    images = some_images(count)
    full = in_full(toy, images)
    confidence = np.asarray(jax.nn.softmax(full)).max(-1)
    # Between two images' confidences: at one of them rounding decides.
    chosen = [float(np.quantile(confidence[0], 0.61)), float(np.quantile(confidence[1], 0.39))]
    batches = batched(images, batch_size)
    logits, exits = answered(inference(batch_size, devices), toy, chosen, batches)
    expected = thresholds.exits_of(confidence, chosen)
    assert set(expected) == {0, 1, 2}
    np.testing.assert_array_equal(exits[:count], expected)
    np.testing.assert_allclose(logits[:count], full[expected, np.arange(count)], atol=1e-5)
    assert not logits[count:].any()


def test_shuffled_images_get_the_same_answers(toy, inference):
    images = some_images(40)
    order = np.random.default_rng(1).permutation(40)
    plain, plain_exits = answered(inference(8, 1), toy, (0.6, 0.5), batched(images, 8))
    mixed, mixed_exits = answered(inference(8, 1), toy, (0.6, 0.5), batched(images[order], 8))
    np.testing.assert_array_equal(mixed_exits, plain_exits[order])
    np.testing.assert_allclose(mixed, plain[order], atol=1e-6)


@pytest.mark.parametrize("devices", [1, 4])
def test_rows_without_an_image_are_passed_over(toy, inference, devices):
    images = some_images(48)
    there = np.random.default_rng(2).uniform(size=48) < 0.6
    there[8:16] = False
    chosen = (0.6, 0.5)
    logits, exits = answered(inference(8, devices), toy, chosen, batched(images, 8, there))
    full = in_full(toy, images)
    expected = thresholds.exits_of(np.asarray(jax.nn.softmax(full)).max(-1), chosen)
    np.testing.assert_array_equal(exits[there], expected[there])
    np.testing.assert_allclose(logits[there], full[expected, np.arange(48)][there], atol=1e-5)
    assert not logits[~there].any()


@pytest.mark.parametrize(
    ("chosen", "exit"),
    [((0.0, 0.0), 0), ((thresholds.NOBODY, 0.0), 1), ((thresholds.NOBODY,) * 2, 2)],
)
def test_everybody_may_leave_at_the_same_exit(toy, inference, chosen, exit):
    images = some_images(20)
    one = inference(8, 1)
    logits, exits = answered(one, toy, chosen, batched(images, 8))
    # Two full batches of 8, and half of one for the last 4.
    assert set(exits[:20]) == {exit} and one.runs == [2.5] * (exit + 1) + [0] * (2 - exit)
    assert one.padding() == pytest.approx(0)
    np.testing.assert_allclose(logits[:20], in_full(toy, images)[exit], atol=1e-5)


def test_later_exits_run_on_full_batches(toy, inference):
    images = some_images(256)
    confidence = np.asarray(jax.nn.softmax(in_full(toy, images))).max(-1)
    chosen = thresholds.geometric(confidence, 0.6)
    one = inference(16, 1)
    _, exits = answered(one, toy, chosen, batched(images, 16))
    reach = [256, int((exits > 0).sum()), int((exits > 1).sum())]
    assert one.runs == [-(-n // 16) for n in reach]


def test_one_that_waits_alone_does_not_wait_without_end(toy, inference, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 3)
    two = some_images(2)
    confidence = np.asarray(jax.nn.softmax(in_full(toy, two))).max(-1)[0]
    images = np.repeat(two[[confidence.argmax()]], 80, axis=0)
    images[0] = two[confidence.argmin()]  # The only one that does not leave at once.
    one, chosen = inference(8, 1), (float(confidence.mean()), thresholds.NOBODY)
    weights = jax.device_put(toy[1], meshes.replicated(one._mesh))
    came = 0

    def counted():
        nonlocal came
        for batch in batched(images, 8):
            came += 1
            yield batch

    next(iter(one.answers(weights, chosen, counted())))
    assert came == 4


@pytest.mark.parametrize("batch", [128, 32])
def test_the_last_images_run_in_smaller_programs(toy, inference, batch):
    images = some_images(359)
    confidence = np.asarray(jax.nn.softmax(in_full(toy, images))).max(-1)
    chosen = thresholds.geometric(confidence, 0.2)
    one = inference(batch, 1)
    logits, exits = answered(one, toy, chosen, batched(images, batch))
    reach = np.array([359, (exits[:359] > 0).sum(), (exits[:359] > 1).sum()])
    smallest = np.maximum(-(-reach // (batch // 8)) * (batch // 8), batch // 8)
    before = -(-reach // batch) * batch
    assert (one.rows < before).any() and (one.rows <= before).all() and (one.rows >= reach).all()
    assert (one.rows <= 2 * smallest).all()
    own = np.diff(one._costs, prepend=0)
    assert one.padding() == pytest.approx(1 - own @ reach / (own @ one.rows))
    assert one.padding() < 1 - own @ reach / (own @ before)
    np.testing.assert_allclose(
        logits[:359], in_full(toy, images)[exits[:359], np.arange(359)], atol=1e-5
    )


@pytest.mark.parametrize("devices", [1, 4])
def test_every_function_is_compiled_once_for_a_size_and_nothing_is_sent_between_devices(
    toy, inference, devices
):
    one = inference(8, devices)
    answered(one, toy, (0.6, 0.5), batched(some_images(61), 8))
    # Once for each number of rows, of which there are four at most.
    sizes = (one._first._cache_size(), one._later._cache_size(), one._put._cache_size())
    assert all(count <= most for count, most in zip(sizes, (4, 8, 4), strict=True))
    weights, images = toy[1], some_images(8)
    with jax.set_mesh(one._mesh):
        logits, _, carried = jax.eval_shape(one._first, weights, images)
        del logits
        placed = jax.device_put(images, one.sharding)
        put = jax.device_put(np.zeros((devices, 16, 2), np.float32), one.sharding)
        rows = jax.device_put(np.zeros((8, 2), np.float32), one.sharding)
        slots = np.zeros((devices, 8 // devices), np.int64)
        whole = jax.device_put(weights, meshes.replicated(one._mesh))
        programs = [
            one._first.lower(whole, placed).compile(),
            one._put.lower(put, rows, slots).compile(),
        ]
        waiting = jax.tree.map(
            lambda x: jax.device_put(np.zeros((devices, 16, *x.shape[1:]), x.dtype), one.sharding),
            (images, carried),
        )
        programs.append(one._later.lower(1, whole, waiting, slots).compile())
    for program in programs:
        assert not any(
            word in program.as_text() for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
        )  # fmt: skip


def test_of_a_model_with_sigmoid_loss_the_largest_probability_counts(toy, inference):
    images = some_images(32)
    full = in_full(toy, images)
    confidence = np.asarray(jax.nn.sigmoid(full)).max(-1)
    chosen = [float(np.median(row)) for row in confidence[:2]]
    _, exits = answered(inference(8, 1, jax.nn.sigmoid), toy, chosen, batched(images, 8))
    np.testing.assert_array_equal(exits, thresholds.exits_of(confidence, chosen))


def test_thresholds_that_do_not_fit_the_model_are_refused(toy):
    with pytest.raises(ConfigError, match="1 thresholds for a model with 3 exits: it takes 2"):
        check_thresholds(toy[2], (0.5,))
    with pytest.raises(ConfigError, match="it has no exits"):
        check_thresholds(toy_exits.Config(image_size=8, num_classes=5, exits=1), ())


def test_a_dynamic_vit_lets_images_leave_with_the_logits_of_its_full_forward():
    config = registry.model_config(
        "DVT-DeiT-S", image_size=16, num_classes=5, grids=(2, 4), depth=2, width=16, heads=2, mlp_dim=32,
        feature_hidden=8, feature_width=4, head_init="normal",
    )  # fmt: skip
    weights = registry.Weights(parameters(config), {})
    dvt = registry.abstract(config)[0], weights, config
    images = np.random.default_rng(0).integers(0, 256, (21, 16, 16, 3), np.uint8)
    full = in_full(dvt, images)
    confidence = np.asarray(jax.nn.softmax(full)).max(-1)
    chosen = (float(np.median(confidence[0])),)
    mesh = meshes.make_mesh({"data": -1, "fsdp": 1, "tensor": 1}, jax.devices()[:4])
    one = Inference(dvt[0], config, DATA, activation=jax.nn.softmax, batch_size=8, mesh=mesh)
    logits, exits = answered(one, dvt, chosen, batched(images, 8))
    expected = thresholds.exits_of(confidence, chosen)
    assert set(expected) == {0, 1}
    np.testing.assert_array_equal(exits[:21], expected)
    np.testing.assert_allclose(logits[:21], full[expected, np.arange(21)], atol=1e-5)
