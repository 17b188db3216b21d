"""A server of a tiny network on a free port, in a thread of its own."""

import asyncio
import contextlib
import http.client
import io
import json
import threading
from unittest import mock
from urllib.parse import urlsplit

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tests.waiting import PATIENCE
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.config import default_config
from vit_jax.devices import local
from vit_jax.models import registry
from vit_jax.serving.limits import Limits
from vit_jax.serving.network import Network

CLASSES = ("ant", "bee", "<b>cat</b>", "dog", "eel", "fox", "gnu")


def make_run(name: str = "ViT-mu/8", **options) -> TrainedModel:
    """A network with random weights, as a checkpoint would have it."""
    config = default_config()
    config.update_from_flattened_dict({
        "model.name": name, "data.image_size": 16, "data.eval_crop": "resize",
        "data.mean": (0.5,) * 3, "data.std": (0.5,) * 3,
        "data.max_pixels": 2**24,  # larger images would have a process of their own
    })  # fmt: skip
    sizes = {"image_size": 16, "num_classes": len(CLASSES), "head_init": "normal"}
    model_config = registry.model_config(name, **sizes | options)
    parameters = registry.initialize(model_config, jax.random.key(0))
    definition = registry.abstract(model_config)[0]
    return TrainedModel(nnx.merge(definition, parameters), model_config, config, CLASSES, 0, "here")


@pytest.fixture(scope="session")
def run():
    return make_run()


@pytest.fixture(scope="session")
def network(run):
    return Network(run, largest=4)


class Slow:
    """A network that computes nothing before `go_on` is set, and counts its batches."""

    def __init__(self, network: Network):
        self._network, self.batches, self.go_on = network, [], threading.Event()

    def __getattr__(self, name):
        return getattr(self._network, name)

    def answer(self, images):
        self.batches.append(len(images))
        self.go_on.wait(PATIENCE)
        return self._network.answer(images)


class Running:
    """A server that runs, until `stop`, with one process that decodes: each takes 0.4 s of processor time to start."""

    def __init__(self, network, names=(), **limits):
        from vit_jax.serving.server import Server

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.stopped = None
        with mock.patch.object(local, "cores", lambda: 1):
            limits = {"seconds": PATIENCE} | limits
            self.server = Server(network, Limits(**limits), {"model": "tiny"}, names)
        self.url = self._do(self.server.start("127.0.0.1", 0)).result()
        self.place = urlsplit(self.url).netloc

    def _do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self):
        """Begins to stop; the result is there once it has ended."""
        self.stopped = self.stopped or self._do(self.server.stop())
        return self.stopped

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.place, timeout=PATIENCE)

    def ask(self, path: str, body=None, method=None, **headers) -> tuple[int, object]:
        """Status and answer."""
        with contextlib.closing(self.connect()) as connection:
            connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
            return self.answer(connection)

    @staticmethod
    def answer(connection: http.client.HTTPConnection) -> tuple[int, object]:
        response = connection.getresponse()
        content = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(content) if is_json else content.decode()


@pytest.fixture
def serving():
    """`serving(network, names, **limits)`: a server that runs."""
    running = []

    def start(network, names=(), **limits) -> Running:
        running.append(Running(network, names, **limits))
        return running[-1]

    yield start
    for one in running:
        one.stop().result(PATIENCE)


def encoded(seed: int = 0, side: int = 16, form: str = "PNG") -> bytes:
    """An image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def form(*files: tuple[str, bytes], boundary: str = "xyz") -> bytes:
    """A body of multipart/form-data, as RFC 7578 has it."""
    parts = [
        b'--%s\r\nContent-Disposition: form-data; name="image"; filename="%s"\r\nContent-Type: image/png\r\n\r\n%s\r\n'
        % (boundary.encode(), name.encode(), content)
        for name, content in files
    ]
    return b"".join(parts) + b"--%s--\r\n" % boundary.encode()
