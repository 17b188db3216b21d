"""Images that cannot be read: an error that says what to do, or passed over and counted."""

import cv2
import jax
import numpy as np
import pytest

from tests.data.test_loader import assert_same, make_config, make_sharding, steps
from vit_jax.data.loader import eval_batches, train_batches
from vit_jax.data.order import batch_indices
from vit_jax.data.record import BadImage, DataError
from vit_jax.data.sources import open_source, open_train


@pytest.fixture
def folder(tmp_path):
    """60 JPEG images in two classes, three of them truncated."""
    random = np.random.default_rng(0)
    for i in range(60):
        path = tmp_path / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(
            cv2.imencode(".jpg", random.integers(0, 256, (24, 24, 3), dtype=np.uint8))[1].tobytes()
        )
    for i in (10, 11, 40):
        path = tmp_path / "ab"[i % 2] / f"{i}.jpg"
        path.write_bytes(path.read_bytes()[:-100])
    return tmp_path


def folder_config(folder, **data):
    fields = {"train_crop": "resize", "name": "folder", "path": str(folder), "holdout": 0.0, **data}
    return make_config(**fields)


def test_a_truncated_image_ends_training_with_its_name(folder):
    config = folder_config(folder)
    with pytest.raises(BadImage, match=r"(10|11|40)\.jpg cannot be read: its end is missing"):
        steps(open_train(config.data), config, 0, 8)


def test_skipped_images_are_replaced_by_the_next_of_the_epoch_counted_and_logged_once(
    folder, caplog
):
    config = folder_config(folder, on_bad_image="skip")
    source = open_train(config.data)
    with train_batches(source, config, make_sharding(), start_step=0, stop_step=15) as batches:
        found = [jax.tree.map(np.asarray, batch) for batch in batches]
        assert {name.rsplit("/", 1)[1] for name in batches.bad_images} == {
            "10.jpg",
            "11.jpg",
            "40.jpg",
        }
    assert sum("cannot be read" in record.getMessage() for record in caplog.records) == 3
    bad = {i for i, path in enumerate(source.paths) if path in ("a/10.jpg", "b/11.jpg", "a/40.jpg")}
    line = np.concatenate([batch_indices(0, step, 16, 60) for step in range(15)]).reshape(4, 60)
    for epoch in line:
        for offset in reversed(range(-2, 60)):
            if epoch[offset] in bad:
                epoch[offset] = epoch[(offset + 1) % 60]
    expected = source.labels[line.ravel()]
    assert np.array_equal(np.concatenate([batch["label"] for batch in found]), expected)
    assert_same(steps(source, config, 7, 15), found[7:])


def test_too_many_unreadable_images_end_training_with_some_of_their_names(folder):
    config = folder_config(folder, on_bad_image="skip", max_bad_images=2)
    with pytest.raises(
        ValueError, match=r"3 training images cannot be read, .*max_bad_images = 2 .*\.jpg: its end"
    ):
        steps(open_train(config.data), config, 0, 8)


def test_only_unreadable_images_are_an_error_and_no_endless_search(tmp_path):
    for name in ("a/1.png", "b/2.png", "b/3.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    config = folder_config(tmp_path, on_bad_image="skip")
    with pytest.raises(ValueError, match="none of the 3 training images can be read"):
        steps(open_train(config.data), config, 0, 1)


def evaluated(config):
    source = open_source(config.data, "train")
    with eval_batches(source, config, make_sharding()) as batches:
        found = [jax.tree.map(np.asarray, batch) for batch in batches]
        bad = batches.bad_images
    return source, {n: np.concatenate([batch[n] for batch in found]) for n in found[0]}, bad


def test_unreadable_images_are_left_out_of_evaluation_counted_and_named_once(folder, caplog):
    source, found, bad = evaluated(folder_config(folder, on_bad_image="skip"))
    there = np.array([path not in ("a/10.jpg", "b/11.jpg", "a/40.jpg") for path in source.paths])
    assert np.array_equal(found["mask"][:60], there) and not found["mask"][60:].any()
    assert np.array_equal(found["label"][:60], source.labels * there)
    assert not found["image"][:60][~there].any() and found["image"][:60][there].any((1, 2, 3)).all()
    assert len(bad) == 3
    messages = [record.getMessage() for record in caplog.records]
    assert sum("it is excluded from evaluation" in message for message in messages) == 3


def test_too_many_unreadable_images_end_evaluation(folder):
    config = folder_config(folder, on_bad_image="skip", max_bad_images=2)
    with pytest.raises(DataError, match="3 evaluation images cannot be read, .*max_bad_images = 2"):
        evaluated(config)


def test_what_to_do_about_an_unreadable_image_is_said(folder):
    advice = "its end is missing .*; repair or remove it, or .* config.data.on_bad_image='skip'$"
    with pytest.raises(BadImage, match=advice):
        evaluated(folder_config(folder))
    with pytest.raises(BadImage, match=advice):
        steps(open_train(folder_config(folder).data), folder_config(folder), 0, 8)


def test_an_image_that_is_met_at_each_evaluation_is_warned_of_once(folder, caplog):
    config = folder_config(folder, on_bad_image="skip")
    for _ in range(2):
        with eval_batches(open_source(config.data, "train"), config, make_sharding()) as batches:
            assert len(list(batches)) and len(batches.bad_images) == 3
    assert sum("cannot be read" in record.getMessage() for record in caplog.records) == 3
