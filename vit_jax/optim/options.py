"""The options of optimizers, `config.optim`."""

import dataclasses
from collections.abc import Callable

from vit_jax.base import durations
from vit_jax.base.schema import option

# The optimizers of single numbers; all others are of matrices, see `preconditioners`.
ELEMENTWISE = (
    "adamw", "nadamw", "lamb", "lars", "sgd", "adafactor", "lion", "rmsprop", "schedule_free"
)  # fmt: skip
# The shapes of the learning rate after warm-up, and the options that each reads; the functions are in `schedules`.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "cosine": ("lr_end",),
    "linear": ("lr_end",),
    "polynomial": ("lr_end", "power"),
    "rsqrt": ("cooldown", "timescale"),
    "constant": ("cooldown",),
    "staircase": ("boundaries", "factor"),
}
_WITH_ORTHOGONAL = ("muon", "adamuon", "normuon")
_WITH_BLOCKS = ("shampoo", "soap")


def _read_by_schedule(name: str) -> Callable[[str], bool]:
    """Whether a schedule reads the option of this name."""
    return lambda schedule: name in SCHEDULES[schedule]


def keeps_average(name: str, ema: float) -> bool:
    """Whether averaged parameters are kept, which are then what is evaluated and loaded; arguments are those
    of `config.optim`.
    """
    return ema > 0 or name == "schedule_free"


def is_of_matrices(name: str) -> bool:
    """Whether a name of `config.optim.name` is that of an optimizer of matrices."""
    return name not in ELEMENTWISE


@dataclasses.dataclass(frozen=True)
class Optim:
    """How parameters are updated. Patterns are regular expressions that must match a whole
    parameter name; the first that does wins.
    """

    name: str = option(
        "adamw",
        "adamw, nadamw, schedule_free, lamb, lars, sgd, adafactor, lion or rmsprop; "
        "of matrices muon, adamuon, normuon, shampoo or soap",
    )
    lr: float = option(1e-3, "peak learning rate", minimum=0, maximum=1e4)
    schedule: str = option(
        "cosine",
        "shape of the learning rate after warm-up",
        choices=SCHEDULES,
    )
    warmup: str = option(
        "0 steps",
        "linear rise from 0 to the peak: steps, epochs, examples or %",
        parse=durations.parse,
    )
    late: tuple = option(
        (),
        "patterns of parameters that rest during the warm-up, while new heads learn, and then have a warm-up of their "
        "own, late_warmup",
    )
    late_warmup: str = option(
        "0 steps",
        "late: how long these parameters rise from 0 to the peak, once the warm-up is over",
        parse=durations.parse,
        when={"late": bool},
    )
    cooldown: str = option(
        "0 steps", "linear fall to 0 at the end, for rsqrt and constant", parse=durations.parse,
        when={"schedule": _read_by_schedule("cooldown")},
    )  # fmt: skip
    timescale: str = option(
        "10000 steps",
        "rsqrt: lr / sqrt(1 + (step - warmup) / timescale)",
        parse=durations.parse,
        when={"schedule": _read_by_schedule("timescale")},
    )
    boundaries: tuple = option(
        (),
        "staircase: when the learning rate falls; steps, epochs, examples or %, warm-up included",
        parse=durations.parse_all,
        when={"schedule": _read_by_schedule("boundaries")},
    )
    factor: float = option(
        0.1, "staircase: what it is multiplied by each time", minimum=0, maximum=1,
        when={"schedule": _read_by_schedule("factor")},
    )  # fmt: skip
    power: float = option(
        0.9,
        "polynomial: lr * (1 - p) ^ power, p from 0 to 1 after warm-up",
        above=0,
        when={"schedule": _read_by_schedule("power")},
    )
    lr_end: float = option(
        0.0,
        "cosine, linear and polynomial: the learning rate at the end",
        minimum=0,
        when={"schedule": _read_by_schedule("lr_end")},
    )
    b1: float = option(
        0.9,
        "adamw, nadamw, lamb, lion, adafactor: decay of the first moment; sgd, lars, rmsprop: momentum; "
        "schedule_free: "
        "how far the gradient is taken towards the mean",
        minimum=0,
        below=1,
    )
    b2: float = option(
        0.999,
        "adamw, nadamw, schedule_free, lamb, lion, rmsprop: decay of the second moment; adafactor: its cap",
        minimum=0,
        below=1,
        when={"name": lambda name: name not in ("sgd", "lars")},
    )
    eps: float = option(
        1e-8,
        "adamw, nadamw, schedule_free, lamb, and those of matrices but muon: added to the root of the second moment; "
        "rmsprop: to the moment itself",
        minimum=0,
        when={"name": lambda name: name not in ("sgd", "lars", "adafactor", "lion")},
    )
    matrices: tuple = option(
        (),
        "patterns of the parameters that are matrices; not given: kernels, but not embeddings and heads",
        when={"name": is_of_matrices},
    )
    others: str = option(
        "adamw", "optimizer of what is not a matrix, with b1, b2 and eps", choices=("adamw", "nadamw"),
        when={"name": is_of_matrices},
    )  # fmt: skip
    matrix_b1: float = option(
        0.95, "decay of the momentum of matrices", minimum=0, below=1,
        when={"name": is_of_matrices},
    )  # fmt: skip
    matrix_b2: float = option(
        0.95, "adamuon, normuon, shampoo, soap: decay of the second moments of matrices", minimum=0, below=1,
        when={"name": ("adamuon", "normuon", *_WITH_BLOCKS)},
    )  # fmt: skip
    nesterov: bool = option(
        True, "whether the momentum of matrices looks one update ahead",
        when={"name": is_of_matrices},
    )  # fmt: skip
    polynomial: str = option(
        "polar_express", "muon, adamuon, normuon: what orthogonalizes a matrix, in five steps",
        choices=("polar_express", "jordan"), when={"name": _WITH_ORTHOGONAL},
    )  # fmt: skip
    matrix_scale: str = option(
        "rms",
        "muon, adamuon, normuon: rms: elements of an update are as large as AdamW's, whose lr and weight_decay "
        "can stay; original: singular values are 1, or more for matrices with more outputs than inputs",
        choices=("rms", "original"), when={"name": _WITH_ORTHOGONAL},
    )  # fmt: skip
    matrix_dtype: str = option(
        "bfloat16", "in which matrices are multiplied; CPUs that would emulate bfloat16 take float32",
        choices=("bfloat16", "float32"), when={"name": _WITH_ORTHOGONAL},
    )  # fmt: skip
    matrix_every: int = option(
        100, "shampoo: steps from one computation of the roots to the next", minimum=1,
        when={"name": ("shampoo",)},
    )  # fmt: skip
    basis_every: int = option(
        10, "soap: steps from one refresh of the eigenbases to the next", minimum=1,
        when={"name": ("soap",)},
    )  # fmt: skip
    matrix_eps: float = option(
        1e-6, "shampoo, soap: added to the eigenvalues of second moments, times the largest of them or the norm",
        above=0, when={"name": _WITH_BLOCKS},
    )  # fmt: skip
    matrix_block: int = option(
        1024, "shampoo, soap: longest side of the blocks that matrices are split into", minimum=4, maximum=8192,
        when={"name": _WITH_BLOCKS},
    )  # fmt: skip
    per_head: bool = option(
        False, "whether each head's queries, keys, values and outputs are a matrix of their own",
        when={"name": is_of_matrices},
    )  # fmt: skip
    moment_dtype: str = option(
        "float32", "type the first moment is kept in", choices=("float32", "bfloat16"),
        when={"name": lambda name: name != "schedule_free"},
    )  # fmt: skip
    clip: float = option(1.0, "largest global norm of the gradient; 0: no clipping", minimum=0)
    weight_decay: float = option(0.0, "weight decay, see weight_decay_by", minimum=0, maximum=1e4)
    weight_decay_end: float | None = option(
        None,
        "weight decay at the end, a cosine away from weight_decay; not given: it stays",
        minimum=0,
        maximum=1e4,
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
    freeze: tuple = option(
        (), "patterns of parameters that stay as they are; of some layers encoder/layers[:4]/.*"
    )
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


def takes_two_gradients(config: Optim) -> bool:
    """Whether training is sharpness-aware, with two gradients a step, see `sharpness`."""
    return max(config.sam_rho) > 0
