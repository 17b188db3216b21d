"""Images that arrive one by one, computed together."""

import asyncio
import collections
import concurrent.futures
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

_LINGER_SECONDS = 0.01
_STEP_SECONDS = 0.001


class Batcher:
    """While a batch is computed, images gather; the next batch takes the largest size that they fill. It starts
    at once, unless others are just being decoded: for these it waits some milliseconds.

    Attributes:
      coming: images that are being decoded, which the caller counts.
    """

    def __init__(
        self, compute: Callable[[Sequence[np.ndarray]], Sequence[Any]], sizes: Collection[int]
    ):
        """`compute` gives an answer for each of several images, as many as one of `sizes`, 1 among them; it runs
        in a thread of its own.
        """
        self._compute, self._sizes, self._largest = compute, sizes, max(sizes)
        self._waiting: collections.deque[tuple[np.ndarray, asyncio.Future]] = collections.deque()
        self._arrived = asyncio.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "device")
        self.coming = 0

    def __len__(self) -> int:
        """How many images wait, those that are computed not counted."""
        return len(self._waiting)

    async def answer(self, image: np.ndarray) -> Any:
        """The answer for one image. Who cancels it gives up the place."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((image, future))
        self._arrived.set()
        return await future

    async def alone(self, compute: Callable, *arguments: Any) -> Any:
        """Another computation, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, compute, *arguments)

    async def run(self) -> None:
        """Computes batches until it is cancelled."""
        try:
            while True:
                await self._arrived.wait()
                await self._linger()
                wanted = [request for request in self._waiting if not request[1].done()]
                size = max((size for size in self._sizes if size <= len(wanted)), default=0)
                self._waiting = collections.deque(wanted[size:])
                if not self._waiting:
                    self._arrived.clear()
                if size:
                    await self._answer(wanted[:size])
        finally:
            self._thread.shutdown(wait=False)

    async def _linger(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + _LINGER_SECONDS
        while self.coming and len(self) < self._largest and loop.time() < until:
            await asyncio.sleep(_STEP_SECONDS)

    async def _answer(self, wanted: list[tuple[np.ndarray, asyncio.Future]]) -> None:
        images, futures = zip(*wanted, strict=True)
        try:
            answers = await self.alone(self._compute, images)
        except Exception as error:  # noqa: BLE001  raised where the answers are awaited
            answers = [error] * len(futures)
        for future, answer in zip(futures, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
