"""EoMT on scenes of digits, each digit a thing, beside transformers' `EomtForUniversalSegmentation` in a plain loop,
with the two warm-ups and the annealing of its authors' code. Scenes are ours for both, and all runs start from one ViT.
"""

import functools
import re

import numpy as np
import torch

from tests.parity import engines
from vit_jax.config import default_config
from vit_jax.data.options import Data
from vit_jax.data.sources import digit_scenes

STEPS, BATCH, SIDE, PATCH, CLASSES = 300, 16, 48, 8, 11
WIDTH, DEPTH, HEADS, EPSILON, STEPS_BEFORE = 48, 3, 4, 1e-6, 1000
QUERIES, BLOCKS, POINTS = 8, 2, 432
RATE, DECAY, CLIP, POWER, WARMUP, LATE_WARMUP = 2e-3, 0.05, 1.0, 0.9, 15, 30
ANNEALING = (1 / 6, 5 / 6)
OWN = ("query.", "upscale_block.", "mask_head.", "class_predictor.")  # not of the ViT
PARTS = {"mask": "loss_mask", "dice": "loss_dice", "label": "loss_cross_entropy"}


def common_config():
    """What the run before and our runs share."""
    config = default_config()
    config.data.update(dict(name="digit_things", image_size=SIDE, mask_feature="auto"))
    config.data.update(dict(train_crop="resize", eval_crop="resize"))
    config.augment.flip = False
    config.objective.name = "segmentation"
    config.model.update(dict(name=f"ViT-S/{PATCH}", width=WIDTH, depth=DEPTH, heads=HEADS))
    config.model.update(dict(mlp_dim=4 * WIDTH, activation="gelu", epsilon=EPSILON))
    config.model.update(dict(layer_scale="all", layer_scale_init=1.0, position_of_class=False))
    config.batch_size = BATCH
    return config


@functools.cache
def checkpoint() -> str:
    """A ViT that learned scenes with a linear head, in timm's format: where all runs start."""
    config = common_config()
    config.objective.head = "linear"
    config.duration = f"{STEPS_BEFORE} steps"
    config.optim.update(dict(name="muon", lr=5e-3, weight_decay=DECAY, warmup="10%"))
    config.eval.evaluators = ("segmentation",)
    return engines.checkpoint_of(config)


def our_config():
    config = common_config()
    config.init_from = checkpoint()
    config.objective.update(dict(queries=QUERIES, blocks=BLOCKS))
    config.objective.update(dict(points=POINTS, annealing=ANNEALING))
    config.duration = f"{STEPS} steps"
    config.optim.update(dict(lr=RATE, weight_decay=DECAY, clip=CLIP, schedule="polynomial"))
    config.optim.update(dict(warmup=f"{WARMUP} steps", late_warmup=f"{LATE_WARMUP} steps"))
    config.optim.update(dict(power=POWER, late=(r"(?!objective/).*",)))
    config.eval.evaluators = ("segmentation",)
    return config


def ours(seed: int) -> dict[str, np.ndarray]:
    named = {"loss": "loss", "mean_iou": "eval/mean_iou"}
    return engines.train_ours(our_config(), seed, named | {name: name for name in PARTS})


def theirs(seed: int, by_image: bool = True) -> dict[str, np.ndarray]:
    """The curves of a run of theirs.

    Args:
      by_image: whether the loss is the mean of those of single images, as ours; transformers divides by the segments
        of a batch.
    """
    torch.manual_seed(seed)
    model, parts, of_steps = _model(), [], []
    losses_of = model.get_loss_dict

    def with_parts(**inputs):
        alone = [inputs]
        if by_image:
            inputs.pop("auxiliary_predictions")
            alone = [{k: x[i : i + 1] for k, x in inputs.items()} for i in range(BATCH)]
            alone = [x | {"auxiliary_predictions": None} for x in alone]
        found = [losses_of(**x) for x in alone]
        parts.append({name: torch.stack([x[name] for x in found]).mean() for name in found[0]})
        return parts[-1]

    model.get_loss_dict = with_parts

    def loss_of(model, batch):
        made, (images, masks, classes) = len(of_steps), batch
        model.attn_mask_probs[:] = torch.tensor([_masked(made, block) for block in range(BLOCKS)])
        loss = model(images, mask_labels=masks, class_labels=classes).loss
        last = parts[-1]  # of the last prediction
        of_steps.append([last[name].item() for name in PARTS.values()])
        parts.clear()
        return loss

    def set_rates():
        for group in optimizer.param_groups:
            group["lr"] = _rate(len(of_steps) - 1, group["late"])

    optimizer = torch.optim.AdamW(_groups(model))
    curves = engines.train_theirs(
        model,
        _batches(seed),
        loss_of,
        optimizer,
        lambda made: 0.0,  # `set_rates` sets two
        steps=STEPS,
        evaluate=_mean_iou,
        clip=CLIP,
        before_update=set_rates,
    )
    of_tenths = np.reshape(of_steps, (engines.TENTHS, -1, len(PARTS))).mean(1)
    return curves | dict(zip(PARTS, of_tenths.T, strict=True))


def _groups(model: torch.nn.Module) -> list[dict]:
    """Parameters by whether they decay, and whether they belong to the ViT, which learns late."""
    names = {id(p): name for name, p in model.named_parameters()}
    free = (".cls_token", ".register_tokens", "query.weight", ".position_embeddings.weight")
    return [
        group
        | {"late": late}
        | {"params": [p for p in group["params"] if names[id(p)].startswith(OWN) != late]}
        for group in engines.split_by_decay(model, DECAY, lambda name: name.endswith(free))
        for late in (False, True)
    ]


def _model() -> torch.nn.Module:
    import transformers

    options = transformers.EomtConfig(
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS, mlp_ratio=4,
        image_size=SIDE, patch_size=PATCH, layer_norm_eps=EPSILON, num_register_tokens=0,
        num_queries=QUERIES, num_blocks=BLOCKS, num_labels=CLASSES, train_num_points=POINTS,
        num_upscale_blocks=1,
    )  # fmt: skip
    model = transformers.EomtForUniversalSegmentation(options)
    missing, unexpected = model.load_state_dict(dict(_weights()), strict=False)
    of_vit = ("embeddings.cls", "embeddings.p", "layers.", "layernorm.")
    assert not unexpected and not any(name.startswith(of_vit) for name in missing)
    return model.train()


def _weights():
    """Those of the ViT by transformers' names."""
    import safetensors.torch

    names = {
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "cls_token": "embeddings.cls_token",
        "attn.proj": "attention.out_proj",
        "blocks.": "layers.",
        "ls1.gamma": "layer_scale1.lambda1",
        "ls2.gamma": "layer_scale2.lambda1",
    }
    for name, value in safetensors.torch.load_file(checkpoint()).items():
        for part, other in names.items():
            name = name.replace(part, other)
        if name == "pos_embed":
            yield "embeddings.position_embeddings.weight", value[0]
        elif "attn.qkv" in name:
            for letter, third in zip("qkv", value.chunk(3), strict=True):
                yield name.replace("attn.qkv", f"attention.{letter}_proj"), third
        else:
            yield re.sub("^norm", "layernorm", name), value


def _rate(made: int, late: bool) -> float:
    """The learning rate after so many updates, of queries and heads or of the model."""
    before, warmup = (WARMUP, LATE_WARMUP) if late else (0, WARMUP)
    if made < before:
        return 0.0
    if made < before + warmup:
        return RATE * (made - before) / warmup
    return RATE * (1 - (made - before - warmup) / (STEPS - before - warmup)) ** POWER


def _masked(made: int, block: int) -> float:
    """How probably a query attends to its own mask alone in one of the last blocks, after so many updates."""
    low, high = (STEPS * share for share in ANNEALING)
    begin = low + (high - low) * block / BLOCKS
    done = (made - begin) / ((high - low) / BLOCKS)
    return (1 - min(max(done, 0.0), 1.0)) ** POWER


@functools.cache
def _scenes(split: str) -> digit_scenes.DigitScenes:
    return digit_scenes.open_digit_things(Data()).open(split)


def _batches(seed: int):
    """Images (B, 3, H, W); of each image its segments' masks (M, H, W) and classes (M,)."""
    scenes = _scenes("train")
    for chosen in engines.epochs(len(scenes), BATCH, np.random.default_rng(seed)):
        records = [scenes[int(i)] for i in chosen]
        numbers = [np.unique(x.label) for x in records]
        masks = [
            torch.from_numpy((x.label == n[:, None, None]).astype(np.float32))
            for x, n in zip(records, numbers, strict=True)
        ]
        # A thing's number is its class and 256 times its place.
        classes = [torch.from_numpy((n % 256).astype(np.int64)) for n in numbers]
        yield _normalized([x.image for x in records]), masks, classes


def _normalized(images: list[np.ndarray]) -> torch.Tensor:
    pixels = torch.from_numpy(np.stack(images).astype(np.float32) / 127.5 - 1)
    return pixels.permute(0, 3, 1, 2).contiguous()


def _mean_iou(model) -> dict[str, float]:
    """Over the classes, of all pixels of the test scenes, each query free as at the end of training; and of the maps as
    transformers makes them, which enlarges each query's mask before it sums their probabilities, ours the sum.
    """
    model.attn_mask_probs[:] = 0
    scenes = [_scenes("test")[i] for i in range(len(_scenes("test")))]
    images = _normalized([x.image for x in scenes])
    enlarged = functools.partial(
        torch.nn.functional.interpolate, size=(SIDE, SIDE), mode="bilinear"
    )
    confusion = {"mean_iou": np.zeros((CLASSES, CLASSES)), "of_masks": np.zeros((CLASSES, CLASSES))}
    for first in range(0, len(scenes), 50):
        output = model(images[first : first + 50])
        masks, classes = output.masks_queries_logits, output.class_queries_logits.softmax(-1)
        joined = functools.partial(torch.einsum, "bqc,bqhw->bchw", classes[..., :-1])
        scores = {"mean_iou": enlarged(joined(masks.sigmoid()))}
        scores["of_masks"] = joined(enlarged(masks).sigmoid())
        for name, values in scores.items():
            for predicted, scene in zip(values.argmax(1).numpy(), scenes[first:], strict=False):
                np.add.at(confusion[name], (scene.label % 256, predicted), 1)
    return {name: _mean_of_classes(counts) for name, counts in confusion.items()}


def _mean_of_classes(confusion: np.ndarray) -> float:
    right = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - right
    return float((right[union > 0] / union[union > 0]).mean())
