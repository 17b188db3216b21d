"""Checkpoints made to harm: what they may take is bounded by their size."""

import io
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from etils import epath

from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.interchange import checkpoint_file, formats, npz, pickles, pytorch, remote, safetensors


def in_safetensors(folder, header: bytes, content: bytes = b"") -> epath.Path:
    path = epath.Path(folder) / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + content)
    return path


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"__metadata__":["vit_jax"]}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0.0,4]}}',
        b'{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}',
        b'{"a":7}',
    ],
)
def test_a_header_of_safetensors_that_makes_no_sense_is_a_checkpoint_error(tmp_path, header):
    with pytest.raises(CheckpointError, match="x.safetensors is damaged"):
        safetensors.read(in_safetensors(tmp_path, header, bytes(4)))


def test_tensors_of_safetensors_do_not_overlap(tmp_path):
    entry = {"dtype": "U8", "shape": [1000], "data_offsets": [0, 1000]}
    header = json.dumps({str(i): entry for i in range(1000)}).encode()
    with pytest.raises(CheckpointError, match="overlap"):
        safetensors.read(in_safetensors(tmp_path, header, bytes(1000)))


@pytest.mark.parametrize("said", ["[]", "[" * 100_000, "7"])
def test_metadata_of_ours_that_is_no_object_is_a_checkpoint_error(tmp_path, said):
    header = json.dumps({"__metadata__": {"vit_jax": said}}).encode()
    with pytest.raises(CheckpointError, match="is damaged"):
        _ = checkpoint_file.CheckpointFile(in_safetensors(tmp_path, header)).header


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b", "..", "", 7, ["a"]])
def test_an_index_names_files_beside_it_and_no_others(tmp_path, name):
    path = epath.Path(tmp_path) / pytorch.INDEX
    path.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="which is no file beside it"):
        pytorch.read_weights(path, "")


def test_a_config_json_nested_too_deeply_is_a_checkpoint_error(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(CheckpointError, match="is damaged"):
        formats.read_checkpoint(tmp_path)


def test_a_file_address_is_a_path(tmp_path):
    path = tmp_path / "a b.npz"
    assert remote.parse_name(path.as_uri()).place == str(path)
    with pytest.raises(ConfigError, match="names another machine"):
        remote.parse_name("file://elsewhere/a.npz")
    with pytest.raises(CheckpointError, match="does not exist"):
        formats.read_checkpoint(path.as_uri())


def in_zip(folder, pickled: bytes, **members: bytes) -> epath.Path:
    path = epath.Path(folder) / "x.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickled)
        for name, content in members.items():
            archive.writestr(f"x/data/{name}", content)
    return path


def nested_key(depth: int) -> bytes:
    """A dictionary whose key is a tuple of two equal tuples of two equal tuples …"""
    pair = pickle.MEMOIZE + pickle.BINGET + b"%c" + pickle.TUPLE2
    nested = b"".join(pair % i for i in range(depth))
    return pickle.PROTO + b"\4" + b"}" + b"K\1" + nested + b"K\1s."


BOMBS = {
    "zeros": bytes(3 * 10**9 // 100),
    "places in a memo": pickle.PROTO
    + b"\2N"
    + pickle.LONG_BINPUT
    + struct.pack("<I", 2**31)
    + b".",
    "a bytearray": pickle.PROTO + b"\5" + pickle.BYTEARRAY8 + struct.pack("<Q", 2**36) + b".",
    "many lists": pickle.PROTO + b"\2(" + b"]" * 2**23 + b"t.",
    "a frame": pickle.PROTO + b"\4" + pickle.FRAME + struct.pack("<Q", 2**40) + b".",
    "a nested key": nested_key(60),
}


def test_a_pickle_takes_no_more_than_its_size_allows(tmp_path):
    """All of them in one process of its own."""
    paths = []
    for i, bomb in enumerate(BOMBS.values()):
        (tmp_path / str(i)).mkdir()
        paths.append(str(in_zip(tmp_path / str(i), bomb)))
    code = f"""
import resource
from etils import epath
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import pickles
before = resource.getrusage(resource.RUSAGE_SELF)
for path in {paths}:
    try:
        pickles.read(epath.Path(path))
        print("read", path)
    except CheckpointError as error:
        print(error)
after = resource.getrusage(resource.RUSAGE_SELF)
print((after.ru_maxrss - before.ru_maxrss) // 1024, after.ru_utime - before.ru_utime)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *answers, last = done.stdout.splitlines()
    megabytes, seconds = map(float, last.split())
    assert megabytes < 600 and seconds < 20, last
    refused = [a for a in answers if "is damaged" in a or "more than 4,194,304 bytes" in a]
    assert len(refused) == len(BOMBS) - 1, answers


def test_a_compressed_tensor_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "x.pth"
    torch.save({"a": torch.zeros(10**6)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(CheckpointError, match="is compressed, as torch.save never does"):
        pickles.read(epath.Path(path))


@pytest.mark.parametrize("shape", ["(-1,)", "(2**40, 2**40)", "(4611686018427387904, 4)"])
def test_a_shape_of_npz_is_that_of_its_bytes(tmp_path, shape):
    path = epath.Path(tmp_path) / "x.npz"
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    header = b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", header)
    with path.open("rb") as file, pytest.raises(CheckpointError, match="damaged"):
        npz.read(path, file)


def test_a_header_of_npz_is_not_decompressed_without_end(tmp_path):
    path, content = epath.Path(tmp_path) / "x.npz", io.BytesIO()
    content.write(b"\x93NUMPY\2\0" + struct.pack("<I", 10**8) + b" " * 10**8)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", content.getvalue())
    with path.open("rb") as file, pytest.raises(CheckpointError, match="damaged"):
        npz.read(path, file)
    np.savez(tmp_path / "whole.npz", a=np.arange(3))
    with (tmp_path / "whole.npz").open("rb") as file:
        assert np.array_equal(np.asarray(npz.read("whole.npz", file)["a"]), np.arange(3))


@pytest.mark.parametrize(
    "names",
    [["model.safetensors"], ["config.json"], ["pytorch_model.bin"], ["a.bin", "pytorch_model.bin.index.json"],
     ["preprocessor_config.json", "model.safetensors"]],
)  # fmt: skip
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path, names):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    in_safetensors(tmp_path, b"{}").rename(tmp_path / "model.safetensors")
    if "a.bin" in names:
        (tmp_path / "model.safetensors").unlink()
        (tmp_path / names[1]).write_text('{"weight_map": {"a": "a.bin"}}')
    elif names[0].endswith(".bin"):
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / names[0]).unlink(missing_ok=True)
    os.mkfifo(tmp_path / names[0])
    signal.alarm(20)  # ends the tests where it is waited for
    try:
        with pytest.raises(CheckpointError, match=f"{names[0]} is no file, but a pipe or a device"):
            formats.read_checkpoint(tmp_path)
    finally:
        signal.alarm(0)


def test_a_pipe_or_a_device_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "x.npz")
    for path in (tmp_path / "x.npz", "/dev/zero"):
        with pytest.raises(CheckpointError, match="is no file, but a pipe or a device"):
            formats.read_checkpoint(path)
