"""DeiT's and DeiT III's recipes, small, on CIFAR-10, beside timm's parts in the order in which its documentation puts
them together.
"""

import functools
import random

import numpy as np
import PIL.Image
import torch

from tests.parity import batch, engines, timm_parts
from tests.parity.images import CIFAR, CLASSES, cifar
from tests.parity.timm_parts import MEAN, STD
from vit_jax import recipes
from vit_jax.config import default_config

STEPS, BATCH, WARMUP, SIDE, PATCH = 300, 60, 30, 32, 8
WIDTH, DEPTH, HEADS = 48, 2, 4
RATE, RATE_END, DECAY, EMA, DROP_PATH = 2e-3, 1e-5, 0.05, 0.9, 0.1
REPEATS, ERASING, SMOOTHING = 3, 0.25, 0.1
MIXUP, CUTMIX, AREA = 0.8, 1.0, (0.35, 1.0)
RATE_LAMB, LAYER_SCALE = 1e-2, 0.1


def our_config(third: bool):
    """DeiT's, or DeiT III's."""
    config = default_config()
    config.data.update(dict(name="tar", path=str(CIFAR), image_size=SIDE, crop_area=AREA))
    config.data.update(dict(interpolation="bicubic", eval_crop="resize", mean=MEAN, std=STD))
    config.augment.update(dict(mixup=MIXUP, cutmix=CUTMIX))
    config.model.update(dict(name=f"ViT-S/{PATCH}", width=WIDTH, depth=DEPTH, heads=HEADS))
    config.model.update(dict(mlp_dim=4 * WIDTH, activation="gelu", init="deit"))
    config.model.update(dict(head_init="normal", drop_path=DROP_PATH))
    config.duration, config.batch_size = f"{STEPS} steps", BATCH
    config.optim.update(dict(lr=RATE, lr_end=RATE_END, warmup=f"{WARMUP} steps"))
    config.optim.update(dict(weight_decay=DECAY, clip=0.0))
    if third:
        config.augment.update(dict(three_augment=True, color_jitter=batch.JITTER))
        config.model.update(dict(position_of_class=False, layer_scale="all"))
        config.model.update(dict(layer_scale_init=LAYER_SCALE, drop_path_by="constant"))
        config.objective.loss = "binary"
        config.optim.update(dict(name="lamb", lr=RATE_LAMB, clip=1.0))
    else:
        config.data.repeats = REPEATS
        config.augment.erasing = ERASING
        config.objective.label_smoothing = SMOOTHING
        config.optim.ema = EMA
        recipes.randaugment_of_deit(config)
    return config


def ours(seed: int, third: bool = False) -> dict[str, np.ndarray]:
    named = {"loss": "loss", "accuracy": "eval/accuracy"}
    return engines.train_ours(our_config(third), seed, named)


def theirs(seed: int, third: bool = False) -> dict[str, np.ndarray]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = _model(third)
    groups = engines.split_by_decay(model, DECAY, lambda name: name in model.no_weight_decay())
    smoothing = 0.0 if third else SMOOTHING
    mix = timm_parts.part("data.mixup").Mixup(
        MIXUP, CUTMIX, label_smoothing=smoothing, num_classes=CLASSES
    )
    if third:
        optimizer = timm_parts.part("optim.lamb").Lamb(groups, lr=RATE_LAMB, eps=1e-8)
        criterion = timm_parts.part("loss").BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0)
        average, peak = None, RATE_LAMB
    else:
        optimizer = torch.optim.AdamW(groups, lr=RATE)
        criterion = timm_parts.part("loss").SoftTargetCrossEntropy()
        average = timm_parts.part("utils.model_ema").ModelEmaV3(model, decay=EMA)
        peak = RATE
    scheduler = timm_parts.part("scheduler").CosineLRScheduler(
        optimizer, t_initial=STEPS - WARMUP, lr_min=RATE_END, warmup_t=WARMUP, warmup_prefix=True,
        t_in_epochs=False,
    )  # fmt: skip
    assert scheduler.base_values == [peak] * 2

    def loss_of(model, batch):
        return criterion(*_called(model, mix(*batch)))

    tests = timm_parts.prepared([PIL.Image.fromarray(x) for x in cifar("test")[0]])
    return engines.train_theirs(
        model,
        _batches(third, seed),
        loss_of,
        optimizer,
        lambda made: scheduler._get_lr(made)[0],
        steps=STEPS,
        evaluate=engines.accuracy_of(tests, torch.from_numpy(cifar("test")[1])),
        average=average,
    )


ours_third, theirs_third = (functools.partial(f, third=True) for f in (ours, theirs))


def _called(model, batch):
    images, targets = batch
    return model(images), targets


def _model(third: bool) -> torch.nn.Module:
    transformer = timm_parts.part("models.vision_transformer")
    blocks = dict(no_embed_class=True, init_values=LAYER_SCALE) if third else {}
    model = transformer.VisionTransformer(
        SIDE, PATCH, num_classes=CLASSES, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS,
        drop_path_rate=DROP_PATH, **blocks,
    )  # fmt: skip
    # As DeiT's code: timm draws it 20,000 times smaller.
    torch.nn.init.normal_(model.cls_token, std=0.02)
    if third:  # the same in all blocks, where timm has it grow
        for block in model.blocks:
            block.drop_path1, block.drop_path2 = (
                timm_parts.part("layers").DropPath(DROP_PATH) for _ in range(2)
            )
    return model


def _batches(third: bool, seed: int):
    """Images (B, 3, H, W), labels (B,)."""
    images, labels = cifar("train")
    policy = timm_parts.policy("3a" if third else "rand-m9-mstd0.5-inc1")
    erase = timm_parts.part("data.random_erasing").RandomErasing(
        0.0 if third else ERASING, mode="pixel", device="cpu"
    )

    def changed(image: PIL.Image.Image) -> PIL.Image.Image:
        image = policy(timm_parts.cropped(image, AREA, SIDE))
        return batch.jittered(image) if third else image

    for chosen in _indices(third, len(images), seed):
        parts = [changed(PIL.Image.fromarray(images[i])) for i in chosen]
        yield erase(timm_parts.prepared(parts)), torch.from_numpy(labels[chosen])


def _indices(third: bool, count: int, seed: int):
    if third:
        yield from engines.epochs(count, BATCH, np.random.default_rng(seed))
    sampler = timm_parts.part("data.distributed_sampler").RepeatAugSampler(
        range(count), num_replicas=1, rank=0, num_repeats=REPEATS
    )
    epoch = 1000 * seed  # from which timm seeds each epoch's order
    while True:
        sampler.set_epoch(epoch)
        order = np.array(list(sampler))
        yield from order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)
        epoch += 1
