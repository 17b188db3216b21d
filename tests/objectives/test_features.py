"""Learning the features of other models, against PyTorch's losses and NumPy in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests.models.conftest import parameters
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.compute import platform
from vit_jax.config import default_config
from vit_jax.data import batches
from vit_jax.interchange import formats
from vit_jax.interchange.file_header import preprocessing_of
from vit_jax.interchange.loading import convert
from vit_jax.models import registry
from vit_jax.objectives.features import features, losses
from vit_jax.objectives.features.standardize import Moments, PhiS, hadamard, phi_s
from vit_jax.training.assembly import assemble, resolve

WIDTHS = (1, 2, 12, 16, 20, 36, 64, 192, 384, 768, 1024, 1152, 1280, 1408, 1664)


@pytest.fixture(autouse=True)
def random():
    return np.random.default_rng(0)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_distance_and_its_gradient_are_pytorchs(random, share):
    torch = pytest.importorskip("torch")
    from torch.nn import functional

    student, teacher = (2 * random.normal(size=(3, 5, 7)) for _ in range(2))
    student[0, 0] = 0  # which has no direction
    x = torch.tensor(student, requires_grad=True)
    y = torch.tensor(teacher)
    cosine = 1 - functional.cosine_similarity(x, y, dim=-1)
    smooth = functional.smooth_l1_loss(x, y, reduction="none").mean(-1)
    expected = share * cosine + (1 - share) * smooth
    distance = jax.jit(losses.distance, static_argnums=2)
    found = distance(student, teacher, share)
    np.testing.assert_allclose(found, expected.detach(), atol=1e-6)
    gradient = jax.jit(jax.grad(lambda s: distance(s, teacher, share).sum()))
    of_student = np.asarray(gradient(student.astype(np.float32)))
    assert np.isfinite(of_student).all()
    expected[1:].sum().backward()
    np.testing.assert_allclose(of_student[1:], x.grad[1:], atol=1e-6)


def test_teachers_are_dropped_as_unic_drops_them(random):
    of_teachers = random.uniform(size=(3, 4000)).astype(np.float32)
    taught = np.asarray(losses.drop(jax.random.key(0), jnp.asarray(of_teachers), 0.3))
    largest = of_teachers == of_teachers.max(0)
    assert (taught[largest] == 1).all()
    assert abs(taught[~largest].mean() - 0.7) < 0.02
    found = np.asarray(
        losses.combined(jnp.asarray(of_teachers), jnp.asarray(taught)), np.float64
    ).mean()
    expected = (taught.astype(np.float64) * of_teachers).sum() / taught.sum()
    assert abs(found - expected) < 1e-6


def observed(standard: Moments | PhiS, batch: np.ndarray, parts: int) -> dict:
    """What the parts of a batch say of its statistics, as a step stacks it."""
    each = [standard.observe(jnp.asarray(part, jnp.float32)) for part in np.split(batch, parts)]
    return jax.tree.map(lambda *x: jnp.stack(x), *each)


@pytest.mark.parametrize("parts", [1, 4])
def test_moments_are_those_from_before_the_batch(random, parts):
    moments, mean, std = Moments(5), np.zeros(5), np.ones(5)
    for weight in (1.0, 0.25):
        batch = 3 + 2 * random.normal(size=(4, 6, 5))
        standard = (batch - mean) / (std + 1e-6)
        np.testing.assert_allclose(moments(jnp.asarray(batch)), standard, rtol=1e-5, atol=1e-5)
        moments.update(observed(moments, batch, parts), jnp.float32(weight))
        flat = batch.reshape(-1, 5)
        mean = (1 - weight) * mean + weight * flat.mean(0)
        std = (1 - weight) * std + weight * flat.std(0, ddof=1)
    np.testing.assert_allclose(moments.mean[...], mean, rtol=1e-5)
    np.testing.assert_allclose(moments.std[...], std, rtol=1e-5)


@pytest.mark.parametrize("size", WIDTHS)
def test_hadamard_matrices_are_orthogonal_and_have_one_magnitude(size):
    matrix = hadamard(size).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-6)
    np.testing.assert_allclose(np.abs(matrix), size**-0.5, rtol=1e-6)


@pytest.mark.parametrize("parts", [1, 4])
def test_phi_s_gives_every_channel_one_variance_and_can_be_undone(random, parts):
    mixing = random.normal(size=(12, 12)) * np.geomspace(0.1, 10, 12)
    batches = [random.normal(size=(8, 9, 12)) @ mixing + 50 for _ in range(4)]
    standard = PhiS(12, batches=3)
    for batch in batches:
        standard.update(observed(standard, batch, parts), jnp.float32(0))
    seen = np.concatenate(batches[:3]).reshape(-1, 12)  # the fourth came too late
    covariance = np.cov(seen.T, bias=True)
    result = np.asarray(standard(jnp.asarray(seen, jnp.float32)), np.float64)
    np.testing.assert_allclose(result.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(result.var(0), 1, atol=1e-4)
    with jax.enable_x64(True):
        matrix = np.asarray(phi_s(jnp.asarray(covariance)))
    np.testing.assert_allclose(np.diag(matrix @ covariance @ matrix.T), 1, atol=1e-6)
    standardised = (seen - seen.mean(0)) @ matrix.T
    undone = standardised @ matrix * np.linalg.eigvalsh(covariance).mean() + seen.mean(0)
    np.testing.assert_allclose(undone, seen, atol=1e-6 * np.abs(seen).max())


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Files of a headless ViT and of a Mixer without class token, of other patch grids."""
    folder, paths = tmp_path_factory.mktemp("teachers"), []
    for name, options in {
        "vit": dict(name="ViT-mu/8", width=24, heads=2, depth=1, num_classes=0, image_size=24),
        "mixer": dict(
            name="Mixer-S/16", width=16, depth=1, mlp_dim=16, token_mlp_dim=8, image_size=32
        ),
    }.items():
        config = registry.model_config(**options)
        seen = preprocessing_of(
            {"image_size": config.image_size, "mean": (0.4,) * 3, "std": (0.3,) * 3}
        )
        checkpoint = formats.LoadedCheckpoint(config, parameters(config), preprocessing=seen)
        paths.append(str(folder / f"{name}.npz"))
        formats.write_checkpoint(checkpoint, paths[-1], "official")
    return tuple(paths)


def run_of(teachers, **changes):
    config = default_config()
    config.data.image_size, config.batch_size, config.duration = 32, 8, "8 steps"
    config.model.name = "ViT-mu/8"
    config.objective.update(dict(name="features", teachers=teachers, hidden=8, last_hidden=16))
    config.optim.update(dict(lr=0.01, warmup="0 steps"))
    config.update_from_flattened_dict(changes)
    return assemble(resolve(config), num_classes=10, examples_per_epoch=64)


@pytest.mark.parametrize(
    "standardize, adaptor",
    [("moments", "ladder"), pytest.param("phi_s", "block", marks=pytest.mark.slow)],
)
def test_a_student_learns_from_teachers_of_other_grids_and_without_class_tokens(
    random, teachers, standardize, adaptor
):
    changes = {
        "objective.standardize": standardize,
        "objective.adaptor": adaptor,
        "objective.sample": 2,
    }
    assembly = run_of(teachers, **changes)
    seen = {"image": jnp.asarray(random.integers(0, 256, (8, 32, 32, 3), np.uint8))}
    state = jax.jit(assembly.init)(jax.random.key(0))
    configs = [t.config for t in assembly.networks.teachers]
    weights = [registry.Weights(parameters(config, seed=1), {}) for config in configs]
    state = state.replace(frozen_teachers=tuple(weights))
    step, told = jax.jit(assembly.train_step), []
    for _ in range(8):
        state, metrics = step(state, seen)
        told.append(jax.device_get(metrics))
    first = 2 if standardize == "phi_s" else 1
    assert standardize != "phi_s" or [m["loss"] for m in told[:2]] == [0, 0]
    assert 0 < told[-1]["loss"] < 0.95 * told[first]["loss"]
    for number in range(2):
        name = f"cosine_{number}"
        assert told[-1][name] > told[first][name]
    # Held out nothing is drawn, and no statistic moves: the loss is that of each image alone.
    objective = assembly.networks.objective

    @jax.jit
    def held_out(state, images, key):
        learner = dataclasses.replace(state.learner(assembly.networks), held_out=True)
        before = nnx.to_pure_dict(nnx.state(learner.modules))
        loss, _ = objective(learner, {"image": images}, nnx.Rngs(key))
        return loss, before, nnx.to_pure_dict(nnx.state(learner.modules))

    images, others = (jnp.asarray(random.normal(size=(4, 32, 32, 3)), jnp.float32) for _ in "ab")
    loss, before, after = held_out(state, images, jax.random.key(0))
    beside_others, *_ = held_out(state, others.at[1].set(images[1]), jax.random.key(1))
    assert loss[1] == beside_others[1] and (loss != beside_others).sum() == 3
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"objective.teachers": ()}, "needs teachers: set --config.objective.teachers="),
        ({"objective.teachers": ("/nowhere.npz",)}, "the teacher: .*nowhere.npz"),
        ({"objective.kinds": ("patches", "tokens")}, "config.objective.kinds = .* one or both of"),
        ({"batch_size": 4, "accumulate": 4}, "config.batch_size / accumulate = 1"),
        ({"model.name": "BiT-R26x1"}, "no grid in common: set it to mlp, linear or block"),
        (
            {"data.channels": 1, "data.mean": (0.5,), "data.std": (0.5,)},
            "sees images of 3 channels",
        ),
    ],
)
def test_what_cannot_be_learned_is_refused_before_the_run(teachers, changes, message):
    with pytest.raises(UserError, match=message):
        run_of(**{"teachers": teachers} | changes)


def test_options_that_a_teachers_file_leaves_open_are_set_by_convert(tmp_path):
    config = registry.model_config(
        "ViT-mu/8", heads=2, num_classes=0, image_size=24, activation="gelu", epsilon=1e-6
    )
    checkpoint = formats.LoadedCheckpoint(config, parameters(config))
    plain, ours = str(tmp_path / "plain.safetensors"), str(tmp_path / "ours")
    formats.write_checkpoint(checkpoint, plain, "timm")
    safetensors.numpy.save_file(safetensors.numpy.load_file(plain), plain)  # without our header
    with pytest.raises(
        UserError, match="(?s)the teacher: .*heads.* pass --model to 'vit_jax convert'"
    ):
        run_of((plain,))
    options = {"heads": 2, "activation": "gelu", "pool": "token", "epsilon": 1e-6}
    convert(plain, ours, "orbax", data={"mean": (0.4,) * 3, "std": (0.3,) * 3}, **options)
    (teacher,) = run_of((ours,)).networks.teachers
    assert teacher.config.heads == 2


def test_what_is_interpolated_and_what_cannot_be_told_apart_is_said(teachers, caplog):
    features._report_grid.cache_clear()
    caplog.set_level("INFO", "absl")
    objective = run_of(teachers).networks.objective
    logged = [text for text in caplog.messages if "which are interpolated to them" in text]
    assert len(logged) == len({text.split()[0] for text in logged}) > 0
    assert not objective.warning({"cosine_0": 0.9998, "cosine_1": 0.3})
    text = objective.warning({"cosine_0": 0.3, "cosine_1": 1.0})
    assert f"are those of {teachers[1]}, " in text and "nothing is left to learn" in text


def test_teachers_compute_in_the_type_of_the_student(teachers, monkeypatch):
    networks = run_of(teachers, **{"model.dtype": "bfloat16"}).networks
    monkeypatch.setattr(platform, "current", lambda: "tpu")
    assert {t.config.dtype for t in networks.teachers} == {"float32"}
    assert {t.config.dtype for t in networks.for_devices().teachers} == {"bfloat16"}


def test_phi_s_is_refused_for_widths_without_a_hadamard_matrix():
    with pytest.raises(ConfigError, match="no Hadamard matrix of 100 rows .* set it to moments"):
        PhiS(100, 1)


@pytest.mark.parametrize(
    "adaptor, standardize, kinds",
    [
        ("linear", "none", ("summary",)),
        ("mlp", "moments", ("patches",)),
        ("block", "phi_s", ("summary", "patches")),
    ],
)
def test_each_kind_of_adaptor_and_scale_makes_a_step(teachers, adaptor, standardize, kinds):
    changes = {"adaptor": adaptor, "standardize": standardize, "kinds": kinds}
    assembly = run_of(teachers, **{f"objective.{name}": value for name, value in changes.items()})
    state = jax.eval_shape(assembly.init, jax.random.key(0))
    batch = {"image": jax.ShapeDtypeStruct((8, 32, 32, 3), np.uint8)}
    after, metrics = jax.eval_shape(assembly.train_step, state, batch)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert {"cosine_0", "cosine_1", "loss"} <= set(metrics)
    assert assembly.step_flops > 0


@pytest.mark.parametrize(
    "sizes", [{"data.size_schedule": ((0, 16), (0.5, 32))}, {"data.patch_sizes": (8, 4)}]
)
def test_a_student_learns_at_sizes_that_vary_by_step_and_teachers_keep_theirs(teachers, sizes):
    assembly = run_of(teachers, **sizes, **{"objective.adaptor": "mlp"})
    state = jax.eval_shape(assembly.init, jax.random.key(0))
    specs = batches.specs(assembly.config, 10, False, None)
    assert len({spec["image"].shape for spec in specs}) == 2
    for batch in specs:
        after, metrics = jax.eval_shape(assembly.train_step, state, batch)
        assert jax.tree.structure(after) == jax.tree.structure(state) and "cosine_1" in metrics
