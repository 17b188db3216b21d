"""The training step against the same in NumPy and float64 (`numpy_step.py`): random combinations of all that a step is
made of, ten steps each.
"""

import dataclasses
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.float64 import in_float64
from tests.training import numpy_step
from vit_jax.base import patterns
from vit_jax.config import default_config
from vit_jax.models import classifier, registry
from vit_jax.models.contract import ModelOutput
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.state import TrainState
from vit_jax.training.upkeep.health import healthy

STEPS, BATCH, CLASSES, WIDTH, SIZE = 10, 8, 5, 6, 4
VARIANTS = ["by-hand"]


@dataclasses.dataclass(frozen=True)
class Config(classifier.ClassifierConfig):
    """The network of `numpy_step`, which has no options."""

    @property
    def layers(self):
        return {"encoder/layers": numpy_step.LAYERS}

    def flops(self):
        return 1


def options_from_name(name: str) -> dict | None:
    return {"image_size": SIZE} if name == VARIANTS[0] else None


class Layers(nnx.Module):
    """The residual layers, stacked."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.zeros((numpy_step.LAYERS, WIDTH, WIDTH)))
        self.bias = nnx.Param(jnp.zeros((numpy_step.LAYERS, WIDTH)))


class Model(classifier.Classifier):
    """The network of `numpy_step`."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Linear(SIZE * SIZE * 3, WIDTH, rngs=rngs)
        self.encoder = nnx.Module()
        self.encoder.layers = Layers()
        self.norm = nnx.Module()
        self.norm.scale = nnx.Param(jnp.ones(WIDTH))
        self.head = classifier.head(WIDTH, config, rngs)

    def __call__(self, images, *, deterministic=True, rngs=None, capture=False):
        x = self.embedding(images.reshape(len(images), -1))
        layers = self.encoder.layers
        for i in range(numpy_step.LAYERS):
            x += jnp.tanh(x @ layers.kernel[i] + layers.bias[i])
        features = x * self.norm.scale
        return ModelOutput(self.classify(features), features, features[:, None])


@pytest.fixture(autouse=True, scope="module")
def family():
    registry.register(sys.modules[__name__])
    yield
    registry.GUESTS.remove(sys.modules[__name__])


OPTIMIZERS = (
    "adamw", "nadamw", "sgd", "lion", "rmsprop", "lamb", "lars", "adafactor", "schedule_free"
)  # fmt: skip
NO_DURATIONS = {"warmup": 0, "late_warmup": 0, "cooldown": 0, "timescale": 1}


def draw(seed: int) -> tuple[dict, int, float]:
    """Fields of `config.optim` with durations in steps, the parts of a batch and the smoothing of labels."""
    rng = random.Random(seed)
    # Of 9 seeds in a row each has another.
    name = OPTIMIZERS[seed % len(OPTIMIZERS)]
    optim = {
        "name": name,
        "lr": rng.uniform(0.01, 0.1) * (0.2 if name == "lion" else 1),
        "b1": rng.choice((0.8, 0.9)),
        "b2": rng.choice((0.9, 0.99)),
        "eps": 10 ** rng.uniform(-8, -3),
        "schedule": rng.choice(("cosine", "linear", "polynomial", "rsqrt", "constant", "staircase")),
        "warmup": rng.choice((0, 3)),
        "clip": rng.choice((0.0, 0.2, 1.0)),
        "weight_decay": rng.choice((0.0, 0.2)),
        "weight_decay_by": rng.choice(("lr", "schedule", "gradient")),
        "weight_decay_rules": rng.choice(((((".*kernel", 1.0)),), (("head/.*", 0.5), (".*", 1.0)))),
        "lr_rules": rng.choice(((), (("head/.*", 3.0), (".*bias", 0.5)))),
        "layer_decay": rng.choice((1.0, 0.6)),
        "freeze": rng.choice(((), ("embedding/.*",), ("encoder/layers[:1]/.*",), (".*bias", "norm/.*"))),
        "ema": rng.choice((0.0, 0.7)),
        "sam_rho": rng.choice(((0.0, 0.0), (0.1, 0.1), (0.05, 0.2))),
    }  # fmt: skip
    if optim["sam_rho"][1]:
        optim["sam_alpha"] = rng.choice((0.0, 0.4))
    if name in ("lamb", "lars"):
        optim["weight_decay_by"] = "lr"
    if name == "schedule_free":
        optim |= {"schedule": "constant", "ema": 0.0}
    schedule = optim["schedule"]
    if schedule in ("cosine", "linear", "polynomial"):
        optim["lr_end"] = rng.choice((0.0, 0.004))
    if schedule == "polynomial":
        optim["power"] = 0.7
    if schedule == "rsqrt":
        optim["timescale"] = 4
    if schedule == "staircase":
        optim |= {"boundaries": (5, 8), "factor": 0.3}
    if schedule in ("rsqrt", "constant") and name != "schedule_free":
        optim["cooldown"] = rng.choice((0, 4))
    if schedule != "staircase" and name != "schedule_free" and rng.random() < 0.3:
        optim |= {"late": ("embedding/.*", "norm/.*"), "late_warmup": 2}
        optim["freeze"] = ()
    takes_end = name not in ("lamb", "lars", "schedule_free") and optim["weight_decay"]
    if takes_end and optim["weight_decay_by"] != "gradient":
        optim["weight_decay_end"] = rng.choice((None, 0.5))
    return optim, rng.choice((1, 2, 4)), rng.choice((0.0, 0.1))


def as_config(optim: dict) -> dict:
    """The same fields as a config has them."""
    fields = dict(optim)
    for name in NO_DURATIONS:
        if name in fields:
            fields[name] = f"{fields[name]} steps"
    if "boundaries" in fields:
        fields["boundaries"] = tuple(f"{step} steps" for step in fields["boundaries"])
    return {f"optim.{name}": value for name, value in fields.items()}


def assembled(optim: dict, parts: int, smoothing: float):
    config = default_config()
    config.update_from_flattened_dict({
        "model.name": VARIANTS[0], "data.image_size": SIZE, "data.mean": (0.5,) * 3, "data.std": (0.5,) * 3,
        "data.interpolation": "bilinear", "augment.flip": False, "batch_size": BATCH, "accumulate": parts,
        "duration": f"{STEPS} steps", "objective.label_smoothing": smoothing, **as_config(optim),
    })  # fmt: skip
    return assemble(resolve(config), num_classes=CLASSES, examples_per_epoch=100)


@pytest.mark.parametrize(
    "seed", [*range(14), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(14, 74))]
)
def test_ten_steps_are_those_of_numpy(seed):
    optim, parts, smoothing = draw(seed)
    assembly = assembled(optim, parts, smoothing)
    rng = np.random.default_rng(seed)
    like, _ = jax.eval_shape(assembly.networks.init, jax.random.key(0))
    params = jax.tree.map(lambda p: 0.5 * rng.standard_normal(p.shape).astype(np.float32), like)
    reference = numpy_step.Run(
        dataclasses.replace(assembly.config.optim, **{**NO_DURATIONS, **optim}),
        STEPS,
        {name: np.float64(p) for name, p in patterns.named(params).items()},
    )
    state = TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=assembly.optimizer.init(params),
        ema=params if assembly.keeps_average else None,
        health=healthy(params),
    )
    step = in_float64(assembly.train_step)
    for _ in range(STEPS):
        batch = {
            "image": rng.integers(0, 256, (BATCH, SIZE, SIZE, 3), np.uint8),
            "label": rng.integers(0, CLASSES, BATCH).astype(np.int32),
        }
        state, metrics = step(state, batch)
        x = (batch["image"].reshape(BATCH, -1) / 255 - 0.5) / 0.5
        targets = np.eye(CLASSES)[batch["label"]] * (1 - smoothing) + smoothing / CLASSES
        expected = reference.step(x, targets)
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-6, atol=1e-9, err_msg=name)
        assert_equal(state.params, reference.params)
        if state.ema is not None:
            assert_equal(state.ema, reference.average)


def assert_equal(tree, expected):
    for name, array in patterns.named(tree).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6, atol=1e-6, err_msg=name)
