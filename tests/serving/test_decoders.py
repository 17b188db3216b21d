"""Images of strangers are decoded in processes that can be ended."""

import asyncio
import io
import json
import logging
import os
import pathlib
import re
import socket
import time

import cv2
import numpy as np
import pytest

from tests.serving.conftest import encoded
from tests.waiting import PATIENCE, until
from vit_jax.data.decoding import decode
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, TooLarge
from vit_jax.serving.decode_worker import Settings
from vit_jax.serving.decoders import Decoders, _Worker

DATA = Data(image_size=16, eval_crop="resize")


def run(steps, **options):
    """Runs `steps(decoders)` with one process."""

    async def begin():
        decoders = Decoders(
            options.pop("data", DATA), **{"count": 1, "seconds": PATIENCE} | options
        )
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
    return {worker._process.pid for pool in decoders.pools for worker in pool.workers}


async def replaced(decoders) -> None:
    """Returns once each pool has a process again."""
    async with asyncio.timeout(PATIENCE):
        while not all(pool.workers for pool in decoders.pools):
            await asyncio.sleep(0.01)


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
        await replaced(decoders)
        (ended,) = before - pids(decoders)
        with pytest.raises(ProcessLookupError):
            os.kill(ended, 0)

    run(steps, seconds=0.1)


def test_who_gives_up_ends_the_decoding():
    async def steps(decoders):
        before, image = pids(decoders), slow_image()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await decoders.decode(image)
        await replaced(decoders)
        assert len(pids(decoders) & before) == 1

    run(steps)


def test_a_process_that_dies_is_replaced():
    async def steps(decoders):
        (pid,) = {worker._process.pid for worker in decoders.pools[0].workers}
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


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="limits are read from /proc")
def test_a_process_has_the_limits_of_time_and_memory_that_are_promised():
    async def steps(decoders):
        await decoders.decode(encoded())
        (worker,) = decoders.pools[0].workers
        return pathlib.Path(f"/proc/{worker._process.pid}/limits").read_text()

    limits = run(steps, count=1)
    seconds, most = (
        int(re.search(rf"{name} +(\d+)", limits)[1])
        for name in ("Max cpu time", "Max address space")
    )
    assert 10 < seconds <= 10 + 30  # beyond what it took to start
    assert 384 * 2**20 < most < 8 * 2**30


def tracebacks(caplog) -> list:
    return [record.getMessage() for record in caplog.records if record.exc_info]


def test_a_client_that_vanishes_leaves_a_line(serving, network, caplog):
    caplog.set_level(logging.INFO)
    server = serving(network)
    for body in (b"", b"half"):
        with socket.create_connection(server.place.split(":"), timeout=PATIENCE) as client:
            client.sendall(
                b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 500\r\n\r\n" + body
            )
            time.sleep(0.2)
    until(lambda: caplog.text.count("a client has gone") == 2 or tracebacks(caplog))
    assert not tracebacks(caplog)
    assert server.ask("/predict", encoded())[0] == 200


def test_a_compressed_body_is_refused_and_leaves_no_traceback(serving, network, caplog):
    server = serving(network)
    for coding in ("gzip", "deflate"):
        status, answer = server.ask("/predict", b"hello", **{"Content-Encoding": coding})
        assert status == 415 and "without Content-Encoding" in answer["error"]
    assert not tracebacks(caplog)
    assert server.ask("/predict", encoded())[0] == 200


def test_a_large_image_is_decoded_by_a_process_of_its_own_which_alone_has_the_memory_for_it():
    large = cv2.imencode(".png", np.zeros((4100, 4100), np.uint8))[1].tobytes()

    async def steps(decoders):
        usual, own = decoders.pools
        assert (await decoders.decode(encoded())).shape == (16, 16, 3)
        held = own._idle.get_nowait()  # as while it decodes another one
        waiting = asyncio.create_task(decoders.decode(large))
        for _ in range(3):
            await decoders.decode(encoded())
        assert not waiting.done() and usual._settings.megabytes == 384 < own._settings.megabytes
        own._idle.put_nowait(held)
        assert (await waiting).shape == (16, 16, 3)

    run(steps)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="limits of memory are Linux's")
def test_many_small_files_of_large_images_take_the_memory_of_one():
    import psutil
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (8000, 8000)).save(file, "AVIF", speed=10)
    assert len(file.getvalue()) < 20_000

    async def steps(decoders):
        processes = [psutil.Process(pid) for pid in pids(decoders)]
        before = sum(process.memory_info().rss for process in processes)
        asked = [asyncio.create_task(decoders.decode(file.getvalue())) for _ in range(4)]
        most = 0
        while not all(one.done() for one in asked):
            most = max(most, sum(process.memory_info().rss for process in processes))
            await asyncio.sleep(0.005)
        print(f"{[one.exception() for one in asked]}: {(most - before) >> 20} MiB more")
        return most - before

    assert run(steps, count=4, seconds=120) < 1.1 * 2**30
