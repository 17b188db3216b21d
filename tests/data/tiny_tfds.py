"""Small data sets in the format in which TFDS stores them, made without TensorFlow."""

import json
import struct

import cv2
import numpy as np


def message(*fields):
    """A protocol buffer message of length-delimited fields, (number, bytes)."""
    return b"".join(
        bytes([number << 3 | 2]) + varint(len(value)) + value for number, value in fields
    )


def varint(value):
    head = b""
    while value > 127:
        head, value = head + bytes([value & 127 | 128]), value >> 7
    return head + bytes([value])


def example(**features):
    """A serialised tf.train.Example of bytes, lists of bytes or of non-negative integers, and arrays of floats."""
    entries = []
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = message((1, message((1, value))))
        elif isinstance(value, list) and value and isinstance(value[0], bytes):
            feature = message((1, message(*((1, text) for text in value))))
        elif isinstance(value, np.ndarray):
            feature = message((2, message((1, value.astype("<f4").tobytes()))))
        else:
            feature = message((3, message((1, b"".join(map(varint, value))))))
        entries.append((1, message((1, name.encode()), (2, feature))))
    return message((1, message(*entries)))


def write_tfds(root, features, splits, *, file_format="array_record", png=None):
    """A data set as TFDS prepares it, one file for each of the `splits`: {name: examples}, or a list
    of the examples of 'train'; returns the encoded image that all of them share which have no own.
    """
    import tensorflow_datasets as tfds

    root.mkdir(parents=True)
    tfds.features.FeaturesDict(features).save_config(root)
    if png is None:
        png = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    image = cv2.imencode(".png", png)[1].tobytes()
    infos = []
    for name, examples in (splits if isinstance(splits, dict) else {"train": splits}).items():
        shared = {"image": image} if "image" in features else {}
        stored = [example(**shared | fields) for fields in examples]
        write_records(root / f"toy-{name}.{file_format}-00000-of-00001", stored)
        info = {"name": name, "shardLengths": [str(len(examples))], "numBytes": "1"}
        info["filepathTemplate"] = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        infos.append(info)
    info = {"name": "toy", "version": root.name, "fileFormat": file_format, "splits": infos}
    (root / "dataset_info.json").write_text(json.dumps(info))
    return image


def write_records(path, records):
    from array_record.python.array_record_module import ArrayRecordWriter

    if "array_record" in path.name:
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()
    else:  # TFRecord; its checksums are not read
        parts = (struct.pack("<Q", len(r)) + bytes(4) + r + bytes(4) for r in records)
        path.write_bytes(b"".join(parts))
