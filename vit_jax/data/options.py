"""What the config says of images: which are read and how the host cuts them, what a teacher labels, and how
the devices change them.
"""

import dataclasses
import operator

from vit_jax.base import sizes
from vit_jax.base.schema import option

MAX_PIXELS = 2**26  # of an image, by default: 192 MiB once it is decoded
AUTO = "auto"  # of `mask_feature`


@dataclasses.dataclass(frozen=True)
class Data:
    """What images are read and how the host cuts them; the device does the rest (`Augment`)."""

    name: str = option(
        "digits",
        "'digits', 'folder', 'prepared', 'tar', 'masks', 'mixture', or a data set of TFDS such as 'imagenet2012'",
    )
    path: str = option(
        "",
        "folder: of images or classes, or a list; prepared: the folder; tar: files; TFDS: ~/tensorflow_datasets",
    )
    image_feature: str = option(
        "",
        "TFDS: the feature with the image; '': 'image', or else the only one with three channels",
        may_change=True,
    )
    mask_feature: str = option(
        "",
        "TFDS: the feature with the mask; 'auto': the only picture beside the image; '': none, labels are classes",
        may_change=True,
    )
    mask_table: str = option(
        "",
        "TFDS: a CSV file that names the values or colours of masks, such as classes.csv; '': as the data set does",
        may_change=True,
        when={"mask_feature": bool},
    )
    mixture: tuple = option(
        (),
        "with name='mixture': ((name or path, weight), …); weights are shares of the examples",
        when={"name": ("mixture",)},
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
    holdout_from: str = option(
        "",
        "data with splits, but none to judge by: the split that 'test' is held out of, such as train; '': none",
    )
    layout: str = option(
        "auto",
        "folders are classes, splits, parts that all hold the same classes, or auto: as their names say, or ask",
        choices=("auto", "classes", "splits", "parts"),
    )
    mask_files: str = option(
        "ask",
        "files named like masks of images beside them (0_mask.png, 0.seg.png): skip, keep as examples, or ask",
        choices=("ask", "skip", "keep"),
    )
    label_separator: str = option(
        "",
        "between several labels of an image in a list, such as '|'; '': ';' in a column labels",
    )
    class_order: str = option(
        "ask",
        "of class folders, for a checkpoint without names: numbers (2 before 10), texts (10 before 2), or ask",
        choices=("ask", "numbers", "texts"),
        may_change=True,
    )
    holdout_by: str = option(
        "file",
        "file: each image by itself; class: the same share of every class",
        choices=("file", "class"),
    )
    examine: bool = option(
        False,
        "folder or list on a disk: all images are read once before the first step; unreadable ones, copies and "
        "conflicting labels are listed, and a hash of the content decides what is held out: copies stay together",
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
    size_schedule: tuple = option(
        (),
        "other sizes of training images by step: ((0, 128), (0.4, 160), (0.7, 192), (0.9, 224)), each from a share of "
        "the run on, the last image_size; batch and rate stay; (): image_size throughout",
        when={"views": operator.not_, "native_tokens": operator.not_},
    )
    patch_sizes: tuple = option(
        (),
        "patches of the model by step, in pixels: (48, 30, 16, 8), one size a step, drawn by seed and step; ((48, 1), "
        "(8, 3)) with shares of the steps; (): the model's own (FlexiViT)",
        when={"views": operator.not_, "native_tokens": operator.not_},
    )
    native_tokens: int = option(
        0,
        "images, and crops of them, keep their aspects, each at up to so many patches; 0: all are cut to image_size",
        minimum=0,
        role="answers",
        when={"views": operator.not_},
    )
    native_lengths: tuple = option(
        (),
        "other numbers in training, (128, 256, 576): one a batch, drawn by seed and step, each equally often or by its "
        "share: ((128, 1), (256, 2)); (): native_tokens",
        when={"native_tokens": bool},
    )
    native_budget: int = option(
        0,
        "patches of a batch of as many images as they allow; loss and rate stay relative to batch_size; 0: batch_size",
        minimum=0,
        when={"native_tokens": bool},
    )
    native_multiple: int = option(
        8, "native_budget: images in a batch are a multiple of this", minimum=1,
        when={"native_budget": bool},
    )  # fmt: skip
    native_loss: str = option(
        "linear", "native_budget: by what the loss of a batch is multiplied, its share of batch_size images",
        choices=("none", "sqrt", "linear"), when={"native_budget": bool},
    )  # fmt: skip
    native_rate: str = option(
        "none", "native_budget: the same of its learning rate",
        choices=("none", "sqrt", "linear"), when={"native_budget": bool},
    )  # fmt: skip
    native_patch: int = option(
        0,
        "side of those patches; 0: the model's",
        minimum=0,
        role="answers",
        when={"native_tokens": bool},
    )
    channels: int = option(
        3,
        "of an image: 3 for RGB, 1 for grey, or as many as its PNG (2, 4), TIFF or .npy file has",
        minimum=1,
        maximum=16,
    )
    train_crop: str = option(
        "inception",
        "how training images are cut",
        choices=("inception", "random", "pad", "resize", "jitter"),
    )
    crop_scale: tuple = option(
        (0.1, 2.0),
        "jitter crop: smallest and largest factor by which an image is enlarged; at 1 it just fits",
        above=0,
        length=2,
        when={"train_crop": ("jitter",)},
    )
    crop_area: tuple = option(
        (0.05, 1.0),
        "inception crop: smallest and largest share of the image's area",
        above=0,
        maximum=1,
        length=2,
        when={"train_crop": ("inception",)},
    )
    crop_aspect: tuple = option(
        (3 / 4, 4 / 3),
        "inception crop: narrowest and widest aspect ratio, times that of image_size; native_tokens: the image's",
        above=0,
        length=2,
        when={"train_crop": ("inception",)},
    )
    resize: int = option(
        256,
        "random crop: the smaller side is first resized to this",
        minimum=1,
        when={"train_crop": ("random",)},
    )
    interpolation: str = option(
        "bilinear",
        "antialiased filter that resizes crops: bilinear, bicubic; '': as init_from has it",
        choices=("bilinear", "bicubic", ""),
    )
    repeats: int = option(
        1,
        "how many times an example is in a batch, each time with another crop (DeiT: 3)",
        minimum=1,
    )
    views: tuple = option(
        (),
        "several views of each image, for objectives that compare them: ({option: value}, …), what differs from "
        "config.data and config.augment, and 'count', how many there are of this kind; (): one image",
    )
    view_sizes: tuple = option(
        (),
        "other sizes of views, in a share of the steps: ({'share': 0.3, 'sizes': (512, 512, 112), 'start': '50%'}, …), "
        "an image_size for each of views; which it is, is drawn by seed and step; (): always those of views",
        when={"views": bool},
    )
    pad: int = option(
        4,
        "pad crop: zero border, in pixels, from which the crop is cut",
        minimum=0,
        when={"train_crop": ("pad",)},
    )
    eval_crop: str = option(
        "central",
        "in evaluation: central, torchvision, transformers (by their rounding), squash (to the aspect), resize (all)",
        choices=("central", "torchvision", "transformers", "squash", "resize"),
        may_change=True,
    )
    eval_resize: int = option(
        256,
        "all but resize: the smaller side is first resized to this",
        minimum=1,
        may_change=True,
        when={"eval_crop": lambda crop: crop != "resize"},
    )
    mean: tuple = option(
        (0.5, 0.5, 0.5),
        "subtracted from pixels in [0, 1], for each channel or all; 0.5 with std 0.5: [-1, 1]; (): as init_from has it",
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
        "a fixed permutation of what the model sees (experiments): none, patches, pixels in patches, both, all pixels",
        choices=("none", "patches", "pixels in patches", "both", "all pixels"),
        role="answers",
    )
    permute_patch: int = option(
        16,
        "permute: side of its patches in pixels",
        minimum=1,
        role="answers",
        when={"permute": lambda kind: kind != "none"},
    )
    threads: int = option(
        0,
        "threads that decode batches; 0: one for each core of the process",
        minimum=0,
        maximum=1024,
        may_change=True,
    )
    read_ahead: float = option(
        -1.0,
        "MiB of images that each process reads before they are decoded; 0: none; -1: by the time that a read takes",
        minimum=-1,
        maximum=2**20,
        may_change=True,
    )
    cache: str = option(
        "",
        "folder on a local disk that keeps what was read, for data in buckets or on slow disks; '': none",
        may_change=True,
    )
    cache_gib: float = option(
        100.0, "cache: at most this many GiB", above=0, may_change=True, when={"cache": bool}
    )
    prefetch: int = option(2, "batches kept ready on the devices", minimum=1, may_change=True)
    max_pixels: int = option(
        MAX_PIXELS,
        "an image of more pixels, by its header, counts as unreadable before it takes memory",
        minimum=1,
        may_change=True,
    )
    max_value: int = option(
        0,
        "images of 16 bits: their largest value, 4095 where 12 bits are used; 0: 65535, with a warning below 2^14",
        minimum=0,
        maximum=2**16 - 1,
        role="answers",
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
        when={"on_bad_image": ("skip",)},
    )


@dataclasses.dataclass(frozen=True)
class Pseudo:
    """Further images to train on, which a teacher labels once, before the run (Noisy Student)."""

    teacher: str = option(
        "",
        "checkpoint of any format that labels them, or another run of the same recipe, by its name; '': there are none",
        may_change=True,  # its weights may not
    )
    data: str = option(
        "",
        "the images: a name or path, as in a mixture; '': those of config.data",
        when={"teacher": bool},
    )
    split: str = option(
        "train", "which of them; labels that they have are not looked at", when={"teacher": bool}
    )
    confidence: float = option(
        0.3,
        "the most probable class of an image has to be more probable than this",
        minimum=0,
        below=1,
        when={"teacher": bool},
    )
    per_class: int = option(
        0,
        "this many images of each class: the most confident, or all of them over and over; 0: all, once",
        minimum=0,
        when={"teacher": bool},
    )
    soft: bool = option(
        True, "the teacher's probabilities are learned, not its decision", when={"teacher": bool}
    )
    ratio: float = option(
        1.0,
        "in an epoch, images labelled by the teacher for one of config.data",
        above=0,
        when={"teacher": bool},
    )


@dataclasses.dataclass(frozen=True)
class Augment:
    """Random changes to training images, made on the devices inside the compiled step."""

    flip: bool = option(True, "mirror left-right with probability 1/2")
    color_jitter: float = option(
        0.0, "strength of random brightness, contrast, saturation; 0: none", minimum=0, maximum=10
    )
    jitter: tuple = option(
        (),
        "strengths of random brightness, contrast, saturation and hue, such as DINO's (0.4, 0.4, 0.2, 0.1); (): none",
        minimum=0,
        length=4,
    )
    jitter_probability: float = option(
        0.8, "share of the images that jitter changes", minimum=0, maximum=1, when={"jitter": bool}
    )
    grey: float = option(0.0, "probability that an image becomes grey", minimum=0, maximum=1)
    blur: float = option(
        0.0, "probability of a Gaussian blur, its deviation 0.1 to 2 pixels", minimum=0, maximum=1
    )
    solarize: float = option(
        0.0, "probability that values from 128 on are inverted", minimum=0, maximum=1
    )
    randaugment_layers: int = option(0, "RandAugment operations; 0: none", minimum=0, maximum=100)
    randaugment_magnitude: float = option(
        10.0,
        "RandAugment strength, of 10 (AugReg goes to 20)",
        minimum=0,
        maximum=30,
        when={"randaugment_layers": bool},
    )
    randaugment_kind: str = option(
        "tensorflow",
        "whose operations and magnitudes: tensorflow (AugReg, big_vision); timm's 'rand-…', or its '-inc1'",
        choices=("tensorflow", "timm", "timm-inc1"),
        when={"randaugment_layers": bool},
    )
    randaugment_std: float = option(
        0.0,
        "timm's 'mstd': standard deviation of the magnitudes, which are then clipped to [0, 10]",
        minimum=0,
        when={"randaugment_layers": bool},
    )
    autoaugment: bool = option(False, "AutoAugment, the policy for ImageNet")
    three_augment: bool = option(
        False, "3-Augment (DeiT III): each image grey, solarised or blurred"
    )
    own: tuple = option(
        (), "names of registered augmentations, in their order, after the changes of colours"
    )
    mixup: float = option(
        0.0, "parameter of the Beta distribution of mixup; 0: none", minimum=0, maximum=1000
    )
    cutmix: float = option(
        0.0, "parameter of the Beta distribution of cutmix; 0: none", minimum=0, maximum=1000
    )
    mix_switch: float = option(
        0.5,
        "with both mixup and cutmix: probability that a step uses cutmix",
        minimum=0,
        maximum=1,
        when={"mixup": bool, "cutmix": bool},
    )
    erasing: float = option(
        0.0, "probability that a random rectangle is replaced by noise", minimum=0, maximum=1
    )
    erasing_mode: str = option(
        "pixel",
        "noise of each pixel, one random colour, or the mean colour",
        choices=("pixel", "rand", "const"),
        when={"erasing": bool},
    )
    erasing_area: tuple = option(
        (0.02, 1 / 3),
        "erasing: smallest and largest share of the image",
        above=0,
        below=1,
        length=2,
        when={"erasing": bool},
    )
    erasing_aspect: float = option(
        0.3,
        "erasing: narrowest aspect ratio; the widest is its inverse",
        above=0,
        maximum=1,
        when={"erasing": bool},
    )
