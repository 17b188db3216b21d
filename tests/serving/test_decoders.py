"""Images of strangers are decoded in processes that can be ended."""

import asyncio
import io
import json
import logging
import os
import socket
import time

import cv2
import numpy as np
import pytest

from tests.serving.conftest import encoded
from vit_jax.data import decode
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, TooLarge
from vit_jax.serving.decode_worker import Settings
from vit_jax.serving.decoders import Decoders, _Worker

DATA = Data(image_size=16, eval_crop="resize")


def run(steps, **options):
    """Runs `steps(decoders)` with one process."""

    async def begin():
        decoders = Decoders(options.pop("data", DATA), count=1, **{"seconds": 20} | options)
        await decoders.start()
        try:
            return await steps(decoders)
        finally:
            await decoders.stop()

    return asyncio.run(begin())


def slow_image() -> bytes:
    """64 million pixels in a small file, which take longer than a tenth of a second."""
    return cv2.imencode(".png", np.zeros((8000, 8000), np.uint8))[1].tobytes()


def pids(decoders) -> set[int]:
    return {worker._process.pid for worker in decoders._workers}


def test_a_process_gives_the_crops_of_this_one():
    async def steps(decoders):
        return [await decoders.decode(encoded(i, side=40)) for i in range(3)]

    for i, found in enumerate(run(steps)):
        assert np.array_equal(found, decode.eval_crop(encoded(i, side=40), DATA, name="x"))


@pytest.mark.parametrize("searched", [False, True])
def test_a_process_imports_nothing_from_the_folder_in_which_the_server_was_started(
    tmp_path, monkeypatch, searched
):
    """Where `python -m vit_jax serve` starts it, that folder is searched by the server itself."""
    for name in ("cv2", "PIL", "simplejpeg", "struct", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    if searched:
        monkeypatch.syspath_prepend(str(tmp_path))

    async def steps(decoders):
        return await decoders.decode(encoded())

    assert run(steps).shape == (16, 16, 3)
    assert not (tmp_path / "imported").exists()


def test_what_cannot_be_read_is_a_bad_image_and_the_process_goes_on():
    async def steps(decoders):
        before = pids(decoders)
        with pytest.raises(BadImage, match="it is Radiance HDR, which is not read"):
            await decoders.decode(b"#?RADIANCE\n" + bytes(100))
        with pytest.raises(TooLarge, match="8000 x 8000 pixels"):
            await decoders.decode(slow_image())
        await decoders.decode(encoded())
        assert pids(decoders) == before

    run(steps, data=Data(image_size=16, eval_crop="resize", max_pixels=10**6))


def test_an_image_that_takes_too_long_ends_with_its_process():
    async def steps(decoders):
        before, image = pids(decoders), slow_image()
        with pytest.raises(BadImage, match="takes more than 0.1 seconds"):
            await decoders.decode(image)
        decoders._seconds = 20
        assert (await decoders.decode(encoded())).shape == (16, 16, 3)
        assert not pids(decoders) & before
        for pid in before:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(steps, seconds=0.1)


def test_who_gives_up_ends_the_decoding():
    async def steps(decoders):
        before = pids(decoders)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await decoders.decode(slow_image())
        await decoders.decode(encoded())
        assert not pids(decoders) & before

    run(steps)


def test_a_process_that_dies_is_replaced():
    async def steps(decoders):
        (pid,) = pids(decoders)
        os.kill(pid, 9)
        with pytest.raises(BadImage, match="takes more than 10 s or too much memory"):
            await decoders.decode(encoded())
        assert (await decoders.decode(encoded())).shape == (16, 16, 3)

    run(steps)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="limits of memory are Linux's")
def test_an_image_that_needs_more_memory_than_there_is_is_refused():
    async def steps():
        worker = await _Worker.start(Settings(DATA, 0, 20), 2**16)
        try:
            refused = json.loads(await worker.ask(slow_image()))
            good = await worker.ask(encoded())
        finally:
            await worker.end()
        return refused, good

    refused, good = asyncio.run(steps())
    assert "emory" in refused["why"] or "alloc" in refused["why"], refused
    assert len(good) == 1 + 8 + 16 * 16 * 3


def tracebacks(caplog) -> list:
    return [record.getMessage() for record in caplog.records if record.exc_info]


def test_a_client_that_vanishes_leaves_a_line(serving, network, caplog):
    caplog.set_level(logging.INFO)
    server = serving(network)
    for body in (b"", b"half"):
        with socket.create_connection(server.place.split(":"), timeout=20) as client:
            client.sendall(
                b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 500\r\n\r\n" + body
            )
            time.sleep(0.2)
    deadline = time.monotonic() + 10
    while caplog.text.count("a client has gone") < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert caplog.text.count("a client has gone") == 2 and not tracebacks(caplog)
    assert server.ask("/predict", encoded())[0] == 200


def test_a_compressed_body_is_refused_and_leaves_no_traceback(serving, network, caplog):
    server = serving(network)
    for coding in ("gzip", "deflate"):
        status, answer = server.ask("/predict", b"hello", **{"Content-Encoding": coding})
        assert status == 415 and "without Content-Encoding" in answer["error"]
    assert not tracebacks(caplog)
    assert server.ask("/predict", encoded())[0] == 200


def test_bytes_count_until_they_are_answered(serving, network, monkeypatch):
    from vit_jax.serving import server as module

    monkeypatch.setattr(module, "_MOST_HELD", 3_000_000)
    server = serving(network)
    large = io.BytesIO()
    np.save(large, np.zeros((1000, 1000, 2), np.uint8))  # 2 MB, of two channels
    assert server.ask("/predict", large.getvalue())[0] == 415
    server.server._held += 2_000_000
    status, answer = server.ask("/predict", large.getvalue())
    assert status == 503 and "too many images" in answer["error"]
    server.server._held -= 2_000_000
    assert server.ask("/predict", encoded())[0] == 200 and server.server._held == 0
