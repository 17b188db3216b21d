"""Checkpoints with names written out, and what they compute in float64 NumPy."""

import contextlib
import http.server
import math
import threading

import numpy as np
import pytest
from flax import nnx
from huggingface_hub import constants

from tests.interchange.hub_double import Handler, Hub
from vit_jax.interchange import remote

WIDTH, HEADS, MLP, DEPTH, PATCH, SIDE, CLASSES = 8, 2, 12, 2, 2, 3, 5
IMAGE = PATCH * SIDE


def official_vit(numbers=(2, 1, 3), seed=0) -> dict[str, np.ndarray]:
    """A file of google-research/vision_transformer; by default with names from before Linen."""
    rng = np.random.default_rng(seed)
    norm, attention, mlp = numbers

    def draw(*shape):
        return rng.normal(0, 0.5, shape).astype(np.float32)

    arrays = {
        "embedding/kernel": draw(PATCH, PATCH, 3, WIDTH),
        "embedding/bias": draw(WIDTH),
        "cls": draw(1, 1, WIDTH),
        "Transformer/posembed_input/pos_embedding": draw(1, 1 + SIDE**2, WIDTH),
        "Transformer/encoder_norm/scale": draw(WIDTH),
        "Transformer/encoder_norm/bias": draw(WIDTH),
        "head/kernel": draw(WIDTH, CLASSES),
        "head/bias": draw(CLASSES),
    }
    for layer in range(DEPTH):
        block = f"Transformer/encoderblock_{layer}"
        for number in (0, norm):
            arrays |= {
                f"{block}/LayerNorm_{number}/{part}": draw(WIDTH) for part in ("scale", "bias")
            }
        at = f"{block}/MultiHeadDotProductAttention_{attention}"
        for name in ("query", "key", "value"):
            arrays[f"{at}/{name}/kernel"] = draw(WIDTH, HEADS, WIDTH // HEADS)
            arrays[f"{at}/{name}/bias"] = draw(HEADS, WIDTH // HEADS)
        arrays |= {
            f"{at}/out/kernel": draw(HEADS, WIDTH // HEADS, WIDTH),
            f"{at}/out/bias": draw(WIDTH),
        }
        for n, (rows, columns) in enumerate([(WIDTH, MLP), (MLP, WIDTH)]):
            arrays[f"{block}/MlpBlock_{mlp}/Dense_{n}/kernel"] = draw(rows, columns)
            arrays[f"{block}/MlpBlock_{mlp}/Dense_{n}/bias"] = draw(columns)
    return arrays


def forward(arrays: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    """Logits of `official_vit`, from the equations of arXiv 2010.11929, in float64."""
    a = {name: array.astype(np.float64) for name, array in arrays.items()}

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * a[f"{name}/scale"]
            + a[f"{name}/bias"]
        )

    def gelu(x):
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    n = len(images)
    patches = (
        images.astype(np.float64)
        .reshape(n, SIDE, PATCH, SIDE, PATCH, 3)
        .transpose(0, 1, 3, 2, 4, 5)
    )
    x = (
        patches.reshape(n, SIDE**2, -1) @ a["embedding/kernel"].reshape(-1, WIDTH)
        + a["embedding/bias"]
    )
    x = (
        np.concatenate([np.repeat(a["cls"], n, 0), x], 1)
        + a["Transformer/posembed_input/pos_embedding"]
    )
    for layer in range(DEPTH):
        block = f"Transformer/encoderblock_{layer}"
        at, y = f"{block}/MultiHeadDotProductAttention_1", norm(x, f"{block}/LayerNorm_0")
        q, k, v = (
            np.einsum("bnd,dhc->bhnc", y, a[f"{at}/{name}/kernel"])
            + a[f"{at}/{name}/bias"][:, None]
            for name in ("query", "key", "value")
        )
        weights = np.exp(q @ k.swapaxes(-1, -2) / math.sqrt(WIDTH // HEADS))
        y = weights / weights.sum(-1, keepdims=True) @ v
        x = x + np.einsum("bhnc,hcd->bnd", y, a[f"{at}/out/kernel"]) + a[f"{at}/out/bias"]
        mlp, y = f"{block}/MlpBlock_3", norm(x, f"{block}/LayerNorm_2")
        y = gelu(y @ a[f"{mlp}/Dense_0/kernel"] + a[f"{mlp}/Dense_0/bias"])
        x = x + y @ a[f"{mlp}/Dense_1/kernel"] + a[f"{mlp}/Dense_1/bias"]
    return norm(x, "Transformer/encoder_norm")[:, 0] @ a["head/kernel"] + a["head/bias"]


@nnx.jit
def run(model, images):
    """The model's output; compiled once for all models of the same config."""
    return model(images)


@pytest.fixture(scope="session")
def images() -> np.ndarray:
    """(4, 6, 6, 3) in [-1, 1]."""
    return np.random.default_rng(9).uniform(-1, 1, (4, IMAGE, IMAGE, 3)).astype(np.float32)


@pytest.fixture(scope="session")
def arrays() -> dict[str, np.ndarray]:
    """`official_vit()`; not to be changed."""
    return official_vit()


@pytest.fixture(scope="session")
def expected(arrays, images) -> np.ndarray:
    """Its logits."""
    return forward(arrays, images)


@pytest.fixture(scope="session")
def file(arrays, tmp_path_factory):
    """It, as `.npz`."""
    path = tmp_path_factory.mktemp("official") / "vit.npz"
    np.savez(path, **arrays)
    return path


@pytest.fixture
def same_arrays():
    """`same_arrays(file, other)` asserts equal names and, of each, dtype, shape and bytes."""

    def check(one, other):
        one, other = np.load(one), np.load(other)
        assert sorted(one.files) == sorted(other.files)
        for name in one.files:
            a, b = one[name], other[name]
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name

    return check


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that is empty, and an empty cache."""
    hub = Hub()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub, hub.address = hub, f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        hub.address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    hub.stop = lambda: (server.shutdown(), server.server_close())
    remote.fetch.cache_clear()
    yield hub
    with contextlib.suppress(OSError):
        hub.stop()
    remote.fetch.cache_clear()
