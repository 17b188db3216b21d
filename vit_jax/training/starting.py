"""The state that a run continues from: that of its newest good checkpoint, on the hosts' local disks or
in the workdir, or else the first.
"""

import dataclasses
import os

import jax
from absl import logging

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import fingerprints, saving, tiers
from vit_jax.checkpoints.lora import BASE
from vit_jax.config import Config
from vit_jax.interchange import fitting, formats, loading
from vit_jax.interchange.conversions import mae as mae_decoder
from vit_jax.models import registry
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.lora import ADAPTERS
from vit_jax.models.registry import Weights
from vit_jax.objectives import mae
from vit_jax.objectives.contract import Objective
from vit_jax.objectives.networks import OWN, model_part
from vit_jax.training import state as states
from vit_jax.training.assembly import Assembly
from vit_jax.training.guards import changed_fields, few_other_images
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
        newest = max(self.checkpoints.steps(), default=0)
        restored = self._restored(newer_than=newest)
        if self.tier and restored and (step := restored[0]) < newest:
            # That of `newest` was damaged: local disks may have a newer one than what is before it.
            restored = None  # Devices need not hold both.
            restored = self._restored(newer_than=step)
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

    def _restored(self, newer_than: int) -> tuple[int, dict] | None:
        """A step and its state: from local disks if they have one above `newer_than`, else from the workdir."""
        if self.tier:
            steps = self.checkpoints.steps()
            restored = self.tier.restore(newer_than, lambda saved: self._check_local(saved, steps))
            if restored:
                return restored
        return self.checkpoints.restore_latest(self.like.parts(), self._check_same_run)

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
        `steps` in the workdir.
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
        weights = loading.weights_from(
            teacher.path, self.like.fixed, teacher.config, where="config.objective.teacher"
        )
        saved = self.saved.get("teacher")
        if saved and not fingerprints.is_digest_of(saved, weights):
            raise ConfigError(
                f"the teacher {teacher.path} has other weights than the one this run was started with: "
                "put that back, or use another --workdir"
            )
        self.description["teacher"] = fingerprints.digest(weights)
        return state.replace(fixed=weights)


def check_same_run(config: Config, saved: dict, description: dict) -> None:
    """Raises `ConfigError` if the run that a checkpoint is of, `saved`, is another than `description`."""
    if (few := few_other_images(saved, description)) and jax.process_index() == 0:
        logging.warning("%s", few)
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
    loading.check_weights(
        assembly.config.init_from, like, assembly.model_config, **_init_options(assembly)
    )


def _init_options(assembly: Assembly) -> dict:
    """How the weights of `config.init_from` are fitted."""
    config = assembly.config
    # Without a head there is nothing to name: one in the checkpoint is skipped, if it has one.
    headless = not assembly.model_config.num_classes
    return {
        "reset": None if headless and not config.init_reset else config.init_reset,
        "resize": config.init_resize,
        "init_channels": config.init_channels,
    }


def start_from(assembly: Assembly, state: TrainState) -> TrainState:
    """`state` with the weights of `config.init_from` in place of the new ones, except those to reset;
    what the objective owns stays new, unless the checkpoint has that too.
    """
    config = assembly.config
    own = {
        name: objective_params(
            assembly.networks.objective, config.init_from, assembly.model_config, tree
        )
        for name, tree in state.params.items()
        if name == OWN
    }
    weights, variables = _weights(assembly, state), dict(state.variables)
    base, params = _split(assembly, weights)
    new = {name: tree for name, tree in state.params.items() if name == ADAPTERS}
    params = own | new | params
    if weights.variables:
        variables["model"] = weights.variables
        if "ema" in variables:
            variables["ema"] = states.copied(weights.variables, variables["ema"])
        if "teacher" in variables:
            of_model = states.copied(weights.variables, variables["teacher"]["model"])
            variables["teacher"] = variables["teacher"] | {"model": of_model}
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
        params = loading.weights_from(anchor.path, like, assembly.model_config, **how).params
    # Copies: the parameters' own buffers are donated to the step.
    earlier = states.copied(params, state.variables[states.ANCHOR])
    return state.replace(variables=state.variables | {states.ANCHOR: earlier})


def _weights(assembly: Assembly, state: TrainState) -> Weights:
    """The model of `config.init_from`, fitted to the run's, in the places of the state's; what is to be reset
    is the state's.
    """
    of_model = {n: tree for n, tree in state.params.items() if n not in (OWN, ADAPTERS)}
    return loading.weights_from(
        assembly.config.init_from,
        Weights(patterns.union(state.base or {}, of_model), state.variables.get("model", {})),
        assembly.model_config,
        **_init_options(assembly),
    )


def _split(assembly: Assembly, weights: Weights) -> tuple[dict | None, dict]:
    """The base below adapters, if there are any, and what is trained of a model."""
    split = assembly.networks.adapters
    return split.split(weights.params) if split else (None, weights.params)


def objective_params(
    objective: Objective, location: str, model: ClassifierConfig, own: dict
) -> dict:
    """The parameters that an objective owns: those of a checkpoint if it has them (MAE's decoder), else `own`.

    Args:
      objective: of the run.
      location: of the checkpoint, in any format.
      model: of the run.
      own: newly initialised.
    """
    if not isinstance(objective, mae.Mae):
        return own
    found = mae_decoder.decoder_in(
        formats.read_checkpoint(location, hints=vars(model)), objective.options.heads
    )
    if found is None:
        return own
    shapes = [jax.tree.map(lambda x: tuple(x.shape), tree) for tree in (found.params, own)]
    if shapes[0] != shapes[1]:
        logging.info("the decoder in the checkpoint has another size: it is re-initialised")
        return own
    logging.info("the decoder is the checkpoint's")
    return jax.tree.map(fitting.placed, found.params, own)
