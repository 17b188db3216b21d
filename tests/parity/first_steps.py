"""The first 100 steps of configs/deit.py on 200 photos, beside timm's DeiT: losses and norms, from initialisations and
orders of their own.
"""

import csv
import functools
import pathlib
import tempfile

import numpy as np
import PIL.Image
import torch

from tests.parity import engines, timm_parts
from tests.parity.images import DATA
from vit_jax.recipes.user_files import load_config

PHOTOS = DATA / "imagenet_sample"
RECIPE = pathlib.Path(__file__).resolve().parents[2] / "configs/deit.py"
STEPS, BATCH, WARMUP, SIDE = 100, 16, 20, 64
CLASSES = 996  # as the last of the photos' labels says
RATE, DECAY = 5e-4, 0.05


def our_config():
    """The recipe, of the smallest size, without augmentation."""
    config = load_config(f"{RECIPE}:Ti")
    config.data.update(dict(name="folder", path=_list_of_photos(), image_size=SIDE, repeats=1))
    config.data.update(dict(train_split="train", eval_split="train", train_crop="resize"))
    config.data.update(dict(eval_crop="resize", interpolation="bicubic", holdout=0.0))
    off = dict(flip=False, randaugment_layers=0, erasing=0.0, mixup=0.0, cutmix=0.0)
    config.augment.update(off)
    config.model.update(dict(dtype="float32", drop_path=0.0, num_classes=CLASSES))
    config.objective.label_smoothing = 0.0
    config.duration, config.batch_size = f"{STEPS} steps", BATCH
    config.optim.update(dict(lr=RATE, lr_end=0.0, warmup=f"{WARMUP} steps", weight_decay=DECAY))
    config.eval.evaluators = ()
    return config


def ours(seed: int) -> dict[str, np.ndarray]:
    names = "loss", "gradient_norm", "update_norm"
    return engines.train_ours(our_config(), seed, {name: name for name in names})


def theirs(seed: int) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    model = timm_parts.part("models.deit").deit_tiny_patch16_224(img_size=SIDE, num_classes=CLASSES)
    # As DeiT's code: timm draws it 20,000 times smaller, and losses fall faster.
    torch.nn.init.normal_(model.cls_token, std=0.02)
    groups = engines.split_by_decay(model, DECAY, lambda name: name in model.no_weight_decay())
    optimizer = torch.optim.AdamW(groups)
    norms = {"gradient_norm": [], "update_norm": []}
    before = []

    def watch_gradient():
        gradients = [p.grad.norm() for p in model.parameters()]
        norms["gradient_norm"].append(torch.stack(gradients).norm().item())
        before[:] = [p.detach().clone() for p in model.parameters()]

    def watch_update(*_):
        updates = [(p - q).norm() for p, q in zip(model.parameters(), before, strict=True)]
        norms["update_norm"].append(torch.stack(updates).norm().item())

    optimizer.register_step_post_hook(watch_update)
    curves = engines.train_theirs(
        model,
        _batches(seed),
        lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer,
        engines.cosine(RATE, WARMUP, STEPS),
        steps=STEPS,
        evaluate=lambda _: {},
        before_update=watch_gradient,
    )
    return curves | {
        name: np.reshape(values, (engines.TENTHS, -1)).mean(1) for name, values in norms.items()
    }


@functools.cache
def _photos() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (n, 3, H, W) and labels (n,)."""
    images, labels = [], []
    for row in csv.DictReader((PHOTOS / "labels.csv").open()):
        with PIL.Image.open(PHOTOS / row["file"]) as image:
            images.append(image.convert("RGB").resize((SIDE, SIDE), PIL.Image.BICUBIC))
        labels.append(int(row["label"]))
    return timm_parts.prepared(images), torch.tensor(labels)


@functools.cache
def _list_of_photos() -> str:
    """The path of a file path,label."""
    path = pathlib.Path(tempfile.mkdtemp()) / "photos.csv"
    rows = csv.DictReader((PHOTOS / "labels.csv").open())
    lines = [f"{PHOTOS / row['file']},{row['label']}\n" for row in rows]
    path.write_text("path,label\n" + "".join(lines))
    return str(path)


def _batches(seed: int):
    images, labels = _photos()
    for chosen in engines.epochs(len(labels), BATCH, np.random.default_rng(seed)):
        yield images[chosen], labels[chosen]
