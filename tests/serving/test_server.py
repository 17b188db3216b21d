"""Requests to a real server, good and bad: each is answered."""

import asyncio
import base64
import concurrent.futures
import io
import json
import logging
import re
import socket
import struct
import threading
import types
import zlib

import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tests.serving.conftest import CLASSES, Running, Slow, encoded, make_run
from tests.waiting import PATIENCE, until
from vit_jax.base.errors import ConfigError
from vit_jax.serving.limits import Limits
from vit_jax.serving.network import ImageAnswer, Network
from vit_jax.serving.waiting import Waiting


@pytest.fixture(scope="module")
def server(network):
    running = Running(network, megabytes=0.1)
    yield running
    running.stop().result(PATIENCE)


@nnx.jit
def logits_of(model, images):
    return model(images).logits


def probabilities(run, content: bytes) -> np.ndarray:
    image = np.asarray(Image.open(io.BytesIO(content)), np.float32) / 127.5 - 1
    logits = np.asarray(logits_of(run.model, image[None]), np.float64)[0]
    return np.exp(logits) / np.exp(logits).sum()


def test_an_image_gets_the_classes_that_the_model_gives(server, run):
    status, answer = server.ask("/predict?topk=3", encoded())
    expected = probabilities(run, encoded())
    best = np.argsort(-expected)[:3]
    assert status == 200 and "attention" not in answer
    assert [one["class"] for one in answer["predictions"]] == [CLASSES[c] for c in best]
    found = [one["probability"] for one in answer["predictions"]]
    np.testing.assert_allclose(found, expected[best], atol=1e-5)


def test_a_model_with_thresholds_lists_and_marks_what_is_decided(serving):
    run = make_run("Mixer-S/8", depth=1, width=16, mlp_dim=16)
    run.config.objective.loss = "sigmoid"
    run.config.eval.thresholds = (0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0)
    server = serving(Network(run, largest=1))
    status, answer = server.ask("/predict?topk=1", encoded())
    decided = {one["class"]: one["decided"] for one in answer["predictions"]}
    assert status == 200 and {name for name, yes in decided.items() if yes} == {"ant", "dog", "eel"}
    # The best class is listed, whether it is decided for or not.
    assert len(decided) <= 4 and answer["predictions"][0]["probability"] == max(
        one["probability"] for one in answer["predictions"]
    )


def test_attention_comes_as_a_picture_of_the_image_as_the_model_sees_it(server):
    status, answer = server.ask("/predict?attention=1", encoded(side=40))
    kind, content = answer["attention"].split(",")
    picture = Image.open(io.BytesIO(base64.b64decode(content)))
    assert status == 200 and kind == "data:image/png;base64" and picture.size == (16, 16)


def test_a_model_without_attention_says_so(serving):
    server = serving(Network(make_run("Mixer-S/8", depth=1, width=16, mlp_dim=16), largest=1))
    assert server.ask("/model")[1]["attention"] is False
    assert server.ask("/predict", encoded())[0] == 200
    status, answer = server.ask("/predict?attention=1", encoded())
    assert status == 400 and "has no attention" in answer["error"]


def huge_png() -> bytes:
    """A small file that says it has 40,000 x 40,000 pixels."""
    head = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    packed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/predict", b"hello", 415, "is no image that can be read: it is no image in a format"),
        ("/predict", encoded(form="JPEG")[:-30], 415, "its end is missing"),
        ("/predict", b"", 400, "the request has no body; POST the bytes of an image"),
        ("/predict", b"x" * 100_001, 413, "more than 0.1 MB"),
        ("/predict", iter([b"x" * 60_000] * 2), 413, "more than 0.1 MB"),  # in chunks
        ("/predict", huge_png(), 413, "40000 x 40000 pixels"),
        ("/predict?topk=0", encoded(), 400, "topk=0 must be a whole number, 1 or more"),
        ("/predict?topk=five", encoded(), 400, "topk=five must be"),
        ("/predict?attention=yes", encoded(), 400, "attention=yes must be 0 or 1"),
        (f"/predict?topk={'9' * 5000}", encoded(), 400, "topk=999999999 must be a .* of up to 9 digits"),
        ("/predict?top=3", encoded(), 400, "no parameter 'top', only topk and attention"),
        ("/predict", None, 405, "POST the bytes of an image to /predict"),
        ("/nowhere", None, 404, "there is nothing here"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_gets_a_status_and_a_sentence(server, path, body, status, sentence):
    found, answer = server.ask(path, body)
    assert found == status and re.search(sentence, answer["error"])
    assert server.ask("/predict", encoded())[0] == 200


def test_more_classes_than_there_are_gives_all(server):
    assert len(server.ask("/predict?topk=1000", encoded())[1]["predictions"]) == len(CLASSES)


def test_a_slow_client_gets_408_and_others_are_served_meanwhile(serving, network):
    server = serving(network)
    patient, server.server._limits = server.server._limits, Limits(seconds=1)
    with socket.create_connection(server.place.split(":"), timeout=PATIENCE) as slow:
        slow.sendall(
            b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 500\r\n\r\nhalf"
        )
        until(lambda: server.server.bodies.held)
        server.server._limits = patient
        assert server.ask("/predict", encoded())[0] == 200
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_connection_that_asks_nothing_is_closed(serving, network):
    server = serving(network, seconds=0.5)
    with socket.create_connection(server.place.split(":"), timeout=PATIENCE) as idle:
        idle.sendall(b"POST /pre")
        assert idle.recv(4096) == b""


def test_images_that_arrive_together_are_computed_together(serving, network, run):
    slow = Slow(network)
    server = serving(slow)
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        first = pool.submit(server.ask, "/predict?topk=1", encoded(0))
        until(lambda: slow.batches)
        others = pool.map(lambda i: server.ask("/predict?topk=1", encoded(i)), range(1, 9))
        until(lambda: len(server.server._batcher) == 8)
        slow.go_on.set()
    for seed, (status, answer) in enumerate([first.result(), *others]):
        expected = probabilities(run, encoded(seed))
        assert status == 200
        assert answer["predictions"][0]["class"] == CLASSES[expected.argmax()]
    assert slow.batches == [1, 4, 4]


def test_batches_have_compiled_sizes_and_are_not_padded(serving, network):
    slow = Slow(network)
    server = serving(slow)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        first = pool.submit(server.ask, "/predict", encoded(0))
        until(lambda: slow.batches)
        others = [pool.submit(server.ask, "/predict", encoded(i)) for i in range(7)]
        until(lambda: len(server.server._batcher) == 7)
        slow.go_on.set()
        assert {one.result()[0] for one in (first, *others)} == {200}
    assert slow.batches == [1, 4, 2, 1]


def test_of_many_at_once_those_that_find_no_place_get_503(serving, network):
    slow = Slow(network)
    server = serving(slow, queue=5)
    with concurrent.futures.ThreadPoolExecutor(100) as pool:
        asked = [pool.submit(server.ask, "/predict", encoded()) for _ in range(100)]
        until(lambda: sum(one.done() for one in asked) >= 95)
        slow.go_on.set()
        answers = [one.result() for one in asked]
    refused = [answer["error"] for status, answer in answers if status == 503]
    assert sum(status == 200 for status, _ in answers) == 5 and len(refused) == 95
    assert refused[0] == "5 images wait for an answer: try again later"


def test_an_answer_that_takes_too_long_is_503(serving, network):
    slow = Slow(network)
    server = serving(slow)
    patient, server.server._waiting = server.server._waiting, Waiting(1, 0.3)
    status, answer = server.ask("/predict", encoded())
    server.server._waiting = patient
    slow.go_on.set()
    assert status == 503 and answer["error"].startswith("no answer within 0.3 seconds")
    assert server.ask("/predict", encoded())[0] == 200


def test_a_failure_inside_is_answered_and_the_server_goes_on(serving, network, monkeypatch):
    server = serving(network)
    monkeypatch.setattr(network, "answer", lambda images: 1 / 0)
    assert server.ask("/predict", encoded()) == (
        500, {"error": "the server failed; its log says how"},
    )  # fmt: skip
    monkeypatch.undo()
    assert server.ask("/predict", encoded())[0] == 200


def test_a_server_that_stops_answers_the_requests_that_are_there(serving, network, monkeypatch):
    slow = Slow(network)
    server = serving(slow)
    stop_listening, last_has_asked = server.server._site.stop, threading.Event()

    async def stop_later():
        await asyncio.to_thread(last_has_asked.wait, PATIENCE)
        await stop_listening()

    monkeypatch.setattr(server.server, "_site", types.SimpleNamespace(stop=stop_later))
    waiting = server.connect()  # has asked nothing yet
    waiting.connect()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(server.ask, "/predict", encoded(i)) for i in range(10)]
        until(lambda: len(server.server._waiting) == 10)
        stopped = server.stop()
        until(lambda: server.server._stopping)
        waiting.request("GET", "/healthz")
        assert server.answer(waiting) == (503, {"error": "the server stops"})
        last_has_asked.set()
        slow.go_on.set()
        assert [one.result()[0] for one in asked] == [200] * 10
    stopped.result(PATIENCE)
    with pytest.raises(ConnectionRefusedError):
        server.ask("/healthz")


def test_metrics_count_requests_images_and_batches(serving, network):
    server = serving(network)
    for body in (encoded(), encoded(), b"hello"):
        server.ask("/predict", body)
    status, text = server.ask("/metrics")
    assert status == 200
    assert 'vit_jax_requests_total{path="/predict",status="200"} 2.0' in text
    assert 'vit_jax_requests_total{path="/predict",status="415"} 1.0' in text
    assert "vit_jax_batch_images_sum 2.0" in text and "vit_jax_waiting_images 0.0" in text
    assert "vit_jax_predict_seconds_count 3.0" in text


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do(server, serving, network):
    from vit_jax.serving.server import Server

    port = int(server.place.split(":")[1])
    with pytest.raises(
        ConfigError, match=f"port {port} .Address already in use.: set another --host or --port"
    ):
        asyncio.run(Server(network, Limits(), {}).start("127.0.0.1", port))


NO_HTTP = {
    "noise": bytes(range(256)) + b"\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",
    "version": b"GET / HTTP/9.7\r\n\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "header": b"GET / HTTP/1.1\r\nHost 127.0.0.1\r\n\r\n",
    "length": b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: many\r\n\r\n",
    "long": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "expect": b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: wonders\r\n\r\n",
    "chunk": b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
}


@pytest.mark.parametrize("sent", NO_HTTP.values(), ids=NO_HTTP)
def test_what_is_no_http_gets_a_sentence_and_a_line_and_is_counted(serving, network, caplog, sent):
    server = serving(network)
    caplog.set_level(logging.INFO)
    with socket.create_connection(server.place.split(":"), timeout=PATIENCE) as client:
        client.sendall(sent)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert 400 <= status < 500 and b"application/json" in head and json.loads(body)["error"]
    assert b"aiohttp" not in answer and b"Server: vit_jax" in head
    lines = [record for record in caplog.records if "request" in record.getMessage()]
    assert len(lines) == 1 and not lines[0].exc_info and "\n" not in lines[0].getMessage()
    counted = re.findall(
        r'vit_jax_requests_total\{.*status="4\d\d"\} (\S+)', server.ask("/metrics")[1]
    )
    assert counted == ["1.0"]
    assert server.ask("/healthz") == (200, {"status": "ok"})


def test_answers_that_are_no_numbers_are_500_and_counted(serving, network, monkeypatch):
    server = serving(network)
    nothing = np.full(len(CLASSES), np.nan, np.float32)
    answers = [ImageAnswer(nothing, np.zeros(8, np.float32))]
    monkeypatch.setattr(network, "answer", lambda images: answers)
    status, answer = server.ask("/predict", encoded())
    assert status == 500 and answer["error"].startswith("what the model answers is not finite")
    assert 'path="/predict",status="500"} 1.0' in server.ask("/metrics")[1]


def test_a_server_that_drains_takes_requests_and_tells_its_probe(serving, network):
    server = serving(network)
    server.stopped = server._do(server.server.stop(drain=1.0))
    until(lambda: server.server._stopping)
    assert server.ask("/healthz") == (503, {"error": "the server stops"})
    assert server.ask("/predict", encoded())[0] == 200
    server.stopped.result(PATIENCE)
    with pytest.raises(ConnectionRefusedError):
        server.ask("/healthz")
