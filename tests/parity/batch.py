"""Statistics of the batch: crops, erasing, mixing and policies as vit_jax draws them, beside timm's own."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import PIL.ImageEnhance
import torch

from tests.parity import timm_parts
from tests.parity.images import CLASSES, cifar
from tests.parity.timm_parts import MEAN, STD
from vit_jax.config import default_config
from vit_jax.data import crops, order
from vit_jax.data.augmentation import augment, pipeline
from vit_jax.data.options import Augment
from vit_jax.objectives.supervised import smoothed

DRAWS, SIDE, BATCH = 10_000, 32, 16
AREA, ASPECT, JITTER = (0.08, 1.0), (3 / 4, 4 / 3), 0.3
ERASING, MIXUP, CUTMIX, SMOOTHING = 0.25, 0.8, 1.0, 0.1
# Policies by what our config and timm's text call them; the last is Pillow's jitter in a drawn order, as torchvision's.
RANDAUGMENT = dict(randaugment_layers=2, randaugment_kind="timm-inc1", randaugment_magnitude=9.0)
POLICIES = {
    "RandAugment": (RANDAUGMENT | dict(randaugment_std=0.5), "rand-m9-mstd0.5-inc1"),
    "AutoAugment": (dict(autoaugment=True), "original"),
    "3-Augment": (dict(three_augment=True), "3a"),
    "jitter": (dict(color_jitter=JITTER), ""),
}
PHOTO = 375, 500  # height and width of the image that crops are cut out of


def ours(seed: int) -> dict[str, np.ndarray]:
    config = default_config().data
    config.update(dict(crop_area=AREA, crop_aspect=ASPECT, image_size=224))
    draws = order.crop_draws(seed, np.arange(DRAWS))
    boxes = [crops.train_part(*PHOTO, config, row)[0] for row in draws]
    top, left, bottom, right = np.array(boxes).T
    statistics = _of_crops(top, left, bottom - top, right - left)
    keys = jax.random.split(jax.random.key(seed), 4)

    blank = jnp.ones((DRAWS, SIDE, SIDE, 3))
    erased = augment.erase(blank, keys[0], ERASING, mode="const") == 0
    statistics |= _of_erased(np.asarray(erased)[..., 0])

    labels = jax.nn.one_hot(jnp.array([3, 7]), CLASSES)
    for name, mixup, cutmix in _MIXES:
        share = functools.partial(
            augment.own_share, size=(SIDE, SIDE), mixup=mixup, cutmix=cutmix, switch=0.5
        )

        @jax.vmap
        def masses(key, share=share):
            own = share(key)
            return smoothed(augment.mix(jnp.zeros((2, SIDE, SIDE, 3)), labels, own)[1], SMOOTHING)[
                0
            ]

        statistics[name] = np.asarray(masses(jax.random.split(keys[1], DRAWS)).max(1))
    images, _ = cifar("train")
    for name, (fields, _) in POLICIES.items():
        config = Augment(flip=False, **fields)

        @jax.jit
        def changed(images, key, config=config):
            given = dict(mean=MEAN, std=STD)
            return pipeline.augment(images, {}, key, config, **given)[0]

        chosen = images[np.random.default_rng(seed).integers(0, len(images), DRAWS)]
        results = [
            np.asarray(changed(part, jax.random.fold_in(keys[2], i)))
            for i, part in enumerate(chosen.reshape(-1, BATCH, SIDE, SIDE, 3))
        ]
        # To whole numbers: a statistic's atoms, such as images that were not changed, must stay atoms.
        pixels = np.rint(255 * (np.concatenate(results) * np.array(STD) + np.array(MEAN)))
        statistics |= _of_pixels(name, chosen, pixels)
    return statistics


def theirs(seed: int) -> dict[str, np.ndarray]:
    random.seed(seed)
    np.random.seed(seed)  # which timm's mixing draws from
    torch.manual_seed(seed)
    photo = PIL.Image.new("RGB", PHOTO[::-1])
    crop = timm_parts.part("data.transforms").RandomResizedCropAndInterpolation
    boxes = [crop.get_params(photo, AREA, ASPECT) for _ in range(DRAWS)]
    statistics = _of_crops(*np.array(boxes, float).T)

    erasing = timm_parts.part("data.random_erasing").RandomErasing
    erased = erasing(ERASING, mode="const", device="cpu")(torch.ones(DRAWS, 3, SIDE, SIDE)) == 0
    statistics |= _of_erased(erased[:, 0].numpy())

    mixing = timm_parts.part("data.mixup").Mixup
    for name, mixup, cutmix in _MIXES:
        mix = mixing(mixup, cutmix, label_smoothing=SMOOTHING, num_classes=CLASSES)
        blank, labels = torch.zeros(2, 3, SIDE, SIDE), torch.tensor([3, 7])
        masses = torch.stack([mix(blank, labels)[1][0] for _ in range(DRAWS)])
        statistics[name] = masses.max(1).values.numpy()

    images, _ = cifar("train")
    for name, (_, text) in POLICIES.items():
        change = timm_parts.policy(text) if text else jittered
        chosen = images[np.random.default_rng(seed).integers(0, len(images), DRAWS)]
        results = [np.asarray(change(PIL.Image.fromarray(x))) for x in chosen]
        statistics |= _of_pixels(name, chosen, np.stack(results).astype(float))
    return statistics


def jittered(image: PIL.Image.Image) -> PIL.Image.Image:
    """Brightness, contrast and saturation in a drawn order."""
    changes = [PIL.ImageEnhance.Brightness, PIL.ImageEnhance.Contrast, PIL.ImageEnhance.Color]
    for change in random.sample(changes, 3):
        image = change(image).enhance(random.uniform(1 - JITTER, 1 + JITTER))
    return image


_MIXES = (
    ("mixup, mass of the heavier label", MIXUP, 0.0),
    ("cutmix, mass of the heavier label", 0.0, CUTMIX),
    ("both, mass of the heavier label", MIXUP, CUTMIX),
)


def _of_crops(top, left, tall, wide) -> dict[str, np.ndarray]:
    return {
        "crop, share of the area": tall * wide / (PHOTO[0] * PHOTO[1]),
        "crop, log aspect": np.log(wide / tall),
        "crop, top": top,
        "crop, left": left,
    }


def _of_erased(masks: np.ndarray) -> dict[str, np.ndarray]:
    """Of masks (n, H, W): the shares, and of images with a box its log aspect and place."""
    boxed = masks[masks.any((1, 2))]
    rows, columns = boxed.any(2), boxed.any(1)
    return {
        "erasing, share of the area": masks.mean((1, 2)),
        "erasing, log aspect": np.log(rows.sum(1) / columns.sum(1)),
        "erasing, top": rows.argmax(1),
        "erasing, left": columns.argmax(1),
    }


def _of_pixels(name: str, before: np.ndarray, after: np.ndarray) -> dict[str, np.ndarray]:
    """Of pixels (n, H, W, 3) in [0, 255]."""
    grey = after.mean(3)
    return {
        f"{name}, brightness": grey.mean((1, 2)),
        f"{name}, contrast": grey.std((1, 2)),
        f"{name}, colour": after.std(3).mean((1, 2)),
        f"{name}, change": np.abs(after - before).mean((1, 2, 3)),
    }
