"""Worker processes that decode what strangers send: one that takes too long, or too much memory, is
ended and replaced, and nothing of it continues.
"""

import asyncio
import contextlib
import dataclasses
import json
import pickle

import numpy as np
from absl import logging

from vit_jax.base import subprocesses
from vit_jax.data import crops
from vit_jax.data.decoding import images
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, TooLarge
from vit_jax.devices import local
from vit_jax.serving.decode_worker import LENGTH, PIXELS, SECONDS, SIZE, Settings

_BYTES_PER_PIXEL = 16  # of the largest image, for what decoders keep beside its pixels
# What a process for images of usual sizes decodes, and the memory that it may take for that.
_USUAL_PIXELS, _USUAL_MEGABYTES = 2**24, 384
_MOST_ANSWER = 2**16  # bytes of an answer without pixels
_NAME = "sent"


class Decoders:
    """Processes that each decode one image at a time, between `start` and `stop`: several for images of usual sizes,
    and one for larger ones, so that memory is not that of the largest image for each of them.
    """

    def __init__(self, data: Data, *, seconds: float, count: int = 0, whole: int = 0):
        """Starts nothing yet.

        Args:
          data: how images are cut, the section `config.data`.
          seconds: how long one image may take, whatever else the machine does.
          count: of processes for images of usual sizes; 0: one for each core.
          whole: see `decode_worker.Settings`.
        """
        usual = dataclasses.replace(data, max_pixels=min(data.max_pixels, _USUAL_PIXELS))
        settings = Settings(usual, whole, _USUAL_MEGABYTES)
        self.pools = [_Pool(settings, seconds, count or local.cores())]
        if data.max_pixels > _USUAL_PIXELS:
            megabytes = max(data.max_pixels * _BYTES_PER_PIXEL >> 20, _USUAL_MEGABYTES)
            self.pools.append(_Pool(Settings(data, whole, megabytes), seconds, 1))

    async def start(self) -> None:
        """Returns once all processes are ready."""
        await asyncio.gather(*(pool.start() for pool in self.pools))

    async def stop(self) -> None:
        """Ends all processes."""
        await asyncio.gather(*(pool.stop() for pool in self.pools))

    async def decode(self, file: bytes) -> np.ndarray:
        """The pixels of an image, (H, W, C) uint8. Who cancels it ends the decoding.

        Raises:
          BadImage: it cannot be read, or takes too long.
        """
        # Without a process, since it takes no library: most of what is no image ends here.
        images.format_of(file, _NAME)
        *smaller, last = self.pools
        for pool in smaller:
            with contextlib.suppress(TooLarge):  # by its header
                return await pool.decode(file)
        return await last.decode(file)


class _Pool:
    """Processes of equal settings."""

    def __init__(self, settings: Settings, seconds: float, count: int):
        self._settings, self._seconds, self._count = settings, seconds, count
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self.workers: set[_Worker] = set()
        self._replacing: set[asyncio.Task] = set()

    async def start(self) -> None:
        await asyncio.gather(*(self._add() for _ in range(self._count)))

    async def stop(self) -> None:
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self.workers))

    async def decode(self, file: bytes) -> np.ndarray:
        """The pixels of an encoded image, from the next idle process. Raises `TooLarge` for one that is too large for
        these processes.
        """
        worker = await self._idle.get()
        try:
            async with asyncio.timeout(self._seconds):
                answer = await worker.ask(file)
        except BaseException as error:
            # It is in the middle of an image, or gone.
            self.workers.discard(worker)
            task = asyncio.create_task(self._replace(worker))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)
            if isinstance(error, TimeoutError):
                raise BadImage(_NAME, f"it takes more than {self._seconds:g} seconds") from None
            if isinstance(error, OSError | EOFError):
                raise BadImage(
                    _NAME, f"decoding it takes more than {SECONDS} s or too much memory"
                ) from None
            raise
        self._idle.put_nowait(worker)
        return _pixels(answer)

    async def _replace(self, worker: "_Worker") -> None:
        await worker.end()
        logging.warning("a process that decoded an image was ended; another takes its place")
        await self._add()

    async def _add(self) -> None:
        height, width, channels = crops.shape(self._settings.data)
        pixels = self._settings.whole or height * width
        most = len(PIXELS) + SIZE.size + channels * pixels
        worker = await _Worker.start(self._settings, max(most, _MOST_ANSWER))
        self.workers.add(worker)
        self._idle.put_nowait(worker)


def _pixels(answer: bytes) -> np.ndarray:
    if answer.startswith(PIXELS):
        size, start = SIZE.unpack_from(answer, len(PIXELS)), len(PIXELS) + SIZE.size
        return np.frombuffer(answer, np.uint8, offset=start).reshape(*size, -1)
    reply = json.loads(answer)
    raise (TooLarge if reply["too_large"] else BadImage)(_NAME, reply["why"])


class _Worker:
    """One process of `decode_worker.py`."""

    def __init__(self, process: asyncio.subprocess.Process, most: int):
        self._process, self._most = process, most

    @classmethod
    async def start(cls, settings: Settings, most: int) -> "_Worker":
        """A process that is ready; no answer of it may have more than `most` bytes."""
        command, environment = subprocesses.python_module("vit_jax.serving.decode_worker")
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**22,
            start_new_session=True,  # signals to the server's group are for the server
            env=environment,
        )  # fmt: skip
        worker = cls(process, most)
        try:
            await worker.ask(pickle.dumps(settings))
        except BaseException:
            await worker.end()
            raise
        return worker

    async def ask(self, message: bytes) -> bytes:
        """The answer to a message. Raises `OSError` or `EOFError` if the process ends meanwhile."""
        inputs, outputs = self._process.stdin, self._process.stdout
        inputs.write(LENGTH.pack(len(message)))
        inputs.write(message)
        await inputs.drain()
        (length,) = LENGTH.unpack(await outputs.readexactly(LENGTH.size))
        if length > self._most:
            raise EOFError(f"an answer of {length} bytes")
        return await outputs.readexactly(length)

    async def end(self) -> None:
        """Ends the process, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
