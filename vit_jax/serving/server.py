"""What is asked of the server, and what it answers: HTTP with aiohttp.

    GET  /         a page where one drops an image
    POST /predict  the bytes of an image: what is in it, see `replies.py`
    POST /features the same, of a model that does not segment: the input of its head
    POST /mask     the same to a model that segments: the mask as PNG
    GET  /model    what the model is
    GET  /healthz  200 while it takes requests, 503 once it stops: for a readiness probe
    GET  /metrics  for Prometheus

A body of multipart/form-data has several images, see `forms.py`: `images` of the reply is a list of their replies, or
errors. A request that cannot be served gets a status and {"error": SENTENCE}.
"""

import asyncio
import contextlib
import pathlib
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import prometheus_client
from absl import logging
from aiohttp import hdrs, web

from vit_jax.base import logs, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.data.record import BadImage, TooLarge
from vit_jax.devices import local
from vit_jax.prediction.finite import all_finite
from vit_jax.serving import browsers, forms
from vit_jax.serving.batching import Batcher
from vit_jax.serving.bodies import Bodies, Body, client_of
from vit_jax.serving.connections import Runner
from vit_jax.serving.decoders import Decoders
from vit_jax.serving.limits import Limits, Refusal
from vit_jax.serving.map_network import MapNetwork
from vit_jax.serving.network import Network
from vit_jax.serving.replies import Reply, Wanted, data_url, replies_of
from vit_jax.serving.waiting import Waiting

_PAGE = pathlib.Path(__file__).with_name("page.html").read_text()
_MOST_HELD = 2**30  # bytes of all bodies that are on their way or not answered
_GONE = 499  # the status, in metrics, of a request whose client did not wait
_BACKLOG = 1024  # connections that the system holds until they are accepted
_ACCEPT_SECONDS, _LAST_SECONDS = 0.05, 0.2  # see `Server.stop`
_USAGE = "POST the bytes of an image to /predict: curl --data-binary @FILE URL/predict"
_NOT_FINITE = (
    "what the model answers is not finite (NaN or infinity): its training diverged, its file is damaged, or numbers "
    "become too large for this image"
)
_MOST_WHY = 200  # characters that the log has of what is no HTTP
_HTTP = {404: f"there is nothing here; {_USAGE}", 405: _USAGE}


class Metrics:
    """What Prometheus reads."""

    def __init__(self, waiting: Callable[[], int], step: Callable[[], int]):
        self.registry = registry = prometheus_client.CollectorRegistry()
        self.requests = prometheus_client.Counter(
            "vit_jax_requests", "Answers by path and status", ("path", "status"), registry=registry
        )
        self.seconds = prometheus_client.Histogram(
            "vit_jax_predict_seconds", "From a request's head to its answer", registry=registry,
            buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
        )  # fmt: skip
        self.batches = prometheus_client.Histogram(
            "vit_jax_batch_images", "Images computed together", registry=registry,
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        )  # fmt: skip
        prometheus_client.Gauge(
            "vit_jax_waiting_images", "Images that wait for a batch", registry=registry
        ).set_function(waiting)
        prometheus_client.Gauge(
            "vit_jax_step", "At which the weights were saved", registry=registry
        ).set_function(step)


class Server:
    """Serves one network, between `start` and `stop`."""

    def __init__(
        self,
        network: Network | MapNetwork,
        limits: Limits,
        about: dict[str, Any],
        names: Collection[str] = (),
    ):
        """Starts nothing yet.

        Args:
          about: what /model says beside its classes.
          names: under which requests may ask for it, beside addresses, localhost and the host it listens on.
        """
        self._names = {name.lower() for name in names}
        self._network, self._limits, self._about = network, limits, about
        self._batcher = Batcher(self._compute, network.sizes)
        self._replies = replies_of(network, self._batcher)
        self.metrics = Metrics(lambda: len(self._batcher), lambda: network.step)
        whole = self._replies.whole
        self._decoders = Decoders(network.data, seconds=limits.seconds, whole=whole)
        # Whole images take memory: only so many are decoded and not yet answered.
        self._places = asyncio.Semaphore(2 * local.cores() if whole else limits.queue)
        self.bodies, self._stopping = Bodies(_MOST_HELD), False
        self._waiting = Waiting(limits.queue, limits.seconds)

    async def start(self, host: str, port: int) -> str:
        """Begins to listen. Returns the URL. Raises `ConfigError` if it cannot."""
        self._host = host.lower()
        await self._decoders.start()
        app = web.Application(middlewares=[self._answer])
        app.add_routes([
            web.get("/", self._page), web.post("/predict", self._predict), web.post("/mask", self._mask),
            web.post("/features", self._features),
            web.get("/model", self._model), web.get("/healthz", self._health), web.get("/metrics", self._metrics),
        ])  # fmt: skip
        seconds = self._limits.seconds
        self._runner = Runner(
            app, self._refuse, shutdown_timeout=2 * seconds, access_log=None, keepalive_timeout=seconds,
            auto_decompress=False,
        )  # fmt: skip
        await self._runner.setup()
        try:
            self._socket = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
            self._site = web.SockSite(self._runner, self._socket, backlog=_BACKLOG)
            await self._site.start()
        except OSError as error:
            await self._decoders.stop()
            await self._runner.cleanup()
            why = error.strerror.partition(" (while")[0]  # it repeats the address
            raise ConfigError(
                f"nothing can listen on {host}, port {port} ({why}): set another --host or --port; --port=0 is any "
                "that is free"
            ) from None
        self._batches = asyncio.create_task(self._batcher.run())
        port = self._runner.addresses[0][1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def stop(self, drain: float = 0.0) -> None:
        """Answers all requests that are there, and ends.

        Args:
          drain: seconds. For so long it still takes requests while /healthz says 503, so that a readiness probe sees it
            and sends them elsewhere.
        """
        self._stopping = True
        await asyncio.sleep(drain)
        # 1. The system takes no more connections, and those that it holds are accepted: to close the port would
        #    reset them. 2. The port is closed. 3. What is connected may still ask. 4. All is answered.
        self._socket.listen(0)
        await asyncio.sleep(_ACCEPT_SECONDS)
        await self._site.stop()
        await asyncio.sleep(_LAST_SECONDS)
        await self._runner.cleanup()
        self._batches.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._batches
        await self._decoders.stop()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Callable) -> web.Response:
        began = time.monotonic()
        try:
            browsers.check_names(request.headers, self._host, self._names)
            response = await handler(request)
        except Refusal as refusal:
            response = _sentence(refusal.status, str(refusal))
        except web.HTTPException as error:
            response = _sentence(error.status, _HTTP.get(error.status, error.reason))
        except ConnectionError:
            logging.info("a client has gone before its request had arrived")
            response = web.Response(status=_GONE)
        except Exception:  # noqa: BLE001  every request is answered
            logging.exception("a request failed")
            response = _sentence(500, "the server failed; its log says how")
        known = request.match_info.route.resource
        path = known.canonical if known else "other"
        self.metrics.requests.labels(path, response.status).inc()
        if path in ("/predict", "/features", "/mask"):
            self.metrics.seconds.observe(time.monotonic() - began)
        for name, value in browsers.HEADERS.items():
            response.headers.setdefault(name, value)
        if self._stopping:
            response.force_close()
        return response

    def _refuse(self, status: int, why: str) -> web.Response:
        """Makes the reply to bytes that are no HTTP; see `connections`."""
        line = " ".join(why.split())[:_MOST_WHY]
        logging.info("what is no request got %d: %s", status, logs.printable(line))
        self.metrics.requests.labels("other", status).inc()
        response = _sentence(status, f"this is no HTTP request that can be understood; {_USAGE}")
        response.headers.update(browsers.HEADERS)
        return response

    async def _predict(self, request: web.Request) -> web.Response:
        return await self._reply(request, self._replies.predict(request.query))

    async def _features(self, request: web.Request) -> web.Response:
        return await self._reply(request, self._replies.features(request.query))

    async def _mask(self, request: web.Request) -> web.Response:
        return await self._reply(request, self._replies.mask(request.query))

    async def _reply(self, request: web.Request, wanted: Wanted) -> web.Response:
        client = client_of(request.remote)
        self._waiting.check(client)
        if request.content_type == forms.TYPE:
            return await self._reply_to_form(request, client, wanted)
        limits = self._limits
        with self.bodies.of(client) as arriving:
            body = await self._receive(request, arriving, limits.bytes, _too_large(limits))
            reply = await self._of_image(client, body, wanted)
        if isinstance(reply, bytes):
            return web.Response(body=reply, content_type="image/png")
        return web.json_response(reply)

    async def _reply_to_form(
        self, request: web.Request, client: str, wanted: Wanted
    ) -> web.Response:
        """The reply to several images of one request."""
        limits = self._limits
        boundary = forms.boundary_of(request.headers[hdrs.CONTENT_TYPE])
        most = forms.most_bytes(limits)
        too_large = f"the form has more than {limits.images} images of {limits.megabytes:g} MB"
        with self.bodies.of(client) as arriving:
            body = await self._receive(request, arriving, most, too_large)
            parts = forms.parts_of(body, boundary, limits.images)
            del body  # The parts are copies.
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._of_part(client, part, wanted)) for part in parts]
        return web.json_response({"images": [task.result() for task in tasks]})

    async def _of_part(self, client: str, part: forms.Part, wanted: Wanted) -> dict[str, Any]:
        """The reply to one of several images, or the error of it."""
        try:
            if not part.content:
                raise Refusal(400, "the image is empty")
            if len(part.content) > self._limits.bytes:
                raise Refusal(413, _too_large(self._limits))
            reply = await self._of_image(client, part.content, wanted)
        except Refusal as refusal:
            return {"name": part.name, "error": str(refusal), "status": refusal.status}
        if isinstance(reply, bytes):
            return {"name": part.name, "mask": data_url(reply)}
        return {"name": part.name} | reply

    async def _receive(
        self, request: web.Request, arriving: Body, most: int, too_large: str
    ) -> bytes:
        """The body of a request, which is refused as `too_large` if it has more than `most` bytes."""
        if request.content_type.startswith("multipart/") and request.content_type != forms.TYPE:
            raise Refusal(415, f"several images are sent as {forms.TYPE}; {_USAGE}")
        if hdrs.CONTENT_ENCODING in request.headers:  # a small body may stand for a large one
            raise Refusal(415, f"images are sent without Content-Encoding: {_USAGE}")
        if (request.content_length or 0) > most:
            raise Refusal(413, too_large)
        seconds = self._limits.seconds
        try:
            async with asyncio.timeout(seconds):
                body = await arriving.receive(request.content.iter_any(), most)
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {seconds:g} seconds") from None
        if body is None:
            raise Refusal(413, too_large)
        if not body:
            raise Refusal(400, f"the request has no body; {_USAGE}")
        return body

    async def _of_image(self, client: str, body: bytes, wanted: Wanted) -> Reply:
        """The reply to an image, which first waits for its turn."""
        async with self._waiting.place(client), self._places:
            return await self._decoded(body, wanted)

    async def _decoded(self, body: bytes, wanted: Wanted) -> Reply:
        try:
            self._batcher.coming += 1
            try:
                image = await self._decoders.decode(body)
            finally:
                self._batcher.coming -= 1
            return await wanted(image)
        except TooLarge as error:
            raise Refusal(413, f"the image is too large: {error.why}") from None
        except BadImage as error:
            raise Refusal(415, f"the body is no image that can be read: {error.why}") from None

    def _compute(self, images: list[np.ndarray]) -> Sequence[Any]:
        self.metrics.batches.observe(len(images))
        answers = self._network.answer(images)
        return [answer if all_finite(answer) else Refusal(500, _NOT_FINITE) for answer in answers]

    async def _page(self, _) -> web.Response:
        headers = browsers.page_headers(_PAGE)
        return web.Response(text=_PAGE, content_type="text/html", headers=headers)

    async def _model(self, _) -> web.Response:
        network = self._network
        about = self._about | {
            "step": network.step, "image_size": sizes.size_text(network.data.image_size),
            "classes": network.classes,
        } | self._replies.about()  # fmt: skip
        return web.json_response(about)

    async def _health(self, _) -> web.Response:
        if self._stopping:
            raise Refusal(503, "the server stops")
        return web.json_response({"status": "ok"})

    async def _metrics(self, _) -> web.Response:
        text = prometheus_client.generate_latest(self.metrics.registry)
        kind = prometheus_client.CONTENT_TYPE_LATEST
        return web.Response(body=text, headers={"Content-Type": kind})


def _too_large(limits: Limits) -> str:
    return f"the image has more than {limits.megabytes:g} MB"


def _sentence(status: int, text: str) -> web.Response:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.json_response({"error": text}, status=status, headers=headers)
