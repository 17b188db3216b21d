"""Where metrics go, also when they cannot."""

import pathlib
import struct

import pytest

from vit_jax.training.writers import JsonLinesWriter, TensorBoardWriter, Writers


def test_tensorboard_files_hold_what_was_written(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    writer = TensorBoardWriter(tmp_path)
    writer.write_scalars(3, {"loss": 0.5, "eval/accuracy": 0.25})
    writer.close()
    (path,) = tmp_path.iterdir()
    events, rest = [], path.read_bytes()
    while rest:  # TFRecord: length, its checksum, the event, its checksum
        (length,) = struct.unpack("<Q", rest[:8])
        events.append(Event.FromString(rest[12 : 12 + length]))
        rest = rest[16 + length :]
    values = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert values == [(3, "loss", 0.5), (3, "eval/accuracy", 0.25)]


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
def test_metrics_that_cannot_be_written_are_told_and_the_others_are_written(tmp_path, caplog):
    good = tmp_path / "metrics.jsonl"
    writers = Writers(JsonLinesWriter(pathlib.Path("/dev/full")), JsonLinesWriter(good))
    writers.write_scalars(1, {"loss": 2.0})
    writers.flush()
    writers.close()
    assert "metrics cannot be written" in caplog.text and "No space left" in caplog.text
    assert good.read_text() == '{"step": 1, "loss": 2.0}\n'
