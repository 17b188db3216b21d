"""What the watch of a reference curve stops (`config.reference.stop_below`), on a fifth of CIFAR-10 as JPEG files:
runs of a small ViT beside the curve of five seeds, healthy ones and ones with a fault.

    python -m tests.benchmarks.watch --data=cifar10_jpeg.tar --out=FOLDER [--healthy=20] [--faulty=2]

Each run takes about 20 s of two quiet cores. FOLDER/found.jsonl has a line for each: its fault, its seed, where it was
ended (a share of the run), or its difference to the curve at the end. Started again, it goes on.
"""

import argparse
import json
import pathlib
import re
import tarfile

from etils import epath

from vit_jax.base.settings import with_fields
from vit_jax.checkpoints.evaluations import evaluations
from vit_jax.config import default_config
from vit_jax.training.loop import train
from vit_jax.training.upkeep import curves
from vit_jax.training.upkeep.reference import BelowReference

SEEDS = 5
RATE = 2e-3  # the best of 0.001, 0.002, 0.003 and 0.01
# What each does to a healthy run; those of labels have files of their own.
FAULTS = {
    "labels of one class in ten wrong": {},
    "rate x 10": {"optim.lr": 10 * RATE},
    "rate / 10": {"optim.lr": RATE / 10},
    "no warm-up": {"optim.warmup": "0 steps"},
    "no normalisation": {"data.mean": (0.0,) * 3, "data.std": (1 / 255,) * 3},
    "decay on everything": {"optim.weight_decay_rules": ((".*", 1.0),)},
    "evaluation crops of the middle": {"data.eval_crop": "central", "data.eval_resize": 40},
}
WRONG = ("cat", "ship")  # images of the first are filed as the second


def healthy(data: pathlib.Path):
    config = default_config()
    config.data.update(dict(name="tar", path=str(data), image_size=32, eval_crop="resize"))
    config.data.update(dict(train_crop="pad", pad=4, threads=2))
    config.model.update(dict(name="ViT-S/8", width=96, depth=3, heads=3, mlp_dim=192))
    config.model.update(dict(pool="mean", position="sincos2d"))
    config.duration, config.batch_size, config.optim.warmup = "5 epochs", 128, "10%"
    config.optim.lr, config.optim.weight_decay = RATE, 0.05
    config.eval.every, config.checkpoint.every, config.log.every = "5%", "100%", "5%"
    config.log.tensorboard = False
    return config


def subset(data: pathlib.Path, folder: pathlib.Path, *, wrong: bool) -> pathlib.Path:
    """A fifth of the images of each class, to train on and to evaluate on; of a wrong one, the training images of one
    class are filed under another, but for a few.
    """
    path = folder / f"{'wrong' if wrong else 'right'}.tar"
    if path.exists():
        return path
    counts: dict[str, int] = {}
    with tarfile.open(data) as read, tarfile.open(path.with_suffix(".part"), "w") as write:
        for member in read:
            place, _, name = member.name.rpartition("/")
            counts[place] = counts.get(place, -1) + 1
            if not member.isfile() or counts[place] % 5:
                continue
            content = read.extractfile(member)
            if wrong and place.endswith(f"train/{WRONG[0]}") and counts[place] > 25:
                member.name = f"{place.removesuffix(WRONG[0])}{WRONG[1]}/{WRONG[0]}_{name}"
            write.addfile(member, content)
    path.with_suffix(".part").rename(path)
    return path


def one(config, workdir: pathlib.Path) -> dict:
    """A run: where and by how much it was ended; else how far from the curve it was at worst and at the end."""
    try:
        result = train(config, workdir)
    except BelowReference:
        last = max(evaluations(epath.Path(workdir)))
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        entry = next(
            e for e in map(json.loads, lines) if e["step"] == last and "eval/accuracy" in e
        )
        return {"stopped": last, "difference": entry["reference/difference"]}
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    differences = [line["reference/difference"] for line in lines if "reference/difference" in line]
    lowest = min(differences, default=None)
    last = differences[-1] if differences else None
    return {
        "accuracy": result["accuracy"],
        "difference": last,
        "lowest": lowest,
        "steps": result["step"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--faulty", type=int, default=2)
    said = parser.parse_args()
    said.out.mkdir(parents=True, exist_ok=True)
    config, found = healthy(subset(said.data, said.out, wrong=False)), said.out / "found.jsonl"
    done = (
        {(e["fault"], e["seed"]) for e in map(json.loads, found.open())}
        if found.exists()
        else set()
    )
    runs = [("reference", seed, {}) for seed in range(SEEDS)]
    for seed in range(said.faulty):
        runs += [(name, 100 + seed, fields) for name, fields in FAULTS.items()]
    runs += [("healthy", 200 + seed, {}) for seed in range(said.healthy)]
    beside = {"reference.curve": str(said.out / curves.FILE), "reference.stop_below": 2.0}
    for fault, seed, fields in runs:
        if (fault, seed) in done:
            continue
        if fault != "reference" and not (said.out / curves.FILE).exists():
            workdirs = [epath.Path(said.out / f"reference_{n}") for n in range(SEEDS)]
            (said.out / curves.FILE).write_text(curves.curve_of_runs(workdirs).to_json())
        run = with_fields(
            config, {"seed": seed, **fields, **(beside if fault != "reference" else {})}
        )
        if fault.startswith("labels"):
            run.data.path = str(subset(said.data, said.out, wrong=True))
        workdir = said.out / f"{re.sub(r'[^a-z0-9]+', '_', fault)}_{seed}"
        entry = {"fault": fault, "seed": seed, **one(run, workdir)}
        with found.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(entry, flush=True)


if __name__ == "__main__":
    main()
