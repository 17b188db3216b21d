"""The state that a run continues from: that of its newest good checkpoint, on the hosts' local disks or
in the workdir, or else the first.
"""

import dataclasses
import os
from collections.abc import Collection, Mapping

import jax
import numpy as np
from absl import logging

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import fingerprints, saving, tiers
from vit_jax.checkpoints.lora import BASE
from vit_jax.config import Config
from vit_jax.interchange import fitting, formats, loading, saved_objectives, tensors_by_name
from vit_jax.models import registry
from vit_jax.models.lora import ADAPTERS
from vit_jax.models.registry import Weights
from vit_jax.objectives.networks import OWN, model_part
from vit_jax.training import state as states
from vit_jax.training.assembly import Assembly
from vit_jax.training.guards import changed_fields
from vit_jax.training.state import TrainState
from vit_jax.training.upkeep.clock import KINDS


@dataclasses.dataclass
class Start:
    """Finds or makes the state to continue from; asked again after a rollback.

    Attributes:
      assembly, checkpoints: of the run.
      tier: the run's local checkpoints, if it has any.
      description: of the run as it is now.
      like: shapes, dtypes and shardings of the state.
      saved: the description of the checkpoint that was restored, or what stands for it in a new
        run.
    """

    assembly: Assembly
    checkpoints: saving.Checkpoints
    tier: tiers.LocalTier | None
    description: dict
    like: TrainState
    saved: dict = dataclasses.field(init=False)

    def __call__(self) -> TrainState:
        """The state.

        Raises:
          ConfigError: the run in the workdir is a different one.
          CheckpointError: there are checkpoints, and none can be read; or the one to start from.
        """
        self.saved = {"seconds": 0.0, "goodput": dict.fromkeys(KINDS, 0.0), "best": None}
        restored = self.checkpoints.restore_latest(
            self.like.parts(), self._check_same_run, self._restored_locally
        )
        if restored:
            step, parts = restored
            logging.info("resumed at step %d of %d", step, self.assembly.total_steps)
            state = self.like.with_parts(parts)
            if state.base is not None:
                state = state.replace(base=_split(self.assembly, _weights(self.assembly, state))[0])
        else:
            state = states.create(self.assembly.init, self.assembly.config.seed, self.like)
            if self.assembly.config.init_from:
                state = start_from(self.assembly, state)
            state = _with_anchor(self.assembly, state)
        self._check_base(state)
        return self._with_teacher(state)

    def _restored_locally(self, steps: list[int]) -> tuple[int, dict] | None:
        """The state on local disks, if it is newer than the good checkpoints of `steps` in the workdir."""
        if self.tier is None:
            return None
        newest = max(steps, default=0)
        return self.tier.restore(newest, lambda saved: self._check_local(saved, steps))

    def _check_base(self, state: TrainState) -> None:
        """Notes where the base below adapters is, and its fingerprint.

        Raises:
          ConfigError: it has other weights than that which the adapters were trained for.
        """
        if state.base is None:
            return
        path, base = self.assembly.config.init_from, Weights(state.base, {})
        saved = self.saved.get(BASE)
        if saved and not fingerprints.is_digest_of(saved["digest"], base):
            raise ConfigError(
                f"config.init_from = {path} has other weights than the base that the adapters of this run were "
                "trained for: put that back, or use another --workdir"
            )
        if os.path.exists(path):
            path = os.path.abspath(path)
        self.description[BASE] = {"path": path, "digest": fingerprints.digest(base)}

    def _check_same_run(self, saved: dict) -> None:
        """Raises `ConfigError` if the saved run is a different one."""
        if saved.get("pixels") != self.description["pixels"] and jax.process_index() == 0:
            logging.warning(
                "images are decoded and resized by other code than before: crops of the same images differ "
                "slightly from those that this run began with"
            )
        check_same_run(self.assembly.config, saved, self.description)
        self.saved |= {"window": []} | saved  # which an earlier version did not save

    def _check_local(self, saved: dict, steps: list[int]) -> None:
        """Raises `ConfigError` unless the run can continue from a local checkpoint, beside those of
        `steps` in the workdir, which are not known to be damaged.
        """
        best = saved["best"] if self.assembly.config.checkpoint.best else None
        if best and best["step"] not in steps:
            raise ConfigError(f"the best checkpoint, of step {best['step']}, was not saved whole")
        self._check_same_run(saved)

    def _with_teacher(self, state: TrainState) -> TrainState:
        """`state` with the weights of a fixed teacher, which are not saved with it."""
        teacher = self.assembly.networks.teacher
        if teacher is None:
            return state
        weights = loading.fit_weights(
            formats.read_checkpoint(teacher.path, hints=vars(teacher.config)),
            self.like.frozen_teacher,
            teacher.config,
            where="config.objective.teacher",
        )
        saved = self.saved.get("teacher")
        if saved and not fingerprints.is_digest_of(saved, weights):
            raise ConfigError(
                f"the teacher {teacher.path} has other weights than the one this run was started with: "
                "put that back, or use another --workdir"
            )
        self.description["teacher"] = fingerprints.digest(weights)
        return state.replace(frozen_teacher=weights)


def check_same_run(config: Config, saved: dict, description: dict) -> None:
    """Raises `ConfigError` if the run that a checkpoint is of, `saved`, is another than `description`."""
    changed = changed_fields(saved, description)
    if not changed:
        return
    message = f"the config differs from the one this run was started with, in {'; '.join(changed)}"
    if config.checkpoint.on_config_change == "error":
        raise ConfigError(
            f"{message}. Use another --workdir, or --config.checkpoint.on_config_change=allow"
        )
    if jax.process_index() == 0:
        logging.warning("%s; continuing, as config.checkpoint.on_config_change says", message)


def check_fits(assembly: Assembly) -> None:
    """Raises `ConfigError` unless the weights of `config.init_from` fit the model; reads none of them."""
    like = registry.abstract_weights(assembly.model_config)[1]
    loading.check_fit(_read(assembly), like, assembly.model_config, **_init_options(assembly))
    _own_reset(assembly, assembly.networks.abstract_own())


def _read(assembly: Assembly) -> formats.LoadedCheckpoint:
    """The checkpoint of `config.init_from`, its arrays unread."""
    return formats.read_checkpoint(assembly.config.init_from, hints=vars(assembly.model_config))


def _init_options(assembly: Assembly) -> dict:
    """How the weights of `config.init_from` are fitted."""
    config = assembly.config
    return {
        "reset": fitting.model_patterns(config.init_reset, assembly.model_config),
        "resize": config.init_resize,
        "init_channels": config.init_channels,
    }


def _own_reset(assembly: Assembly, like: Weights) -> tuple[set[str], dict[str, np.ndarray]]:
    """What `config.init_reset` names of the objective's own, see `patterns.select`.

    Raises:
      ConfigError: a pattern for what the objective owns selects nothing.
    """
    shapes = {f"{OWN}/{n}": x.shape for n, x in patterns.named(patterns.union(*like)).items()}
    return patterns.select(
        fitting.objective_patterns(assembly.config.init_reset), shapes, "config.init_reset"
    )


def start_from(assembly: Assembly, state: TrainState) -> TrainState:
    """`state` with the weights of `config.init_from` in place of the new ones, except those to reset; those that
    the objective owns too, if the checkpoint has them.
    """
    variables = dict(state.variables)
    own = Weights(state.params.get(OWN, {}), variables.get(OWN, {}))
    if jax.tree.leaves(own):
        own = own_weights(assembly, own)
    weights = _weights(assembly, state)
    base, params = _split(assembly, weights)
    new = {name: tree for name, tree in state.params.items() if name == ADAPTERS}
    params = ({OWN: own.params} if OWN in state.params else {}) | new | params
    for owner, tree in {"model": weights.variables, OWN: own.variables}.items():
        if tree:
            variables[owner] = tree
            if "teacher" in variables:
                theirs = variables["teacher"]
                copy = {owner: states.copied(tree, theirs[owner])}
                variables["teacher"] = theirs | copy
    if weights.variables and "ema" in variables:
        variables["ema"] = states.copied(weights.variables, variables["ema"])
    # Copies: the parameters' own buffers are donated to the step.
    return state.replace(
        params=params,
        base=base,
        ema=None if state.ema is None else states.copied(params, state.ema),
        teacher=None if state.teacher is None else states.copied(params, state.teacher),
        variables=variables,
    )


def _with_anchor(assembly: Assembly, state: TrainState) -> TrainState:
    """A new run's state with the earlier weights that the objective needs, if it does."""
    anchor = assembly.networks.objective.anchor()
    if anchor is None:
        return state
    params = model_part(state.params)
    if anchor.path:
        like = Weights(params, state.variables.get("model", {}))
        how = {"reset": None, "resize": assembly.config.init_resize, "where": anchor.option}
        checkpoint = formats.read_checkpoint(anchor.path, hints=vars(assembly.model_config))
        params = loading.fit_weights(checkpoint, like, assembly.model_config, **how).params
    # Copies: the parameters' own buffers are donated to the step.
    earlier = states.copied(params, state.variables[states.ANCHOR])
    return state.replace(variables=state.variables | {states.ANCHOR: earlier})


def _weights(assembly: Assembly, state: TrainState) -> Weights:
    """The model of `config.init_from`, fitted to the run's, in the places of the state's; what is to be reset
    is the state's.
    """
    of_model = {n: tree for n, tree in state.params.items() if n not in (OWN, ADAPTERS)}
    return loading.fit_weights(
        _read(assembly),
        Weights(patterns.union(state.base or {}, of_model), state.variables.get("model", {})),
        assembly.model_config,
        **_init_options(assembly),
    )


def _split(assembly: Assembly, weights: Weights) -> tuple[dict | None, dict]:
    """The base below adapters, if there are any, and what is trained of a model."""
    split = assembly.networks.adapters
    return split.split(weights.params) if split else (None, weights.params)


def own_weights(assembly: Assembly, new: Weights) -> Weights:
    """What the objective owns: the arrays of `config.init_from` that it continues with, the others new. What is
    taken and what is re-initialised, and why, is logged.

    Args:
      new: newly initialised.
    """
    config, objective = assembly.config, assembly.networks.objective
    saved = saved_objectives.find_saved(_read(assembly), type(objective), vars(objective.options))
    arrays = patterns.union(*new)
    if saved is None:
        taken, reset = {}, dict.fromkeys(patterns.names(arrays), "not in the checkpoint")
    else:
        taken, reset = objective.own_from(saved, new)
    to_reset, layers = _own_reset(assembly, new)
    for name in list(taken):
        if f"{OWN}/{name}" in to_reset:
            taken.pop(name)
            reset[name] = "config.init_reset"
    logging.info("config.init_from: %s", _summary(config.objective.name, taken, reset))
    layers = {n: mask for n, mask in layers.items() if n.removeprefix(f"{OWN}/") in taken}
    found = fitting.take(
        {OWN: arrays},
        {f"{OWN}/{name}": array for name, array in taken.items()},
        {f"{OWN}/{name}" for name in reset},
        layers,
        is_logged=False,
    )
    return tensors_by_name.divided(found[OWN], new)


def _summary(objective: str, taken: Collection[str], reset: Mapping[str, str]) -> str:
    """What an objective continues with, and what is re-initialised, in words."""
    parts = [f"of what the objective {objective} owns"]
    if taken:
        parts.append(f"{', '.join(taken)} continue as they are in the checkpoint")
    for why in dict.fromkeys(reset.values()):
        names = ", ".join(name for name, reason in reset.items() if reason == why)
        parts.append(f"{names} re-initialised ({why})")
    return f"{parts[0]}, {'; '.join(parts[1:])}"
