"""The kinds of stored runs: how each is made, unpacked and trained. `make.py` writes them, `tests/test_stored_runs.py`
resumes and evaluates them.
"""

import contextlib
import json
import pathlib
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import vit_jax
from vit_jax.training.upkeep.callbacks import Callback

FOLDER = pathlib.Path(__file__).parent
EXPECTED = "expected.json"
# The adapters' base is the run of this kind, beside theirs: a relative path, which is the same in every clone.
BASE = "digits"

# What makes a run small. Each has data that is in scikit-learn or drawn from that, so that no path is part of it.
SMALL = {
    "batch_size": 16,
    "duration": "8 steps",
    "log.every": "1 steps",
    "log.tensorboard": False,
    "checkpoint.every": "0 steps",
    "checkpoint.keep": 1,
    "eval.every": "0 steps",
    "eval.evaluators": ("accuracy",),
    "audit.every": 0,
    "data.threads": 1,
    "data.train_split": "train[:128]",
    "data.eval_split": "test[:32]",
    "model.name": "ViT-mu/8",
    "model.width": 16,
    "model.depth": 1,
    "model.heads": 2,
    "model.mlp_dim": 32,
}
# Without what `digits` has already, and what takes a third of the time to compile.
PLAIN = SMALL | {"augment.mixup": 0.0, "augment.cutmix": 0.0, "optim.ema": 0.0}
GLOBAL_VIEW = {"crop_area": (0.7, 1.0), "again": 2.0}
SCENES = {
    "init_from": "",
    "data.mean": (0.5,),
    "data.std": (0.5,),
    "data.interpolation": "bilinear",
    "data.image_size": 16,
    "optim.name": "adamw",
    "optim.freeze": (),
    "optim.lr": 5e-3,
    "eval.evaluators": ("segmentation",),
}
TERMS = (
    ("image_text", {"text_depth": 1}),
    ("masked_patches", {"weight": 0.25, "start": "25%"}),
)
A_FEW_PIXELS = 0.002  # of 32 images, as a share


class StoredRun(NamedTuple):
    """How runs of a kind are made and resumed.

    Attributes:
      recipe: of the package, as `vit_jax train --config` takes it.
      fields: of the config, by dotted names. Where a recipe changes, they keep its earlier values.
      has_base: whether it trains adapters of the run `BASE`. A checkpoint has the absolute path of its base, which is
        another where it is unpacked: only once it is resumed there, the run can be evaluated.
      tolerance: of metrics that are shares, on other machines: that of one image of 32 by default.
      slow: whether only slow tests read it.
    """

    recipe: str
    fields: Mapping[str, Any]
    has_base: bool = False
    tolerance: float = 1 / 32
    slow: bool = False


RUNS = {
    "digits": StoredRun("digits", SMALL),
    "deit3": StoredRun("deit3:smoke", PLAIN | {"augment.three_augment": True, "data.repeats": 2}),
    "native_sizes": StoredRun(
        "naflex:smoke",
        PLAIN
        | {"model.name": "ViT-mu/4", "augment.erasing": 0.0, "data.native_tokens": 16}
        | {"data.native_lengths": (9, 16), "data.native_budget": 256},
    ),
    "size_schedule": StoredRun("digits", PLAIN | {"data.size_schedule": ((0, 16), (0.75, 32))}),
    "lora": StoredRun(
        "digits_finetune",
        PLAIN | {"init_from": BASE, "data.image_size": 32, "lora.lora_rank": 2},
        has_base=True,
    ),
    "muon": StoredRun("digits", PLAIN | {"optim.name": "muon"}),
    "gram": StoredRun(
        "dino_continue:smoke",
        PLAIN
        | {"model.name": "ViT-mu/4", "model.rope_jitter": 1.0, "model.rope_shift": 0.0}
        | {"data.views": (GLOBAL_VIEW, GLOBAL_VIEW), "data.view_sizes": ()}
        | {"objective.prototypes": 16, "objective.head_hidden": 16, "objective.bottleneck": 8}
        | {"objective.gram_start": "1 steps", "objective.gram_refresh": "3 steps"}
        | {"objective.koleo": 0.0, "eval.evaluators": ("knn",)},
    ),
    "segmentation": StoredRun("segmentation:smoke,linear", PLAIN | SCENES, tolerance=A_FEW_PIXELS),
    "segmentation_queries": StoredRun(
        "segmentation:smoke",
        PLAIN | SCENES | {"objective.blocks": 1, "objective.queries": 4, "objective.points": 16},
        tolerance=A_FEW_PIXELS,
        slow=True,
    ),
    "sum": StoredRun(
        "sum:smoke", PLAIN | {"objective.terms": TERMS, "eval.evaluators": ("retrieval",)}
    ),
}


class Trained(NamedTuple):
    """What a run gave.

    Attributes:
      losses: by step, of the steps that were trained.
      result: see `vit_jax.train`.
    """

    losses: dict[int, float]
    result: dict[str, Any]


def generations() -> list[str]:
    """The folders of stored runs, each made by one version."""
    return sorted(path.parent.name for path in FOLDER.glob(f"*/{EXPECTED}"))


def read_expected(generation: str) -> dict[str, dict]:
    """What is expected of the runs of a generation, by their kinds."""
    return json.loads((FOLDER / generation / EXPECTED).read_text())


def unpack(generation: str, kind: str, folder: pathlib.Path) -> pathlib.Path:
    """The workdir of a stored run, unpacked below `folder`, with its base beside it if it has one."""
    kinds = {BASE, kind} if RUNS[kind].has_base else {kind}
    for each in kinds:
        with tarfile.open(FOLDER / generation / f"{each}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    return folder / kind


def train(
    kind: str,
    workdir: pathlib.Path,
    *,
    callbacks: Sequence[Callback] = (),
    compilation_cache: str = "",
) -> Trained:
    """Trains a run of a kind in a folder, beside its base if it has one, or resumes it there."""
    config = vit_jax.load_config(RUNS[kind].recipe)
    config.update_from_flattened_dict(RUNS[kind].fields)
    config.compilation_cache = compilation_cache
    losses = {}

    def keep_loss(step: int, metrics: dict[str, float]) -> None:
        if "loss" in metrics:  # else they are of an evaluation
            losses[step] = metrics["loss"]

    with contextlib.chdir(workdir.parent):
        result = vit_jax.train(config, workdir, callbacks=[keep_loss, *callbacks])
    return Trained(losses, result)
