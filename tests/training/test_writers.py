"""Where metrics go, also when they cannot."""

import io
import pathlib
import struct
import sys

import numpy as np
import pytest
from etils import epath
from PIL import Image

from vit_jax.evaluation.run import text
from vit_jax.training.upkeep.wandb_writer import WandbWriter
from vit_jax.training.upkeep.writers import (
    ConsoleWriter,
    Histogram,
    JsonLinesWriter,
    TensorBoardWriter,
    Writers,
)

# As arrays come from devices.
HISTOGRAM = Histogram(*map(np.array, ([1, 2, 1], [0.0, 1.0, 2.0, 3.0], 6.0, 14.0)))


def values_in(folder):
    """(step, value) of the only event file in a folder."""

    (path,) = folder.iterdir()
    return [(event.step, value) for event in events_in(path) for value in event.summary.value]


def events_in(path):
    """The events of a file."""
    from tensorboardX.proto.event_pb2 import Event

    events, rest = [], path.read_bytes()
    while rest:  # TFRecord: length, its checksum, the event, its checksum
        (length,) = struct.unpack("<Q", rest[:8])
        events.append(Event.FromString(rest[12 : 12 + length]))
        rest = rest[16 + length :]
    return events


def test_tensorboard_files_hold_what_was_written(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write_scalars(3, {"loss": 0.5, "eval/accuracy": 0.25, "mfu": 2.0, "gradient_norm": 4.0})
    writer.close()
    values = [(step, v.tag, v.simple_value) for step, v in values_in(tmp_path)]
    assert values == [
        (3, "train/loss", 0.5), (3, "eval/accuracy", 0.25), (3, "speed/mfu", 2), (3, "optim/gradient_norm", 4),
    ]  # fmt: skip


def test_tensorboard_forgets_what_a_killed_process_wrote_after_its_last_checkpoint(tmp_path):
    for after, losses in ((0, {10: 4.0, 20: 3.0, 30: 2.9}), (20, {30: 2.0})):
        writer = TensorBoardWriter(tmp_path, after)
        for step, loss in losses.items():
            writer.write_scalars(step, {"loss": loss})
        writer.close()
    assert starts_in(tmp_path) == [1, 21]


def test_tensorboard_forgets_what_was_written_after_the_checkpoint_that_a_run_goes_back_to(
    tmp_path,
):
    writer = Writers(TensorBoardWriter(tmp_path, 0))
    for step in (10, 20, 30):
        writer.write_scalars(step, {"loss": 2.0})
    writer.rewind(10)
    writer.write_scalars(20, {"loss": 1.0})
    writer.close()
    assert starts_in(tmp_path) == [1, 11]


def starts_in(folder) -> list[int]:
    """The steps from which readers of TensorBoard's files forget what came before."""
    from tensorboardX.proto.event_pb2 import SessionLog

    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return [
        event.step
        for path in files
        for event in events_in(path)
        if event.session_log.status == SessionLog.START
    ]


def test_tensorboard_shows_images_histograms_and_texts(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 6, 3)).astype(np.uint8)
    writer = TensorBoardWriter(tmp_path)
    writer.write_images(1, {"images": pixels})
    writer.write_histograms(2, {"gradients/head/bias": HISTOGRAM})
    writer.write_texts(0, {"config": "    seed = 0"})
    writer.close()
    first, second, histogram, text = (value for _, value in values_in(tmp_path))
    assert (first.tag, second.tag) == ("images/0", "images/1")
    shown = np.asarray(Image.open(io.BytesIO(second.image.encoded_image_string)))
    np.testing.assert_array_equal(shown, pixels[1])
    assert histogram.tag == "gradients/head/bias" and list(histogram.histo.bucket) == [1, 2, 1]
    assert (histogram.histo.min, histogram.histo.max, histogram.histo.num) == (0, 3, 4)
    assert text.tag.startswith("config") and text.tensor.string_val == [b"    seed = 0"]


def test_what_is_not_finite_makes_no_histogram(tmp_path):
    writer = Writers(TensorBoardWriter(tmp_path))
    bad = HISTOGRAM._replace(sum_squares=np.float32("nan"))
    writer.write_histograms(2, {"gradients/a": bad, "gradients/b": HISTOGRAM})
    writer.close()
    assert [value.tag for _, value in values_in(tmp_path)] == ["gradients/b"]


def test_without_the_package_of_weights_and_biases_the_run_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    writer = WandbWriter("project", epath.Path(tmp_path), tmp_path, {})
    writer.write_scalars(1, {"loss": 2.0})
    writer.close()
    assert "wandb is not installed" in caplog.text


@pytest.mark.slow
def test_weights_and_biases_keeps_a_run_offline_and_goes_on_with_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step in (1, 2):  # the second time as after a restart
        writer = WandbWriter("project", epath.Path(tmp_path), tmp_path, {"optim": {"lr": 0.1}})
        writer.write_scalars(step, {"loss": 2.0})
        writer.write_images(step, {"images": np.zeros((2, 4, 4, 1), np.uint8)})
        writer.write_histograms(step, {"gradients/head/bias": HISTOGRAM})
        writer.close()
    assert "Weights & Biases" not in caplog.text
    run = (tmp_path / "wandb_id.txt").read_text().strip()
    folders = list((tmp_path / "wandb").glob(f"offline-run-*-{run}"))
    assert folders and all(list(folder.glob("*.wandb")) for folder in folders)


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
def test_metrics_that_cannot_be_written_are_told_and_the_others_are_written(tmp_path, caplog):
    good = tmp_path / "metrics.jsonl"
    writers = Writers(JsonLinesWriter(pathlib.Path("/dev/full")), JsonLinesWriter(good))
    writers.write_scalars(1, {"loss": 2.0})
    writers.flush()
    writers.close()
    assert "metrics cannot be written" in caplog.text and "No space left" in caplog.text
    assert good.read_text() == '{"step": 1, "loss": 2.0}\n'


def test_a_count_is_logged_with_all_its_figures(caplog):
    caplog.set_level("INFO")
    ConsoleWriter().write_scalars(
        7, {"eval/examples": 10000.0, "eval/accuracy": 1.0, "eval/loss": 0.12345}
    )
    assert "step 7  eval/examples 10,000  eval/accuracy 100.0%  eval/loss 0.123" in caplog.text
    assert text({"examples": 10000.0, "loss": 1234567.8}) == "examples 10,000  loss 1.235e+06"
