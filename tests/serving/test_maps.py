"""A model that segments, served: masks, shares, overlays, and what is refused."""

import base64
import io
import re

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tests.serving.conftest import encoded, form
from vit_jax.checkpoints.objective_weights import ObjectiveModules
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.config import default_config
from vit_jax.data.labels.segments import PanopticTable
from vit_jax.data.record import BadImage
from vit_jax.models import registry
from vit_jax.models.registry import Weights
from vit_jax.objectives.contract import ObjectiveContext
from vit_jax.objectives.networks import OWN, Networks
from vit_jax.objectives.segmentation.segmentation import (
    Segmentation,
    SegmentationOptions,
)
from vit_jax.prediction.images import Named
from vit_jax.prediction.maps import Segmenter, segment
from vit_jax.serving.map_network import MapNetwork

CLASSES = ("sky", "car", "tree")


def make_run(head: str, windows: str = "whole", **evaluator) -> TrainedModel:
    """A network with random weights; EoMT's finds single cars."""
    config = default_config()
    options = {"windows": windows} | evaluator
    config.update_from_flattened_dict({
        "data.image_size": 16, "data.mean": (0.5,) * 3, "data.std": (0.5,) * 3, "objective.name": "segmentation",
        "eval.evaluators": (("segmentation", options),),
    })  # fmt: skip
    table = PanopticTable(CLASSES, (), (), things=(False, True, False), most=4)
    how = SegmentationOptions(head=head, queries=6, segments=6, blocks=1)

    def make_objective(model_config, teachers):
        context = ObjectiveContext(
            model_config, (0.5,) * 3, (0.5,) * 3, 10, int,
            num_classes=len(CLASSES), segments=table if head == "eomt" else None,
        )  # fmt: skip
        return Segmentation(how, context)

    model_config = registry.model_config("ViT-mu/8", image_size=16, num_classes=0)
    networks = Networks(model_config, make_objective)
    params, variables = networks.init(jax.random.key(1))
    own = Weights(params.pop(OWN), variables.pop(OWN, {}))
    layer = own.params["linear" if head == "linear" else "class_head"]
    layer["kernel"] = layer["kernel"] * 100  # so that no class wins everywhere
    weights = Weights(params, variables.get("model", {}))
    model = nnx.merge(registry.abstract(model_config)[0], *weights)
    return TrainedModel(
        model, model_config, config, CLASSES, 0, "here", ObjectiveModules(networks, own)
    )


def segmented(run: TrainedModel, content: bytes):
    (found,) = segment(Segmenter(run), [Named("x", content)], batch_size=1)
    return found


def test_predict_gives_a_picture_of_too_many_windows_back_as_unreadable():
    long = io.BytesIO()
    Image.new("RGB", (4_000, 4)).save(long, "PNG")
    files = [Named("long", long.getvalue()), Named("x", encoded())]
    refused, found = segment(Segmenter(make_run("linear", "sliding")), files, batch_size=2)
    assert isinstance(refused, BadImage) and "in 1000 windows, of at most 64" in str(refused)
    assert found.file == "x"


def picture(url: str) -> Image.Image:
    kind, content = url.split(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


def mask(running, path: str, content: bytes) -> np.ndarray:
    connection = running.connect()
    connection.request("POST", path, content)
    response = connection.getresponse()
    assert response.status == 200 and response.headers.get_content_type() == "image/png"
    return np.asarray(Image.open(io.BytesIO(response.read())))


@pytest.mark.parametrize("windows", ["whole", "sliding"])
def test_an_image_of_any_size_gets_the_mask_that_predict_writes(serving, windows):
    run = make_run("linear", windows)
    running, content = serving(MapNetwork(run, largest=2)), wide()
    expected = segmented(run, content)
    assert len(np.unique(expected.labels)) > 1
    status, answer = running.ask("/predict?overlay=1", content)
    assert status == 200 and (answer["width"], answer["height"]) == (40, 24)
    assert {one["class"]: one["share"] for one in answer["classes"]} == expected.shares()
    over = picture(answer["overlay"]).convert("RGBA")
    colors = np.asarray(over).reshape(-1, 4).tolist()
    found = {f"#{r:02x}{g:02x}{b:02x}" for r, g, b, _ in colors}
    assert over.size == (40, 24) and found == {one["color"] for one in answer["classes"]}
    assert np.array_equal(mask(running, "/mask", content), expected.labels)
    kind = {"Content-Type": "multipart/form-data; boundary=xyz"}
    _, several = running.ask("/mask", form(("a", content), ("b", b"no image")), **kind)
    assert np.array_equal(picture(several["images"][0]["mask"]), expected.labels)
    assert several["images"][1]["status"] == 415
    assert running.ask("/features", content)[0] == 404
    about = running.ask("/model")[1]
    assert about["maps"] and not about["things"] and about["classes"] == list(CLASSES)


def wide() -> bytes:
    pixels = np.random.default_rng(3).integers(0, 256, (3, 5, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((40, 24), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def test_single_things_are_listed_with_their_ids_and_boxes(serving):
    run = make_run("eomt", score=0.0, overlap=0.0)
    running, content = serving(MapNetwork(run, largest=1)), encoded(side=20)
    answer = running.ask("/predict", content)[1]
    colors = mask(running, "/mask?panoptic=1", content).astype(int)
    ids = colors[..., 0] + 256 * colors[..., 1] + 65536 * colors[..., 2]
    assert answer["segments"] and "overlay" not in answer
    for one in answer["segments"]:
        rows, columns = np.nonzero(ids == one["id"])
        left, top, width, height = one["box"]
        assert one["class"] in CLASSES and one["share"] == len(rows) / 400
        assert (rows.min(), columns.min()) == (top, left)
        assert (np.ptp(rows) + 1, np.ptp(columns) + 1) == (height, width)


def test_large_images_are_made_smaller_and_very_long_ones_refused(serving, monkeypatch):
    monkeypatch.setattr("vit_jax.serving.replies.MapReplies.whole", 1000)
    running = serving(MapNetwork(make_run("linear", "sliding"), largest=4))
    answer = running.ask("/predict", encoded(side=50))[1]
    assert answer["width"] == answer["height"] == 31
    long = io.BytesIO()
    Image.new("RGB", (1000, 1)).save(long, "PNG")
    status, answer = running.ask("/predict", long.getvalue())
    assert status == 413 and "in 1000 windows, of at most 64" in answer["error"]
    assert running.ask("/predict", encoded())[0] == 200


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/predict?topk=3", 400, "no parameter 'topk', only overlay"),
        ("/predict?overlay=yes", 400, "overlay=yes must be 0 or 1"),
        ("/mask?panoptic=1", 400, "finds no single things"),
        ("/mask?overlay=1", 400, "no parameter 'overlay', only panoptic"),
    ],
)
def test_what_a_segmenter_is_not_asked_is_refused(serving, path, status, sentence):
    running = serving(MapNetwork(make_run("linear"), largest=1))
    found, answer = running.ask(path, encoded())
    assert found == status and re.search(sentence, answer["error"])


def test_a_classifier_has_no_masks(serving, network):
    status, answer = serving(network).ask("/mask", encoded())
    assert status == 404 and "gives classes of images" in answer["error"]
