"""A process that decodes images of strangers, one after the other, from standard input to standard
output: python -m vit_jax.serving.decode_worker

It imports neither JAX nor the model, so that it starts at once; `decoders.py` starts it, and ends it
when it takes too long. Every message is its length, as 8 bytes, and its content: first `Settings`, answered with an
empty message; then files, each answered with `PIXELS`, height, width and the pixels' bytes, or with a `BadImage` as
JSON.
"""

import json
import math
import os
import pickle
import resource
import struct
import sys
from typing import BinaryIO, NamedTuple

import numpy as np

from vit_jax.data.decoding import resize
from vit_jax.data.decoding.decode import decode, eval_crop
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, TooLarge

PIXELS = b"\0"  # how an answer with pixels begins; JSON does not
SIZE = struct.Struct(">II")  # height and width
SECONDS = 10  # of processor time that one image may take
LENGTH = struct.Struct(">Q")


class Settings(NamedTuple):
    """How images are decoded.

    Attributes:
      data: the section `config.data`.
      whole: 0: images are cut as for evaluation; otherwise they come whole, made smaller to this many pixels at most.
      megabytes: that a decode may take.
    """

    data: Data
    whole: int
    megabytes: int


def main() -> None:
    """Answers until standard input ends."""
    inputs = sys.stdin.buffer
    outputs = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    settings = pickle.loads(_read(inputs))  # from the server, not from a client
    _limit_memory(settings.megabytes)
    _write(outputs, b"")
    while (file := _read(inputs)) is not None:
        _limit_time()
        try:
            pixels = _decode(file, settings)
            answer = PIXELS + SIZE.pack(*pixels.shape[:2]) + pixels.tobytes()
        except BadImage as error:
            too_large = isinstance(error, TooLarge)
            answer = json.dumps({"why": error.why, "too_large": too_large}).encode()
        _write(outputs, answer)


def _decode(file: bytes, settings: Settings) -> np.ndarray:
    """(H, W, C) uint8."""
    data = settings.data
    if not settings.whole:
        return eval_crop(file, data, name="sent")
    limits = {"max_pixels": data.max_pixels, "max_value": data.max_value}
    pixels = decode(file, name="sent", channels=data.channels, **limits)
    height, width, channels = pixels.shape
    scale = math.sqrt(settings.whole / (height * width))
    if scale >= 1:
        return pixels
    size = (min(max(int(side * scale), 1), settings.whole) for side in (height, width))
    smaller = np.empty((*size, channels), np.uint8)
    resize.cut_pixels(pixels, ((0, 0, height, width), False), smaller, data.interpolation)
    return smaller


def _limit_memory(megabytes: int) -> None:
    """Allocations beyond what the process has now, and this much, fail: a decoder says so, or ends."""
    if sys.platform != "linux":  # other systems do not enforce it
        return
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    most = now + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_time() -> None:
    """The system ends this process when it has worked for `SECONDS` from now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = math.ceil(used.ru_utime + used.ru_stime) + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _read(file: BinaryIO) -> bytes | None:
    length = file.read(LENGTH.size)
    return file.read(LENGTH.unpack(length)[0]) if length else None


def _write(file: BinaryIO, content: bytes) -> None:
    file.write(LENGTH.pack(len(content)) + content)
    file.flush()


if __name__ == "__main__":
    main()
