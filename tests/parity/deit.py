"""DeiT's and DeiT III's recipes, small, on CIFAR-10, and each part of the latter alone, beside timm's parts in the
order in which its documentation puts them together.
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a recipe has beside a ViT, AdamW, a cosine and flips.

    Attributes:
      third: the network is DeiT III's: LayerScale, and no position of the class token.
      crops: random parts of an image.
      policy: '', 'rand', RandAugment as DeiT has it, or '3a', 3-Augment with its jitter.
      mixing: mixup or CutMix of each batch.
      repeats: each image stands several times in an epoch, and a part of it is erased.
      smoothing: of the labels.
      binary: the loss is a sigmoid for each class.
      lamb: LAMB in AdamW's place.
      drop_path: largest probability that a block is left out.
      average: the moving average of the weights is evaluated.
    """

    third: bool = True
    crops: bool = False
    policy: str = ""
    mixing: bool = False
    repeats: bool = False
    smoothing: float = 0.0
    binary: bool = False
    lamb: bool = False
    drop_path: float = 0.0
    average: bool = False


RECIPES = {
    "deit": Recipe(
        third=False, crops=True, policy="rand", mixing=True, repeats=True, smoothing=SMOOTHING,
        drop_path=DROP_PATH, average=True,
    ),
    "deit3": Recipe(
        crops=True, policy="3a", mixing=True, binary=True, lamb=True, drop_path=DROP_PATH
    ),
    "bare": Recipe(),
    "lamb": Recipe(lamb=True),
    "average": Recipe(average=True),
    "policy": Recipe(policy="3a"),
    "binary": Recipe(binary=True),
    "drop_path": Recipe(drop_path=DROP_PATH),
    "crops": Recipe(crops=True),
}  # fmt: skip


def our_config(recipe: Recipe):
    config = default_config()
    config.data.update(dict(name="tar", path=str(CIFAR), image_size=SIDE))
    config.data.update(dict(interpolation="bicubic", eval_crop="resize", mean=MEAN, std=STD))
    config.model.update(dict(name=f"ViT-S/{PATCH}", width=WIDTH, depth=DEPTH, heads=HEADS))
    config.model.update(dict(mlp_dim=4 * WIDTH, activation="gelu", init="deit"))
    config.model.update(dict(head_init="normal", drop_path=recipe.drop_path))
    config.duration, config.batch_size = f"{STEPS} steps", BATCH
    config.optim.update(dict(lr=RATE, lr_end=RATE_END, warmup=f"{WARMUP} steps"))
    config.optim.update(dict(weight_decay=DECAY, clip=0.0))
    config.objective.label_smoothing = recipe.smoothing
    if recipe.crops:
        config.data.crop_area = AREA
    else:
        config.data.train_crop = "resize"
    if recipe.mixing:
        config.augment.update(dict(mixup=MIXUP, cutmix=CUTMIX))
    if recipe.policy == "rand":
        recipes.randaugment_of_deit(config)
    if recipe.policy == "3a":
        config.augment.update(dict(three_augment=True, color_jitter=batch.JITTER))
    if recipe.repeats:
        config.data.repeats = REPEATS
        config.augment.erasing = ERASING
    if recipe.third:
        config.model.update(dict(position_of_class=False, layer_scale="all"))
        config.model.update(dict(layer_scale_init=LAYER_SCALE, drop_path_by="constant"))
    if recipe.binary:
        config.objective.loss = "binary"
    if recipe.lamb:
        config.optim.update(dict(name="lamb", lr=RATE_LAMB, clip=1.0))
    if recipe.average:
        config.optim.ema = EMA
    return config


def ours(seed: int, variant: str) -> dict[str, np.ndarray]:
    named = {"loss": "loss", "accuracy": "eval/accuracy"}
    return engines.train_ours(our_config(RECIPES[variant]), seed, named)


def theirs(seed: int, variant: str) -> dict[str, np.ndarray]:
    recipe = RECIPES[variant]
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = _model(recipe)
    groups = engines.split_by_decay(model, DECAY, lambda name: name in model.no_weight_decay())
    if recipe.lamb:
        peak = RATE_LAMB
        optimizer = timm_parts.part("optim.lamb").Lamb(groups, lr=peak, eps=1e-8)
    else:
        peak = RATE
        optimizer = torch.optim.AdamW(groups, lr=peak)
    average = None
    if recipe.average:
        average = timm_parts.part("utils.model_ema").ModelEmaV3(model, decay=EMA)
    scheduler = timm_parts.part("scheduler").CosineLRScheduler(
        optimizer, t_initial=STEPS - WARMUP, lr_min=RATE_END, warmup_t=WARMUP, warmup_prefix=True,
        t_in_epochs=False,
    )  # fmt: skip
    assert scheduler.base_values == [peak] * 2
    tests = timm_parts.prepared([PIL.Image.fromarray(x) for x in cifar("test")[0]])
    return engines.train_theirs(
        model,
        _batches(recipe, seed),
        _loss(recipe),
        optimizer,
        lambda made: scheduler._get_lr(made)[0],
        steps=STEPS,
        evaluate=engines.accuracy_of(tests, torch.from_numpy(cifar("test")[1])),
        average=average,
    )


def _loss(recipe: Recipe):
    """The loss as a function of the model and of images (B, 3, H, W) with labels (B,)."""
    losses = timm_parts.part("loss")
    if recipe.binary:
        criterion = losses.BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0)
    else:
        criterion = losses.SoftTargetCrossEntropy()
    mix = None
    if recipe.mixing:
        mix = timm_parts.part("data.mixup").Mixup(
            MIXUP, CUTMIX, label_smoothing=recipe.smoothing, num_classes=CLASSES
        )

    def loss_of(model, batch):
        images, labels = batch
        if mix is None:
            targets = torch.nn.functional.one_hot(labels, CLASSES).float()
        else:
            images, targets = mix(images, labels)
        return criterion(model(images), targets)

    return loss_of


def _model(recipe: Recipe) -> torch.nn.Module:
    transformer = timm_parts.part("models.vision_transformer")
    blocks = dict(no_embed_class=True, init_values=LAYER_SCALE) if recipe.third else {}
    model = transformer.VisionTransformer(
        SIDE, PATCH, num_classes=CLASSES, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS,
        drop_path_rate=recipe.drop_path, **blocks,
    )  # fmt: skip
    # As DeiT's code: timm draws it 20,000 times smaller.
    torch.nn.init.normal_(model.cls_token, std=0.02)
    if recipe.third:  # the same in all blocks, where timm has it grow
        for block in model.blocks:
            block.drop_path1, block.drop_path2 = (
                timm_parts.part("layers").DropPath(recipe.drop_path) for _ in range(2)
            )
    return model


def _batches(recipe: Recipe, seed: int):
    """Images (B, 3, H, W), labels (B,)."""
    images, labels = cifar("train")
    names = {"rand": "rand-m9-mstd0.5-inc1", "3a": "3a"}
    policy = timm_parts.policy(names[recipe.policy]) if recipe.policy else None
    erase = timm_parts.part("data.random_erasing").RandomErasing(
        ERASING if recipe.repeats else 0.0, mode="pixel", device="cpu"
    )

    def arranged(image: PIL.Image.Image) -> PIL.Image.Image:
        if recipe.crops:
            return timm_parts.cropped(image, AREA, SIDE)
        return timm_parts.flipped(image)

    def changed(image: PIL.Image.Image) -> PIL.Image.Image:
        image = arranged(image)
        if policy is not None:
            image = policy(image)
        return batch.jittered(image) if recipe.policy == "3a" else image

    for chosen in _indices(recipe, len(images), seed):
        parts = [changed(PIL.Image.fromarray(images[i])) for i in chosen]
        yield erase(timm_parts.prepared(parts)), torch.from_numpy(labels[chosen])


def _indices(recipe: Recipe, count: int, seed: int):
    if not recipe.repeats:
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
