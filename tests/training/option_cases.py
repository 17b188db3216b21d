"""Every option of `optim` with another value, and what it claims to change; see `test_options.py`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

ALL = ".*"
# What decays by default, and what stands for kernels where adapters are trained.
KERNELS = ".*(kernel|lora_[ab])"
# Of a ViT, and of the layers that have adapters: what the optimizers of matrices take for matrices.
MATRICES = ".*(attention|mlp)/.*(kernel|lora_[ab])"
OTHERS = f"(?!{MATRICES}$).*"
HEAD = "head/.*"


@dataclasses.dataclass(frozen=True)
class Case:
    """Two runs that differ in an option.

    Attributes:
      value: of the option in the second; in the first it has its default.
      base: other fields of both, by their names in `config.optim`.
      first: the value in the first run, where the default would not do.
      claims: a pattern of the parameters that it changes. All others stay the same to the bit.
      rate: whether the logged learning rate changes too.
    """

    value: Any
    base: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    first: Any = None
    claims: str = ALL
    rate: bool = False

    def runs(self, option: str) -> tuple[dict, dict]:
        """The fields of both runs."""
        first = {} if self.first is None else {option: self.first}
        return {**self.base, **first}, {**self.base, option: self.value}


DECAYED = {"weight_decay": 0.5}
ORTHOGONAL = {"name": "muon"}
STAIRCASE = {"schedule": "staircase", "boundaries": ("1 steps",)}
OPTIM = {
    "name": Case("sgd"),
    "lr": Case(0.02, rate=True),
    "schedule": Case("linear", rate=True),
    "warmup": Case("2 steps", rate=True),
    "late": Case((HEAD,), {"warmup": "2 steps"}, claims=HEAD),
    "late_warmup": Case("2 steps", {"warmup": "1 steps", "late": (HEAD,)}, claims=HEAD),
    "cooldown": Case("5 steps", rate=True),
    "timescale": Case("2 steps", {"schedule": "rsqrt"}, rate=True),
    "boundaries": Case(("2 steps",), STAIRCASE, ("1 steps",), rate=True),
    "factor": Case(0.5, STAIRCASE, rate=True),
    "power": Case(0.5, {"schedule": "polynomial"}, rate=True),
    "lr_end": Case(0.005, {"schedule": "linear"}, rate=True),
    "b1": Case(0.5),
    "b2": Case(0.5),
    "eps": Case(0.1),
    "matrices": Case((".*mlp/down/(kernel|lora_[ab])", ".*/value/lora_a"), ORTHOGONAL, claims=MATRICES),
    "others": Case("nadamw", ORTHOGONAL, claims=OTHERS),
    "matrix_b1": Case(0.5, ORTHOGONAL, claims=MATRICES),
    "matrix_b2": Case(0.5, {"name": "normuon"}, claims=MATRICES),
    "nesterov": Case(False, ORTHOGONAL, claims=MATRICES),
    "polynomial": Case("jordan", ORTHOGONAL, claims=MATRICES),
    "matrix_scale": Case("original", ORTHOGONAL, claims=MATRICES),
    "matrix_every": Case(1, {"name": "shampoo"}, claims=MATRICES),
    "basis_every": Case(1, {"name": "soap"}, claims=MATRICES),
    "matrix_eps": Case(0.1, {"name": "shampoo", "matrix_every": 1}, claims=MATRICES),
    "matrix_block": Case(4, {"name": "soap", "basis_every": 1}, claims=MATRICES),
    "per_head": Case(True, ORTHOGONAL, claims=".*attention/.*(kernel|lora_[ab])"),
    "moment_dtype": Case("bfloat16"),
    "clip": Case(0.5),
    "weight_decay": Case(0.5, claims=KERNELS),
    "weight_decay_end": Case(5.0, DECAYED, claims=KERNELS),
    "weight_decay_rules": Case(((".*bias", 1.0),), DECAYED, claims=".*(kernel|lora_[ab]|bias)"),
    "weight_decay_by": Case("schedule", DECAYED, claims=KERNELS),
    "lr_rules": Case(((HEAD, 0.5),), claims=HEAD),
    "freeze": Case((HEAD,), claims=HEAD),
    "layer_decay": Case(0.5, claims=r"(?!head/|norm/|encoder/norm/|objective/).*"),
}  # fmt: skip
# These need two gradients, or a state beside the parameters: the whole step is run.
OF_STEPS = {
    "sam_rho": Case((0.5, 0.5)),
    "sam_alpha": Case(0.5, {"sam_rho": (0.5, 0.5)}),
    "ema": Case(0.5),
}
