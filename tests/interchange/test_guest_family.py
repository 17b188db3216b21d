"""A family from outside the package brings the names of its authors' checkpoints with it, running
statistics included.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from vit_jax.base.errors import CheckpointError
from vit_jax.base.schema import option
from vit_jax.config import default_config
from vit_jax.interchange import formats, loading, safetensors
from vit_jax.interchange.conversions import pytorch
from vit_jax.interchange.conversions.contract import (
    Conversion,
    DetectedModel,
    image_size,
    patch_grid,
)
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.models import classifier, registry
from vit_jax.models.contract import ModelOutput
from vit_jax.models.embeddings import PatchEmbedding
from vit_jax.training.initial_weights import start_from
from vit_jax.training.state import TrainState

SIDE, PATCH, WIDTH, CLASSES = 4, 2, 6, 3


@dataclasses.dataclass(frozen=True)
class Config(classifier.ClassifierConfig):
    patch: int = option(PATCH, "side of a patch in pixels", minimum=1, role="size")
    width: int = option(WIDTH, "size of a token", minimum=1, role="size")

    @property
    def tokens(self) -> int:
        rows, columns = classifier.patch_grid(self)
        return rows * columns


class Model(nnx.Module):
    """Patches with positions, a batch norm, their mean, a linear head."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = PatchEmbedding(
            config.patch, config.channels, config.width, dtype=jnp.float32, rngs=rngs
        )
        self.position = nnx.Param(jnp.zeros((1, config.tokens, config.width)))
        self.norm = nnx.BatchNorm(config.width, rngs=rngs)
        self.head = classifier.head(config.width, config, rngs)

    def __call__(self, images, *, deterministic=True, rngs=None, capture=False) -> ModelOutput:
        x = self.embedding(images) + self.position[...]
        tokens = self.norm(x, use_running_average=deterministic)
        features = tokens.mean(1)
        return ModelOutput(self.head(features), features, tokens)


class Authors(Conversion):
    def recognise(self, shapes, said):
        if "bn.running_mean" not in shapes:
            return None
        width, channels, patch, _ = shapes["patches.weight"]
        grid, _ = patch_grid(shapes["table"][1], (0,), patch, said)
        options = {
            "image_size": image_size(grid, patch), "channels": channels, "patch": patch, "width": width,
            "num_classes": shapes["fc.bias"][0],
        }  # fmt: skip
        return DetectedModel(options, left_out=("teacher[.].*",))

    def rules(self, config, layout):
        return [
            pytorch.convolution("embedding", "patches"),
            Rule("embedding/bias", "patches.bias"),
            Rule("position", "table"),
            *pytorch.batch_norm("norm", "bn"),
            *pytorch.linear("head", "fc"),
        ]


GUEST = types.SimpleNamespace(
    __name__="guest", Config=Config, Model=Model, VARIANTS=["Guest"],
    options_from_name=lambda name: {} if name == "Guest" else None,
    conversions=lambda: {"authors": Authors()},
)  # fmt: skip


@pytest.fixture(autouse=True)
def registered():
    registry.register(GUEST)
    yield
    registry.GUESTS.remove(GUEST)


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return {
        "patches.weight": draw(WIDTH, 3, PATCH, PATCH), "patches.bias": draw(WIDTH),
        "table": draw(1, (SIDE // PATCH) ** 2, WIDTH), "bn.weight": draw(WIDTH), "bn.bias": draw(WIDTH),
        "bn.running_mean": draw(WIDTH), "bn.running_var": draw(WIDTH) ** 2,
        "bn.num_batches_tracked": np.array(7), "fc.weight": draw(CLASSES, WIDTH), "fc.bias": draw(CLASSES),
    }  # fmt: skip


def saved(path, tensors):
    specs = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    safetensors.write(path, tensors.items(), specs, {})
    return path


def read_back(path):
    return {name: np.asarray(tensor) for name, tensor in safetensors.read(path)[0].items()}


def expected(t, images):
    grid = SIDE // PATCH
    x = images.reshape(-1, grid, PATCH, grid, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
    kernel = t["patches.weight"].transpose(2, 3, 1, 0).reshape(-1, WIDTH)
    x = x.reshape(len(images), grid**2, -1) @ kernel + t["patches.bias"] + t["table"]
    x = (x - t["bn.running_mean"]) / np.sqrt(t["bn.running_var"] + 1e-5)
    return (x * t["bn.weight"] + t["bn.bias"]).mean(1) @ t["fc.weight"].T + t["fc.bias"]


@pytest.mark.parametrize("container", ["safetensors", "npz"])
def test_its_authors_file_is_recognised_and_computes_what_they_compute(
    container, tensors, tmp_path
):
    path, more = tmp_path / f"a.{container}", {"teacher.weight": np.ones(3, np.float32)}
    if container == "npz":
        np.savez(path, **tensors, **more)
    else:
        saved(path, tensors | more)
    assert formats.detect(path) == "authors"
    model = vit_jax.load(path)
    images = np.random.default_rng(1).uniform(-1, 1, (2, SIDE, SIDE, 3)).astype(np.float32)
    np.testing.assert_allclose(model(images).logits, expected(tensors, images), atol=1e-5)


def test_statistics_go_along_to_every_format_and_come_back(tensors, tmp_path):
    path = saved(tmp_path / "a.safetensors", tensors)
    loading.convert(path, tmp_path / "run", "orbax")
    loading.convert(tmp_path / "run", tmp_path / "b.safetensors", "authors")
    for name, tensor in read_back(tmp_path / "b.safetensors").items():
        assert (tensor.dtype, tensor.tobytes()) == (tensors[name].dtype, tensors[name].tobytes())
    run = vit_jax.load_run(tmp_path / "run")
    np.testing.assert_array_equal(run.model.norm.mean[...], tensors["bn.running_mean"])
    like = registry.abstract_weights(run.model_config)[1]
    checkpoint = formats.read_checkpoint(path, hints=vars(run.model_config))
    weights = loading.fit_weights(checkpoint, like, run.model_config)
    assert set(weights.variables["norm"]) == {"mean", "var"}
    with pytest.raises(CheckpointError, match="timm has no guest models; these have: authors"):
        loading.convert(path, tmp_path / "c.safetensors", "timm")


def test_a_new_model_is_written_with_a_count_of_no_batches(tmp_path):
    config = registry.model_config("Guest", image_size=SIDE, num_classes=CLASSES)
    _, weights = registry.split(registry.build(config, rngs=nnx.Rngs(0)))
    params, variables = jax.tree.map(np.asarray, tuple(weights))
    formats.write_checkpoint(
        formats.LoadedCheckpoint(config, params, variables=variables),
        tmp_path / "a.safetensors",
        "authors",
    )
    assert read_back(tmp_path / "a.safetensors")["bn.num_batches_tracked"] == 0
    assert formats.read_checkpoint(tmp_path / "a.safetensors").model_config == config


def test_a_run_starts_from_the_statistics_of_its_checkpoint_and_so_do_its_average_and_teacher(
    tensors, tmp_path
):
    config = default_config()
    config.init_from = str(saved(tmp_path / "a.safetensors", tensors))
    model_config = registry.model_config("Guest", image_size=SIDE, num_classes=CLASSES)
    _, (zeros, nothing) = registry.split(registry.build(model_config, rngs=nnx.Rngs(0)))
    before = {"model": nothing, "ema": nothing, "teacher": {"model": nothing, "objective": {}}}
    state = TrainState(
        step=0, params=zeros, opt_state=None, ema=zeros, health=None, variables=before, teacher=zeros
    )  # fmt: skip
    networks = types.SimpleNamespace(objective=None, adapters=None)
    assembly = types.SimpleNamespace(config=config, model_config=model_config, networks=networks)
    after = start_from(assembly, state)
    for tree in (
        after.variables["model"],
        after.variables["ema"],
        after.variables["teacher"]["model"],
    ):
        np.testing.assert_array_equal(tree["norm"]["mean"], tensors["bn.running_mean"])
    for tree in (after.params, after.ema, after.teacher):
        np.testing.assert_array_equal(tree["norm"]["scale"], tensors["bn.weight"])
    assert before["teacher"]["model"] is nothing
    kept = {id(x) for x in jax.tree.leaves((after.params, after.variables["model"]))}
    assert not kept & {id(x) for x in jax.tree.leaves((after.ema, after.variables["ema"]))}
