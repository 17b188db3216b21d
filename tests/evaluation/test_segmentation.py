"""Mean IoU by exact counts, windows over images of any size, and what does not go together."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import lazily
from vit_jax import evaluation
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.config import config_class, default_config
from vit_jax.data import sources
from vit_jax.data.labels.masks import IGNORED, numbered
from vit_jax.data.record import DataError, DataSet, Record, TooLarge
from vit_jax.devices import meshes
from vit_jax.evaluation import maps
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel
from vit_jax.evaluation.segmentation import confusion_of, measures
from vit_jax.models import registry
from vit_jax.models.registry import Weights
from vit_jax.objectives.contract import ObjectiveContext
from vit_jax.objectives.networks import OWN, Networks
from vit_jax.objectives.segmentation.segmentation import (
    Segmentation,
    SegmentationOptions,
)

torch, torchmetrics = lazily.Package("torch"), lazily.Package("torchmetrics")

CLASSES = tuple("abcd")
# Several tests run the same programs.
pytestmark = pytest.mark.usefixtures("compilation_cache")


def data(size=16):
    return dataclasses.replace(schema.typed(config_class(), default_config()).data, image_size=size)


def test_mean_iou_is_that_of_torchmetrics_with_ignored_pixels_and_absent_classes():
    random = np.random.default_rng(0)
    expected = torchmetrics.JaccardIndex(
        task="multiclass", num_classes=4, ignore_index=IGNORED, average="macro"
    )
    confusion = np.zeros((4, 4), np.int64)
    for _ in range(5):
        labels = random.choice([0, 1, 3, IGNORED], (9, 11)).astype(np.uint8)
        predicted = np.where(random.random((9, 11)) < 0.6, labels % 4, random.choice([0, 1]))
        expected.update(torch.tensor(predicted.astype(int)), torch.tensor(labels.astype(int)))
        confusion += confusion_of(predicted.astype(np.uint8), labels, 4)
    found = measures(confusion, CLASSES)
    assert found["mean_iou"] == pytest.approx(float(expected.compute()), abs=1e-6)
    assert "iou/c" not in found and set(found) >= {"iou/a", "iou/b", "iou/d"}
    assert found["pixel_accuracy"] == confusion.trace() / confusion.sum()


def test_windows_cover_an_image_and_a_map_of_places_comes_back():
    """Scores that say where a pixel is put every window back to its place."""
    pixels = np.zeros((40, 100, 3), np.uint8)
    pixels[..., 0] = np.arange(100)[None] * 2
    cut = maps.cut(pixels, data(), "sliding", 4, name="x")
    assert cut.size == (16, 40) and cut.places == ((0, 0), (0, 12), (0, 24))
    halves = [window[::2, ::2, :1].astype(np.float32) for window in cut.pixels]
    joined = cut._joined(halves)
    assert joined.shape == (8, 20, 1)
    np.testing.assert_allclose(np.diff(joined[0, :, 0]), 10, atol=4)
    bright = np.stack([255 - joined[..., 0], joined[..., 0]], -1)
    labels = maps.enlarged(bright, (40, 100))
    assert labels[:, 68:].all() and not labels[:, :58].any()


def test_a_whole_image_is_one_window_of_the_models_size():
    cut = maps.cut(np.zeros((40, 100, 3), np.uint8), data(), "whole", 4, name="x")
    assert cut.pixels.shape == (1, 16, 16, 3)
    scores = np.random.default_rng(0).normal(size=(4, 4, 5)).astype(np.float32)
    labels = cut.labels([scores])
    expected = torch.nn.functional.interpolate(
        torch.tensor(scores).movedim(-1, 0)[None], (40, 100), mode="bilinear"
    )[0].argmax(0)
    assert (labels == expected.numpy()).mean() > 0.999


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Images of coloured blocks of several sizes; one cannot be read."""

    count: int = 7
    bad: int = -1
    classes: tuple[str, ...] = CLASSES
    masks: object = dataclasses.field(default_factory=lambda: numbered(CLASSES))
    multi_label: bool = False
    labels: None = None

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.bad:
            return Record(b"no image", np.zeros((4, 4), np.uint8), str(index))
        random = np.random.default_rng(index)
        labels = random.integers(0, 4, (2, 3)).repeat(8 + index, 0).repeat(8, 1).astype(np.uint8)
        return Record(np.stack([labels * 60] * 3, -1), labels, str(index))


def made(monkeypatch, source, **changes):
    """The evaluator, and a model whose linear head nobody trained."""
    config = default_config()
    config.update_from_flattened_dict({
        "data.name": "blocks", "data.image_size": 16, "batch_size": 8, "model.name": "ViT-mu/8",
        "objective.name": "segmentation", "objective.head": "linear", **changes,
    })  # fmt: skip
    monkeypatch.setitem(
        sources.OPENERS, "blocks", lambda _: DataSet("", {"train": 7, "test": 7}, lambda _: source)
    )
    typed = schema.typed(config_class(), config)
    networks, trained = untrained()
    definition = registry.abstract(networks.model_config)[0]
    context = EvalContext(typed, networks.model_config, definition, CLASSES, networks)
    return evaluation.make(typed.eval.evaluators, context), trained


@functools.cache
def untrained():
    """The networks, and their weights."""
    model_config = registry.model_config("ViT-mu/8", image_size=16, num_classes=0, depth=1)

    def make_objective(model_config, teachers):
        about = ObjectiveContext(model_config, (0.5,) * 3, (0.5,) * 3, 10, int, num_classes=4)
        return Segmentation(SegmentationOptions(head="linear"), about)

    networks = Networks(model_config, make_objective)
    params, variables = jax.jit(networks.init)(jax.random.key(0))
    own = Weights(params.pop(OWN), variables.pop(OWN))
    own.params["linear"]["kernel"] *= 100  # so that no class wins everywhere
    return networks, EvaluatedModel(Weights(params, variables.get("model", {})), module_weights=own)


@pytest.mark.parametrize("windows", ["whole", "sliding"])
def test_the_evaluator_counts_every_pixel_once_on_any_mesh(monkeypatch, windows):
    found = []
    for axes in ({"data": 1, "fsdp": 1, "tensor": 1}, {"data": 4, "fsdp": 2, "tensor": 1}):
        devices = jax.devices()[: np.prod(list(axes.values()))]
        mesh = meshes.make_mesh(axes, devices)
        judges, trained = made(
            monkeypatch, Blocks(), **{"eval.evaluators": (("segmentation", {"windows": windows}),)}
        )
        with jax.set_mesh(mesh):
            found.append(judges(trained, mesh))
    assert found[0] == found[1] and found[0]["images"] == 7
    assert 0 < found[0]["pixel_accuracy"] < 1


@pytest.mark.parametrize("shape", [(1, 10_000), (4_000, 4), (16, 16 * 65), (1, 65)])
def test_a_picture_of_too_many_windows_is_refused_with_the_cure(shape):
    pixels = np.zeros((*shape, 3), np.uint8)
    with pytest.raises(TooLarge, match="image long.png .* windows, of at most 64: .*windows=whole"):
        maps.cut(pixels, data(), "sliding", 4, name="long.png")
    assert len(maps.cut(pixels, data(), "whole", 4, name="long.png").pixels) == 1


@pytest.mark.parametrize("shape", [(1, 64), (16 * 64, 16), (3, 3)])
def test_as_many_windows_as_the_limit_are_taken(shape):
    cut = maps.cut(np.zeros((*shape, 3), np.uint8), data(), "sliding", 4, name="x")
    assert len(cut.pixels) == max(shape) // min(shape)


def test_the_evaluator_passes_over_pictures_of_too_many_windows_as_over_unreadable_ones(
    monkeypatch,
):
    class Long(Blocks):
        def __getitem__(self, index):
            if index != 2:
                return super().__getitem__(index)
            pixels = np.zeros((4, 4_000, 3), np.uint8)
            return Record(pixels, pixels[..., 0], "long.png")

    sliding = {"eval.evaluators": (("segmentation", {"windows": "sliding"}),)}
    mesh = meshes.replica_mesh()
    for most in (0, 1):
        options = sliding | {"data.on_bad_image": "skip", "data.max_bad_images": most}
        judges, trained = made(monkeypatch, Long(), **options)
        with jax.set_mesh(mesh):
            if most:
                assert judges(trained, mesh)["images"] == 6
                continue
            with pytest.raises(DataError, match="long.png: .* in 1000 windows"):
                judges(trained, mesh)


def test_the_evaluator_agrees_with_a_forward_pass_by_hand(monkeypatch):
    judges, trained = made(monkeypatch, Blocks())
    mesh = meshes.replica_mesh()
    with jax.set_mesh(mesh):
        found = judges(trained, mesh)
    (_, evaluator), *_ = judges.evaluators
    score = maps.make_answers(evaluator.context.networks, evaluator.config.data)
    expected, source = torchmetrics.JaccardIndex(task="multiclass", num_classes=4), Blocks()
    for index in range(7):
        record = source[index]
        cut = maps.cut(record.image, evaluator.config.data, "whole", 8, name="x")
        (scores,) = score(trained.weights, trained.module_weights, jnp.asarray(cut.pixels))
        predicted = maps.enlarged(np.asarray(scores[0]), record.label.shape)
        expected.update(torch.tensor(predicted.astype(int)), torch.tensor(record.label.astype(int)))
    assert found["mean_iou"] == pytest.approx(float(expected.compute()), abs=1e-6)


def test_a_bad_image_ends_the_evaluation_or_is_skipped(monkeypatch):
    mesh = meshes.replica_mesh()
    with jax.set_mesh(mesh):
        judges, trained = made(monkeypatch, Blocks(bad=3))
        with pytest.raises(Exception, match="image 3 cannot be read"):
            judges(trained, mesh)
        judges, trained = made(monkeypatch, Blocks(bad=3), **{"data.on_bad_image": "skip"})
        assert judges(trained, mesh)["images"] == 6


def test_data_that_does_not_fit_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="the model knows 4"):
        made(monkeypatch, Blocks(classes=("a", "b"), masks=numbered("ab")))
    with pytest.raises(ConfigError, match="needs masks"):
        made(monkeypatch, Blocks(masks=None))
