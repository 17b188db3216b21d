"""The options of self-distillation, see `dino`."""

import dataclasses

from vit_jax.base import durations
from vit_jax.base.schema import option
from vit_jax.models.resized import METHODS


@dataclasses.dataclass(frozen=True)
class DinoOptions:
    """What `config.objective` says for self-distillation."""

    prototypes: int = option(65_536, "outputs of a head", minimum=2)
    head_hidden: int = option(2048, "hidden size of a head", minimum=1)
    bottleneck: int = option(256, "size of what is compared with prototypes", minimum=1)
    head_std: float = option(
        0.02,
        "standard deviation of a head's kernels at first; small heads need a larger one, or biases soon "
        "outweigh what differs between images",
        above=0,
    )
    two_heads: bool = option(False, "patches have a head of their own")
    centering: str = option(
        "centre",
        "how the teacher's outputs are kept apart: less a moving centre, or by Sinkhorn-Knopp",
        choices=("centre", "sinkhorn"),
    )
    centre_momentum: float = option(0.9, "of the centre", minimum=0, below=1)
    student_temperature: float = option(0.1, "the student's logits are divided by it", above=0)
    teacher_temperature: tuple = option(
        (0.04, 0.07), "the teacher's: at first, and after temperature_warmup", above=0, length=2
    )
    temperature_warmup: str = option(
        "30 epochs", "how long the teacher's temperature rises", parse=durations.parse
    )
    momentum: tuple = option(
        (0.992, 1.0),
        "of the teacher, at the beginning and at the end; a cosine between",
        minimum=0,
        maximum=1,
        length=2,
    )
    frozen_prototypes: str = option(
        "1 epoch", "how long prototypes stay as they are at first", parse=durations.parse
    )
    patch_weight: float = option(1.0, "of the loss of masked patches; 0: none", minimum=0)
    mask_shares: tuple = option(
        (0.1, 0.5),
        "smallest and largest share of patches that are masked",
        above=0,
        below=1,
        length=2,
    )
    koleo: float = option(0.1, "weight of KoLeo; 0: none", minimum=0)
    koleo_images: int = option(
        0,
        "how many images KoLeo compares with each other; 0: the whole batch, or with config.accumulate each part of it",
        minimum=0,
    )
    view_resize: str = option(
        "dinov2", "how positions are interpolated for views of other sizes", choices=METHODS
    )
    gram_weight: float = option(
        0.0,
        "of Gram anchoring: patches stay as alike to each other as an earlier checkpoint has them; 0: none "
        "(2 in DINOv3)",
        minimum=0,
    )
    gram_teacher: str = option(
        "", "that checkpoint, of the same model; '': the model as it is when anchoring starts"
    )
    gram_start: str = option(
        "0 steps", "how long there is no Gram anchoring at first", parse=durations.parse
    )
    gram_refresh: str = option(
        "0 steps",
        "after so long the Gram teacher takes the teacher's weights, again and again; 0: never "
        "(10,000 steps in DINOv3)",
        parse=durations.parse,
    )
    gram_refreshes: int = option(3, "gram_refresh: how often at most", minimum=1)
    collapse_steps: int = option(
        100,
        "warn after this many steps of identical teacher outputs (collapse)",
        minimum=1,
    )
