"""EfficientNets of timm and of transformers: their weights here, the same logits, running statistics
and bytes.

timm is imported without torchvision, see `test_timm.py`. Without either package its tests are skipped.
"""

import copy
import dataclasses
import functools
import importlib.util
import json

import jax
import numpy as np
import pytest
from flax import nnx

from tests import float64, lazily, without_torchvision
from tests.models import oracles
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, loading, safetensors
from vit_jax.interchange.conversions.table import conversions_of
from vit_jax.interchange.conversions.translation import to_theirs
from vit_jax.models import registry
from vit_jax.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from vit_jax.models.zoo import efficientnet

torch = lazily.Package("torch")

# L2's depth of 88 blocks, an eighth of its width.
SIZES = {"B0": (1.0, 1.0), "B3": (1.2, 1.4), "L2 narrowed": (0.5, 5.3)}
# Most of the time is XLA's, which compiles a network of each size.
CASES = [pytest.param(size, marks=[pytest.mark.slow] * (size != "B0"), id=size) for size in SIZES]
# Where strides meet odd heights: 68, 34, 17, 9, 5, 3.
IMAGE_SIZE, CLASSES = 68, 7
BOUND = 1e-6  # in float64: what is left is of constants in float32
UNROLLED_ONCE = dict(remat="none", unroll=1)


@pytest.fixture(scope="module")
def timm():
    """timm's module of EfficientNets, imported without torchvision."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("pip install --no-deps timm")
    without_torchvision.timm_models()
    from timm.models import efficientnet

    return efficientnet


def randomize(model):
    """Random weights, of the branches smaller ones; running statistics near those of the images, or
    values would grow without bounds from block to block.
    """
    generator = torch.Generator().manual_seed(0)
    draw = lambda like: torch.randn(like.shape, generator=generator)  # noqa: E731
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    usual = [norm.momentum for norm in norms]
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim > 1:
                tensor.copy_(draw(tensor) * (2 / tensor[0].numel()) ** 0.5)
            else:
                tensor.copy_(name.endswith("weight") + draw(tensor) / 5)
            if "bn3." in name or "project_bn." in name:
                tensor.mul_(0.1)
        for norm in norms:
            norm.momentum = 1.0
        model.train()(torch.from_numpy(images()).permute(0, 3, 1, 2))
        for norm, momentum in zip(norms, usual, strict=True):
            # Not quite the batch's, which are what training normalises by.
            norm.running_var.mul_(1.2)
            norm.momentum = momentum
    return model.eval()


def images():
    shape = (4, IMAGE_SIZE, IMAGE_SIZE, 3)
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def their_logits(model, x):
    """In the type of the model's parameters."""
    pixels = torch.from_numpy(x).to(next(model.parameters()).dtype)
    with torch.no_grad():
        output = model(pixels.permute(0, 3, 1, 2))
    return (output if isinstance(output, torch.Tensor) else output.logits).numpy()


def ours(config, params, variables, x):
    """Logits, logits in training mode, and the statistics after it."""
    model = nnx.merge(registry.abstract(config)[0], params, variables)
    logits = model(x).logits
    trained = model(x, deterministic=False, rngs=nnx.Rngs(dropout=0)).logits
    return logits, trained, registry.split(model)[1].variables


def answers(checkpoint, x):
    """What `ours` gives, in float64."""
    config = dataclasses.replace(checkpoint.model_config, **UNROLLED_ONCE)
    arrays = jax.tree.map(np.asarray, (checkpoint.params, checkpoint.variables))
    return _exact(config)(*arrays, x)


@functools.cache
def _exact(config):
    return float64.in_float64(functools.partial(ours, config))


def save(model, path):
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    specs = {name: (value.shape, value.dtype) for name, value in tensors.items()}
    safetensors.write(path, tensors.items(), specs, {})
    return path


def bytes_of(path):
    return {n: np.asarray(t).tobytes() for n, t in safetensors.read(path)[0].items()}


@pytest.mark.parametrize("size", CASES)
def test_timms_logits_and_running_statistics_are_ours_and_its_file_comes_back(timm, size, tmp_path):
    width, depth = SIZES[size]
    model = timm._gen_efficientnet(
        "tf_efficientnet_b0",
        channel_multiplier=width,
        depth_multiplier=depth,
        bn_eps=1e-3,
        bn_momentum=0.01,
        pad_type="same",
        num_classes=CLASSES,
    )
    path = save(randomize(model), tmp_path / "tf_efficientnet_b0.safetensors")
    checkpoint = formats.read_checkpoint(path, image_size=IMAGE_SIZE)
    config = checkpoint.model_config
    assert config.units == efficientnet.units(depth) and config.width_factor == width
    x = images()
    logits, trained, after = answers(checkpoint, x)
    exact = copy.deepcopy(model).double()
    expected = their_logits(exact, x)
    assert expected.std() > 0.05
    oracles.assert_close(logits, expected, BOUND)

    formats.write_checkpoint(checkpoint, tmp_path / "ours.safetensors", "timm")
    assert bytes_of(path) == bytes_of(tmp_path / "ours.safetensors")
    assert formats.read_checkpoint(tmp_path / "ours.safetensors").model_config == config

    oracles.assert_close(trained, their_logits(exact.train(), x), BOUND)
    rules = conversions_of(efficientnet)["timm"].rules(config, {})
    theirs = {n: v.numpy() for n, v in exact.state_dict().items() if "running" in n}
    found = dict(to_theirs(rules, after, constants={}))
    assert found.keys() == theirs.keys()
    for name, value in theirs.items():
        oracles.assert_close(found[name], value, BOUND)


@pytest.mark.parametrize("size", CASES)
def test_a_folder_of_transformers_gives_its_logits_and_comes_back(size, tmp_path):
    transformers = pytest.importorskip("transformers")
    width, depth = SIZES[size]
    config = transformers.EfficientNetConfig(
        width_coefficient=width,
        depth_coefficient=depth,
        hidden_dim=efficientnet.scaled(1280, width),
        image_size=IMAGE_SIZE,
        depthwise_padding=[sum(efficientnet.units(depth)[:stage]) for stage in (2, 3, 5)],
        dropout_rate=0,
        drop_connect_rate=0,
        num_labels=CLASSES,
    )
    model = randomize(transformers.EfficientNetForImageClassification(config))
    model.save_pretrained(tmp_path / "theirs")
    checkpoint = formats.read_checkpoint(tmp_path / "theirs")
    x = images()
    expected = their_logits(copy.deepcopy(model).double(), x)
    assert expected.std() > 0.05
    oracles.assert_close(answers(checkpoint, x)[0], expected, BOUND)

    formats.write_checkpoint(checkpoint, tmp_path / "ours", "huggingface")
    before, after = (bytes_of(tmp_path / n / "model.safetensors") for n in ("theirs", "ours"))
    assert before == after
    again, info = transformers.EfficientNetForImageClassification.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    # Of the same bytes.
    np.testing.assert_allclose(their_logits(again.eval().double(), x), expected, atol=1e-12)
    assert again.config.depthwise_padding == config.depthwise_padding


def checkpoint(**options):
    """A small EfficientNet of zeros."""
    usual = dict(image_size=32, units=(1,) * 7, width_factor=0.5, num_classes=3)
    config = registry.model_config("EfficientNet-B0", **usual | options)
    arrays = registry.abstract_weights(config)[1]
    params, variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), arrays)
    return formats.LoadedCheckpoint(config, params, variables=variables)


def test_a_folder_for_timm_is_built_there_by_its_name(timm, tmp_path):
    import timm as package

    config = registry.model_config("EfficientNet-B1", image_size=32, num_classes=3)
    arrays = registry.abstract_weights(config)[1]
    params, variables = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), arrays)
    whole = formats.LoadedCheckpoint(config, params, variables=variables)
    formats.write_checkpoint(whole, tmp_path / "out", "timm")
    model = package.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert model.conv_stem.weight.detach().numpy().min() == 1
    again = formats.read_checkpoint(tmp_path / "out")
    assert again.model_config == config
    # 32 pixels to spare.
    prepared = again.preprocessing
    assert (prepared.mean, prepared.eval_crop, prepared.eval_resize) == (
        IMAGENET_MEAN,
        "torchvision",
        64,
    )


def test_a_processor_of_transformers_that_divides_twice_is_read_as_one_that_divides_once(tmp_path):
    formats.write_checkpoint(checkpoint(), tmp_path / "a", "huggingface")
    processor = {
        "image_processor_type": "EfficientNetImageProcessor",
        "image_mean": list(IMAGENET_MEAN),
        "image_std": [std**0.5 for std in IMAGENET_STD],
        "size": {"height": 32, "width": 32},
    }
    (tmp_path / "a" / "preprocessor_config.json").write_text(json.dumps(processor))
    prepared = formats.read_checkpoint(tmp_path / "a").preprocessing
    np.testing.assert_allclose(prepared.std, IMAGENET_STD, rtol=1e-12)
    assert prepared.mean == IMAGENET_MEAN


@pytest.mark.parametrize(
    ("options", "to", "words"),
    [
        ({"image_size": 33}, "huggingface", "images of an odd height or width"),
        ({"image_size": (34, 36)}, "huggingface", "height and width alike"),
        ({"width_factor": 0.25}, "huggingface", "never added to its input"),
        ({}, "timm", "timm has no EfficientNet of units"),
    ],
)
def test_what_they_would_compute_otherwise_is_not_written(tmp_path, options, to, words):
    with pytest.raises(CheckpointError, match=words):
        formats.write_checkpoint(checkpoint(**options), tmp_path / "out", to)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "relu"}, "hidden_act = relu is not supported, only with swish"),
        ({"kernel_sizes": [3] * 7}, "kernel_sizes"),
        (
            {"image_size": 34},
            r"has the blocks \[\], but with images of 34 .* in the blocks \[1, 2, 3, 5\]",
        ),
    ],
)
def test_what_our_code_would_compute_otherwise_is_not_read(tmp_path, change, words):
    formats.write_checkpoint(checkpoint(), tmp_path / "a", "huggingface")
    path = tmp_path / "a" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=words):
        formats.read_checkpoint(tmp_path / "a")


def test_timms_efficientnets_without_tensorflows_padding_are_refused(tmp_path):
    config = registry.model_config("EfficientNet-B0", image_size=32, num_classes=3)
    arrays = registry.abstract_weights(config)[1]
    params, variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), arrays)
    formats.write_checkpoint(
        formats.LoadedCheckpoint(config, params, variables=variables), tmp_path / "a", "timm"
    )
    path = tmp_path / "a" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architecture": "efficientnet_b0"}))
    with pytest.raises(CheckpointError, match="not efficientnet_b0, which pads"):
        formats.read_checkpoint(tmp_path / "a")


def test_whether_a_bare_file_pads_as_tensorflow_is_asked_for(tmp_path):
    formats.write_checkpoint(checkpoint(), tmp_path / "a.safetensors", "timm")
    assert (
        formats.read_checkpoint(tmp_path / "a.safetensors").model_config
        == checkpoint().model_config
    )
    tensors = {n: np.asarray(t) for n, t in safetensors.read(tmp_path / "a.safetensors")[0].items()}
    specs = {n: (x.shape, x.dtype) for n, x in tensors.items()}
    bare = tmp_path / "weights.safetensors"
    safetensors.write(bare, tensors.items(), specs, {})
    with pytest.raises(CheckpointError, match="does not state whether .* as TensorFlow .*Name the"):
        formats.read_checkpoint(bare)
    named = bare.rename(tmp_path / "tf_efficientnet_b0.in1k.safetensors")
    assert formats.read_checkpoint(named).model_config.units == checkpoint().model_config.units


def test_a_file_that_lacks_a_tensor_or_has_one_more_names_it(tmp_path):
    formats.write_checkpoint(checkpoint(), tmp_path / "a.safetensors", "timm")
    tensors = {n: np.asarray(t) for n, t in safetensors.read(tmp_path / "a.safetensors")[0].items()}
    tensors["surplus"] = tensors.pop("blocks.1.0.bn2.running_var")
    path = tmp_path / "tf_efficientnet_b0.npz"
    np.savez(path, **tensors)
    with pytest.raises(CheckpointError) as error:
        loading.load(path)
    assert "blocks.1.0.bn2.running_var (48,): missing in the file" in str(error.value)
    assert "surplus (48,): in the file, but not in the model" in str(error.value)
