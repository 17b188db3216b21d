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

TWICE = {"objective.teachers": ("{teacher}", "{teacher}")}
GRAM = {"objective.gram_weight": 1.0}
TOKEN = {"model.pool": "token"}
CLIP = {"objective.text": "clip"}
OF_LEVELS = {
    "objective.head": "multilevel",
    "objective.width": 8,
    "objective.layers": ("blocks/0", "blocks/1"),
}
LOCAL_VIEW = {"data.views": ({}, {}, {"image_size": 8})}
# A sum of a term of several views and one of one, instead of one with texts.
OF_VIEWS = {
    "objective.tokenizer": None,
    "data.views": ({}, {}, {}),
    "objective.terms": (
        ("masked_patches", {}),
        (
            "dino",
            {
                "prototypes": 12,
                "head_hidden": 16,
                "bottleneck": 8,
                "temperature_warmup": "0 steps",
                "frozen_prototypes": "0 steps",
            },
        ),
    ),
}
# Decay changes the own parameters of a late term before it begins, unless they rest.
LATE_TERM = {
    "objective.terms": (
        ("image_text", {"text_depth": 1}),
        ("masked_patches", {"start": "1 steps"}),
    ),
    "optim.weight_decay": 0.5,
}
# By objective; `base` has whole names of fields.
OBJECTIVE = {
    "supervised": {
        "loss": Case("sigmoid"), "label_smoothing": Case(0.1), "focal": Case(2.0),
        "class_weights": Case((1.0, 2.0, 3.0)),
    },
    "mae": {
        "masked": Case(0.5), "normalize": Case(False), "width": Case(24), "depth": Case(2), "heads": Case(4),
        "mlp_ratio": Case(2),
    },
    "masked_patches": {"target": Case("downsized"), "corrupted": Case(0.25)},
    "dino": {
        "prototypes": Case(16), "head_hidden": Case(24), "bottleneck": Case(12), "head_std": Case(0.5),
        "two_heads": Case(True), "centering": Case("sinkhorn"), "centre_momentum": Case(0.5),
        "student_temperature": Case(0.2), "teacher_temperature": Case((0.1, 0.2)),
        "temperature_warmup": Case("4 steps"),
        "momentum": Case((0.5, 1.0)), "frozen_prototypes": Case("2 steps"), "patch_weight": Case(0.5),
        "mask_shares": Case((0.5, 0.5)), "koleo": Case(0.5), "koleo_images": Case(2),
        "view_resize": Case("torch", LOCAL_VIEW), "gram_weight": Case(1.0), "gram_start": Case("2 steps", GRAM),
        "gram_refresh": Case("1 steps", GRAM),
        "gram_refreshes": Case(1, {**GRAM, "objective.gram_refresh": "1 steps"}),
    },
    "distill": {
        "kind": Case("soft"), "alpha": Case(0.25), "temperature": Case(2.0, {"objective.kind": "soft"}),
        "loss": Case("sigmoid"), "label_smoothing": Case(0.1),
    },
    "features": {
        "teachers": Case(("{teacher}", "{teacher}"), first=("{teacher}",)), "kinds": Case(("summary",)),
        "adaptor": Case("linear"), "hidden": Case(12), "last_hidden": Case(12), "standardize": Case("none"),
        "momentum": Case((0.5, 0.1)), "sample": Case(1, {"objective.standardize": "phi_s"}), "cosine": Case(0.25),
        "drop": Case(0.9, TWICE),
    },
    "image_text": {
        "text": Case("clip"), "text_length": Case(12), "vocabulary": Case(300), "text_end": Case(2, CLIP),
        "loss": Case("softmax"), "text_width": Case(24), "text_depth": Case(2), "text_mlp_dim": Case(40),
        "text_heads": Case(4), "text_activation": Case("quick_gelu"), "image_blocks": Case(1, TOKEN),
        "image_drop_path": Case(0.5, {**TOKEN, "objective.image_blocks": 1}), "embed": Case(12),
        "temperature": Case(5.0), "bias": Case(-5.0),
    },
    "sum": {
        "text": Case("clip"), "text_length": Case(12), "vocabulary": Case(300), "text_end": Case(2, CLIP),
        "terms": Case((("image_text", {"text_depth": 1}), ("masked_patches", {"weight": 0.5}))),
        "view": Case(2, OF_VIEWS), "rest": Case(False, LATE_TERM),
    },
    "segmentation": {
        "head": Case("linear"), "layers": Case(("blocks/1",), OF_LEVELS), "width": Case(12, OF_LEVELS),
        "queries": Case(6), "blocks": Case(2), "segments": Case(1), "points": Case(16), "annealing": Case((0.0, 0.2)),
        "mask_weight": Case(1.0), "dice_weight": Case(1.0), "class_weight": Case(1.0), "no_object": Case(0.5),
    },
}  # fmt: skip
