"""The schema of a run: every field of the config, its default and what it does.

Recipes live in `configs/`; each starts from `default_config()`, a `ConfigDict`, and says what
differs. When that is checked, code gets a frozen `Config`. The options of model families and
objectives are declared beside their code and joined here, so that a new one needs no edit in this
file, even one that a recipe registers.
"""

import dataclasses
import functools

from ml_collections import ConfigDict

from vit_jax import objectives
from vit_jax.base import durations, schema, sizes
from vit_jax.base.schema import option, section
from vit_jax.models import registry as models

# The value of `init_from` in a recipe that needs a checkpoint, until the user names one.
CHECKPOINT = "CHECKPOINT"


@dataclasses.dataclass(frozen=True)
class Data:
    """What images are read and how the host cuts them; the device does the rest (`Augment`)."""

    name: str = option(
        "digits",
        "'digits', 'folder', 'prepared', 'tar', 'mixture', or the name of a TFDS data set such as 'imagenet2012'",
    )
    path: str = option(
        "",
        "folder: images or class folders, or a list of images; prepared: the folder; tar: a file, a folder, or a "
        "pattern; TFDS: the data directory (default ~/tensorflow_datasets)",
    )
    mixture: tuple = option(
        (), "with name='mixture': ((name or path, weight), …); weights are shares of the examples"
    )
    train_split: str = option(
        "train", "examples to train on; slices as in TFDS: 'train[:99%]', 'train[1000:]'"
    )
    eval_split: str = option("test", "examples to evaluate on", may_change=True)
    holdout: float = option(
        0.1,
        "folder, list or tar files without splits: the share held out as 'test', chosen by file name",
        minimum=0,
        maximum=1,
    )
    holdout_by: str = option(
        "file",
        "file: each image by itself; class: the same share of every class",
        choices=("file", "class"),
    )
    sampling: str = option(
        "uniform",
        "in an epoch of training, uniform: every example once; balanced: every class equally often",
        choices=("uniform", "balanced"),
    )
    image_size: int | str | tuple = option(
        224, "the images that the model sees, in pixels: 224, or height x width: 224x448",
        parse=sizes.parse,
    )  # fmt: skip
    channels: int = option(
        3,
        "of an image: 3 for RGB, 1 for grey, or as many as its PNG (2, 4), TIFF or .npy file has",
        minimum=1,
        maximum=16,
    )
    train_crop: str = option(
        "inception", "how training images are cut", choices=("inception", "random", "pad", "resize")
    )
    crop_area: tuple = option(
        (0.05, 1.0),
        "inception crop: smallest and largest share of the image's area",
        above=0,
        maximum=1,
        length=2,
    )
    crop_aspect: tuple = option(
        (3 / 4, 4 / 3), "inception crop: narrowest and widest aspect ratio", above=0, length=2
    )
    resize: int = option(256, "random crop: the smaller side is first resized to this", minimum=1)
    interpolation: str = option(
        "bilinear",
        "antialiased filter by which crops for training and evaluation are resized; '': as init_from has it",
        choices=("bilinear", "bicubic", ""),
    )
    repeats: int = option(
        1, "how many times an example is in a batch, cut anew each time (DeiT: 3)", minimum=1
    )
    views: tuple = option(
        (),
        "several views of each image, for objectives that compare them: ({option: value}, …), what differs from "
        "config.data and config.augment, and 'count', how many there are of this kind; (): one image",
    )
    pad: int = option(4, "pad crop: zero border, in pixels, from which the crop is cut", minimum=0)
    eval_crop: str = option(
        "central",
        "how evaluation images are cut: the middle of the resized image, also with others' rounding; that of one "
        "squeezed to the model's aspect ratio; or the whole image",
        choices=("central", "torchvision", "transformers", "squash", "resize"),
        may_change=True,
    )
    eval_resize: int = option(
        256,
        "all but resize: the smaller side is first resized to this",
        minimum=1,
        may_change=True,
    )
    mean: tuple = option(
        (0.5, 0.5, 0.5),
        "subtracted from pixels in [0, 1], one number for each channel or one for all; 0.5 with std 0.5 maps to "
        "[-1, 1]; (): as init_from has it",
        minimum=0,
        maximum=1,
    )
    std: tuple = option(
        (0.5, 0.5, 0.5),
        "what is left is divided by this, one number for each channel or one for all; (): as init_from has it",
        above=0,
        maximum=1,
    )
    permute: str = option(
        "none",
        "a fixed permutation of what the model sees, in training and evaluation: of the patches, the pixels in "
        "each, both, or all pixels (experiments)",
        choices=("none", "patches", "pixels in patches", "both", "all pixels"),
    )
    permute_patch: int = option(16, "permute: side of its patches in pixels", minimum=1)
    threads: int = option(
        0, "threads that decode batches; 0: one for each core", minimum=0, may_change=True
    )
    prefetch: int = option(2, "batches kept ready on the devices", minimum=1, may_change=True)
    mixed_decoders: bool = option(
        False,
        "let some hosts of a run decode with the compiled decoder and others without: crops differ by rounding",
        may_change=True,
    )
    on_bad_image: str = option(
        "error",
        "an unreadable image ends the run (error), or another takes its place, in evaluation none (skip)",
        choices=("error", "skip"),
        may_change=True,
    )
    max_bad_images: int = option(
        100,
        "with skip: how many are tolerated, in training and in each evaluation, before the run ends with an error",
        minimum=0,
        may_change=True,
    )


@dataclasses.dataclass(frozen=True)
class Pseudo:
    """Further images to train on, which a teacher labels once, before the run (Noisy Student)."""

    teacher: str = option(
        "",
        "checkpoint of any format that labels them, or another run of the same recipe, by its name; '': there are none",
        may_change=True,  # its weights may not
    )
    data: str = option("", "the images: a name or path, as in a mixture; '': those of config.data")
    split: str = option("train", "which of them; labels that they have are not looked at")
    confidence: float = option(
        0.3,
        "the most probable class of an image has to be more probable than this",
        minimum=0,
        below=1,
    )
    per_class: int = option(
        0,
        "so many images of each class: the most confident, or all of them over and over; 0: all, once",
        minimum=0,
    )
    soft: bool = option(True, "the teacher's probabilities are learnt, not its decision")
    ratio: float = option(
        1.0, "in an epoch, images labelled by the teacher for one of config.data", above=0
    )


@dataclasses.dataclass(frozen=True)
class Augment:
    """Random changes to training images, made on the devices inside the compiled step."""

    flip: bool = option(True, "mirror left-right with probability 1/2")
    color_jitter: float = option(
        0.0, "strength of random brightness, contrast and saturation; 0: none", minimum=0
    )
    jitter: tuple = option(
        (),
        "strengths of random brightness, contrast, saturation and hue, such as DINO's (0.4, 0.4, 0.2, 0.1); (): none",
        minimum=0,
        length=4,
    )
    jitter_probability: float = option(
        0.8, "share of the images that jitter changes", minimum=0, maximum=1
    )
    grey: float = option(0.0, "probability that an image becomes grey", minimum=0, maximum=1)
    blur: float = option(
        0.0,
        "probability of a Gaussian blur, its deviation uniform in 0.1 to 2 pixels",
        minimum=0,
        maximum=1,
    )
    solarize: float = option(
        0.0, "probability that values from 128 on are inverted", minimum=0, maximum=1
    )
    randaugment_layers: int = option(0, "RandAugment operations per image; 0: none", minimum=0)
    randaugment_magnitude: float = option(
        10.0, "RandAugment strength, of 10 (AugReg goes to 20)", minimum=0, maximum=30
    )
    randaugment_kind: str = option(
        "tensorflow",
        "whose operations and magnitudes: tensorflow (AugReg, big_vision); timm's 'rand-…', or its '-inc1'",
        choices=("tensorflow", "timm", "timm-inc1"),
    )
    randaugment_std: float = option(
        0.0,
        "timm's 'mstd': standard deviation of the magnitudes, which are then clipped to [0, 10]",
        minimum=0,
    )
    autoaugment: bool = option(False, "AutoAugment, the policy for ImageNet")
    three_augment: bool = option(
        False, "3-Augment (DeiT III): each image grey, solarised or blurred"
    )
    mixup: float = option(0.0, "parameter of the Beta distribution of mixup; 0: none", minimum=0)
    cutmix: float = option(0.0, "parameter of the Beta distribution of cutmix; 0: none", minimum=0)
    mix_switch: float = option(
        0.5,
        "with both mixup and cutmix: probability that a step uses cutmix",
        minimum=0,
        maximum=1,
    )
    erasing: float = option(
        0.0, "probability that a random rectangle is replaced by noise", minimum=0, maximum=1
    )
    erasing_mode: str = option(
        "pixel",
        "noise of each pixel, one random colour, or the mean colour",
        choices=("pixel", "rand", "const"),
    )
    erasing_area: tuple = option(
        (0.02, 1 / 3),
        "erasing: smallest and largest share of the image",
        above=0,
        below=1,
        length=2,
    )
    erasing_aspect: float = option(
        0.3, "erasing: narrowest aspect ratio; the widest is its inverse", above=0, maximum=1
    )


@dataclasses.dataclass(frozen=True)
class Optim:
    """How parameters are updated. Patterns are regular expressions that must match a whole
    parameter name; the first that does wins.
    """

    name: str = option("adamw", "adamw, sgd, adafactor, lion or rmsprop")
    lr: float = option(1e-3, "peak learning rate", minimum=0)
    schedule: str = option(
        "cosine",
        "shape of the learning rate after warm-up",
        choices=("cosine", "linear", "rsqrt", "constant", "staircase"),
    )
    warmup: str = option(
        "0 steps",
        "linear rise from 0 to the peak: steps, epochs, examples or %",
        parse=durations.parse,
    )
    cooldown: str = option(
        "0 steps", "linear fall to 0 at the end, for rsqrt and constant", parse=durations.parse
    )
    timescale: str = option("10000 steps", "rsqrt: lr / sqrt(1 + (step - warmup) / timescale)")
    boundaries: tuple = option(
        (),
        "staircase: when the learning rate falls; steps, epochs, examples or %, warm-up included",
        parse=durations.parse_all,
    )
    factor: float = option(
        0.1, "staircase: what it is multiplied by each time", minimum=0, maximum=1
    )
    lr_end: float = option(0.0, "cosine and linear: the learning rate at the end", minimum=0)
    b1: float = option(
        0.9,
        "adamw, lion, adafactor: decay of the first moment; sgd, rmsprop: momentum",
        minimum=0,
        below=1,
    )
    b2: float = option(
        0.999,
        "adamw, lion, rmsprop: decay of the second moment; adafactor: its cap",
        minimum=0,
        below=1,
    )
    eps: float = option(
        1e-8,
        "adamw: added to the root of the second moment; rmsprop: to the moment itself",
        minimum=0,
    )
    moment_dtype: str = option(
        "float32", "type the first moment is kept in", choices=("float32", "bfloat16")
    )
    clip: float = option(1.0, "largest global norm of the gradient; 0: no clipping", minimum=0)
    weight_decay: float = option(0.0, "weight decay, see weight_decay_by", minimum=0)
    weight_decay_end: float | None = option(
        None,
        "weight decay at the end, a cosine away from weight_decay; not given: it stays",
        minimum=0,
    )
    weight_decay_rules: tuple = option(
        ((".*kernel", 1.0),), "(pattern, multiplier): what decays and how much; others do not"
    )
    weight_decay_by: str = option(
        "lr",
        "decoupled decay, multiplied by the learning rate (papers, AdamW) or the schedule alone (big_vision); or "
        "gradient: added to the gradient after clipping, as that of a squared norm in the loss is",
        choices=("lr", "schedule", "gradient"),
    )
    lr_rules: tuple = option((), "(pattern, multiplier) of the learning rate; others 1")
    freeze: tuple = option((), "patterns of parameters that stay as they are")
    layer_decay: float = option(
        1.0,
        "layer-wise decay of the learning rate, from the head down; 1: none",
        above=0,
        maximum=1,
    )
    sam_rho: tuple = option(
        (0.0, 0.0),
        "sharpness-aware training (SAM, GSAM), two gradients a step: radius at lr_end and at lr; (0, 0): none",
        minimum=0,
        length=2,
    )
    sam_alpha: float = option(
        0.0,
        "GSAM: weight of the step that lowers the loss less its highest nearby; 0: SAM",
        minimum=0,
    )
    ema: float = option(
        0.0,
        "Polyak averaging: decay of the averaged parameters, which are then evaluated; 0: none",
        minimum=0,
        below=1,
    )


@dataclasses.dataclass(frozen=True)
class Mesh:
    """How the devices are arranged; -1 takes what the others leave. The batch is cut over data ×
    fsdp.
    """

    data: int = option(-1, "replicas of the parameters", minimum=-1)
    fsdp: int = option(1, "parts that parameters and optimizer state are cut into", minimum=-1)
    tensor: int = option(1, "parts that heads and MLP width are cut into", minimum=-1)
    fsdp_min_size: int = option(
        2**16, "arrays with fewer elements are not cut over fsdp", minimum=0
    )


@dataclasses.dataclass(frozen=True)
class Eval:
    """How the model is judged on `data.eval_split` while it trains."""

    every: str = option(
        "0 steps",
        "how often: steps, epochs, examples or %; 0: at the end only",
        parse=durations.parse,
    )
    batch_size: int = option(0, "over all devices and hosts; 0: as in training", minimum=0)
    evaluators: tuple = option(
        (),
        "what is measured: names, or (name, {option: value}); of accuracy, loss, few_shot, knn, "
        "early_exit; "
        "(): accuracy, or of what is learnt without labels the loss",
    )
    best: str = option(
        "",
        "the metric by which models are compared, e.g. knn/accuracy; METRIC:min or METRIC:max where "
        "its name does not tell; '': the first there is",
    )
    patience: int = option(
        0, "evaluations in a row without a better one that end the run; 0: none do", minimum=0
    )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What is kept of a run, in WORKDIR/checkpoints."""

    every: str = option(
        "1000 steps",
        "how often to save: steps, epochs, examples or %; 0: at the end only",
        parse=durations.parse,
    )
    every_minutes: float = option(
        0.0, "also save when this much time has passed since the last; 0: never", minimum=0
    )
    keep: int = option(3, "how many of the last are kept", minimum=1)
    best: bool = option(
        False, "also keep the checkpoint of the best evaluation (eval.best): WORKDIR/best"
    )
    keep_every: int = option(0, "steps divisible by this are kept for ever; 0: none", minimum=0)
    max_failures: int = option(
        3, "how many saves in a row may fail before the run ends with an error", minimum=1
    )
    on_config_change: str = option(
        "error", "resuming with a config that would change the result", choices=("error", "allow")
    )


@dataclasses.dataclass(frozen=True)
class Log:
    """What is reported about a run, on the console, in WORKDIR/metrics.jsonl and in
    WORKDIR/tensorboard.
    """

    every: str = option(
        "50 steps", "how often metrics are read from the devices and written", parse=durations.parse
    )
    tensorboard: bool = option(True, "write TensorBoard event files")
    images: str = option(
        "0 steps",
        "how often images of the batch are written to TensorBoard as the model sees them; 0: never",
        parse=durations.parse,
    )
    histograms: str = option(
        "0 steps",
        "how often histograms of parameters, gradients and updates are written there; each costs about a step more; "
        "0: never",
        parse=durations.parse,
    )
    wandb: str = option(
        "",
        "project of Weights & Biases where metrics go too (pip install 'vit_jax[wandb]'); '': nowhere",
    )
    parameters: bool = option(
        False, "print a table of all parameters, with their shapes and shardings, at the start"
    )
    profile: tuple = option(
        (), "(first, last) step to record a trace of, into WORKDIR/profile", minimum=1, length=2
    )


@dataclasses.dataclass(frozen=True)
class Spike:
    """When a loss is so high that its step counts as bad, as if it were not finite."""

    factor: float = option(
        0.0, "a loss this many times its running mean counts as a bad step; 0: none does", minimum=0
    )
    memory: int = option(
        100,
        "steps that the running mean goes back; no step before that counts as a spike",
        minimum=1,
    )


@dataclasses.dataclass(frozen=True)
class Hosts:
    """What ends a run that hangs, so that it can be started again; with several processes, all of
    them.
    """

    heartbeat_seconds: int = option(
        60, "a process that gave no sign of life for so long is taken for dead", minimum=5
    )
    wait_minutes: float = option(
        20.0, "how long processes wait for each other where they must meet", minimum=0
    )
    step_minutes: float = option(
        20.0,
        "no step for so long: say what every thread does and exit with 42; 0: wait for ever",
        minimum=0,
    )
    other_minutes: float = option(
        60.0,
        "the same for compiling, restoring, saving, and one batch of an evaluation",
        minimum=0,
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """A run."""

    seed: int = option(
        0,
        "of everything random: initialisation, order, crops, augmentation, dropout",
        minimum=0,
        maximum=2**32 - 1,
    )
    duration: str = option(
        "10 epochs", "how long to train: steps, epochs or examples", parse=durations.parse
    )
    batch_size: int = option(128, "examples in a step, over all devices and hosts", minimum=1)
    accumulate: int = option(
        1,
        "parts a step's batch is worked through in, one after the other, to save memory",
        minimum=1,
    )
    init_from: str = option("", "checkpoint of any format to start from, see docs/checkpoints.md")
    init_reset: tuple = option(
        ("head(_distilled)?/.*",), "init_from: patterns of parameters that start anew"
    )
    init_resize: str = option(
        "scipy",
        "init_from: how position embeddings are resized; torch: as transformers does, dinov2: as DINOv2",
        choices=("scipy", "bilinear", "bicubic", "torch", "dinov2"),
    )
    init_channels: str = option(
        "error",
        "init_from: what is done about images of other channels; mean: each of ours gets the mean of the "
        "checkpoint's, scaled so that their sum stays",
        choices=("error", "mean"),
        may_change=True,
    )
    nonfinite: str = option(
        "stop",
        "what a non-finite loss or gradient, or a spike, does: end the run, leave the update out, or "
        "go back to the last checkpoint and leave the data out",
        choices=("stop", "skip", "rollback"),
        may_change=True,
    )
    max_skips: int = option(
        10,
        "nonfinite=skip: how many updates in a row are skipped before the run ends with an error",
        minimum=1,
        may_change=True,
    )
    rollback_skip: str = option(
        "1 step",
        "nonfinite=rollback: how much data is left out, from the bad step's on",
        parse=durations.parse,
        may_change=True,
    )
    max_rollbacks: int = option(
        10,
        "nonfinite=rollback: how many there may be in a run before it ends with an error",
        minimum=1,
        may_change=True,
    )
    compilation_cache: str = option(
        "~/.cache/vit_jax/xla",
        "directory of compiled programs; only you should be able to write to it; '': none",
        may_change=True,
    )
    model: models.Name = section(models.Name)
    objective: objectives.Name = section(objectives.Name)
    data: Data = section(Data)
    pseudo: Pseudo = section(Pseudo)
    augment: Augment = section(Augment)
    optim: Optim = section(Optim)
    mesh: Mesh = section(Mesh, may_change=True)
    eval: Eval = section(Eval, may_change=True)
    checkpoint: Checkpoint = section(Checkpoint, may_change=True)
    log: Log = section(Log, may_change=True)
    hosts: Hosts = section(Hosts, may_change=True)
    spike: Spike = section(Spike, may_change=True)


def config_class() -> type[Config]:
    """`Config` with the options of every registered family and objective."""
    return _joined(tuple(models.config_classes()), tuple(objectives.option_classes()))


@functools.cache
def _joined(families: tuple[type, ...], objective_options: tuple[type, ...]) -> type[Config]:
    model = schema.union("Model", models.Name, *families)
    objective = schema.union("Objective", objectives.Name, *objective_options)
    fields = [("model", model, section(model)), ("objective", objective, section(objective))]
    return dataclasses.make_dataclass("Config", fields, bases=(Config,), frozen=True)


def default_config() -> ConfigDict:
    """The config of which every recipe says what differs; locked."""
    return schema.to_config(config_class())
