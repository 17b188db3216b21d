"""The rows: what is compared with what."""

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Sequence

from tests.parity import comparison, engines

SEEDS = 5
_PACKAGES = ("jax", "flax", "optax", "torch", "timm", "transformers", "lightly")


@dataclasses.dataclass(frozen=True)
class Row:
    """A comparison by a module's functions of a seed, `ours` and `theirs`.

    Attributes:
      about: what is compared with whose engine.
      module: of this folder.
      judge: the quantity that says how good a run is; '': no curves are compared, but statistics of many draws.
      percent: whether it is a share.
      ours, theirs: the functions.
    """

    about: str
    module: str
    judge: str = "accuracy"
    percent: bool = True
    ours: str = "ours"
    theirs: str = "theirs"


ROWS = {
    "batch": Row(
        "what is drawn for a batch: crops, erasing, mixing, policies; timm's parts",
        "batch",
        judge="",
    ),
    "plain": Row("digits, AdamW, warm-up, cosine; Flax's layers and optax", "plain"),
    "huggingface": Row(
        "CIFAR-10, crops and flips, AdamW, linear; transformers' ViT, Trainer's rules",
        "huggingface",
    ),
    "deit": Row("CIFAR-10, DeiT: repeats, RandAugment, mixing, erasing, EMA; timm's parts", "deit"),
    "deit3": Row(
        "CIFAR-10, DeiT III: 3-Augment, LAMB, binary loss; timm's parts",
        "deit",
        ours="ours_third",
        theirs="theirs_third",
    ),
    "finetune": Row(
        "CIFAR-10 at twice the size, SGD, interpolated positions; timm's ViT", "finetune"
    ),
    "mae": Row(
        "CIFAR-10, a masked autoencoder; transformers' ViTMAEForPreTraining",
        "mae",
        judge="held_out",
        percent=False,
    ),
    "first_steps": Row(
        "200 photos, the first 100 steps of configs/deit.py: losses and norms; timm's DeiT",
        "first_steps",
        judge="loss",
        percent=False,
    ),
    "eomt": Row(
        "scenes of digits, EoMT; transformers' EomtForUniversalSegmentation",
        "eomt",
        judge="mean_iou",
    ),
    "dino": Row("CIFAR-10, DINO; lightly's head, loss and average, timm's ViT", "dino"),
}


def run(name: str, seeds: Sequence[int]) -> list[comparison.Check]:
    """The checks of a row."""
    row = ROWS[name]
    module = importlib.import_module(f"tests.parity.{row.module}")
    ours, theirs = getattr(module, row.ours), getattr(module, row.theirs)
    if not row.judge:
        return comparison.compare_draws(ours(seeds[0]), theirs(1000 + seeds[0]))
    # Theirs from other seeds: no draw is to be shared by chance.
    both = engines.samples(ours, seeds), engines.samples(theirs, [1000 + s for s in seeds])
    for whose, curves in zip(("ours", "theirs"), both, strict=True):
        print(f"{whose}\n{comparison.describe_curves(curves)}")
    return comparison.compare_curves(*both, judge=row.judge, percent=row.percent)


def versions() -> str:
    """The versions of the engines."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
