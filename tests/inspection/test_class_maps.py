"""Maps by class against Grad-CAM written with PyTorch's autograd, of transformers' models with the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests import lazily
from tests.inspection.test_inspect import checkpoint, photos
from tests.interchange.test_probabilities import CLASSIFIERS, NAMES, build, picture
from tests.models.conftest import parameters
from tests.repeats import slow_unless
from vit_jax.evaluation.forward import data_of
from vit_jax.inspection import run
from vit_jax.inspection.class_maps import class_maps, has_class_maps, make_class_maps
from vit_jax.inspection.contract import InspectOptions
from vit_jax.models import registry

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")


def grad_cam(model, images, classes) -> np.ndarray:
    """(B, 3, 3) float64, from the tokens that the last layer of a model of transformers gets."""
    kept = []

    def keep(module, inputs):
        inputs[0].retain_grad()
        kept.append(inputs[0])

    layers = [m for m in model.modules() if type(m).__name__.endswith("Layer")]
    layers[-1].register_forward_pre_hook(keep)
    pixels = torch.tensor(images / 127.5 - 1.0).permute(0, 3, 1, 2)
    logits = model.double()(pixel_values=pixels).logits
    logits.gather(1, torch.tensor(classes)[:, None]).sum().backward()
    (tokens,) = kept
    patches = tokens.detach()[:, -9:].numpy()
    weights = tokens.grad[:, -9:].mean(1).numpy()
    return np.maximum(np.einsum("bnd,bd->bn", patches, weights), 0).reshape(-1, 3, 3)


KINDS = (
    "ViTForImageClassification",  # a class token
    "Dinov2WithRegistersForImageClassification",  # class token and mean, with registers
    "IJepaForImageClassification",  # the mean of patches alone
    "DeiTForImageClassificationWithTeacher",  # two heads
)


@pytest.mark.parametrize("name", slow_unless(KINDS[1:3], KINDS))
def test_maps_are_those_of_grad_cam_for_any_class(tmp_path, monkeypatch, name):
    kind, fields = CLASSIFIERS[name]
    monkeypatch.setitem(CLASSIFIERS, name, (kind, fields | {"num_hidden_layers": 3}))
    model = build(tmp_path, name)
    loaded = vit_jax.load_run(tmp_path)
    compute = make_class_maps(loaded.model_config, registry.split(loaded.model)[1], data_of(loaded))
    images = np.stack([picture(seed) for seed in range(2)])
    largest = 0.0
    for number, class_name in NAMES.items():
        ours = loaded.classes.index(class_name)
        expected = grad_cam(model, images, np.full(2, number))
        found = compute(images, np.full(2, ours))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * expected.max())
        largest = max(largest, expected.max())
    assert largest > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(position="relative", registers=1),
        dict(rope="axial", pool="mean"),
        dict(pool="map", registers=2),
        dict(distilled=True),
    ],
    ids=str,
)
def test_a_map_is_the_derivative_of_the_model_by_its_patches(options):
    size = dict(image_size=12, patch=4, width=16, mlp_dim=32, heads=2, num_classes=5, depth=1)
    config = registry.model_config("ViT-mu/16", head_init="normal", **size | options)
    assert has_class_maps(config)
    model = nnx.merge(registry.abstract(config)[0], parameters(config))
    images = jnp.asarray(np.random.default_rng(0).normal(size=(1, 12, 12, 3)), jnp.float32)
    found = class_maps(model, images, jnp.array([2]))
    # Of one block the tokens before it are those that are placed: a plain derivative reaches them.
    placed = model.add_positions(model.patches(images))

    def logit(tokens):
        return model.read(model.encode(tokens)[0], {}).logits[0, 2]

    gradient = jax.grad(logit)(placed)[0, -9:]
    expected = jax.nn.relu((placed[0, -9:] * gradient.mean(0)).sum(-1)).reshape(3, 3)
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_report_draws_the_classes_that_are_asked_for(tmp_path, command):
    config = registry.model_config(
        "ViT-mu/16", image_size=12, patch=4, width=16, mlp_dim=32, heads=2, num_classes=3, depth=2,
        head_init="normal",
    )  # fmt: skip
    model = checkpoint(tmp_path / "model", config)
    images = [str(photos(tmp_path / "photos"))]
    options = InspectOptions(shown=2, map_classes=("2", "0"))
    result = run.inspect(model, images, tmp_path / "report", options=options)
    assert result["sections"]["Maps by class"].startswith("Grad-CAM of 2, 0:")
    assert (tmp_path / "report" / "class_maps.png").exists()
    numbers = np.load(tmp_path / "report" / "numbers.npz")
    assert numbers["Maps by class/class_maps"].shape == (2, 2, 3, 3)
    code, _, err = command(
        "inspect", f"--checkpoint={model}", f"--images={images[0]}", f"--out={tmp_path / 'other'}",
        "--map_classes=tabby",
    )  # fmt: skip
    assert code == 2 and "--map_classes: the model has no class 'tabby'" in err


def test_of_other_families_it_says_why_there_is_none():
    for name, options in (("Mixer-S/16", {}), ("CaiT-S24", {}), ("ViT-mu/16", {"num_classes": 0})):
        assert not has_class_maps(registry.model_config(name, image_size=32, **options))
