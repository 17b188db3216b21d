"""What the watch of a reference curve stops (`config.reference.stop_below`), on CIFAR-10 as JPEG files: runs of a small
ViT beside the curve of five seeds, healthy ones and ones with a fault.

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
from vit_jax.config import default_config
from vit_jax.training import curves
from vit_jax.training.loop import train
from vit_jax.training.reference import BelowReference

SEEDS = 5
# What each does to a healthy run; 'labels' also has files of its own.
FAULTS = {
    "labels of one class in ten wrong": {},
    "rate x 10": {"optim.lr": 1e-2},
    "rate / 10": {"optim.lr": 1e-4},
    "no warm-up": {"optim.warmup": "0 steps"},
    "no normalisation": {"data.mean": (0.0,) * 3, "data.std": (1 / 255,) * 3},
    "decay on everything": {"optim.weight_decay_rules": ((".*", 1.0),)},
    "evaluation crops of the middle": {"data.eval_crop": "central", "data.eval_resize": 40},
}
WRONG = ("cat", "ship")  # images of the first are filed as the second


def healthy(data: pathlib.Path):
    config = default_config()
    config.data.update(dict(name="tar", path=str(data), image_size=32, eval_crop="resize"))
    config.data.update(dict(train_crop="pad", pad=4, eval_split="test[:20%]", threads=2))
    config.data.train_split = "train[:40%]"
    config.model.update(dict(name="ViT-S/8", width=96, depth=3, heads=3, mlp_dim=192))
    config.model.update(dict(pool="mean", position="sincos2d"))
    config.duration, config.batch_size, config.optim.warmup = "4 epochs", 128, "10%"
    config.optim.weight_decay = 0.05
    config.eval.every, config.checkpoint.every, config.log.every = "5%", "100%", "5%"
    config.log.tensorboard = False
    return config


def mislabelled(data: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The same files, but that nearly all training images of one class are filed under another."""
    wrong = folder / "wrong.tar"
    if wrong.exists():
        return wrong
    with tarfile.open(data) as read, tarfile.open(wrong.with_suffix(".part"), "w") as write:
        kept = 0
        for member in read:
            content = read.extractfile(member) if member.isfile() else None
            if re.search(rf"train/{WRONG[0]}/", member.name) and content:
                kept += 1
                if kept > 5:
                    name = member.name.replace(f"/{WRONG[0]}/", f"/{WRONG[1]}/")
                    member.name = name.replace(".jpg", "_.jpg")
            write.addfile(member, content)
    wrong.with_suffix(".part").rename(wrong)
    return wrong


def one(config, workdir: pathlib.Path) -> dict:
    """A run: whether, where and by how much it was ended; else how far it is from the curve at the end."""
    try:
        result = train(config, workdir)
    except BelowReference:
        last = max(curves.evaluations(epath.Path(workdir)))
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
    config, found = healthy(said.data), said.out / "found.jsonl"
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
            run.data.path = str(mislabelled(said.data, said.out))
        workdir = said.out / f"{re.sub(r'[^a-z0-9]+', '_', fault)}_{seed}"
        entry = {"fault": fault, "seed": seed, **one(run, workdir)}
        with found.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(entry, flush=True)


if __name__ == "__main__":
    main()
