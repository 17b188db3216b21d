"""`vit_jax serve`: as a process that is stopped, and its page in a browser."""

import asyncio
import base64
import collections
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import cv2
import jax
import numpy as np
import pytest

from tests.serving.conftest import CLASSES, encoded
from tests.waiting import PATIENCE
from vit_jax.interchange import formats
from vit_jax.models import registry

IMAGES = ("--config.data.mean=(0.5, 0.5, 0.5)", "--config.data.std=(0.5, 0.5, 0.5)")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = registry.model_config("ViT-mu/16", image_size=32, num_classes=7, head_init="normal")
    parameters = jax.device_get(registry.initialize(config, jax.random.key(0)))
    path = tmp_path_factory.mktemp("served") / "tiny.npz"
    formats.write_checkpoint(formats.LoadedCheckpoint(config, parameters), path, "official")
    return path


@contextlib.contextmanager
def process(checkpoint, *flags):
    """A server that runs, and its URL."""
    command = ("-m", "vit_jax", "serve", f"--checkpoint={checkpoint}", "--port=0", "--json")
    with subprocess.Popen(
        [sys.executable, *command, *IMAGES, *flags], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"XLA_FLAGS": ""},
    ) as server:  # fmt: skip
        try:
            yield server, json.loads(server.stdout.readline())["url"]
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--checkpoint=DIR is missing"),
        (["--checkpoint=nowhere", "--port=70000"], "--port=70000 must be"),
        (["--checkpoint=nowhere", "--queue=0"], "--queue=0 must be"),
    ],
)
def test_a_wrong_command_line_is_said(command, flags, message):
    code, _, err = command("serve", *flags)
    assert code == 2 and message in err


@pytest.mark.slow
def test_a_signal_stops_it_and_every_request_is_answered(checkpoint):
    with process(checkpoint, "--batch_size=4") as (server, url):
        answers, failures = [], []

        def client(number: int) -> None:
            """A new connection for each image, until no more are taken."""
            while True:
                connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
                try:
                    connection.connect()
                except ConnectionRefusedError:
                    return
                try:
                    connection.request("POST", "/predict", encoded(number))
                    answers.append(connection.getresponse().status)
                except (OSError, http.client.HTTPException) as error:
                    failures.append(error)
                connection.close()

        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            clients = [pool.submit(client, number) for number in range(20)]
            while len(answers) < 100:
                time.sleep(0.01)
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE) == 0
        assert [one.result() for one in clients] == [None] * 20
        assert not failures and set(answers) == {200}


@pytest.mark.slow
def test_a_thousand_at_once_are_all_answered(checkpoint):
    with process(checkpoint, "--batch_size=8", "--queue=64") as (_, url):

        def ask(number: int) -> int:
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
            connection.request("POST", "/predict", encoded(number % 10))
            return connection.getresponse().status

        with concurrent.futures.ThreadPoolExecutor(1000) as pool:
            found = list(pool.map(ask, range(1000)))
        assert set(found) <= {200, 503} and found.count(200) >= 64
        assert ask(0) == 200


def radiance(height: int, width: int) -> bytes:
    """A Radiance HDR of that size in few bytes: each row is one colour, by run lengths."""
    runs = b"".join(
        bytes([128 + min(127, width - x), 7]) for _ in range(4) for x in range(0, width, 127)
    )
    row = b"\2\2" + width.to_bytes(2, "big") + runs
    return b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y %d +X %d\n" % (height, width) + row * height


def resident(process_id: int) -> int:
    """Bytes of a process and those that it started."""
    import psutil

    server = psutil.Process(process_id)
    return sum(one.memory_info().rss for one in [server, *server.children(recursive=True)])


@pytest.mark.slow
def test_good_images_are_answered_throughout_an_attack(checkpoint):
    """Two huge Radiance files over and over, small PNGs of 60 million pixels, bodies cut short and
    compressed, from 1,000 connections; beside them 3,600 good images from others.
    """
    hdr, good = radiance(4900, 30_000), [encoded(i, side=200) for i in range(10)]
    bomb = cv2.imencode(".png", np.zeros((7500, 8000), np.uint8))[1].tobytes()
    assert 9e6 < len(hdr) < 1e7 and len(bomb) < 3e5
    with process(checkpoint, "--batch_size=8", "--queue=1024") as (server, url):
        before, stop = resident(server.pid), threading.Event()
        idle = [socket.create_connection(urlsplit(url).netloc.split(":")) for _ in range(990)]
        attacks, answers, most = collections.Counter(), [], 0

        def attack(number: int) -> None:
            while not stop.is_set():
                body, headers = [(hdr, {}), (hdr, {}), (b"x", {"Content-Encoding": "gzip"})][
                    number % 3
                ]
                if number == 9:
                    body = bomb
                connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
                try:
                    connection.request("POST", "/predict", body, headers)
                    if number % 4:
                        attacks[connection.getresponse().status] += 1
                except OSError as error:
                    attacks[type(error).__name__] += 1
                connection.close()  # every fourth does not wait for its answer
                stop.wait(0.05)

        def ask(number: int) -> None:
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
            for i in range(360):
                connection.request("POST", "/predict", good[(number + i) % 10])
                response = connection.getresponse()
                response.read()
                answers.append(response.status)

        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            attackers = [pool.submit(attack, number) for number in range(10)]
            asking = [pool.submit(ask, number) for number in range(10)]
            while not all(one.done() for one in asking):
                most = max(most, resident(server.pid))
                time.sleep(0.1)
            stop.set()
            [one.result() for one in (*asking, *attackers)]
        for one in idle:
            one.close()
    print(
        f"{collections.Counter(answers)}, attackers {attacks}, {(most - before) / 1e6:.0f} MB more"
    )
    assert collections.Counter(answers) == {200: 3600} and attacks[415] > 10
    assert most - before < 1e9


@pytest.mark.slow
def test_the_page_shows_classes_and_attention_in_a_browser(checkpoint, tmp_path):
    if not shutil.which("chromium"):
        pytest.skip("no chromium")
    image, text = tmp_path / "image.png", tmp_path / "text.png"
    image.write_bytes(encoded(side=200))
    text.write_text("hello")
    with process(checkpoint, "--batch_size=1") as (_, url):
        seen = asyncio.run(browse(url, [image, text], tmp_path))
    assert "ViT-mu/16" in seen[0] and seen[0].count("%") == 5
    assert all(name in (*map(str, range(7)), *CLASSES) for name in names(seen[0]))
    assert "is no image that can be read" in seen[1] and "%" not in seen[1]
    picture = (tmp_path / "0.png").read_bytes()
    assert len(picture) > 20_000  # with two images of noise


@pytest.mark.slow
def test_a_page_whose_name_was_made_to_mean_this_machine_reads_nothing(checkpoint, tmp_path):
    """In a real browser that takes the server for the page's own."""
    if not shutil.which("chromium"):
        pytest.skip("no chromium")
    with process(checkpoint, "--batch_size=1") as (_, url):
        port = urlsplit(url).port
        found = asyncio.run(asked_by_a_page(f"http://evil.example:{port}/", url, tmp_path))
    assert [answer["status"] for answer in found["own"].values()] == [421] * 4
    assert all(list(json.loads(answer["text"])) == ["error"] for answer in found["own"].values())
    assert (
        found["other"] == "TypeError"
    )  # a page from elsewhere reads no answer of http://127.0.0.1


async def asked_by_a_page(page: str, url: str, folder) -> dict:
    """What scripts of a page get of the server: as its own, and from http://127.0.0.1."""
    async with browser(folder, "--host-resolver-rules=MAP evil.example 127.0.0.1") as (call, value):
        await call("Page.setBypassCSP", enabled=True)  # as of a page that came from elsewhere
        await call("Page.navigate", url=page)
        script = f"""(async () => {{
            const own = {{}};
            for (const path of ["/", "/model", "/metrics", "/predict"]) {{
                const answer = await fetch(path, path == "/predict" ? {{method: "POST", body: "x"}} : {{}});
                own[path] = {{status: answer.status, text: await answer.text()}};
            }}
            let other = "read";
            try {{ await fetch("{url}/model"); }} catch (error) {{ other = error.name; }}
            return {{own, other}};
        }})()"""
        return await value(script)


def names(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.endswith("\t")]


@contextlib.asynccontextmanager
async def browser(folder, *flags):
    """A browser's tab: (a function that calls its protocol, one that gives the value of an expression)."""
    import aiohttp

    home = f"--user-data-dir={folder / 'home'}"
    running = subprocess.Popen(
        ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", home,
         "--window-size=950,760", *flags, "about:blank"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        listening = next(line for line in running.stderr if "DevTools listening on" in line)
        place = urlsplit(listening.split()[-1]).netloc
        async with aiohttp.ClientSession() as session:
            tabs = await (await session.get(f"http://{place}/json")).json()
            tab = next(one for one in tabs if one["type"] == "page")["webSocketDebuggerUrl"]
            async with session.ws_connect(tab, max_msg_size=0) as socket:
                numbers = itertools.count(1)

                async def call(method: str, **parameters) -> dict:
                    number = next(numbers)
                    await socket.send_json({"id": number, "method": method, "params": parameters})
                    while (answer := await socket.receive_json()).get("id") != number:
                        pass  # what the browser says of itself
                    return answer["result"]

                async def value(expression: str):
                    found = await call(
                        "Runtime.evaluate",
                        expression=expression,
                        returnByValue=True,
                        awaitPromise=True,
                    )
                    return found["result"].get("value")

                yield call, value
    finally:
        running.terminate()
        running.wait()


async def browse(url: str, files, folder) -> list[str]:
    """Gives the page one file after the other; the texts that it shows, and FOLDER/0.png, … as pictures."""
    async with browser(folder) as (call, value):

        async def until(expression: str) -> None:
            for _ in range(300):
                if await value(expression):
                    return
                await asyncio.sleep(0.1)
            raise TimeoutError(expression)

        await call("Page.navigate", url=url)
        await until("document.querySelector('#about')?.textContent")
        texts = []
        for number, file in enumerate(files):
            root = (await call("DOM.getDocument"))["root"]["nodeId"]
            chooser = await call("DOM.querySelector", nodeId=root, selector="#file")
            await call("DOM.setFileInputFiles", files=[str(file)], **chooser)
            await until("document.querySelector('#message').textContent != '…'")
            texts.append(await value("document.body.innerText"))
            shot = await call("Page.captureScreenshot", format="png")
            (folder / f"{number}.png").write_bytes(base64.b64decode(shot["data"]))
        return texts
