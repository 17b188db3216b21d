"""DINO on CIFAR-10 beside lightly's head, loss and moving average, around timm's ViT, in the order in which its
documentation puts them together. Its views are of Pillow, as lightly's are, which needs torchvision for them.
"""

import random

import numpy as np
import PIL.Image
import PIL.ImageChops
import PIL.ImageEnhance
import PIL.ImageFilter
import PIL.ImageOps
import torch

from tests import without_torchvision
from tests.parity import engines, timm_parts
from tests.parity.images import CIFAR, cifar
from tests.parity.timm_parts import MEAN, STD
from vit_jax.config import default_config
from vit_jax.data.augmentation.color import BLUR

STEPS, BATCH, WARMUP, SIDE, LOCAL_SIDE, PATCH = 200, 64, 20, 32, 16, 8
WIDTH, DEPTH, HEADS = 64, 3, 4
RATE, DECAY, CLIP, FROZEN = 1e-3, 0.04, 3.0, 20
HIDDEN, BOTTLENECK, PROTOTYPES, HEAD_STD = 128, 32, 256, 0.1
TEMPERATURE, TAUGHT_BY, CENTRE, MOMENTUM = 0.1, 0.04, 0.9, (0.98, 1.0)
NEIGHBOURS, VOTE = 20, 0.07
JITTER, JITTERED, GREY = (0.4, 0.4, 0.2, 0.1), 0.8, 0.2
# By view: area, side, probability of blur and of solarising.
VIEWS = (
    ((0.4, 1.0), SIDE, 1.0, 0.0),
    ((0.4, 1.0), SIDE, 0.1, 0.2),
    ((0.1, 0.4), LOCAL_SIDE, 0.5, 0.0),
    ((0.1, 0.4), LOCAL_SIDE, 0.5, 0.0),
)


def our_config():
    config = default_config()
    config.data.update(dict(name="tar", path=str(CIFAR), image_size=SIDE, mean=MEAN, std=STD))
    config.data.update(dict(interpolation="bicubic", eval_crop="resize"))
    colours = dict(jitter=JITTER, jitter_probability=JITTERED, grey=GREY)
    config.data.views = tuple(
        dict(crop_area=area, image_size=side, blur=blur, solarize=solarize) | colours
        for area, side, blur, solarize in VIEWS
    )
    config.objective.name = "dino"
    config.objective.update(dict(prototypes=PROTOTYPES, head_hidden=HIDDEN, koleo=0.0))
    config.objective.update(dict(bottleneck=BOTTLENECK, head_std=HEAD_STD, patch_weight=0.0))
    config.objective.update(dict(student_temperature=TEMPERATURE, centre_momentum=CENTRE))
    config.objective.update(dict(teacher_temperature=(TAUGHT_BY, TAUGHT_BY), momentum=MOMENTUM))
    config.objective.update(dict(temperature_warmup="0 steps", frozen_prototypes=f"{FROZEN} steps"))
    config.model.update(dict(name=f"ViT-S/{PATCH}", width=WIDTH, depth=DEPTH, heads=HEADS))
    config.model.update(dict(mlp_dim=4 * WIDTH, activation="gelu", init="deit"))
    config.duration, config.batch_size = f"{STEPS} steps", BATCH
    config.optim.update(dict(lr=RATE, warmup=f"{WARMUP} steps", weight_decay=DECAY, clip=CLIP))
    config.eval.evaluators = ("knn",)
    return config


def ours(seed: int) -> dict[str, np.ndarray]:
    named = {"loss": "loss", "entropy": "teacher_entropy", "accuracy": "eval/knn/accuracy"}
    return engines.train_ours(our_config(), seed, named)


def theirs(seed: int) -> dict[str, np.ndarray]:
    random.seed(seed)
    torch.manual_seed(seed)
    student, entropies = _network(), []
    teacher = _network().requires_grad_(False)
    teacher.load_state_dict(student.state_dict())
    criterion = without_torchvision.imported("lightly.loss").DINOLoss(
        PROTOTYPES, teacher_temp=TAUGHT_BY, student_temp=TEMPERATURE, center_momentum=CENTRE
    )
    utils = without_torchvision.imported("lightly.models.utils")
    momentum = without_torchvision.imported("lightly.utils.scheduler").cosine_schedule
    named = list(student.named_parameters())
    free = [p for n, p in named if p.ndim == 1 or n.endswith(("weight_g", "_token", "pos_embed"))]
    chosen = {id(p) for p in free}
    optimizer = torch.optim.AdamW([
        {"params": [p for _, p in named if id(p) not in chosen], "weight_decay": DECAY},
        {"params": free, "weight_decay": 0.0},
    ])  # fmt: skip
    made = 0

    def loss_of(student, views):
        nonlocal made
        utils.update_momentum(student, teacher, momentum(made, STEPS, *MOMENTUM))
        with torch.no_grad():
            taught = [teacher(view) for view in views[:2]]
            logits = (torch.stack(taught) - criterion.center) / TAUGHT_BY
            entropies.append(torch.distributions.Categorical(logits=logits).entropy().mean().item())
        made += 1
        return criterion(taught, [student(view) for view in views])

    curves = engines.train_theirs(
        student,
        _batches(seed),
        loss_of,
        optimizer,
        engines.cosine(RATE, WARMUP, STEPS),
        steps=STEPS,
        evaluate=lambda _: {"accuracy": _accuracy_of_neighbours(teacher[0])},
        clip=CLIP,
        before_update=lambda: student[1].cancel_last_layer_gradients(made - 1),
    )
    return curves | {"entropy": np.reshape(entropies, (engines.TENTHS, -1)).mean(1)}


def _network() -> torch.nn.Module:
    """A ViT, and lightly's head."""
    model = timm_parts.part("models.vision_transformer").VisionTransformer(
        SIDE, PATCH, num_classes=0, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS,
        dynamic_img_size=True,
    )  # fmt: skip
    torch.nn.init.normal_(model.cls_token, std=0.02)  # as DeiT's code
    heads = without_torchvision.imported("lightly.models.modules.heads")
    head = heads.DINOProjectionHead(
        WIDTH, HIDDEN, BOTTLENECK, PROTOTYPES, freeze_last_layer=FROZEN, norm_last_layer=False
    )
    for layer in head.layers:
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.normal_(layer.weight, std=HEAD_STD)
    return torch.nn.Sequential(model, head)


def _batches(seed: int):
    """Views (B, 3, H, W), one after the other."""
    images, _ = cifar("train")
    for chosen in engines.epochs(len(images), BATCH, np.random.default_rng(seed)):
        parts = [PIL.Image.fromarray(images[i]) for i in chosen]
        yield [timm_parts.prepared([_changed(x, *view) for x in parts]) for view in VIEWS]


def _changed(image, area, side, blur: float, solarize: float) -> PIL.Image.Image:
    image = timm_parts.cropped(image, area, side)
    if random.random() < JITTERED:
        changes = [_blended(PIL.ImageEnhance.Brightness, JITTER[0])]
        changes += [_blended(PIL.ImageEnhance.Contrast, JITTER[1])]
        changes += [_blended(PIL.ImageEnhance.Color, JITTER[2]), _turned]
        for change in random.sample(changes, len(changes)):
            image = change(image)
    if random.random() < GREY:
        image = image.convert("L").convert("RGB")
    if random.random() < blur:
        image = image.filter(PIL.ImageFilter.GaussianBlur(random.uniform(*BLUR)))
    return PIL.ImageOps.solarize(image, 128) if random.random() < solarize else image


def _blended(change, strength: float):
    factor = random.uniform(1 - strength, 1 + strength)
    return lambda image: change(image).enhance(factor)


def _turned(image: PIL.Image.Image) -> PIL.Image.Image:
    """With its hue turned by up to the last of `JITTER` of the circle."""
    turn = random.uniform(-JITTER[3], JITTER[3])
    hue, *others = image.convert("HSV").split()
    hue = hue.point([int(level + turn * 256) % 256 for level in range(256)])
    return PIL.Image.merge("HSV", (hue, *others)).convert("RGB")


def _accuracy_of_neighbours(model: torch.nn.Module) -> float:
    """Of the test images, by the weighted vote of the training images nearest to them."""
    model.eval()
    features = []
    for split in ("train", "test"):
        images = timm_parts.prepared([PIL.Image.fromarray(x) for x in cifar(split)[0]])
        parts = [model(part) for part in images.split(500)]
        features.append(torch.nn.functional.normalize(torch.cat(parts)))
    labels, expected = (torch.from_numpy(cifar(split)[1]) for split in ("train", "test"))
    similarity, nearest = (features[1] @ features[0].T).topk(NEIGHBOURS)
    weights = (similarity / VOTE).softmax(1)[..., None]
    votes = (weights * torch.nn.functional.one_hot(labels[nearest])).sum(1)
    model.train()
    return (votes.argmax(1) == expected).float().mean().item()
