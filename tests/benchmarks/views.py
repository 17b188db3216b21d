"""Ten views of a JPEG file, cut by ours and by Pillow: python tests/benchmarks/views.py --images=FOLDER

Decoding and cutting alone, by processor time, in turns; the views are those of configs/dino.py:L/16, whose colours are
changed on the devices.
"""

import io
import itertools
import pathlib
import time

import numpy as np
from absl import app, flags
from PIL import Image

from vit_jax.base import schema
from vit_jax.config import config_class
from vit_jax.data import crops, views
from vit_jax.data.decoding import decode
from vit_jax.data.order import crop_draws
from vit_jax.prediction.images import find_images
from vit_jax.recipes.user_files import load_config

IMAGES = flags.DEFINE_string("images", None, "a folder of JPEG files", required=True)
FILES = flags.DEFINE_integer("files", 64, "how many of them")
ROUNDS = flags.DEFINE_integer("rounds", 5, "how often all are cut in each way")


def main(_):
    found = itertools.islice(find_images([IMAGES.value]), FILES.value)
    files = [pathlib.Path(named.name).read_bytes() for named in found]
    config = schema.typed(config_class(), load_config("configs/dino.py:L/16"))
    wanted = [(view.data, number) for view in views.of(config) for number in view.numbers]
    draws = [crop_draws(0, np.arange(len(files)), number).tolist() for _, number in wanted]

    def decoded_once():
        for i, file in enumerate(files):
            pixels = decode.decode(file, name="")
            for data, number in wanted:
                decode.train_crop(pixels, data, draws[number][i], name="")

    def decoded_for_each():
        for i, file in enumerate(files):
            for data, number in wanted:
                decode.train_crop(file, data, draws[number][i], name="")

    def pillow():
        for i, file in enumerate(files):
            image = Image.open(io.BytesIO(file)).convert("RGB")
            for data, number in wanted:
                height, width = crops.shape(data)[:2]
                (top, left, bottom, right), _ = crops.train_part(
                    image.height, image.width, data, draws[number][i]
                )
                box, method = (left, top, right, bottom), Image.Resampling.BICUBIC
                np.asarray(image.resize((width, height), method, box=box))

    ways, seconds = (decoded_once, decoded_for_each, pillow), {}
    for _ in range(ROUNDS.value + 1):
        for way in ways:
            start = time.process_time()
            way()
            seconds.setdefault(way.__name__, []).append(time.process_time() - start)
    for name, found in seconds.items():  # but the first
        print(f"{name}: {len(files) / np.median(found[1:]):.0f} images per core-second")


if __name__ == "__main__":
    app.run(main)
