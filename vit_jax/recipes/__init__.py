"""What several recipes in `configs/` share: reading their argument, augmentation levels, starting
from a checkpoint, what the largest models need.

Here rather than beside them, so that a recipe still works when it is copied elsewhere. No recipe is
complete in here.
"""

import os
from collections.abc import Collection, Iterable, Mapping

from ml_collections import ConfigDict

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest
from vit_jax.base.settings import folder_name, with_fields
from vit_jax.config import CHECKPOINT, default_config
from vit_jax.models import classifier, registry

# RandAugment layers, its magnitude, parameter of mixup (AugReg §3.2; big_vision). Its figures call
# 'strong' 'heavy'. light1 is not none: most operations change an image even at magnitude 0.
AUGMENTATION = {
    "none": (0, 0, 0.0),
    "light1": (2, 0, 0.0),
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5),
    "strong2": (2, 20, 0.8),
}


def arguments(text: str, **known: Collection[str]) -> list[str | None]:
    """The comma-separated parts of a recipe's argument, in the order of `known`; `None` for those
    skipped at the end.

    >>> arguments("B/16", model=["B/16", "L/16"], level=AUGMENTATION)
    ['B/16', None]

    Args:
      text: what follows the colon in --config=FILE:ARGUMENT.
      known: what each part is, and its valid values.

    Raises:
      ConfigError: a part that is not known, or too many of them.
    """
    parts = text.split(",")
    if len(parts) > len(known):
        takes = ",".join(known).upper()
        raise ConfigError(
            f"config argument {text!r} has {len(parts)} parts, but the recipe takes {takes}"
        )
    for part, (what, values) in zip(parts, known.items(), strict=False):
        if part not in values:
            raise ConfigError(
                f"config argument {text!r}: there is no {what} {part!r}{nearest(part, values)}"
            )
    return parts + [None] * (len(known) - len(parts))


def beside(file: str, spec: str) -> ConfigDict:
    """The config of another recipe, FILE[:ARGUMENT], named from the folder of `file`; for experiments,
    whose names may be those of recipes. Of a copied experiment, the package's own recipe.
    """
    from vit_jax.recipes import user_files  # which imports much more

    name, _, argument = os.path.join(os.path.dirname(file), spec).partition(":")
    if not os.path.exists(name):
        name = spec.partition(":")[0].removeprefix("../")
    return user_files.load_config(f"{name}:{argument}")


def vary(
    config: ConfigDict, settings: Iterable[Mapping] | Mapping[str, Mapping], *, seeds: int
) -> dict[str, ConfigDict]:
    """The runs of an experiment: a config with each of several settings, each with several seeds.

    Args:
      config: not changed.
      settings: fields by dotted name: [{"optim.lr": 0.1}, {"optim.lr": 0.2}]; by names of their own, where fields are
        many or long: {"low": {"optim.lr": 0.1}, "high": {"optim.lr": 0.2}}.
      seeds: how many, from `config.seed` on.

    Returns:
      Configs by their names, by default the settings: 'lr=0.1/seed=0'.
    """
    if not isinstance(settings, Mapping):
        settings = {_name_of(setting): setting for setting in settings}
    runs = {}
    for name, setting in settings.items():
        for seed in range(config.seed, config.seed + seeds):
            runs[f"{name}/seed={seed}"] = with_fields(config, {**setting, "seed": seed})
    return runs


def _name_of(setting: Mapping) -> str:
    return folder_name({field.split(".")[-1]: value for field, value in setting.items()})


def next_stage(runs: Mapping[str, ConfigDict]) -> ConfigDict:
    """A further stage of a recipe with `get_runs`: the config of its last run so far, not changed, which starts from
    that run's weights, head included. Positions are interpolated as PyTorch does.
    """
    name, config = list(runs.items())[-1]
    config = config.copy_and_resolve_references()
    config.init_from = name
    config.init_reset = ()
    config.init_resize = "torch"
    return config


def images_of_deit3(config: ConfigDict, pixels: int) -> ConfigDict:
    """ImageNet as DeiT III and what is built on it read it: bicubic crops, and evaluated whole (crop ratio 1)."""
    config.data.update(dict(name="imagenet2012", train_split="train", eval_split="validation"))
    config.data.update(dict(image_size=pixels, crop_area=(0.08, 1.0), interpolation="bicubic"))
    config.data.update(dict(eval_crop="torchvision", eval_resize=pixels))
    config.data.update(dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)))
    return config


def randaugment_of_deit(config: ConfigDict) -> None:
    """Sets timm's rand-m9-mstd0.5-inc1."""
    config.augment.update(dict(randaugment_layers=2, randaugment_kind="timm-inc1"))
    config.augment.update(dict(randaugment_magnitude=9.0, randaugment_std=0.5))


def views_of_dinov2(config: ConfigDict, local_pixels: int = 96) -> ConfigDict:
    """Makes a config learn by DINO, iBOT and KoLeo as DINOv2 joins them: two global views and eight local ones,
    their colours, decay and rates by layer, and the clipping.

    Args:
      config: changed, and returned.
      local_pixels: height and width of a local view.
    """
    colours = {"jitter": (0.4, 0.4, 0.2, 0.1), "jitter_probability": 0.8, "grey": 0.2}
    large = {"crop_area": (0.32, 1.0)} | colours
    small = {
        "count": 8,
        "image_size": local_pixels,
        "crop_area": (0.05, 0.32),
        "blur": 0.5,
    } | colours
    config.objective.name = "dino"
    config.data.update(dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)))
    config.data.views = (large | {"blur": 1.0}, large | {"blur": 0.1, "solarize": 0.2}, small)
    config.data.update(dict(image_size=224, interpolation="bicubic"))
    config.model.update(dict(dtype="bfloat16", drop_path=0.3))
    config.optim.lr_end = 1e-6
    config.optim.update(dict(weight_decay=0.04, weight_decay_end=0.4))
    config.optim.weight_decay_rules = ((".*(kernel|token|registers|position|mask)", 1.0),)
    config.optim.update(dict(clip=3.0, lr_rules=(("embedding/.*", 0.2),), layer_decay=0.9))
    return config


def dinov2_on_digits(config: ConfigDict) -> ConfigDict:
    """Makes the recipe of configs/digits.py learn by DINO without labels: views of 16 and of 8 pixels, small heads.
    Changes and returns the config.
    """
    config.objective.update(dict(prototypes=256, head_hidden=128, bottleneck=32, head_std=0.1))
    config.objective.update(dict(name="dino", momentum=(0.99, 1.0), patch_weight=0.5))
    config.objective.update(dict(temperature_warmup="0 steps", teacher_temperature=(0.04, 0.04)))
    large = {"crop_area": (0.7, 1.0), "jitter": (0.4, 0.4, 0.0, 0.0)}
    small = {"count": 2, "image_size": 8, "crop_area": (0.4, 0.7), "blur": 0.5}
    views = (large, large | {"blur": 0.5}, large | small)
    config.data.update(dict(image_size=16, train_crop="inception", views=views))
    config.augment.mixup = 0.0
    config.model.update(dict(pool="token", depth=2, position="sincos2d"))
    config.duration = "1500 steps"
    config.optim.update(dict(lr=1e-3, warmup="10%", clip=3.0, ema=0.0))
    config.optim.update(dict(weight_decay=0.04, weight_decay_end=0.4))
    config.eval.update(dict(every="10%", evaluators=("knn",)))
    return config


def on_digits(config: ConfigDict, duration: str, *, lr: float, **model) -> ConfigDict:
    """Makes a recipe for ImageNet one for digits on a CPU, with patches of 4 pixels and few of what costs time.

    Args:
      config: changed, and returned.
      duration, lr: for batches of 64.
      **model: options of the model; by default it is as large as that of configs/digits.py.
    """
    config.data.update(dict(name="digits", train_split="train", eval_split="test", repeats=1))
    config.data.update(dict(train_crop="pad", pad=3, eval_crop="resize"))
    config.augment.update(dict(flip=False, three_augment=False, color_jitter=0.0))
    if config.augment.cutmix:
        config.augment.update(dict(mixup=0.2, cutmix=0.2))
    small = dict(name="ViT-S/4", width=64, depth=4, heads=4, mlp_dim=256, num_classes=None)
    config.model.update(small | dict(dtype="float32") | model)
    if config.model.layer_scale:  # from 1e-4 takes longer to grow than these runs last
        config.model.layer_scale_init = 0.1
    config.duration = duration
    config.batch_size = 64
    config.optim.lr = lr
    config.optim.warmup = "10%"
    config.eval.every = "25%"
    config.checkpoint.every = "200 steps"
    config.log.every = "50 steps"
    config.reference.curve = ""
    config.mesh.fsdp = 1
    return config


def vit_names() -> list[str]:
    """The listed ViTs as recipes take them: 'B/16' for 'ViT-B/16'."""
    names = registry.FAMILIES["vit"].VARIANTS
    return [name.removeprefix("ViT-") for name in names if name.startswith("ViT-")]


def width(model: str) -> int:
    """Size of the tokens of a ViT: 768 for 'B/16'."""
    return registry.model_config(f"ViT-{model}").width


def from_checkpoint() -> ConfigDict:
    """The default config for whatever model `init_from` holds, with a new head."""
    config = default_config()
    config.init_from = CHECKPOINT
    config.init_reset = (classifier.READOUTS,)
    config.init_channels = "mean"
    config.data.mean = config.data.std = ()
    config.data.interpolation = ""
    config.model.name = ""
    config.model.dtype = "bfloat16"
    return config


def augment(config: ConfigDict, level: str) -> None:
    """Sets RandAugment and mixup to a level of `AUGMENTATION`."""
    layers, magnitude, mixup = AUGMENTATION[level]
    config.augment.randaugment_layers = layers
    config.augment.randaugment_magnitude = float(magnitude)
    config.augment.mixup = mixup


def quick(config: ConfigDict, duration: str = "600 steps") -> None:
    """Shortens a recipe for digits to one of many runs of an experiment, with 4 x 4 tokens. Nothing in its
    step is drawn at random, so that runs which differ in their seeds alone share a compiled program.

    ViTs get fixed positions: learned ones begin at 0.02 beside patches of about 1, and a run this short would
    mostly see a bag of patches.
    """
    config.duration = duration
    config.batch_size = 32
    config.model.name = config.model.name.replace("-S/4", "-S/8")
    config.optim.lr = 1e-3
    config.data.pad = 2
    config.augment.mixup = 0.0
    config.checkpoint.every = "100%"
    if config.model.name.startswith("ViT-"):
        config.model.position = "sincos2d"


def on_cifar10(config: ConfigDict, duration: str = "400 steps") -> None:
    """Makes a recipe of configs/digits.py, of whatever family, one of many runs of an experiment on CIFAR-10: some ten
    thousands of views of its images, with 4 x 4 tokens, in half a minute of a CPU core. As in `quick`, seeds share a
    program.
    """
    quick(config, duration)
    config.data.update(dict(name="cifar10", pad=4, eval_split=of_each_class("test", 200)))
    config.batch_size = 64
    config.optim.lr = 2e-3
    config.optim.ema = 0.0
    config.eval.every = "50%"
    config.log.every = "10%"
    config.log.tensorboard = False


def of_each_class(split: str, images: int, classes: range = range(10)) -> str:
    """The first images of each class of CIFAR-10, where they are in the order of their classes, as in files; where they
    are not, as many of all.

    >>> of_each_class("test", 200, range(2))
    'test[0:200]+test[1000:1200]'
    """
    size = {"train": 5_000, "test": 1_000}[split]
    starts = [number * size for number in classes]
    return "+".join(f"{split}[{start}:{start + images}]" for start in starts)


def on_classes(config: ConfigDict, classes: range, images: int = 5_000) -> None:
    """Of CIFAR-10 only these classes, with this many training images of each, and 2,000 test images in all."""
    config.data.train_split = of_each_class("train", images, classes)
    config.data.eval_split = of_each_class("test", 2_000 // len(classes), classes)


def on_first_half(config: ConfigDict, size: str) -> None:
    """Makes a recipe of configs/digits.py the first stage of an experiment: on half of the digits ("smoke"), or on five
    classes of CIFAR-10.
    """
    if size == "smoke":
        quick(config)
        config.data.train_split = "train[:50%]"
    else:
        on_cifar10(config)
        on_classes(config, range(5))


def cifar10_subsets(*images: int) -> dict[str, dict]:
    """Settings for `vary`: this many training images in all, each subset holds the smaller ones."""
    return {
        f"images={number}": {"data.train_split": of_each_class("train", number // 10)}
        for number in images
    }


def few_shot_on_imagenet(config: ConfigDict) -> None:
    """Judges by a linear fit of five images of each class of ImageNet, as ViT's and Mixer's ablations are."""
    data = {"name": "imagenet2012", "eval_split": "validation"}
    config.eval.evaluators = (("few_shot", {"shots": (5,), "data": data}),)
    config.eval.best = "few_shot/5shot"


def on_photos(config: ConfigDict, *, epochs: int, steps: int, lr: float, **fields) -> ConfigDict:
    """Fits a recipe to some hundreds or thousands of images of the user's on one machine: its length, warm-up,
    evaluations and checkpoints follow from their number, and 16 images are computed at a time. Files that cannot
    be read are found before the first step, and passed over.

    Args:
      config: changed, and returned.
      epochs: how often to see every image.
      steps: how many there are at least, for a few hundred images.
      lr: for batches of 64.
      **fields: of `config.data` or `config.model`, what else is not the recipe's.
    """
    config.data.update(dict(name="folder", path="IMAGES", train_split="train", eval_split="test"))
    config.data.examine = True
    config.data.on_bad_image = "skip"
    config.duration = f"{epochs} epochs, at least {steps} steps"
    config.batch_size = 64
    config.accumulate = 4
    config.optim.lr = lr
    config.optim.warmup = config.eval.every = config.checkpoint.every = "10%"
    config.log.every = "20 steps"
    for name, value in fields.items():
        section = config.data if name in config.data else config.model
        section[name] = value
    return config


def shard_by_size(config: ConfigDict, model: str) -> None:
    """Shards the parameters of a ViT, 'B/16', over as many devices as is fastest by the compiler's
    cycles on v5e slices (docs/notes/2026-11-23-families-on-tpus.md); over those there are, if fewer.
    """
    size = width(model)
    config.mesh.fsdp = 16 if size >= 1024 else 8 if size >= 768 else 1


def spread(config: ConfigDict) -> None:
    """For models too large for one accelerator of 16 GB: the state is sharded over 8, and activations
    are recomputed, except those that are worth their memory because recomputing their products
    takes long.

    Neither changes what is learned; `vit_jax plan --fit` says what a pod has room for.
    """
    config.mesh.fsdp = 8
    config.model.remat = "save_products"
