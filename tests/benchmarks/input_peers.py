"""Our input pipeline beside those of the field, on the same JPEG files and cores, in turn.

    python tests/benchmarks/input_peers.py --images=FOLDER_OF_JPEGS [--only=ours,tf_fused] [--seconds=6]

Work: JPEG records -> inception crop -> batches of 128 uint8 images of 224 × 224, on two workers.
Each contender is a process of its own; all are started and measured in turn, several rounds. The
last line is a JSON object. Peers need `pip install tensorflow` (tf_*) and `timm torch torchvision`
(timm); those that are not installed are left out, and said.

    ours            `vit_jax prepare`'s records    ours_320      the same with --max_side=320
    ours_folder     files from a folder
    pillow          a plain loop: open, draft, resize with a box, in threads (near our quality, see `psnr` of
                    `vit_jax benchmark input`)
    tf_fused        tf.data, crop decoded alone, resized without antialiasing (big_vision's way)
    tf_antialias    the same, accurate DCT and antialiasing: about our quality
    timm            timm's transforms and collation in PyTorch's DataLoader
    large_ours, large_opencv   photos of 1,500 px: ours, and a full decode and area average by
                    OpenCV in threads
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

BATCH, SIZE, WORKERS = 128, 224, 2
AHEAD = 6  # batches that may have been made while others were measured: not timed
NEEDS = {"tf_fused": "tensorflow", "tf_antialias": "tensorflow", "timm": "torchvision"}
FOLDERS = {
    "ours": "prepared",
    "ours_320": "prepared_320",
    "large_ours": "large_prepared",
    "large_opencv": "large",
}


def ours(folder: pathlib.Path):
    """Batches of vit_jax, from a prepared set or a folder of classes."""
    import jax

    from vit_jax.config import default_config
    from vit_jax.data import loader, sources
    from vit_jax.devices import meshes

    config = default_config()
    config.batch_size = BATCH
    name = "prepared" if "prepared" in folder.name else "folder"
    config.data.update({"name": name, "path": str(folder), "holdout": 0.0, "threads": WORKERS})
    source = sources.open_train(config.data)
    sharding = meshes.batch_sharding(meshes.make_mesh(config.mesh))
    for batch in loader.train_batches(source, config, sharding, start_step=0, stop_step=10**9):
        yield jax.block_until_ready(batch)["image"]


def tensorflow(folder: pathlib.Path, antialias: bool):
    """Batches of tf.data from a TFRecord file, decoding the crop alone."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    def cut(record):
        shape = tf.io.extract_jpeg_shape(record)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            shape,
            tf.zeros([0, 0, 4], tf.float32),
            area_range=(0.05, 1),
            min_object_covered=0,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.stack([begin[0], begin[1], size[0], size[1]])
        method = "INTEGER_ACCURATE" if antialias else ""
        image = tf.io.decode_and_crop_jpeg(record, window, channels=3, dct_method=method)
        image = tf.image.resize(image, [SIZE, SIZE], antialias=antialias)
        return tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)

    options = tf.data.Options()
    options.threading.private_threadpool_size = WORKERS
    options.deterministic = False
    records = str(folder / "records.tfrecord")
    with tf.io.TFRecordWriter(records) as writer:
        for file in jpegs(folder):
            writer.write(file.read_bytes())
    data = tf.data.TFRecordDataset(records).repeat()
    data = data.shuffle(200).map(cut, num_parallel_calls=WORKERS)
    yield from data.batch(BATCH, drop_remainder=True).prefetch(2).with_options(options)


def timm(folder: pathlib.Path):
    """Batches of timm: Pillow, worker processes, uint8 collation."""
    import torch

    # Of torchvision only transforms are used; its operators may be built for another torch.
    register = torch.library.register_fake
    torch.library.register_fake = lambda *_, **__: lambda function: function
    import torchvision  # noqa: F401

    torch.library.register_fake = register
    from timm.data import create_dataset, create_transform
    from timm.data.loader import fast_collate

    transform = create_transform(
        SIZE, is_training=True, use_prefetcher=True, scale=(0.05, 1.0), hflip=0.0,
        color_jitter=None, interpolation="bilinear",
    )  # fmt: skip
    data = create_dataset("", str(folder), transform=transform)
    order = torch.utils.data.RandomSampler(data, replacement=True, num_samples=10**8)
    for images, _ in torch.utils.data.DataLoader(
        data, BATCH, sampler=order, num_workers=WORKERS, collate_fn=fast_collate
    ):
        yield images


def pillow(folder: pathlib.Path):
    """Images opened by Pillow, at a smaller scale where the part has twice the pixels, and resized from it."""
    import io

    from PIL import Image

    from vit_jax.config import default_config
    from vit_jax.data.crops import train_part

    config = default_config().data

    def cut(file, draws, out):
        image = Image.open(io.BytesIO(file))
        width, height = image.size
        (top, left, bottom, right), _ = train_part(height, width, config, draws)
        room = min(bottom - top, right - left) / SIZE
        if room > 1:
            image.draft("RGB", (int(width / room), int(height / room)))
        x, y = image.size[0] / width, image.size[1] / height
        box = (left * x, top * y, right * x, bottom * y)
        out[:] = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)

    yield from in_threads(folder, cut)


def opencv(folder: pathlib.Path):
    """Whole images decoded and areas averaged by OpenCV, in threads, straight into the batch."""
    import cv2
    import numpy as np

    from vit_jax.config import default_config
    from vit_jax.data.crops import train_part

    cv2.setNumThreads(1)
    config = default_config().data

    def cut(file, draws, out):
        image = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR_RGB)
        (top, left, bottom, right), _ = train_part(*image.shape[:2], config, draws)
        part = image[top:bottom, left:right]
        out[:] = cv2.resize(part, (SIZE, SIZE), interpolation=cv2.INTER_AREA)

    yield from in_threads(folder, cut)


def in_threads(folder: pathlib.Path, cut):
    """Batches of what `cut(file, draws, out)` makes of the folder's images."""
    import concurrent.futures

    import numpy as np

    from vit_jax.data.crops import DRAWS

    files = [file.read_bytes() for file in jpegs(folder)]
    random = np.random.default_rng(0)
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        ahead = []
        while True:
            batch = np.empty((BATCH, SIZE, SIZE, 3), np.uint8)
            chosen = [files[index] for index in random.integers(len(files), size=BATCH)]
            jobs = zip(chosen, random.random((BATCH, DRAWS)), batch, strict=True)
            ahead.append((batch, [pool.submit(cut, *job) for job in jobs]))
            if len(ahead) == 2:
                batch, jobs = ahead.pop(0)
                [job.result() for job in jobs]
                yield batch


CONTENDERS = {
    "ours": ours,
    "tf_fused": lambda folder: tensorflow(folder, antialias=False),
    "tf_antialias": lambda folder: tensorflow(folder, antialias=True),
    "timm": timm,
    "pillow": pillow,
    "ours_320": ours,
    "ours_folder": ours,
    "large_ours": ours,
    "large_opencv": opencv,
}


def jpegs(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.rglob("*.JPEG"))


def make_folders(images: pathlib.Path, root: pathlib.Path) -> None:
    """The images in ten classes, nine together as one of 1,500 px, and both as prepared records."""
    from PIL import Image

    from vit_jax.data.preparation.prepare import prepare
    from vit_jax.data.preparation.shards import ShardOptions

    files = jpegs(images)
    for i, file in enumerate(files):
        place = root / "plain" / f"class{i % 10}" / f"{i}.JPEG"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())
    for i in range(40):
        large = Image.new("RGB", (1500, 1125))
        for k in range(9):
            tile = Image.open(files[(9 * i + k) % len(files)]).convert("RGB").resize((500, 375))
            large.paste(tile, (k % 3 * 500, k // 3 * 375))
        place = root / "large" / f"class{i % 10}" / f"{i}.JPEG"
        place.parent.mkdir(parents=True, exist_ok=True)
        large.save(place, quality=92)
    prepare(str(root / "plain"), str(root / "prepared"), holdout=0.0)
    prepare(str(root / "large"), str(root / "large_prepared"), holdout=0.0)
    smaller = prepare(
        str(root / "plain"),
        str(root / "prepared_320"),
        holdout=0.0,
        options=ShardOptions(max_side=320),
    )
    print("prepare --max_side=320:", smaller)


class Child:
    """A contender in a process of its own."""

    def __init__(self, name: str, folder: pathlib.Path):
        command = [sys.executable, __file__, f"--child={name}", f"--images={folder}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, **pipes)
        self.first = self._read()
        self.rounds: list[dict] = []

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a contender ended, see above")
        return json.loads(line)

    def measure(self, seconds: float) -> None:
        print(seconds, file=self._process.stdin, flush=True)
        self.rounds.append(self._read())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def result(self) -> dict:
        best = {
            name: [part["images"] / part[name] for part in self.rounds]
            for name in ("seconds", "core_seconds")
        }
        return self.first | {
            "images_per_second": statistics.median(best["seconds"]),
            "images_per_core_second": statistics.median(best["core_seconds"]),
            "resident_bytes": max(part["resident_bytes"] for part in self.rounds),
        }


def child(name: str, folder: pathlib.Path) -> None:
    """Makes batches when told to on standard input, and says on standard output how it went."""
    import psutil

    processes = [psutil.Process()]

    def core_seconds() -> float:
        return sum(sum(one.cpu_times()[:2]) for one in processes)

    began = time.perf_counter()
    batches = iter(CONTENDERS[name](folder))
    assert next(batches).shape[0] == BATCH
    print(json.dumps({"first_batch_seconds": time.perf_counter() - began}), flush=True)
    processes += psutil.Process().children(recursive=True)
    for line in sys.stdin:
        for _ in range(AHEAD):
            next(batches)
        count, began, core_began = 0, time.perf_counter(), core_seconds()
        while time.perf_counter() - began < float(line):
            next(batches)
            count += BATCH
        seconds, used = time.perf_counter() - began, core_seconds() - core_began
        resident = sum(one.memory_info().rss for one in processes)
        told = {"images": count, "seconds": seconds, "core_seconds": used}
        print(json.dumps(told | {"resident_bytes": resident}), flush=True)
    os._exit(0)  # the peers' threads need not be waited for


def installed(name: str) -> bool:
    import importlib.util

    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=pathlib.Path, required=True)
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        return child(options.child, options.images)
    names = [name for name in options.only.split(",") if installed(name)]
    with tempfile.TemporaryDirectory() as root:
        make_folders(options.images, pathlib.Path(root))
        children = {
            name: Child(name, pathlib.Path(root) / FOLDERS.get(name, "plain")) for name in names
        }
        for _, one in itertools.product(range(options.rounds), children.values()):
            one.measure(options.seconds)
        for one in children.values():
            one.close()
    results = {name: one.result() for name, one in children.items()}
    for name, result in results.items():
        print(name, {key: round(value, 3) for key, value in result.items()})
    print(json.dumps(results | {"left_out": sorted(set(options.only.split(",")) - set(names))}))
    return None


if __name__ == "__main__":
    main()
