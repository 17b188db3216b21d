"""A run that trains is served: its newer checkpoints are taken while requests are answered, by a real run."""

import collections
import concurrent.futures
import http.client
import json
import shutil
import signal
import threading
import time
from urllib.parse import urlsplit

import pytest

from tests.serving.conftest import encoded
from tests.serving.test_command import process
from tests.waiting import PATIENCE
from vit_jax.base.errors import ConfigError
from vit_jax.prediction.overrides import load_for_images
from vit_jax.serving.following import Follower
from vit_jax.serving.network import Network


def load(folder):
    return load_for_images(folder, (), "serve")


@pytest.fixture(scope="module")
def trained(finished_run):
    """The workdir of a run with checkpoints of the steps 4, 8 and 12."""
    return finished_run.workdir


@pytest.fixture(scope="module")
def network(trained):
    return Network(load(trained / "checkpoints/4"), largest=2)


@pytest.fixture
def followed(trained, tmp_path, network):
    """(workdir that has step 4 alone, a function that adds a step, the follower of a network that has step 4)."""
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir, ignore=shutil.ignore_patterns("8", "12"))

    def add(step: int) -> None:
        shutil.copytree(trained / f"checkpoints/{step}", workdir / "part")
        (workdir / "part").rename(workdir / f"checkpoints/{step}")

    first = load(workdir)
    network.replace(first)
    return workdir, add, Follower(workdir, first, network, load)


def test_a_newer_checkpoint_is_served_and_no_request_is_lost(followed, serving, network):
    _, add, follower = followed
    server, stop = serving(network), threading.Event()
    assert server.ask("/model")[1]["step"] == 4
    follower.look()  # nothing is new
    before = server.ask("/predict", encoded(side=32))[1]["predictions"]

    def client(_) -> list[int]:
        answers = []
        while not stop.is_set():
            answers.append(server.ask("/predict", encoded(side=32))[0])
        return answers

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, number) for number in range(4)]
        for step in (8, 12):
            add(step)
            follower.look()
        stop.set()
        answers = [status for one in clients for status in one.result()]
    assert set(answers) == {200} and server.ask("/model")[1]["step"] == 12
    assert "vit_jax_step 12.0" in server.ask("/metrics")[1]
    after = server.ask("/predict", encoded(side=32))[1]["predictions"]
    fresh = serving(Network(load(followed[0] / "checkpoints/12"), largest=1))
    assert fresh.ask("/predict", encoded(side=32))[1]["predictions"] == after != before


def test_one_that_cannot_be_read_is_tried_again_and_the_served_one_stays(followed, network, caplog):
    workdir, add, follower = followed
    add(8)
    for file in (workdir / "checkpoints/8/state").rglob("d/*"):
        file.write_bytes(b"")
    follower.look()
    follower.look()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert (
        len(warnings) == 1 and "is tried again" in warnings[0] and "step 4 is served" in warnings[0]
    )
    shutil.rmtree(workdir / "checkpoints/8")
    add(8)
    follower.look()
    assert network.step == 8


def test_one_with_other_classes_is_refused(followed, network, caplog, monkeypatch):
    _, add, follower = followed
    monkeypatch.setattr(network, "classes", ("others",))
    add(8)
    follower.look()
    follower.look()
    assert network.step == 4 and caplog.text.count("it has other classes") == 1


def test_what_does_not_change_is_not_followed(trained, network):
    one = load(trained / "checkpoints/4")
    with pytest.raises(ConfigError, match="with --follow set --checkpoint=WORKDIR"):
        Follower(trained / "checkpoints/4", one, network, load)


@pytest.mark.slow
def test_ten_thousand_requests_are_answered_with_reloads_among_them(followed):
    workdir, add, _ = followed
    with process(workdir, "--follow", "--batch_size=8") as (server, url):
        answers, steps = collections.Counter(), set()

        def client(number: int) -> None:
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
            for _ in range(1000):
                connection.request("POST", "/predict", encoded(number, side=32))
                response = connection.getresponse()
                response.read()
                answers[response.status] += 1
            connection.close()

        with concurrent.futures.ThreadPoolExecutor(10) as pool:
            clients = [pool.submit(client, number) for number in range(10)]
            for step, count in ((8, 1000), (12, 4000)):
                while answers.total() < count:
                    time.sleep(0.05)
                add(step)
            while not all(one.done() for one in clients):
                connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
                connection.request("GET", "/model")
                steps.add(json.loads(connection.getresponse().read())["step"])
                connection.close()
                time.sleep(0.5)
            [one.result() for one in clients]
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    print(answers, steps)
    assert answers == {200: 10_000} and 12 in steps
