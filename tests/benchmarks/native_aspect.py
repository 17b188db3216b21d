"""Learning at the native aspect against learning from squashed squares of as many patches, three seeds each:

    python -m tests.benchmarks.native_aspect stretched CIFAR10.tar WORKDIR
    python -m tests.benchmarks.native_aspect cut CIFAR10.tar WORKDIR
    python -m tests.benchmarks.native_aspect photos WEIGHTS FOLDER WORKDIR

CIFAR10.tar has its images as files, train/CLASS/… and test/CLASS/…. Each image gets an aspect that is log-uniform in
[1/3, 3]: `stretched` to it, with all its content, or `cut` to it, the largest window at a random place, undistorted.
Squashing undoes the first, and distorts the second. The networks are those of `recipes.on_cifar10`, with 16 patches.

photos: WEIGHTS is timm's DeiT-Ti, FOLDER has labels.csv with columns file and label, one photo a class. Each seed
continues training, with all 1000 classes, on a random half of the photos, and is judged by the other.

Both ways see whole images, mirrored at random, and nothing else is random. Runs that have ended are not repeated.
"""

import csv
import io
import pathlib
import random
import statistics
import sys
import tarfile

from PIL import Image

from vit_jax import recipes
from vit_jax.studies.sweep import run_all

SEEDS = 3
WAYS = {"native": lambda tokens: {"data.native_tokens": tokens}, "squashed": lambda tokens: {}}


def stretch(image: Image.Image, aspect: float) -> Image.Image:
    """The whole image as one of this aspect, width over height, and nearly its area."""
    size = (round(image.width * aspect**0.5), round(image.height / aspect**0.5))
    return image.resize(size, Image.BICUBIC)


def cut(image: Image.Image, aspect: float, place: float) -> Image.Image:
    """The largest window of this aspect of a square image."""
    side = image.width
    width, height = round(side * min(1, aspect)), round(side / max(1, aspect))
    left, top = (round(place * (side - length)) for length in (width, height))
    return image.crop((left, top, left + width, top + height))


def make_set(source: str, target: pathlib.Path, kind: str) -> None:
    """Writes the images of the tar file `source`, stretched or cut, as PNG into the tar file `target`."""
    numbers, part = random.Random(0), target.with_suffix(".part")
    with tarfile.open(source) as images, tarfile.open(part, "w") as tar:
        for member in sorted(images.getmembers(), key=lambda m: m.name):
            if not member.isfile():
                continue
            image = Image.open(images.extractfile(member)).convert("RGB")
            aspect, place = 3 ** numbers.uniform(-1, 1), numbers.random()
            image = stretch(image, aspect) if kind == "stretched" else cut(image, aspect, place)
            file = io.BytesIO()
            image.save(file, "PNG", compress_level=1)
            info = tarfile.TarInfo(str(pathlib.PurePath(member.name).with_suffix(".png")))
            info.size = file.tell()
            file.seek(0)
            tar.addfile(info, file)
    part.rename(target)


def cifar10(kind: str, source: str, workdir: str) -> None:
    """A row for each way."""
    config = recipes.beside(__file__, "../../configs/digits.py")
    recipes.on_cifar10(config)
    config.augment.flip = True
    folder = pathlib.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}.tar"
    if not path.exists():
        make_set(source, path, kind)
    config.data.update(dict(name="tar", path=str(path), train_crop="resize"))
    train(vary(config, kind, 16), folder)


def photos(weights: str, images: str, workdir: str) -> None:
    """A row for each way."""
    folder = pathlib.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classes.txt").write_text("".join(f"{n}\n" for n in range(1000)))
    with (pathlib.Path(images) / "labels.csv").open() as file:
        rows = [
            (pathlib.Path(images).resolve() / r["file"], r["label"]) for r in csv.DictReader(file)
        ]
    config = recipes.from_checkpoint()
    config.init_from, config.init_reset = weights, ()
    config.data.update(dict(name="folder", image_size=224, train_split="train", eval_split="test"))
    config.data.update(dict(train_crop="resize", eval_crop="resize", examine=False))
    config.data.update(dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)))
    config.data.interpolation = "bicubic"
    config.model.update(dict(dtype="float32", num_classes=1000))
    config.duration, config.batch_size, config.eval.batch_size = "16 steps", 16, 20
    config.optim.update(dict(lr=3e-5, warmup="10%", weight_decay=0.05))
    config.eval.every, config.log.every, config.log.tensorboard = "100%", "4 steps", False
    config.audit.every, config.checkpoint.every = 0, "0 steps"
    runs = {}
    for seed in range(SEEDS):
        order = random.Random(seed).sample(range(len(rows)), len(rows))
        halves = {place: "train" if n < len(rows) // 2 else "test" for n, place in enumerate(order)}
        path = folder / f"{seed}.csv"
        lines = [f"{file},{label},{halves[n]}\n" for n, (file, label) in enumerate(rows)]
        path.write_text("path,label,split\n" + "".join(lines))
        config.data.path, config.seed = str(path), seed
        runs |= vary(config, "photos", 196, seeds=1)
    train(runs, folder)


def vary(config, name: str, tokens: int, seeds: int = SEEDS) -> dict:
    """Runs of both ways, by 'NAME/WAY/seed=N'."""
    settings = {f"{name}/{way}": options(tokens) for way, options in WAYS.items()}
    return recipes.vary(config, settings, seeds=seeds)


def train(runs: dict, folder: pathlib.Path) -> None:
    """Trains them, and prints mean and values of the accuracy by setting."""
    results, found = run_all(runs, folder), {}
    for name, result in results.items():
        found.setdefault(name.rpartition("/")[0], []).append(100 * result["accuracy"])
    for name, values in found.items():
        each = ", ".join(f"{value:.1f}" for value in values)
        print(f"| {name} | {statistics.mean(values):.1f} | {each} |", flush=True)


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    photos(*arguments) if kind == "photos" else cifar10(kind, *arguments)
