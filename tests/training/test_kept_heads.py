"""A head that is kept, for data with other classes: each class gets the row of its name, or the run is refused."""

import logging

import cv2
import numpy as np
import pytest

import vit_jax
from tests.models.conftest import parameters
from vit_jax.base.errors import ConfigError
from vit_jax.data.labels import imagenet
from vit_jax.interchange import formats
from vit_jax.interchange.kept_heads import with_rows_by_name
from vit_jax.models import classifier, registry

TINY = dict(image_size=8, patch=4, depth=1, width=8, mlp_dim=8, heads=1)
NAMES = ("fern", "moss", "palm")


def checkpoint(classes=NAMES, **options):
    options = {"num_classes": len(classes)} | TINY | options
    config = registry.model_config("ViT-mu/16", **options)
    return formats.LoadedCheckpoint(config, parameters(config), classes)


def kernels(checkpoint):
    return {
        name: np.asarray(leaf["kernel"])
        for name, leaf in checkpoint.params.items()
        if "head" in name
    }


@pytest.mark.parametrize(
    "classes, rows",
    [
        (("palm", "fern", "moss"), (2, 0, 1)),
        (("ash", "fern", "moss"), (None, 0, 1)),
        (("moss", "fern"), (1, 0)),
        (("oak", "palm", "ash", "fern"), (None, 2, None, 0)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"distilled": True}], ids=["one head", "two heads"])
def test_each_class_gets_the_row_of_its_name_and_a_new_one_zeros(classes, rows, options):
    before = checkpoint(**options)
    after = with_rows_by_name(before, classes, ())
    assert after.model_config.num_classes == len(classes) and after.classes == classes
    for name, kernel in kernels(after).items():
        old = np.asarray(before.params[name]["kernel"])
        expected = [old[:, row] if row is not None else 0 * old[:, 0] for row in rows]
        np.testing.assert_array_equal(kernel, np.stack(expected, -1))
    assert len(kernels(after)) == 1 + bool(options)


def test_classes_of_imagenet_are_known_by_id_and_by_name():
    names, ids = tuple(imagenet.classes().values()), tuple(imagenet.classes())
    before = checkpoint(names)
    after = with_rows_by_name(before, ids[::-1], ())
    np.testing.assert_array_equal(kernels(after)["head"], kernels(before)["head"][:, ::-1])


@pytest.mark.parametrize(
    "classes, reset",
    [
        (NAMES, ()),
        (("ash", "elm", "oak"), (classifier.HEADS,)),
        (("ash", "elm", "oak"), None),
        ((), ()),
    ],
    ids=["the same classes", "a new head", "no head", "no labels"],
)
def test_what_needs_no_other_rows_stays_as_it_is(classes, reset):
    before = checkpoint()
    assert with_rows_by_name(before, classes, reset) is before


@pytest.mark.parametrize("own, classes", [(("0", "1", "2"), NAMES), (NAMES, ("0", "1", "2"))])
def test_of_numbers_the_order_is_kept_with_a_warning(own, classes, caplog):
    before = checkpoint(own)
    with caplog.at_level(logging.WARNING):
        assert with_rows_by_name(before, classes, ()) is before
    assert "rows stay in their order" in caplog.text and "'fern', 'moss', 'palm'" in caplog.text


def test_a_head_that_knows_none_of_the_classes_is_refused():
    with pytest.raises(ConfigError, match=r"none of the classes .*'fern'.* the data has 'ash'"):
        with_rows_by_name(checkpoint(), ("ash", "elm"), ())


def photos(folder, colours):
    random = np.random.default_rng(0)
    for name, channel in colours.items():
        (folder / name).mkdir(parents=True)
        for number in range(12):
            image = random.integers(0, 60, (24, 24, 3))
            image[..., channel] += 150
            cv2.imwrite(str(folder / name / f"{number}.png"), image.astype(np.uint8))
    return folder


def config_of(folder, steps, **fields):
    config = vit_jax.load_config("folder")
    small = {"model.name": "ViT-mu/8", "data.image_size": 24, "data.eval_resize": 24, "batch_size": 8,
             "data.holdout": 0.25, "augment.randaugment_layers": 0, "augment.mixup": 0.0, "optim.lr": 3e-3,
             "optim.warmup": "1 steps", "model.depth": 1, "model.width": 32, "model.mlp_dim": 32, "model.heads": 2,
             "data.path": str(folder)}  # fmt: skip
    config.update_from_flattened_dict(small | fields)
    config.duration = config.eval.every = config.checkpoint.every = f"{steps} steps"
    return config


@pytest.mark.slow
def test_a_run_goes_on_with_other_classes_by_their_names(tmp_path):
    colours = {"fern": 0, "moss": 1, "palm": 2}
    vit_jax.train(config_of(photos(tmp_path / "a", colours), 60), tmp_path / "first")
    other = photos(tmp_path / "b", {"ash": 2, "fern": 0, "moss": 1})
    start = {"init_from": str(tmp_path / "first"), "init_reset": (), "optim.lr": 1e-9}
    result = vit_jax.train(config_of(other, 1, **start), tmp_path / "second")
    assert result["accuracy"] > 0.9
    frozen = start | {"lora.lora_rank": 1, "lora.also": ("encoder/norm/.*",)}
    frozen["optim.weight_decay_rules"] = ()
    with pytest.raises(ConfigError, match=r"config\.lora\.also"):
        vit_jax.train(config_of(other, 1, **frozen), tmp_path / "third")
