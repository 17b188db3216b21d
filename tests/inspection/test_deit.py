"""Real weights: DeiT-Ti inspected here against timm's own attention weights, taken by hooks, in NumPy
and float64. Needs timm, see tests/interchange/test_timm.py, and the data beside the project.
"""

import importlib.util

import jax
import numpy as np
import pytest

from tests import without_torchvision
from tests.inspection import references
from vit_jax.config import default_config
from vit_jax.data.decoding.decode import eval_crop
from vit_jax.inspection import observe
from vit_jax.interchange.loading import load
from vit_jax.models import registry

WEIGHTS = "weights/deit_tiny_patch16_224_lnq.timm.safetensors"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.slow
def test_deit_is_inspected_as_from_the_weights_that_timm_computes(shared_data):
    if importlib.util.find_spec("timm") is None:
        pytest.skip("pip install --no-deps timm")
    torch, models = pytest.importorskip("torch"), without_torchvision.timm_models()
    from safetensors.torch import load_file

    data = default_config().data
    data.update(mean=MEAN, std=STD, eval_crop="central", eval_resize=248, image_size=224)
    files = sorted((shared_data / "imagenet_sample").glob("*.JPEG"))[:2]
    images = np.stack([eval_crop(file.read_bytes(), data, name=file.name) for file in files])

    theirs = models.create_model("deit_tiny_patch16_224").double().eval()
    theirs.load_state_dict(load_file(shared_data / WEIGHTS))
    found = []
    for block in theirs.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda *args: found.append(args[2].numpy()))
    with torch.no_grad():
        pixels = (images / 255.0 - MEAN) / STD
        theirs(torch.from_numpy(pixels.transpose(0, 3, 1, 2)))
    weights = np.stack(found)  # (L, n, H, T, T) float64

    model = load(shared_data / WEIGHTS)
    config = observe.for_inspection(model.config)
    arrays = jax.device_get(registry.split(model)[1])
    how = (registry.abstract(config)[0], arrays, config, data)
    ours = observe.observe(*how, [images], shown=2)
    (stream,) = ours.streams.values()

    def compare(ours, wanted):
        """To 1e-5 of the largest."""
        assert np.abs(ours - wanted).max() <= 1e-5 * np.abs(wanted).max()

    distances = [
        [[references.distance(h, (14, 14), (224, 224)) for h in image] for image in layer]
        for layer in weights[::11]
    ]
    compare(stream.distance[::11], np.array(distances))
    compare(stream.entropy, references.entropy(weights))
    rollouts = np.stack([references.rollout(weights[:, image]) for image in range(2)])
    compare(stream.rollout[-1], rollouts[:, 0, 1:])
    compare(stream.read, weights[..., 0, 1:])
    similar = np.mean([references.similarity(weights[:, image]) for image in range(2)], axis=0)
    compare(observe.details(*how, images).similarity["attention"], similar)
