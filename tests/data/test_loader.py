import functools
import itertools
import sys
import threading
import time
import tracemalloc

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.waiting import PATIENCE, returns, until
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.data.batches import EvalBatches, TrainBatches, spec
from vit_jax.data.loader import eval_batches, local_rows, train_batches
from vit_jax.data.order import batch_indices, crop_draws, example_ids
from vit_jax.data.record import Record
from vit_jax.data.sources import open_eval, open_train


def make_config(batch_size=16, **data):
    config = default_config()
    config.batch_size = batch_size
    config.data.update({"image_size": 8, "eval_crop": "resize", "threads": 2, **data})
    return config


def make_sharding(devices=8, fsdp=1, tensor=1):
    shape = (devices // fsdp // tensor, fsdp, tensor)
    mesh = jax.make_mesh(
        shape, ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3, devices=jax.devices()[:devices]
    )
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def steps(source, config, start, stop, sharding=None):
    with train_batches(
        source, config, sharding or make_sharding(), start_step=start, stop_step=stop
    ) as batches:
        return [jax.tree.map(np.asarray, batch) for batch in batches]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype and np.array_equal(
                one[name], other[name]
            ), name


digits = functools.cache(lambda: open_train(make_config().data))


class Numbers:
    """Example i is an image of grey i with label i, or with the classes of the bits of i."""

    def __init__(self, size, multi_label=False, labels=None):
        self.size, self.multi_label = size, multi_label
        self.classes = tuple(map(str, range(8 if multi_label else labels or size)))

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        label = tuple(bit for bit in range(8) if index >> bit & 1) if self.multi_label else index
        return Record(np.full((8, 8, 3), index, np.uint8), label, f"number {index}")


# order


@pytest.mark.parametrize("num_examples, batch_size", [(1, 3), (2, 2), (97, 10), (1000, 64)])
def test_every_epoch_is_another_permutation_of_all_examples(num_examples, batch_size):
    epochs = 4
    count = -(-epochs * num_examples // batch_size)
    line = np.concatenate(
        [batch_indices(7, step, batch_size, num_examples) for step in range(count)]
    )
    runs = [line[i * num_examples : (i + 1) * num_examples] for i in range(epochs)]
    for run in runs:
        assert np.array_equal(np.sort(run), np.arange(num_examples))
    if num_examples > 50:
        assert all((a != b).mean() > 0.9 for a, b in itertools.combinations(runs, 2))
        assert (
            runs[0]
            != np.concatenate([batch_indices(8, s, num_examples, num_examples) for s in [0]])
        ).mean() > 0.9


def test_seeds_do_not_share_epochs():
    second_of_zero = batch_indices(0, 1, 100, 100)
    assert not np.array_equal(second_of_zero, batch_indices(1, 0, 100, 100))


def test_the_order_looks_random():
    first = batch_indices(3, 0, 20_000, 20_000)
    assert abs(np.corrcoef(np.arange(20_000), first)[0, 1]) < 4 / np.sqrt(20_000)
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 4 / np.sqrt(20_000)


def test_three_billion_examples_cost_no_memory_and_any_step_no_more_than_the_first():
    size, epoch_of_late = 3 * 10**9, 5
    late_step = epoch_of_late * size // 1024  # has the end of an epoch in it
    seconds = {}
    tracemalloc.start()
    for step in (0, 10**6, late_step):
        start = time.thread_time()  # of the processor, and of nothing else that runs
        ids = batch_indices(0, step, 1024, size)
        seconds[step] = time.thread_time() - start
        assert len(set(ids.tolist())) == 1024 and ids.min() >= 0 and ids.max() < size
        assert ids.max() > 2**31 and abs(ids.mean() / size - 0.5) < 4 / np.sqrt(12 * 1024)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20 and max(seconds.values()) < 0.5


def test_no_example_of_three_billion_comes_twice_in_an_epoch():
    """As no two of its places hold the same one: looked at are 200,000 from all over the epoch."""
    size = 3 * 10**9
    places = np.unique(np.random.default_rng(0).integers(0, size, 200_000))
    assert len(np.unique(example_ids(0, places, size))) == len(places)
    # Of so many independent draws, about seven would be the same as another.


def test_a_run_that_goes_on_at_step_a_million_has_its_first_batch_as_fast_as_a_new_one():
    seconds = {}
    for step in (0, 10**6):
        start = time.process_time()  # of the processor, whatever else the machine does
        steps(Numbers(200), make_config(train_crop="resize"), step, step + 1)
        seconds[step] = time.process_time() - start
    assert seconds[10**6] < 5 * seconds[0] + 0.5


# training batches


def filled(blocks, step):
    batch = blocks.empty()
    blocks.fill(batch, step, slice(None))
    return batch


def test_batches_are_the_same_for_any_number_of_processes():
    config = make_config(24, image_size=16)
    whole = TrainBatches(digits(), config, range(24))
    for processes in (2, 4):
        rows = np.split(np.arange(24), processes)
        parts = [TrainBatches(digits(), config, mine) for mine in rows]
        for step in (0, 59, 60, 99):  # the 60th holds the end of the first epoch
            expected = filled(whole, step)
            for name in ("image", "label"):
                found = np.concatenate([filled(part, step)[name] for part in parts])
                assert np.array_equal(found, expected[name])


def test_the_draws_of_a_position_are_its_own_and_uniform():
    positions = np.array([0, 1, 2, 7, 8, 10**12])
    draws = crop_draws(3, positions)
    for one, position in zip(draws, positions, strict=True):
        assert np.array_equal(crop_draws(3, np.array([position]))[0], one)
    assert (
        len(np.unique(draws)) == draws.size and not np.isin(crop_draws(4, positions), draws).any()
    )
    many = crop_draws(0, np.arange(2000))
    assert (
        many.min() >= 0 and many.max() < 1 and abs(many.mean() - 0.5) < 4 / np.sqrt(12 * many.size)
    )
    assert abs(np.corrcoef(many[1:, 0], many[:-1, 0])[0, 1]) < 4 / np.sqrt(2000)


def test_batches_are_the_same_for_any_mesh_thread_count_and_start():
    expected = steps(digits(), make_config(), 0, 6)
    assert_same(steps(digits(), make_config(), 4, 6), expected[4:])
    assert_same(steps(digits(), make_config(threads=5, prefetch=1), 0, 6), expected)
    assert_same(steps(digits(), make_config(), 0, 6, make_sharding(4, fsdp=2)), expected)
    assert_same(steps(digits(), make_config(), 0, 6, make_sharding(8, tensor=4)), expected)
    assert_same(steps(digits(), make_config(), 0, 6, make_sharding(1)), expected)


def test_labels_and_images_are_those_of_the_examples_in_order():
    config = make_config(train_crop="resize")
    for step, batch in enumerate(steps(Numbers(100), config, 0, 12)):
        ids = batch_indices(config.seed, step, 16, 100)
        assert batch["image"].dtype == np.uint8 and batch["image"].shape == (16, 8, 8, 3)
        assert batch["label"].dtype == np.int32 and np.array_equal(batch["label"], ids)
        assert np.array_equal(
            batch["image"], np.broadcast_to(ids[:, None, None, None], (16, 8, 8, 3))
        )


def test_images_are_height_by_width_in_every_batch_and_in_what_a_step_is_compiled_for():
    config = make_config(image_size=(6, 10))
    (batch,) = steps(digits(), config, 0, 1)
    assert batch["image"].shape == (16, 6, 10, 3)
    assert spec(config, num_classes=10)["image"].shape == batch["image"].shape
    with eval_batches(digits(), config, make_sharding()) as batches:
        assert next(batches)["image"].shape == (16, 6, 10, 3)


def test_crops_differ_between_epochs_and_seeds():
    class One(Numbers):
        def __getitem__(self, index):
            return Record(
                np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), 0, "one"
            )

    images = np.concatenate([batch["image"] for batch in steps(One(1), make_config(), 0, 4)])
    assert len({image.tobytes() for image in images}) == 64
    config = make_config()
    config.seed = 1
    assert not np.array_equal(steps(One(1), config, 0, 1)[0]["image"], images[:16])


def test_a_multi_label_source_gives_rows_of_zeros_and_ones():
    (batch,) = steps(Numbers(200, multi_label=True), make_config(train_crop="resize"), 3, 4)
    expected = batch_indices(0, 3, 16, 200)[:, None] >> np.arange(8) & 1
    assert batch["label"].dtype == np.float32 and np.array_equal(batch["label"], expected)


def test_each_device_holds_its_rows_only():
    sharding = make_sharding(8, fsdp=2, tensor=2)
    with train_batches(digits(), make_config(), sharding, start_step=0, stop_step=1) as batches:
        image = next(batches)["image"]
    assert image.sharding == sharding and image.addressable_shards[0].data.shape == (4, 8, 8, 3)


def test_rows_of_a_process_are_those_its_devices_hold():
    assert local_rows(make_sharding(8, tensor=2), 16).tolist() == list(range(16))


def test_a_batch_that_cannot_be_cut_evenly_is_refused():
    with pytest.raises(ConfigError, match="config.batch_size = 12 is not divisible by 8"):
        train_batches(digits(), make_config(12), make_sharding(), start_step=0, stop_step=1)


def test_no_steps_are_no_batches():
    assert steps(digits(), make_config(), 5, 5) == []


def test_nothing_is_transferred_implicitly():
    before = jax.config.jax_transfer_guard
    jax.config.update(
        "jax_transfer_guard", "disallow"
    )  # for all threads; the context manager guards only its own
    try:
        with train_batches(
            digits(), make_config(), make_sharding(), start_step=0, stop_step=3
        ) as batches:
            assert len(list(batches)) == 3
        with eval_batches(Numbers(20), make_config(), make_sharding()) as batches:
            assert len(list(batches)) == 2
    finally:
        jax.config.update("jax_transfer_guard", before or "allow")


# waiting and closing


class Slow(Numbers):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


class Asked:
    """The queue of batches that are ready: when it was asked for one first, and whether it had one each time."""

    def __init__(self, ready):
        self._ready, self.had_one, self.first = ready, [], threading.Event()
        self.put = ready.put

    def get(self):
        self.had_one.append(not self._ready.empty())
        self.first.set()
        return self._ready.get()


def test_waiting_for_the_host_is_counted_and_prefetching_hides_it():
    begin = threading.Event()

    class Begun(Slow):
        def __getitem__(self, index):
            assert begin.wait(PATIENCE)
            return super().__getitem__(index)

    config = make_config(8, train_crop="resize", threads=1, read_ahead=0)
    with train_batches(Begun(50), config, make_sharding(), start_step=0, stop_step=6) as batches:
        ready, batches._ready = batches._ready, Asked(batches._ready)
        threading.Thread(target=lambda: batches._ready.first.wait() and begin.set()).start()
        next(batches)
        assert batches.wait_seconds > 0.04
        until(lambda: ready.qsize() == 2)
        next(batches), next(batches)
        assert batches._ready.had_one == [False, True, True]


def test_closing_early_stops_the_threads():
    before = set(threading.enumerate())
    config = make_config(8, train_crop="resize")
    batches = train_batches(Slow(50), config, make_sharding(), start_step=0, stop_step=10**6)
    next(batches)
    returns(batches.close)
    until(lambda: not set(threading.enumerate()) - before)
    with pytest.raises(StopIteration):
        next(batches)


# evaluation


@pytest.mark.parametrize("batch_size, devices", [(1, 1), (7, 1), (64, 8), (8, 8)])
def test_evaluation_sees_every_example_once_and_masks_the_rest(batch_size, devices):
    source = Numbers(150)
    with eval_batches(source, make_config(), make_sharding(devices), batch_size) as batches:
        seen = [jax.tree.map(np.asarray, batch) for batch in batches]
    mask = np.concatenate([batch["mask"] for batch in seen])
    labels = np.concatenate([batch["label"] for batch in seen])
    images = np.concatenate([batch["image"] for batch in seen])
    assert all(len(batch["mask"]) == batch_size for batch in seen) and mask.dtype == np.float32
    assert mask.sum() == 150 and np.array_equal(labels[mask == 1], np.arange(150))
    assert np.array_equal(images[:150, 0, 0, 0], np.arange(150)) and not images[150:].any()


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_evaluation_rows_of_eight_processes_cover_every_example_once(batch_size):
    blocks = EvalBatches(Numbers(150), make_config(), range(batch_size), batch_size=batch_size)
    for rows in np.array_split(np.arange(batch_size), min(8, batch_size)):
        part = EvalBatches(Numbers(150), make_config(), rows, batch_size=batch_size)
        assert len(part) == len(blocks) == -(-150 // batch_size)
        for step in (0, len(blocks) - 1):
            for name in ("image", "label", "mask"):
                assert np.array_equal(filled(part, step)[name], filled(blocks, step)[name][rows])


def test_evaluation_batch_size_comes_from_the_config():
    config = make_config(16)
    with eval_batches(open_eval(config.data), config, make_sharding()) as batches:
        assert next(batches)["mask"].shape == (16,)
    config.eval.batch_size = 24
    with eval_batches(open_eval(config.data), config, make_sharding()) as batches:
        assert next(batches)["mask"].shape == (24,)
    with pytest.raises(ConfigError, match="the evaluation batch size = 12 is not divisible by 8"):
        eval_batches(open_eval(config.data), config, make_sharding(), 12)


def test_labels_out_of_range_are_named():
    with pytest.raises(
        ValueError, match="the label 9[0-9] of number 9[0-9] is out of range: there are 90 classes"
    ):
        steps(Numbers(100, labels=90), make_config(), 0, 7)


def test_nothing_here_imports_tensorflow():
    assert "tensorflow" not in sys.modules
