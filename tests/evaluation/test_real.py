"""ImageNet-ReaL's rule over its published labels (arXiv 2006.07159): images without one are left out, and an
answer is right if it is one of the image's.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models.conftest import parameters
from vit_jax import evaluation
from vit_jax.base import schema
from vit_jax.config import config_class, default_config
from vit_jax.data import sources
from vit_jax.data.record import DataSet, Record
from vit_jax.devices import meshes
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel
from vit_jax.models import registry

pytestmark = pytest.mark.slow
CLASSES = tuple(map(str, range(1000)))


@dataclasses.dataclass(frozen=True)
class Noise:
    """Images of noise with the labels of ImageNet's validation set."""

    images: np.ndarray
    labels: list[list[int]]
    classes: tuple[str, ...] = CLASSES
    multi_label: bool = True

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return Record(self.images[index], tuple(self.labels[index]), str(index))


def test_of_50_000_images_46_837_are_scored_and_right_are_those_of_the_published_rule(
    shared_data, monkeypatch
):
    labels = json.loads((shared_data / "labels" / "imagenet_real.json").read_text())
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 8, 8, 3), np.uint8)
    noise = DataSet("noise", {"train": 1, "test": len(labels)}, lambda parts: Noise(images, labels))
    monkeypatch.setitem(sources.OPENERS, "noise", lambda _: noise)
    config = default_config()
    config.update_from_flattened_dict({
        "model.name": "ViT-mu/8", "data.name": "noise", "data.image_size": 8, "data.eval_crop": "resize",
        "batch_size": 504,
    })  # fmt: skip
    model_config = registry.model_config(
        "ViT-mu/8", image_size=8, num_classes=1000, head_init="normal"
    )
    definition = registry.abstract(model_config)[0]
    weights = registry.Weights(parameters(model_config), {})
    context = EvalContext(schema.typed(config_class(), config), model_config, definition, CLASSES)
    suite, mesh = evaluation.make(("accuracy",), context), meshes.replica_mesh()
    with jax.set_mesh(mesh):
        found = suite(EvaluatedModel(weights), mesh)

    network = jax.jit(lambda x: nnx.merge(definition, *weights)(x).logits)
    parts = np.split(images, 100)
    logits = np.concatenate([np.asarray(network(part / np.float32(127.5) - 1)) for part in parts])
    best = np.argsort(-logits, axis=-1, kind="stable")[:, :5].tolist()
    scored = [(answers, set(own)) for answers, own in zip(best, labels, strict=True) if own]
    assert found["examples"] == len(scored) == 46_837
    right = sum(answers[0] in own for answers, own in scored)
    assert round(found["accuracy"] * 46_837) == right > 0
    several = sum(bool(own & set(answers)) for answers, own in scored)
    assert round(found["top5_accuracy"] * 46_837) == several > right
