"""Records read ahead of decoding, in the order in which batches need them.

Which examples come next is a function of (seed, step), so that they can be read long before they are
decoded: with many requests in flight, for as many images as memory allows. Where reads are fast (files
on a local disk) that gains nothing: then the threads that decode also read. Which of the two it is
follows from the measured time that a read waits, and may change during a run.
"""

import collections
import contextlib
import math
import pathlib
import threading
import time
from collections.abc import Callable

import numpy as np
from absl import logging

from vit_jax.data import retrying
from vit_jax.data.record import Record, Source

BLOCK = 16  # images that a thread decodes at once
MIB = 2**20
MOST_REQUESTS = 256  # in flight: each has a thread, which does nothing but wait
_FEWEST_REQUESTS = 4  # so that one which hangs does not hold up all
# Requests in flight are as many as would read this many images a second.
_IMAGES_PER_SECOND = 10_000
# Seconds that a read waits, from which on it is done ahead, and below which it is not any more.
_SLOW = 0.5e-3
_FAST = 0.25e-3
_REQUEST_SECONDS = 2e-3  # reads that wait for less are grouped: a request has a cost too
# The mean wait of this many reads is taken, without the longest eighth: on a busy machine a few wait
# for a core or for Python's lock, which is no matter of storage.
_MEASURED = 64
# Automatic memory: 1 / 16 of the free memory, at most 1 GiB.
_SHARE = 16
_MOST_MEMORY = 2**30
_CLOSING = 1.0  # seconds that closing waits for reads in flight


class RowBlock:
    """The examples of rows that a thread decodes at once, and what was read of them.

    Attributes:
      number: in the order of all blocks.
      examples: indices in the source; None: whoever decodes reads them.
      missing: how many have not been read yet.
      size: bytes of those that have.
      wait_seconds: how long the thread that decodes it has waited for reads meanwhile.
    """

    def __init__(self, number: int, examples: list[int] | None = None):
        self.number = number
        self.examples = examples
        self.requested = 0
        self.missing = len(examples or ())
        self.size = 0
        self.wait_seconds = 0.0
        self._records: list[Record | Exception | None] = [None] * self.missing

    def put(self, first: int, records: list[Record | Exception]) -> int:
        """Keeps what was read of the examples from place `first` on; returns its bytes."""
        self._records[first : first + len(records)] = records
        size = sum(_bytes(record) for record in records)
        self.missing -= len(records)
        self.size += size
        return size

    def pop(self, place: int) -> Record:
        """The record at `place`, which is kept no longer; raises the error that reading it raised."""
        record = self._records[place]
        self._records[place] = None
        if isinstance(record, Exception):
            raise record
        return record


class ReadAhead:
    """Blocks of records for threads that decode.

    A thread calls `take`, decodes what `record` gives it, and calls `release`. Blocks come in order,
    except that one which is complete does not wait for an earlier one which is not.

    Attributes:
      wait_seconds: how long decoding threads have waited for reads, added up.
      most_bytes: the most that was held in records at any time.
      most_requests: the most requests that were in flight at any time.
    """

    def __init__(
        self,
        source: Source,
        examples: Callable[[int], list[int]],
        total: int,
        *,
        memory: float = -1,
        decoders: int = 1,
    ):
        """Starts to read.

        Args:
          source: the examples.
          examples: number of a block -> the examples in it.
          total: blocks.
          memory: for records that were read and are not decoded yet, in bytes; -1: automatic, and
            only where reads are slow; 0: none is read ahead.
          decoders: threads that decode.
        """
        self._source = source
        self._examples = examples
        self._total = total
        self._automatic = memory < 0
        self._decoders = decoders
        self._memory = _free_memory() if self._automatic else memory
        self.wait_seconds = 0.0
        self.most_bytes = 0
        self.most_requests = 0

        self._lock = threading.Lock()
        self._complete = threading.Condition(self._lock)  # something can be taken
        self._wanted = threading.Condition(self._lock)  # something can be read
        self._closed = threading.Event()
        self._ahead = memory > 0 or None  # None: not measured yet
        self._next = self._taken = self._allowed = 0  # blocks: begun; given away; that may be
        self._open: RowBlock | None = None  # the block whose examples are being requested
        self._begun: collections.deque[RowBlock] = collections.deque()  # not taken
        self._requests = self._unread = self._held = 0  # in flight; their images; images begun
        self._bytes = 0  # of images that were read
        self._mean_size = 0.0  # of an image, in bytes
        self._waits: collections.deque[float] = collections.deque(maxlen=_MEASURED)
        self._wait = 0.0  # their mean, see `_MEASURED`
        self._warm = self._reported = False
        self._threads: list[threading.Thread] = []
        self._idle = 0
        if memory == 0:
            self._ahead = False
        elif total:
            self._start_thread()

    # for threads that decode

    def allow(self, blocks: int) -> None:
        """Lets `blocks` more blocks be taken."""
        with self._lock:
            self._allowed += blocks
            self._complete.notify_all()

    def take(self) -> RowBlock | None:
        """The next block to decode; waits for one. None: there are no more."""
        with self._lock:
            while not self._closed.is_set() and self._taken < self._total:
                if block := self._takeable():
                    self._taken += 1
                    return block
                missed = self._taken < self._allowed
                start = time.perf_counter()
                self._complete.wait()
                if missed:
                    self.wait_seconds += time.perf_counter() - start
            self._complete.notify_all()
            return None

    def record(self, block: RowBlock, index: int, place: int | None = None) -> Record:
        """Example `index`, which is at `place` in `block`, or nowhere in it: then, and if the block
        was not read ahead, it is read now.

        Raises:
          DataError: it cannot be read; `BadImage` if it alone.
        """
        if block.examples is not None and place is not None:
            return block.pop(place)
        start = time.perf_counter(), time.thread_time()
        try:
            return retrying.read_with_retries(self._source, index, self._closed)
        finally:
            with self._lock:
                block.wait_seconds += self._note(start, 1)

    def release(self, block: RowBlock) -> None:
        """Says that a block is decoded, so that there is memory for another one."""
        with self._lock:
            self._bytes -= block.size
            self._held -= len(block.examples or ())
            self.wait_seconds += block.wait_seconds
            if self._threads:
                self._wake()

    def close(self) -> None:
        """Ends the threads. Reads in flight are waited for only for a moment."""
        with self._lock:
            self._closed.set()
            self._begun.clear()
            self._complete.notify_all()
            self._wanted.notify_all()
        join(self._threads)

    def _takeable(self) -> RowBlock | None:
        for block in self._begun:
            if block.number >= self._allowed:
                break
            if not block.missing:
                self._begun.remove(block)
                return block
        if self._ahead is False and self._next < self._allowed:
            self._next += 1
            return RowBlock(self._next - 1)
        return None

    # for threads that read

    def _start_thread(self) -> None:
        name = f"reading-{len(self._threads)}"
        thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _read(self) -> None:
        """What a thread does: reads one request after the other."""
        with self._lock:
            while request := self._next_request():
                block, first, stop = request
                self._lock.release()
                start = time.perf_counter(), time.thread_time()
                records = self._read_some(block.examples[first:stop])
                self._lock.acquire()
                self._note(start, len(records))
                self._keep(block, first, records)

    def _keep(self, block: RowBlock, first: int, records: list[Record | Exception]) -> None:
        """Takes what a request gave."""
        self._requests -= 1
        self._unread -= len(records)
        size = block.put(first, records)
        self._bytes += size
        self.most_bytes = max(self.most_bytes, self._bytes)
        self._mean_size += (size / len(records) - self._mean_size) / (len(self._waits) + 1)
        if not block.missing:
            self._complete.notify()
        self._report()

    def _report(self) -> None:
        """Logs once how far ahead is read."""
        if self._reported or not self._ahead or len(self._waits) < _MEASURED:
            return
        self._reported = True
        images = min(self._most_images(), self._memory / max(self._mean_size, 1))
        logging.info(
            "reading ahead of decoding: a read waits %.3g ms; up to %d at once, up to %d images, %d MiB",
            1000 * self._wait, self._most_requests(), images, images * self._mean_size / MIB,
        )  # fmt: skip

    def _next_request(self) -> tuple[RowBlock, int, int] | None:
        """Waits for something to read: (block, first place, last place + 1); None once it is closed."""
        while not self._closed.is_set():
            if request := self._request():
                self._wake()  # one wakes the next, as long as there is something for it
                return request
            self._idle += 1
            self._wanted.wait()
            self._idle -= 1
        return None

    def _wake(self) -> None:
        """Has another thread read, if there is something to be read."""
        if self._closed.is_set() or not self._may_request():
            return
        if self._idle:
            self._wanted.notify()
        else:
            self._start_thread()

    def _request(self) -> tuple[RowBlock, int, int] | None:
        while not self._open and self._may_request():
            block = RowBlock(self._next, self._examples(self._next))
            self._next += 1
            self._begun.append(block)
            self._held += len(block.examples)
            self._unread += len(block.examples)
            if block.examples:
                self._open = block
            else:  # padding alone
                self._complete.notify()
        if not self._may_request():
            return None
        block = self._open
        first = self._open.requested
        stop = block.requested = min(first + self._request_size(), len(block.examples))
        if stop == len(block.examples):
            self._open = None
        self._requests += 1
        self.most_requests = max(self.most_requests, self._requests)
        return block, first, stop

    def _may_request(self) -> bool:
        if self._requests >= self._most_requests():
            return False
        if self._open:
            return True
        if self._next == self._total or self._ahead is False:
            return False
        if not self._held:
            return True
        images = self._held + BLOCK
        unread = self._unread + images - self._held
        needed = self._bytes + self._mean_size * unread
        return needed <= self._memory and images <= self._most_images()

    def _most_requests(self) -> int:
        if not self._waits:
            return 1
        return min(max(math.ceil(_IMAGES_PER_SECOND * self._wait), _FEWEST_REQUESTS), MOST_REQUESTS)

    def _most_images(self) -> float:
        """Images ahead of decoding, where nobody says how much memory they may take: for four times
        as long as a read takes.
        """
        if not self._automatic:
            return math.inf
        for_requests = 4 * self._most_requests() * self._request_size()
        for_decoders = 2 * BLOCK * self._decoders
        return max(for_requests, for_decoders)

    def _request_size(self) -> int:
        if not self._waits:
            return 1
        if hasattr(self._source, "read"):
            return BLOCK
        return max(int(_REQUEST_SECONDS / max(self._wait, _FAST / 2)), 1)

    # reading, and how long it waits

    def _read_some(self, examples: list[int]) -> list[Record | Exception]:
        """The records, or what went wrong in reading them."""
        if len(examples) > 1 and hasattr(self._source, "read"):
            try:
                return list(self._source.read(examples))
            except Exception:  # one of them has it: which, they say one by one
                pass
        records = []
        for index in examples:
            try:
                records.append(retrying.read_with_retries(self._source, index, self._closed))
            except Exception as error:
                records.append(error)
        return records

    def _note(self, start: tuple[float, float], records: int) -> float:
        """Takes the measurement of `records` reads: the seconds in which they used no core, which it
        returns. Decides by the last ones who reads.
        """
        waited = time.perf_counter() - start[0] - (time.thread_time() - start[1])
        if not self._warm:  # the first read opens files
            self._warm = True
            return waited
        self._waits.append(max(waited, 0.0) / records)
        num_outliers = len(self._waits) // 8
        shortest = sorted(self._waits)[: len(self._waits) - num_outliers]
        self._wait = sum(shortest) / len(shortest)
        if self._automatic:
            if self._ahead is not True and self._wait > _SLOW:
                self._ahead = True
                self._wanted.notify()
            elif self._ahead is None or (self._ahead and self._wait < _FAST):
                self._ahead = False
                self._complete.notify_all()
        return waited


def join(threads: list[threading.Thread]) -> None:
    """Waits for threads that were ended, but only for a moment: one may be in a read that hangs."""
    until = time.monotonic() + _CLOSING
    for thread in list(threads):
        thread.join(max(until - time.monotonic(), 0))


def _bytes(record: Record | Exception) -> int:
    if isinstance(record, Exception):
        return 0
    mask = record.label[0] if isinstance(record.label, tuple) and record.label else record.label
    mask = mask if isinstance(mask, bytes) else b""
    image = record.image
    return len(mask) + (image.nbytes if isinstance(image, np.ndarray) else len(image))


def _free_memory() -> float:
    """The share of this machine's free memory that records may take where nobody says how much."""
    free = []
    with contextlib.suppress(OSError, StopIteration):  # systems other than Linux
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        kibibytes = int(available.split()[1])
        free.append(1024 * kibibytes)
    with contextlib.suppress(OSError, ValueError):  # in no container, or in one without a limit
        group = pathlib.Path("/sys/fs/cgroup")
        limit, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        free.append(int(limit) - int(used))
    shares = [max(amount, 0) // _SHARE for amount in free]
    return min([*shares, _MOST_MEMORY])
