"""The schema of a run: every field of the config, its default and what it does.

Recipes live in `configs/`; each starts from `default_config()`, a `ConfigDict`, and says what
differs. When that is checked, code gets a frozen `Config`. The options of data, model families and
objectives are declared beside their code and joined here, so that a new one needs no edit in this
file, even one that a recipe registers.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from ml_collections import ConfigDict

from vit_jax import objectives
from vit_jax.base import durations, places, schema
from vit_jax.base.schema import option, section
from vit_jax.base.sections import ConfigSection, RootConfig
from vit_jax.data.options import Augment, Data, Pseudo
from vit_jax.devices.meshes import MeshOptions as Mesh
from vit_jax.models import classifier
from vit_jax.models import registry as models
from vit_jax.optim.options import Optim

if TYPE_CHECKING:
    from vit_jax.annotations import RunConfig

# The value of `init_from` in a recipe that needs a checkpoint, until the user names one.
CHECKPOINT = "CHECKPOINT"


@dataclasses.dataclass(frozen=True)
class Lora:
    """Fine-tuning by low-rank adapters (LoRA) of a frozen model."""

    lora_rank: int = option(
        0,
        "rank of the adapters of the layers that lora_targets names; 0: none, the model is trained itself",
        minimum=0,
    )
    lora_targets: tuple = option(
        (".*/query", ".*/value"),
        "patterns of the layers with adapters: '.*/query', '.*/key', '.*/value', or names such as layers/mlp/up",
        when={"lora_rank": bool},
    )
    also: tuple = option(
        (classifier.HEADS,),
        "patterns of the parameters that are trained beside the adapters",
        when={"lora_rank": bool},
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
        "(): accuracy, or of what is learned without labels the loss",
    )
    best: str = option(
        "",
        "the metric by which models are compared, e.g. knn/accuracy; METRIC:min or METRIC:max where "
        "its evaluator does not say which is good; '': the main metric of the first evaluator",
    )
    patience: int = option(
        0,
        "early stopping: end the run after this many evaluations without a better one; 0: never",
        minimum=0,
    )
    thresholds: tuple = option(
        (),
        "of a model with sigmoids: how probable each class has to be to count as predicted, in the order of the "
        "classes; (): 0.5",
        minimum=0,
        maximum=1,
        role="answers",
    )
    target: float | None = option(
        None,
        "end the run at the first evaluation whose eval.best is as good as this, e.g. 0.6 of accuracy; "
        "not given: never",
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
        0.0, "also save when this many minutes have passed since the last save; 0: never", minimum=0
    )
    local: str = option(
        "",
        "folder on a local disk or RAM disk of each host for checkpoints that are saved more often; "
        "'': none",
        parse=places.local_folder,
    )
    local_every: str = option(
        "20 steps",
        "how often to save to checkpoint.local: steps, epochs, examples or %; 0: never",
        parse=durations.parse,
        when={"local": bool},
    )
    keep: int = option(3, "how many of the last are kept", minimum=1)
    best: bool = option(
        False, "also keep the checkpoint of the best evaluation (eval.best): WORKDIR/best"
    )
    keep_every: int = option(0, "steps divisible by this are kept forever; 0: none", minimum=0)
    keep_for_followers: int = option(
        10,
        "how many older checkpoints each `evaluate --follow` may hold until it has read them; 0: none",
        minimum=0,
    )
    max_failures: int = option(
        3, "how many consecutive saves may fail before the run ends with an error", minimum=1
    )
    commit_minutes: float = option(
        5.0,
        "how long the first process may take to merge and commit what all processes have written",
        minimum=0,
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
        "how often images of the batch are written to TensorBoard as the model sees them, with masks if they have any; "
        "0: never",
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
        "project of Weights & Biases where metrics go too (extra 'wandb' of the installation); '': nowhere",
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
        0.0,
        "a loss this many times the running mean of its absolute value counts as a bad step; 0: off",
        minimum=0,
    )
    memory: int = option(
        100,
        "length of the running mean in steps; as many steps at the beginning are never spikes",
        minimum=1,
        when={"factor": bool},
    )


@dataclasses.dataclass(frozen=True)
class Reference:
    """A curve of earlier runs, with which every evaluation is compared."""

    curve: str = option(
        "", "name of a curve in the package, path of a curve's file or of a run; '': none"
    )
    stop_below: float = option(
        0.0,
        "end the run this many points (of %) below the curve and its seeds, on average of 3 evaluations; 0: never",
        minimum=0,
        when={"curve": bool},
    )
    stop_after: str = option(
        "10%",
        "stop_below: how much of the run is let pass before",
        parse=durations.parse,
        when={"curve": bool},
    )


@dataclasses.dataclass(frozen=True)
class Hosts:
    """What ends a run that hangs, so that it can be started again; with several processes, all of
    them.
    """

    heartbeat_seconds: int = option(
        60, "a process without a heartbeat for this long is considered dead", minimum=5
    )
    wait_minutes: float = option(
        20.0, "how long processes wait for each other at a barrier", minimum=0
    )
    step_minutes: float = option(
        20.0,
        "without a step for this long: print the stacks of all threads and exit with 42; 1e6: practically never",
        minimum=0,
    )
    other_minutes: float = option(
        60.0, "the same for compiling, restoring, saving, and one batch of an evaluation", minimum=0
    )


@dataclasses.dataclass(frozen=True)
class Audit:
    """How often devices are checked for wrong bits and wrong results."""

    every: int = option(
        100,
        "steps between audits, which compare every copy of the state; also before each save; 0: never",
        minimum=0,
    )
    differing: str = option(
        "rollback",
        "what copies that differ after steps may have used them do: rollback: restore the last checkpoint; majority: "
        "most copies replace the others, and the run continues",
        choices=("rollback", "majority"),
        when={"every": bool},
    )
    replay_every: int = option(
        0,
        "steps between replays, in which two devices compute the gradient of the same images; 0: never",
        minimum=0,
    )
    checker_every: int = option(
        0,
        "TPUs: steps between those that run libtpu's checker, which computes everything twice; 0: never",
        minimum=0,
    )
    most: int = option(
        3, "how often a host may be at fault before the run ends with exit code 42", minimum=1
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
        "10 epochs",
        "how long to train: steps, epochs or examples; '4 epochs, at least 300 steps' is the longer of two",
        parse=durations.parse,
    )
    batch_size: int = option(128, "examples in a step, over all devices and hosts", minimum=1)
    accumulate: int = option(
        1,
        "gradient accumulation: parts that a batch is split into, computed one after the other to save memory",
        minimum=1,
    )
    init_from: str = option(
        "", "checkpoint to start from: a run, a file that 'vit_jax show' knows, or hf://OWNER/NAME"
    )
    init_reset: tuple = option(
        (classifier.HEADS,),
        "init_from: patterns of parameters that are re-initialised; of some layers encoder/layers[-2:]/.*; what the "
        "objective owns begins with objective/",
        when={"init_from": bool},
    )
    init_resize: str = option(
        "scipy",
        "init_from: how position embeddings are resized; torch: as transformers does, dinov2: as DINOv2",
        choices=("scipy", "bilinear", "bicubic", "torch", "dinov2"),
        when={"init_from": bool},
    )
    init_channels: str = option(
        "error",
        "init_from: if the images have other channels than the checkpoint's; error: refuse; mean: each channel gets "
        "the mean of the checkpoint's kernels, scaled to the same sum",
        choices=("error", "mean"),
        may_change=True,
        when={"init_from": bool},
    )
    nonfinite: str = option(
        "stop",
        "what a non-finite loss or gradient, or a spike, does: stop: end the run; skip: skip the update; "
        "rollback: restore the last checkpoint and skip the data (rollback_skip)",
        choices=("stop", "skip", "rollback"),
        may_change=True,
    )
    max_skips: int = option(
        10,
        "nonfinite=skip: how many updates in a row are skipped before the run ends with an error",
        minimum=1,
        may_change=True,
        when={"nonfinite": ("skip",)},
    )
    rollback_skip: str = option(
        "1 step",
        "nonfinite=rollback: how much data is skipped, starting with the bad step's",
        parse=durations.parse,
        may_change=True,
        when={"nonfinite": ("rollback",)},
    )
    max_rollbacks: int = option(
        10,
        "nonfinite=rollback: how many rollbacks a run may have before it ends with an error",
        minimum=1,
        may_change=True,
        when={"nonfinite": ("rollback",)},
    )
    compilation_cache: str = option(
        "auto",
        "directory of compiled programs; only you should be able to write to it; auto: "
        "~/.cache/vit_jax/xla, or WORKDIR/compiled for several processes and in buckets; '': none",
        may_change=True,
    )
    deterministic: bool = option(
        False,
        "GPUs: only kernels that add in the same order every time, chosen without timing them, so that a restart gives "
        "the same bits; slower. CPUs and TPUs need no such option",
        may_change=True,
    )
    model: models.Name = section(models.Name)
    objective: objectives.Name = section(objectives.Name)
    data: Data = section(Data)
    pseudo: Pseudo = section(Pseudo)
    augment: Augment = section(Augment)
    optim: Optim = section(Optim)
    lora: Lora = section(Lora)
    mesh: Mesh = section(Mesh, may_change=True)
    eval: Eval = section(Eval, may_change=True)
    checkpoint: Checkpoint = section(Checkpoint, may_change=True)
    log: Log = section(Log, may_change=True)
    hosts: Hosts = section(Hosts, may_change=True)
    spike: Spike = section(Spike, may_change=True)
    audit: Audit = section(Audit, may_change=True)
    reference: Reference = section(Reference, may_change=True)


def config_class(config: ConfigDict | Mapping | None = None) -> type[Config]:
    """`Config` with the options of the model and the objective that a config names, and of others only if one of
    those is set; without a config, with those of every registered family and objective.

    Args:
      config: of this version or an earlier one, as a `ConfigDict` or as JSON has it.
    """
    if config is None:
        return _joined(models.Section.everything(), objectives.Section.everything())
    sections = [config.get(name) for name in ("model", "objective")]
    model, objective = (
        values if isinstance(values, ConfigDict | dict) else {} for values in sections
    )
    return _joined(models.Section.declared(model), objectives.Section.declared(objective))


@functools.cache
def _joined(model: type, objective: type) -> type[Config]:
    fields = [
        ("model", model, section(model, kind=models.Section)),
        ("objective", objective, section(objective, kind=objectives.Section)),
    ]
    return dataclasses.make_dataclass("Config", fields, bases=(Config,), frozen=True)


def default_config() -> "RunConfig":
    """The config of which every recipe says what differs; locked. `config.model` has the options of the default's
    family, until another is named.
    """
    names = {"model": vars(models.Name()), "objective": vars(objectives.Name())}
    return cast("RunConfig", schema.to_config(config_class(names), RootConfig, ConfigSection))
