"""What a run looks like from inside, and that looking changes nothing."""

import json

import jax
import numpy as np
import pytest

import vit_jax
from tests.training.test_writers import values_in
from vit_jax.base import schema
from vit_jax.config import config_class, default_config
from vit_jax.data import sources
from vit_jax.data.augmentation.augment import normalize
from vit_jax.data.labels.masks import mask_table
from vit_jax.devices import meshes
from vit_jax.recipes.user_files import load_config
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.upkeep import snapshots


def test_a_histogram_counts_as_numpy_does():
    values = np.random.default_rng(0).standard_normal((7, 5, 3)).astype(np.float32)
    found = jax.jit(snapshots.histogram)(values)
    counts, edges = np.histogram(values, bins=snapshots.BINS)
    np.testing.assert_array_equal(found["counts"], counts)
    np.testing.assert_allclose(found["edges"], edges, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["sum_squares"], np.square(values.astype(float)).sum(), 1e-5)


def test_of_values_that_are_all_equal_the_last_bin_has_all():
    found = snapshots.histogram(np.full(9, 0.5, np.float32))
    assert found["counts"].sum() == 9 and found["counts"][-1] == 9


def test_images_are_shown_as_they_were_before_they_were_normalised():
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 6, 3)).astype(np.uint8)
    data = schema.typed(config_class(), default_config()).data
    normal = normalize(images, data.mean, data.std, np.float32)
    np.testing.assert_array_equal(snapshots.pixels(normal, data), images)


def test_by_default_there_is_nothing_to_compute():
    assembly = assemble(
        resolve(load_config("configs/digits.py")), num_classes=10, examples_per_epoch=100
    )
    mesh = meshes.make_mesh(vars(assembly.config.mesh))
    assert not snapshots.Snapshots(assembly, mesh)._due


def test_images_with_masks_are_shown_beside_them_and_what_is_predicted():
    config = load_config("configs/segmentation.py:smoke,panoptic")
    config.init_from, config.model.name = "", "ViT-mu/8"
    config.model.update(width=16, depth=2, heads=2, mlp_dim=16, position="sincos2d")
    config.data.update(dict(mean=(0.5,), std=(0.5,), interpolation="bilinear"))
    config = resolve(config)
    source = sources.open_train(config.data)
    assembly = assemble(config, num_classes=11, examples_per_epoch=100, masks=mask_table(source))
    records = [source[i] for i in range(3)]
    batch = {
        "image": np.stack([record.image for record in records]),
        "label": np.stack([record.label for record in records]),
    }
    state = jax.jit(assembly.init)(jax.random.key(0))
    found = jax.device_get(jax.jit(snapshots.make_images(assembly))(state, batch))
    np.testing.assert_array_equal(found["images"][..., 0], batch["image"][..., 0])
    np.testing.assert_array_equal(found["labels"][0], batch["label"] & 255)
    shown = snapshots.with_masks(found["images"], found["labels"], source.classes)
    assert shown.shape[0] == 3 and shown.shape[2] > 3 * 48 and shown.dtype == np.uint8
    np.testing.assert_array_equal(shown[:, :48, :48], found["images"])
    assert (shown[:, :48, 48:96] != shown[:, :48, :48]).any()


@pytest.mark.slow
def test_a_run_that_is_looked_at_trains_the_same(tmp_path):
    losses, tags = [], set()
    for every in ("0 steps", "2 steps"):
        config = load_config("configs/digits.py")
        config.model.update(width=16, depth=1, heads=2, mlp_dim=16)
        config.duration, config.batch_size, config.optim.warmup = "5 steps", 8, "0 steps"
        config.data.eval_split, config.log.every = "test[:8]", "1 steps"
        config.log.images = config.log.histograms = every
        vit_jax.train(config, tmp_path / every)
        lines = map(json.loads, (tmp_path / every / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
        tags = {(step, value.tag) for step, value in values_in(tmp_path / every / "tensorboard")}
    assert losses[0] == losses[1]
    assert {step for step, tag in tags if tag == "images/7"} == {1, 2, 4}
    for kind in ("parameters", "gradients", "updates"):
        assert {step for step, tag in tags if tag == f"{kind}/head/kernel"} == {1, 2, 4}
    assert any(tag.startswith("config") for _, tag in tags)
