"""Several images in one request, and features, of a real server."""

import asyncio

import aiohttp
import numpy as np
import pytest

from tests.serving.conftest import CLASSES, Running, encoded, form, make_run
from tests.serving.test_server import huge_png, probabilities
from tests.waiting import PATIENCE
from vit_jax.prediction.features import compile_features, compute_features
from vit_jax.prediction.images import Named
from vit_jax.serving import forms
from vit_jax.serving.limits import Refusal
from vit_jax.serving.network import Network

KIND = {"Content-Type": "multipart/form-data; boundary=xyz"}


@pytest.fixture(scope="module")
def server(network):
    running = Running(network, megabytes=0.1, images=6)
    yield running
    running.stop().result(PATIENCE)


def features_of(run, *contents: bytes) -> np.ndarray:
    """As `predict --features` has them."""
    files = [Named(str(number), content) for number, content in enumerate(contents)]
    compiled = compile_features(run)
    return np.concatenate([x for _, (x, _), _ in compute_features(run, files, 2, compiled)])


def test_features_are_those_of_predict(server, run):
    status, answer = server.ask("/features", encoded(3, side=40))
    expected = features_of(run, encoded(3, side=40))
    assert status == 200 and answer.keys() == {"features"}
    np.testing.assert_allclose([answer["features"]], expected, atol=1e-6)
    assert server.ask("/model")[1]["features"] == expected.shape[1]
    status, answer = server.ask("/features?topk=3", encoded())
    assert (status, answer["error"]) == (400, "there is no parameter 'topk'")


def test_several_images_get_what_each_gets_alone_and_a_bad_one_its_own_error(server, run):
    contents = {
        "a.png": encoded(1), "no image": b"hello", "b.png": encoded(2), "large": b"x" * 100_001,
        "empty": b"", "bomb": huge_png(),
    }  # fmt: skip
    status, answer = server.ask("/predict?topk=1", form(*contents.items()), **KIND)
    replies = answer["images"]
    assert status == 200 and [reply["name"] for reply in replies] == list(contents)
    statuses = [reply.get("status") for reply in replies]
    assert statuses == [None, 415, None, 413, 400, 413]
    for reply in (replies[0], replies[2]):
        (best,) = reply["predictions"]
        expected = probabilities(run, contents[reply["name"]])
        assert best["class"] == CLASSES[expected.argmax()]
        assert best["probability"] == pytest.approx(expected.max(), abs=1e-5)
    alone = [server.ask("/predict", contents[name]) for name in ("no image", "large", "bomb")]
    assert [replies[i]["error"] for i in (1, 3, 5)] == [answer["error"] for _, answer in alone]


def test_features_of_several_images_are_in_their_order(server, run):
    contents = [encoded(seed) for seed in range(6)]
    files = [(f"{number}.png", content) for number, content in enumerate(contents)]
    status, answer = server.ask("/features", form(*files), **KIND)
    found = [reply["features"] for reply in answer["images"]]
    assert status == 200
    np.testing.assert_allclose(found, features_of(run, *contents), atol=1e-6)


def test_the_forms_of_another_library_are_read(server, run):
    """aiohttp's client, with names of every kind."""
    names = ["a.png", "Ä ö.png", 'quo"te.png', "日本.png"]

    async def ask():
        data = aiohttp.FormData()
        for number, name in enumerate(names):
            data.add_field("image", encoded(number), filename=name)
        address = f"{server.url}/features"
        async with aiohttp.ClientSession() as session, session.post(address, data=data) as reply:
            return await reply.json()

    replies = asyncio.run(ask())["images"]
    expected = features_of(run, *map(encoded, range(4)))
    np.testing.assert_allclose([reply["features"] for reply in replies], expected, atol=1e-6)
    assert replies[0]["name"] == "a.png"


@pytest.mark.parametrize(
    ("kind", "body", "status", "sentence"),
    [
        ("multipart/form-data", form(("a", b"x")), 400, "has no boundary"),
        (f"multipart/form-data; boundary={'y' * 71}", b"x", 400, "has no boundary"),
        ("multipart/form-data; boundary=xyz", b"hello", 400, "does not begin with the boundary"),
        ("multipart/form-data; boundary=xyz", b"--xyz--\r\n", 400, "the form has no images"),
        ("multipart/form-data; boundary=xyz", form(("a", b"x"))[:-20], 400, "a part has no"),
        ("multipart/form-data; boundary=xyz", b"--xyz\r\nno end", 400, "a part has no head"),
        ("multipart/form-data; boundary=xyz", form(*[("a", b"x")] * 7), 413, "than 6 images"),
        ("multipart/form-data; boundary=xyz", b"x" * 650_000, 413, "than 6 images of 0.1 MB"),
        ("multipart/mixed; boundary=xyz", b"x", 415, "are sent as multipart/form-data"),
    ],
)
def test_what_is_no_form_gets_a_status_and_a_sentence(server, kind, body, status, sentence):
    code, answer = server.ask("/predict", body, **{"Content-Type": kind})
    assert code == status and sentence in answer["error"]
    assert server.ask("/predict", encoded())[0] == 200


def test_each_image_of_a_form_takes_a_place_of_the_queue(serving, network):
    server = serving(network, queue=2)
    files = [(str(seed), encoded(seed)) for seed in range(5)]
    status, answer = server.ask("/predict", form(*files), **KIND)
    statuses = [reply.get("status") for reply in answer["images"]]
    assert status == 200 and statuses == [None, None, 503, 503, 503]
    assert server.server.bodies.held == 0


@pytest.mark.slow
def test_a_model_without_head_is_served_for_its_features(serving):
    run = make_run(num_classes=0)
    server = serving(Network(run, largest=2))
    status, answer = server.ask("/features", encoded())
    assert status == 200
    np.testing.assert_allclose([answer["features"]], features_of(run, encoded()), atol=1e-6)
    status, answer = server.ask("/predict", encoded())
    assert status == 404 and "has no head" in answer["error"]


@pytest.mark.slow
def test_another_engine_has_features_too(run, monkeypatch, tmp_path):
    from vit_jax.export import engines

    monkeypatch.setattr(engines, "HOME", str(tmp_path))
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    answers = Network(run, 2, engine="onnxruntime").answer(images)
    for answer, expected in zip(answers, Network(run, 2).answer(images), strict=True):
        np.testing.assert_allclose(answer.features, expected.features, atol=1e-5)
        np.testing.assert_allclose(answer.probabilities, expected.probabilities, atol=1e-6)


def test_random_bytes_around_a_form_never_fail_otherwise_than_by_a_refusal():
    random = np.random.default_rng(0)
    whole = form(("a.png", b"\r\n--xy content"), ("b", b""))
    assert [part.content for part in forms.parts_of(whole, b"xyz", 6)] == [b"\r\n--xy content", b""]
    for _ in range(2000):
        body = bytearray(whole)
        for _ in range(random.integers(1, 6)):
            start = random.integers(len(body))
            body[start : start + random.integers(4)] = random.bytes(random.integers(4))
        try:
            forms.parts_of(bytes(body), b"xyz", 6)
        except Refusal as refusal:
            assert refusal.status in (400, 413)
