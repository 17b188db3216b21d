r"""Pre-trains a small ViT on handwritten digits, fine-tunes it at a higher resolution, evaluates,
predicts, inspects and compares.

The same as these commands, one after the other:

  vit_jax train --config=digits --workdir=DIR/pretrain
  vit_jax train --config=digits_finetune --config.init_from=DIR/pretrain \
    --workdir=DIR/finetune
  vit_jax predict --checkpoint=DIR/finetune DIR/images/*.png --picture=DIR/predictions.png
  vit_jax inspect --checkpoint=DIR/finetune --images=DIR/images --out=DIR/inspection
  vit_jax report DIR/pretrain DIR/finetune --out=DIR/report

The last line of standard output is one JSON object.
"""

import argparse
import json
import pathlib
import time

from PIL import Image

import vit_jax
from vit_jax.base import logs
from vit_jax.data.sources import open_eval
from vit_jax.inspection.run import inspect
from vit_jax.prediction.images import find_images
from vit_jax.prediction.predict import predict_files
from vit_jax.studies.report import report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", type=pathlib.Path, help="by default a new folder in runs/")
    arguments = parser.parse_args()
    workdir = arguments.workdir or pathlib.Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S")
    logs.to_stderr()

    print("1. Pre-training on 32x32 digits", flush=True)
    pretrain = train("digits", workdir / "pretrain", arguments.seed)
    print(
        "2. Fine-tuning at 48x48: more tokens, interpolated position embeddings, a new head",
        flush=True,
    )
    finetune = train(
        "digits_finetune",
        workdir / "finetune",
        arguments.seed,
        init_from=str(workdir / "pretrain"),
    )
    print("3. Predicting test images", flush=True)
    files = save_test_images(workdir / "images", count=9)
    predict_files(
        vit_jax.load_run(workdir / "finetune"),
        find_images(files),
        topk=2,
        batch_size=9,
        form="text",
        picture=workdir / "predictions.png",
    )

    print("4. What the model has learned, and how the runs went", flush=True)
    inspected = inspect(workdir / "finetune", [str(workdir / "images")], workdir / "inspection")
    compared = report([workdir / "pretrain", workdir / "finetune"], workdir / "report")

    print(f"\ncheckpoints   {workdir}/pretrain/checkpoints  {workdir}/finetune/checkpoints")
    print(f"TensorBoard   tensorboard --logdir={workdir}")
    print(f"pictures      {workdir}/predictions.png  {workdir}/images")
    print(f"reports       {compared['report']}  {inspected['report']}")
    print(json.dumps({"pretrain": pretrain, "finetune": finetune, "workdir": str(workdir)}))


def train(recipe: str, workdir: pathlib.Path, seed: int, init_from: str = "") -> dict[str, float]:
    """Trains a recipe and tells how accurate it is on the test split, and how long it took."""
    config = vit_jax.load_config(recipe)
    config.seed, config.init_from = seed, init_from
    began = time.monotonic()
    result = vit_jax.train(config, workdir)
    return {"test_accuracy": result["accuracy"], "seconds": round(time.monotonic() - began, 1)}


def save_test_images(folder: pathlib.Path, count: int) -> list[str]:
    """Writes some test digits as PNG files, named after what they show."""
    source = open_eval(vit_jax.load_config("digits").data)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for record in (source[i * len(source) // count] for i in range(count)):
        files.append(
            str(folder / f"{record.name.replace('/', '_')}_is_{source.classes[record.label]}.png")
        )
        Image.fromarray(record.image).save(files[-1])
    return files


if __name__ == "__main__":
    main()
