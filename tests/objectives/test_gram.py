"""Gram anchoring: its loss against float64 and transformers, its teacher, views of several sizes, moved places."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.interchange import zoo
from tests.models.conftest import parameters
from tests.new_models import drawn
from tests.objectives.test_dino import assembled, leaves, tiny
from vit_jax.base.errors import ConfigError
from vit_jax.compute import rope
from vit_jax.data import batches
from vit_jax.interchange import formats
from vit_jax.models import layer_features, registry, rotary
from vit_jax.objectives.dino import gram
from vit_jax.objectives.networks import OWN
from vit_jax.training.state import GRAM_TEACHER

ONE, OTHER = {"crop_area": (0.5, 1.0), "again": 2.0}, {"blur": 0.0, "again": 2.0}
LOCAL = {"count": 2, "image_size": 16}


def anchored(**changes):
    """Self-distillation with Gram anchoring from step 2 on, whose teacher is refreshed once, at step 4."""
    settings = {
        "gram_weight": 2.0,
        "gram_start": "2 steps",
        "gram_refresh": "2 steps",
        "gram_refreshes": 1,
    }
    config = tiny(**{f"objective.{name}": value for name, value in settings.items()})
    config.data.views = (ONE, OTHER, LOCAL)
    config.data.view_sizes = ({"sizes": (48, 48, 24), "again": 1.5, "start": "4 steps"},)
    config.update_from_flattened_dict(changes)
    return config  # fmt: skip


def of_numpy(student, teacher):
    found = []
    for x, y in zip(student.astype(np.float64), teacher.astype(np.float64), strict=True):
        x, y = (z / np.linalg.norm(z, axis=-1, keepdims=True) for z in (x, y))
        found.append(np.mean((x @ x.T - y @ y.T) ** 2))
    return np.array(found)


def test_the_loss_is_that_of_float64():
    random = np.random.default_rng(0)
    student, teacher = (random.normal(size=(3, 20, 8)).astype(np.float32) for _ in range(2))
    teacher[0] = student[0] + 1e-3 * teacher[0]  # almost alike, as when anchoring begins
    expected = of_numpy(student, teacher)
    loss = jax.jit(gram.loss)
    np.testing.assert_allclose(loss(student, teacher), expected, atol=1e-6, rtol=1e-5)
    low = loss(*[student.astype(jnp.bfloat16)] * 2)
    assert low.dtype == jnp.float32 and not np.asarray(low).any()


@pytest.mark.parametrize("grids", [((8, 12), (4, 6)), ((9, 6), (6, 4)), ((3, 3), (3, 3))])
def test_features_are_resized_as_pytorch_does(grids):
    torch = pytest.importorskip("torch")
    old, new = grids
    x = np.random.default_rng(0).normal(size=(2, math.prod(old), 5)).astype(np.float32)
    maps = torch.from_numpy(x).reshape(2, *old, 5).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(maps, size=new, mode="bicubic", antialias=False)
    expected = expected.permute(0, 2, 3, 1).reshape(2, -1, 5).numpy()
    np.testing.assert_allclose(gram.resized(x, old, new), expected, atol=1e-6)


def test_the_loss_of_dinov3s_features_is_that_of_transformers(tmp_path):
    """A student at 32 pixels, its Gram teacher another model that sees the same at 64."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.DINOv3ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=4,
        num_register_tokens=2,
    )  # fmt: skip
    large = np.random.default_rng(0).uniform(-1, 1, (2, 64, 64, 3)).astype(np.float32)
    small = large[:, ::2, ::2]
    ours, theirs = [], []
    for seed, x in enumerate((small, large)):
        torch.manual_seed(seed)
        model = zoo.randomize(transformers.DINOv3ViTModel(config))
        model.save_pretrained(tmp_path / str(seed))
        with torch.no_grad():
            tokens = model(torch.from_numpy(x).permute(0, 3, 1, 2)).last_hidden_state[:, 3:]
        theirs.append(tokens)
        read = vit_jax.load(tmp_path / str(seed), image_size=x.shape[1])
        last = nnx.jit(lambda model, x: layer_features.last(model(x), model.config).patches)
        ours.append(last(read, x))
    grid = theirs[1].reshape(2, 16, 16, 32).permute(0, 3, 1, 2)
    grid = torch.nn.functional.interpolate(grid, size=(8, 8), mode="bicubic", antialias=False)
    expected = of_numpy(theirs[0].numpy(), grid.permute(0, 2, 3, 1).reshape(2, 64, 32).numpy())
    loss = jax.jit(lambda x, y: gram.loss(x, gram.resized(y, (16, 16), (8, 8))))
    found = loss(*ours)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.fixture(scope="module")
def run():
    """(assembly, states before and after five steps, their metrics, the step, a batch of the first four); the last step
    has larger views.
    """
    assembly = assembled(anchored())
    state, step = jax.jit(assembly.init)(jax.random.key(0)), jax.jit(assembly.train_step)
    specs = batches.specs(assembly.config, num_classes=0)
    random, states, metrics, given = np.random.default_rng(0), [state], [], []
    for i in range(5):
        batch = {n: random.integers(0, 256, x.shape, np.uint8) for n, x in specs[i == 4].items()}
        given.append(batch)
        state, found = step(state, batch)
        states.append(state)
        metrics.append(jax.device_get(found))
    return assembly, states, metrics, step, given[0]


def test_the_gram_teacher_is_the_teacher_where_anchoring_starts_and_where_it_is_refreshed(run):
    _, states, *_ = run

    def same(state, other):
        teacher = leaves({n: tree for n, tree in other.teacher.items() if n != OWN})
        return all(
            (x == teacher[name]).all() for name, x in leaves(state.variables[GRAM_TEACHER]).items()
        )

    assert same(states[0], states[0]) and not same(states[1], states[1])
    assert same(states[2], states[2])
    assert same(states[3], states[2]) and not same(states[3], states[3])
    assert same(states[4], states[4]) and same(states[5], states[4])


def test_the_gram_teacher_is_taken_where_it_is_due_also_if_the_update_is_skipped(run):
    _, states, _, step, batch = run
    spoiled = states[1].replace(params=jax.tree.map(lambda x: x * jnp.nan, states[1].params))
    skipped, metrics = step(spoiled, batch)
    assert metrics["skipped_updates"] == 1
    teacher = leaves({n: tree for n, tree in states[1].teacher.items() if n != OWN})
    for name, taken in leaves(skipped.variables[GRAM_TEACHER]).items():
        np.testing.assert_array_equal(taken, teacher[name])


def test_the_loss_counts_from_its_start_on_with_views_of_every_size(run):
    assembly, _, metrics, *_ = run
    for step, found in enumerate(metrics):
        parts = found["dino_loss"] + found["ibot_loss"] + 0.1 * found["koleo_loss"]
        parts += 2.0 * found["gram_loss"] if step >= 2 else 0
        np.testing.assert_allclose(found["loss"], parts, rtol=1e-5)
        assert found["gram_loss"] > 0
    first, second = assembly.networks.objective.views
    assert (first.model.image_size, first.gram.image_size) == (32, (64, 64))
    assert (second.model.image_size, second.gram.image_size) == ((48, 48), (72, 72))
    assert second.local["image_2"].image_size == (24, 24)


def test_the_gram_teacher_is_saved_with_the_run(run):
    _, states, *_ = run
    parts = states[3].parts()
    assert set(parts["anchor_variables"]) == set(parts["teacher"])
    again = states[0].with_parts(parts)
    assert (
        leaves(again.variables[GRAM_TEACHER]).keys()
        == leaves(states[3].variables[GRAM_TEACHER]).keys()
    )
    assert OWN not in states[3].weights().params


def written(folder, **options):
    """A checkpoint for `tiny`'s model, but for the options."""
    config = registry.model_config("ViT-mu/8", image_size=32, num_classes=0, **options)
    formats.write_checkpoint(formats.LoadedCheckpoint(config, parameters(config)), folder, "timm")
    return str(folder)


def test_a_gram_teacher_of_another_width_is_refused_by_name(tmp_path):
    other = written(tmp_path / "wide.safetensors", width=64, activation="gelu")
    with pytest.raises(
        ConfigError, match="gram_teacher = .*wide.* width 64, and the student's is 32"
    ):
        assembled(anchored(**{"objective.gram_teacher": other}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.view_sizes": ({"sizes": (48, 48, 20)},)}, "view 2: image size 20x20 cannot be split into patches of 8"),
        ({"data.view_sizes": ({"sizes": (48, 40, 24)},)}, "the global views have different sizes"),
        ({"data.view_sizes": ({"sizes": (48, 24)},)}, "entry 0 has 2 sizes, and config.data.views has 3"),
        ({"data.view_sizes": ({"size": (48, 48, 24)},)}, "entry 0.* no option 'size'"),
        ({"data.view_sizes": ((0.5, 48, 24),)}, r"entry 0, \(0.5, 48, 24\), is no {"),
        ({"data.views": (ONE | {"again": 1.125}, OTHER | {"again": 1.125}, LOCAL)}, "view 0, cut again: .* 36x36 "),
        ({"data.views": (ONE | {"again": 1.3}, OTHER, LOCAL)}, "again = 1.3 times 32 pixels is no whole number"),
        ({"data.views": (ONE, OTHER, LOCAL | {"again": 2.0})}, "again is for both global views"),
        ({"objective.gram_weight": 0.0}, "again is for both global views"),
        ({"model.rope_jitter": 2.0}, "model.rope_jitter = 2 moves places .* which is none"),
        ({"model.rope": "centred", "model.position": "none", "model.rope_rescale": 0.5}, "rope_rescale = 0.5"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        assembled(anchored(**changes))


def test_places_are_shifted_and_scaled_as_dinov3_does():
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.models.dinov3_vit.modeling_dinov3_vit")
    coordinates = theirs.get_patches_center_coordinates(3, 5, dtype=torch.float32, device="cpu")
    shift, scale = np.array([0.1, -0.2], np.float32), np.array([1.5, 0.7], np.float32)
    moved = (coordinates.numpy() + shift) * scale
    periods = 100.0 ** (np.arange(4) / 4)
    expected = (2 * np.pi * moved[:, :, None] / periods).reshape(15, 8)
    angles = rope.centred_angles((3, 5), 16, theta=100.0)
    found = rope.moved(angles, jnp.array(shift), jnp.array(scale), theta=100.0)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_places_move_in_training_alone_and_within_their_bounds():
    options = dict(rope="centred", position="none", image_size=16, patch=4, num_classes=0)
    moves = dict(rope_shift=0.5, rope_jitter=2.0, rope_rescale=1.5)
    config = registry.model_config(
        "ViT-mu/4", **{n: v for n, v in options.items() if n != "patch"}, **moves
    )
    moves = jax.jit(jax.vmap(lambda seed: rotary._moves(config, jax.random.key(seed))))
    shift, scale = (np.asarray(x) for x in moves(np.arange(200)))
    assert 0.4 < np.abs(shift).max() <= 0.5 and (shift[:, 0] != shift[:, 1]).all()
    assert 1 / 3 <= scale.min() < 0.5 and 2 < scale.max() <= 3
    ratios = scale[:, 0] / scale[:, 1]  # of two jitters alone
    assert ratios.min() >= 1 / 4 and ratios.max() <= 4
    model = drawn(lambda: registry.build(config, rngs=nnx.Rngs(0)))
    x = np.ones((1, 16, 16, 3), np.float32)
    x[:, :8] = 0

    @nnx.jit(static_argnames="deterministic")
    def tokens(model, x, seed, deterministic):
        return model(
            x, deterministic=deterministic, rngs=nnx.Rngs(dropout=jax.random.key(seed))
        ).tokens

    still, again, first, second = (
        np.asarray(tokens(model, x, seed, seed < 2)) for seed in range(4)
    )
    np.testing.assert_array_equal(still, again)
    assert np.abs(first - second).max() > 1e-4


def test_anchoring_that_would_never_begin_is_refused():
    objective = assembled(anchored(**{"objective.gram_start": "100%"})).networks.objective
    with pytest.raises(ConfigError, match="gram_start = '100%' is step 8, and the run has 8"):
        objective.check_effects()
