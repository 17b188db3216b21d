"""The lock of a folder in a bucket has one holder, however late the bucket answers."""

import concurrent.futures
import contextlib
import itertools
import random
import threading
import time

import pytest
from etils import epath

from tests.waiting import PATIENCE, until
from vit_jax.base import lock

SCHEMES = {"gs": ("bucket", "faults"), "s3": ("s3_bucket", "s3_faults")}


@pytest.fixture(params=SCHEMES)
def folder_and_faults(request):
    """A folder in an empty bucket, and the faults of its server."""
    bucket, faults = map(request.getfixturevalue, SCHEMES[request.param])
    return epath.Path(bucket) / "run", faults


def asked(faults, methods=("POST", "PUT")) -> int:
    return sum(m in methods and lock.NAME in path for m, path in faults.requests())


def test_of_two_that_find_it_free_one_has_it_although_its_write_came_second(folder_and_faults):
    folder, faults = folder_and_faults
    faults.inject("stall", seconds=PATIENCE, times=1, methods=("POST", "PUT"), path="lock$|lock&")
    with concurrent.futures.ThreadPoolExecutor() as threads, contextlib.ExitStack() as at_last:
        at_last.callback(faults.clear)
        late = threads.submit(lock.Lock(folder, patience=0.0)._take_in_bucket)
        until(lambda: asked(faults))
        with lock.Lock(folder, patience=0.0):
            faults.clear()
            assert not late.result()
            assert lock.is_held(folder)
    assert not lock.is_held(folder)
    with lock.Lock(folder, patience=0.0):  # What was released can be taken.
        assert lock.is_held(folder)


def test_whose_write_was_done_but_not_answered_has_the_lock(folder_and_faults, monkeypatch):
    folder, faults = folder_and_faults
    monkeypatch.setattr(lock, "_RENEW_SECONDS", 0.1)
    lost = []
    faults.inject("lost", times=2, methods=("POST", "PUT"), path="lock$|lock&")
    with lock.Lock(folder, patience=0.0, on_lost=lost.append):
        before = asked(faults)
        # Renewals, the first of them not answered either.
        until(lambda: asked(faults) >= before + 3)
        assert lock.is_held(folder)
    assert not lost and not lock.is_held(folder)


@pytest.mark.slow
def test_200_races_never_have_two_winners(bucket, faults):
    """Each of two processes takes, holds and releases each lock, while all answers and some requests are up to
    five seconds late.
    """
    faults.inject("late", seconds=5, every=2, path="race")
    faults.inject("delay", seconds=5, path="race")
    holders, won, count = {}, itertools.count(), threading.Lock()

    def contend(race: int) -> None:
        time.sleep(random.uniform(0, 1))
        with lock.Lock(epath.Path(bucket) / f"race-{race}", patience=600.0):
            with count:
                holders[race] = holders.get(race, 0) + 1
                assert holders[race] == 1, f"race {race} has two winners"
                next(won)
            time.sleep(random.uniform(0, 1))
            with count:
                holders[race] -= 1

    with concurrent.futures.ThreadPoolExecutor(100) as threads:
        for done in [threads.submit(contend, n // 2) for n in range(400)]:
            done.result()
    assert next(won) == 400
