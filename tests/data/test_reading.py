"""Reads ahead of decoding change when images are read, and nothing else."""

import errno
import hashlib
import random
import threading
import time

import jax
import numpy as np
import pytest

from tests.data import test_loader
from tests.data.test_loader import Numbers, assert_same, digits, filled, make_sharding, steps
from tests.waiting import PATIENCE, returns, until
from vit_jax.base import schema
from vit_jax.config import config_class
from vit_jax.data import loader, reading, retrying
from vit_jax.data.batches import EvalBatches, TrainBatches
from vit_jax.data.loader import eval_batches, train_batches
from vit_jax.data.reading import BLOCK, MIB, ReadAhead
from vit_jax.data.record import BadImage, DataError, Record
from vit_jax.data.sources import open_train

AHEAD = [-1, 0, 0.01, 64]  # automatic, none, less than a block takes, more than there is


def make_config(batch_size=16, **data):
    return schema.typed(config_class(), test_loader.make_config(batch_size, **data))


class Late:
    """A source whose reads take a while, each another one, and count those under way."""

    def __init__(self, source, seconds=0.005):
        self.source, self.seconds = source, seconds
        self.classes, self.multi_label = source.classes, source.multi_label
        self.labels = getattr(source, "labels", None)
        self.under_way = self.most = self.reads = 0
        self._lock = threading.Lock()

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        with self._lock:
            self.under_way += 1
            self.reads += 1
            self.most = max(self.most, self.under_way)
        self.wait()
        with self._lock:
            self.under_way -= 1
        return self.source[index]

    def wait(self):
        time.sleep(self.seconds * 2 * random.random())


class Meeting(Late):
    """A source whose slow reads, after enough of them to be measured, end when more than `others` are under way."""

    def __init__(self, source, seconds, others):
        super().__init__(source, seconds)
        self.others, self._alone, self._met = others, 2 * reading._MEASURED, threading.Event()

    def wait(self):
        super().wait()
        with self._lock:
            self._alone -= self.seconds > 0
        if self.most > self.others:
            self._met.set()
        if self._alone < 0:
            assert self._met.wait(PATIENCE), f"at most {self.most} reads at once"


class InBlocks(Late):
    """A source that several records can be read from at once."""

    def read(self, indices):
        assert len(indices) <= BLOCK
        time.sleep(self.seconds)
        return [self.source[index] for index in indices]


# what is in batches

KINDS = {
    "plain": {},
    "repeats": {"repeats": 3},
    "views": {"views": ({"count": 2}, {"image_size": 6, "count": 3})},
    "balanced": {"sampling": "balanced"},
    "one row in a block": {"threads": 1},
}


@pytest.mark.parametrize("make", [Late, InBlocks])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_have_the_same_bits_however_far_ahead_is_read(kind, make):
    expected = steps(digits(), make_config(24, read_ahead=0, **KINDS[kind]), 2, 8)
    for read_ahead in AHEAD:
        config = make_config(24, read_ahead=read_ahead, **KINDS[kind])
        assert_same(steps(make(digits(), 0.001), config, 2, 8), expected)
        assert_same(steps(make(digits(), 0.001), config, 6, 8), expected[4:])  # resumed


def test_batches_have_the_same_bits_with_steps_skipped():
    found = []
    for read_ahead in (0, 64):
        config, skipped = make_config(read_ahead=read_ahead), [(2, 3), (9, 1)]
        with train_batches(
            Late(digits()), config, make_sharding(), start_step=0, stop_step=9, skipped=skipped
        ) as batches:
            found.append([jax.tree.map(np.asarray, batch) for batch in batches])
    assert_same(*found)
    whole = steps(digits(), make_config(), 0, 13)
    assert_same(found[1], [whole[i] for i in (0, 1, 5, 6, 7, 8, 10, 11, 12)])


def test_a_mixture_has_the_same_bits():
    mixed = {"name": "mixture", "mixture": (("digits", 1), ("digits_few", 2))}
    found = []
    for read_ahead in (0, 64):
        config = make_config(read_ahead=read_ahead, **mixed)
        found.append(steps(Late(open_train(config.data)), config, 0, 4))
    assert_same(*found)


@pytest.mark.parametrize("kind", ["plain", "repeats"])
def test_each_process_reads_the_examples_of_its_rows(kind):
    config = make_config(48, **KINDS[kind])
    whole = TrainBatches(digits(), config, range(48))
    for step in (0, 7):
        expected = whole.examples(step, slice(None))
        found = []
        for rows in np.split(np.arange(48), 3):
            mine = TrainBatches(digits(), config, rows)
            found += mine.examples(step, slice(0, 7)) + mine.examples(step, slice(7, None))
            records = [digits()[index] for index in mine.examples(step, slice(None))]
            batch = mine.empty()
            mine.fill(
                batch, step, slice(None), lambda index, place, records=records: records[place]
            )
            assert np.array_equal(batch["image"], filled(whole, step)["image"][rows])
        assert found == expected


@pytest.mark.parametrize("read_ahead", AHEAD)
def test_evaluation_sees_every_example_once_and_pads(read_ahead):
    source = Late(Numbers(150), 0.001)
    config = make_config(read_ahead=read_ahead)
    with eval_batches(source, config, make_sharding(), 64) as batches:
        seen = [jax.tree.map(np.asarray, batch) for batch in batches]
    mask = np.concatenate([batch["mask"] for batch in seen])
    labels = np.concatenate([batch["label"] for batch in seen])
    assert mask.sum() == 150 and np.array_equal(labels[mask == 1], np.arange(150))
    assert source.reads == 150
    blocks = EvalBatches(source, config, range(64), batch_size=64)
    assert blocks.examples(2, slice(16, 32)) == list(range(144, 150))
    assert blocks.examples(2, slice(32, 48)) == []


class SomeBad(Late):
    """Every seventh image cannot be read, every eleventh not decoded."""

    def __getitem__(self, index):
        record = super().__getitem__(index)
        if index % 7 == 3:
            raise BadImage(record.name, "nobody knows why")
        return Record(b"", record.label, record.name) if index % 11 == 4 else record


@pytest.mark.parametrize("make", [train_batches, eval_batches])
def test_bad_images_are_replaced_or_skipped_alike(make):
    found, bad = [], []
    for read_ahead in AHEAD:
        config = make_config(on_bad_image="skip", read_ahead=read_ahead)
        ends = {"start_step": 0, "stop_step": 8} if make is train_batches else {}
        with make(SomeBad(Numbers(100), 0.001), config, make_sharding(), **ends) as batches:
            found.append([jax.tree.map(np.asarray, batch) for batch in batches])
            bad.append(batches.bad_images)
    for one, others in zip(found[1:], bad[1:], strict=True):
        assert_same(one, found[0])
        assert others == bad[0] and len(others) > 10


# speed and memory


def test_slow_reads_are_done_at_once_and_wait_for_nobody():
    config = make_config(64, train_crop="resize")
    source = Meeting(Numbers(200), 0.02, others=64)
    with train_batches(source, config, make_sharding(), start_step=0, stop_step=40) as batches:
        assert len(list(batches)) == 40
        requests = batches.reading.most_requests
    assert 64 < source.most <= requests <= reading.MOST_REQUESTS


def test_fast_reads_are_not_done_ahead(monkeypatch):
    monkeypatch.setattr(reading, "_SLOW", 2.0)  # on a busy machine, any read may wait for a core
    monkeypatch.setattr(reading, "_FAST", 1.0)
    config = make_config(64, train_crop="resize")
    with train_batches(
        Numbers(200), config, make_sharding(), start_step=0, stop_step=30
    ) as batches:
        assert len(list(batches)) == 30
        assert batches.reading.most_bytes <= 2 * BLOCK * 8 * 8 * 3 and not batches.reading._ahead


def test_reads_that_become_slow_are_done_ahead_from_then_on():
    source = Meeting(Numbers(200), 0.0, others=10)
    config = make_config(64, train_crop="resize")
    with train_batches(source, config, make_sharding(), start_step=0, stop_step=60) as batches:
        next(batches)
        source.seconds = 0.01
        assert len(list(batches)) == 59 and source.most > 10
        waited = batches.read_wait()
    assert 0 < waited < 1


class Large(Numbers):
    def __getitem__(self, index):
        return Record(np.full((150, 150, 3), index, np.uint8), index, f"number {index}")


def test_memory_is_bounded_and_filled():
    source, size = Late(Large(200), 0.002), 150 * 150 * 3
    config = make_config(16, train_crop="resize", read_ahead=4)
    with train_batches(source, config, make_sharding(), start_step=0, stop_step=200) as batches:
        next(batches)
        # Nobody asks: so much is read, and no more than batches that are made take beside it.
        until(lambda: batches.reading.most_bytes > 4 * MIB - 2 * BLOCK * size)
        time.sleep(0.2)
        assert source.reads <= 4 * MIB // size + 16 * (1 + config.data.prefetch + loader._UNDER_WAY)
        for _ in range(20):
            next(batches)
        most = batches.reading.most_bytes
    assert most <= 4 * MIB


def test_memory_that_is_too_small_takes_a_block_at_a_time():
    source, size = Late(Large(200), 0.002), 150 * 150 * 3
    config = make_config(32, train_crop="resize", read_ahead=0.001)
    with train_batches(source, config, make_sharding(), start_step=0, stop_step=4) as batches:
        assert len(list(batches)) == 4
        assert batches.reading.most_bytes == BLOCK * size


def test_waiting_threads_use_no_core():
    config, source = make_config(64, train_crop="resize"), Late(Numbers(200), 0.02)
    others = set(threading.enumerate())
    with train_batches(source, config, make_sharding(), start_step=0, stop_step=10**6) as batches:
        next(batches)

        def spent(seconds: float) -> float:
            """Processor time of the threads that read and decode, and of no other, while this one uses so much: on a
            busy machine a thread that has something to do gets as much.
            """
            clocks = [
                time.pthread_getcpuclockid(thread.ident)
                for thread in set(threading.enumerate()) - others
                if thread.ident  # it has begun
            ]
            before, until_then = sum(map(time.clock_gettime, clocks)), time.thread_time() + seconds
            while time.thread_time() < until_then:
                hashlib.sha256(bytes(MIB))  # without Python's lock
            return sum(map(time.clock_gettime, clocks)) - before

        reads = -1
        while reads != source.reads or source.under_way:  # until there is no more to do
            reads = source.reads
            spent(0.1)
        assert spent(0.25) < 0.05


def test_what_holds_up_is_measured():
    shares = {}
    for name, source, size in (("reads", Late(Large(50), 0.05), 8), ("decoding", Large(50), 224)):
        config = make_config(8, image_size=size, read_ahead=0)
        with train_batches(source, config, make_sharding(), start_step=0, stop_step=5) as batches:
            list(batches)
            shares[name] = batches.read_wait()
            assert batches.read_wait() == 0.0  # since the last call
    assert 0 <= shares["decoding"] < shares["reads"] <= 1 and shares["reads"] > 0.5


# errors and ends


class Failing(Numbers):
    """Reads fail some times, each image at first."""

    def __init__(self, size, error, times):
        super().__init__(size)
        self.error, self.times, self.tries = error, times, {}

    def __getitem__(self, index):
        self.tries[index] = self.tries.get(index, 0) + 1
        if self.tries[index] <= self.times:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("read_ahead", [0, 64])
def test_what_passes_is_tried_again(monkeypatch, read_ahead):
    monkeypatch.setattr(retrying, "PAUSES", (0.01,) * 4)
    config = make_config(train_crop="resize", read_ahead=read_ahead)
    source = Failing(100, ConnectionResetError(errno.ECONNRESET, "reset"), times=2)
    assert_same(steps(source, config, 0, 3), steps(Numbers(100), config, 0, 3))


@pytest.mark.parametrize("read_ahead", [0, 64])
@pytest.mark.parametrize(
    "error, kind, message, tries",
    [
        (TimeoutError(errno.ETIMEDOUT, "no answer"), DataError, r"image number \d+ .*no answer", 5),
        (FileNotFoundError(errno.ENOENT, "gone"), FileNotFoundError, "gone", 1),
        (KeyError("wrong"), KeyError, "wrong", 1),
        (BadImage("a.jpg", "no image"), BadImage, "image a.jpg cannot be read: no image", 1),
    ],
)
def test_what_lasts_ends_with_a_sentence(monkeypatch, read_ahead, error, kind, message, tries):
    monkeypatch.setattr(retrying, "PAUSES", (0.01,) * 4)
    source = Failing(100, error, times=10**6)
    with pytest.raises(kind, match=message):
        steps(source, make_config(read_ahead=read_ahead), 0, 3)
    assert max(source.tries.values()) == tries


class Hanging(Numbers):
    """Images from number 20 on never come."""

    def __init__(self, size):
        super().__init__(size)
        self.hangs = threading.Event()

    def __getitem__(self, index):
        if index >= 20:
            self.hangs.set()
            threading.Event().wait()
        return super().__getitem__(index)


@pytest.mark.parametrize("read_ahead", [-1, 0, 64])
def test_closing_does_not_wait_for_a_read_that_hangs(read_ahead):
    config = make_config(8, train_crop="resize", read_ahead=read_ahead)
    source = Hanging(200)
    batches = train_batches(source, config, make_sharding(), start_step=0, stop_step=99)
    assert source.hangs.wait(PATIENCE)
    returns(batches.close)
    with pytest.raises(StopIteration):
        next(batches)


def test_a_pause_between_tries_ends_with_the_batches(monkeypatch):
    monkeypatch.setattr(retrying, "PAUSES", (10 * PATIENCE,))
    source = Failing(100, ConnectionResetError(errno.ECONNRESET, "reset"), times=10**6)
    before = set(threading.enumerate())
    batches = train_batches(source, make_config(), make_sharding(), start_step=0, stop_step=9)
    until(lambda: source.tries)
    batches.close()
    until(lambda: not set(threading.enumerate()) - before)


def test_who_waits_for_a_batch_can_be_let_go():
    config = make_config(8, train_crop="resize")
    with train_batches(
        Hanging(200), config, make_sharding(), start_step=0, stop_step=99
    ) as batches:
        threading.Timer(0.2, batches.end).start()
        assert not returns(lambda: list(batches))


def test_blocks_do_not_wait_for_one_that_is_not_there():
    others_came = threading.Event()

    class OneIsLate(Numbers):
        def __getitem__(self, index):
            if index == 8:
                others_came.wait()
            return super().__getitem__(index)

    ahead = ReadAhead(
        OneIsLate(100), lambda block: list(range(4 * block, 4 * block + 4)), 8, memory=MIB
    )
    ahead.allow(8)
    order = []
    while block := ahead.take():
        order.append(block.number)
        assert ahead.record(block, 0, 3).label == 4 * block.number + 3
        ahead.release(block)
        if len(order) == 7:
            others_came.set()
    ahead.close()
    assert sorted(order) == list(range(8)) and order[-1] == 2
