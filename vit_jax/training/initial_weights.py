"""The weights that a run takes from the checkpoints of others: of `config.init_from`, of a fixed teacher, and of what
an objective's Gram teacher starts from. A run that names none of them does not import this.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np
from absl import logging
from flax import nnx

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import fingerprints
from vit_jax.data.labels.classes import are_numbers
from vit_jax.interchange import fitting, formats, loading, saved_objectives, tensors_by_name
from vit_jax.interchange.kept_heads import with_rows_by_name
from vit_jax.models import classifier, registry
from vit_jax.models.lora import ADAPTERS
from vit_jax.models.registry import Weights
from vit_jax.objectives.contract import GramTeacher, Objective
from vit_jax.objectives.networks import OWN, FixedTeacher
from vit_jax.training import state as states
from vit_jax.training.assembly import Assembly
from vit_jax.training.state import TrainState


def check_fits(assembly: Assembly, classes: Sequence[str] = ()) -> None:
    """Raises `ConfigError` unless the weights of `config.init_from` fit the model; reads none of them.

    Args:
      classes: names of those of the data; () if they are not known.
    """
    like = registry.abstract_weights(assembly.model_config)[1]
    checkpoint = _for_classes(assembly, read_checkpoint(assembly), classes, is_logged=True)
    loading.check_fit(checkpoint, like, assembly.model_config, **_init_options(assembly))
    _own_reset(assembly, assembly.networks.abstract_modules())


def read_checkpoint(assembly: Assembly) -> formats.LoadedCheckpoint:
    """The checkpoint of `config.init_from`, its arrays unread."""
    return formats.read_checkpoint(assembly.config.init_from, hints=vars(assembly.model_config))


def _for_classes(
    assembly: Assembly,
    checkpoint: formats.LoadedCheckpoint,
    classes: Sequence[str],
    *,
    is_logged: bool,
) -> formats.LoadedCheckpoint:
    """The checkpoint of `config.init_from` with a head for the classes of the data, if it is kept."""
    reset = _init_options(assembly)["reset"]
    of_head = classes if assembly.model_config.num_classes else ()
    fitted = with_rows_by_name(checkpoint, of_head, reset, is_logged=is_logged)
    adapters = assembly.networks.adapters
    if fitted is not checkpoint and adapters:
        in_base = patterns.names(adapters.split(checkpoint.params)[0])
        if patterns.matching([classifier.HEADS], in_base):
            raise ConfigError(
                "the data has other classes than the checkpoint of config.init_from, and config.lora.also does not "
                "train the head: name it there (\"('head/.*',)\")"
            )
    return fitted


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


def start_from(assembly: Assembly, state: TrainState, classes: Sequence[str] = ()) -> TrainState:
    """`state` with the weights of `config.init_from` in place of the new ones, except those to reset; those that
    the objective owns too, if the checkpoint has them.

    Args:
      classes: names of those of the data; () if they are not known.
    """
    variables, checkpoint = dict(state.variables), read_checkpoint(assembly)
    own = Weights(state.params.get(OWN, {}), variables.get(OWN, {}))
    if jax.tree.leaves(own):
        own = module_weights(assembly, checkpoint, own, classes)
    checkpoint = _for_classes(assembly, checkpoint, classes, is_logged=False)
    weights = _weights(assembly, checkpoint, state)
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


def base_of(assembly: Assembly, state: TrainState) -> dict | None:
    """The frozen base below the adapters of a state, read again, since it is not saved with them."""
    return _split(assembly, _weights(assembly, read_checkpoint(assembly), state))[0]


def teacher_weights(teacher: FixedTeacher, like: Weights, saved: str = "") -> tuple[Weights, str]:
    """The weights of a fixed teacher, in the places and types of `like`, and their fingerprint, which is that of the
    weights as they were read.

    Args:
      saved: the fingerprint that the run was started with; '' in a new run.

    Raises:
      ConfigError: they have another.
    """
    checkpoint = formats.read_checkpoint(teacher.path, hints=vars(teacher.config))
    whole = registry.abstract_weights(teacher.config)[1]
    exact = jax.tree.map(
        lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y.sharding), whole, like
    )
    weights = loading.fit_weights(checkpoint, exact, teacher.config, where=teacher.option)
    digest = fingerprints.digest(weights)
    if saved not in ("", digest) and not fingerprints.is_digest_of(saved, weights):
        raise ConfigError(
            f"the teacher {teacher.path} has other weights than the one this run was started with: put that back, "
            "or use another --workdir"
        )
    return _rounded(weights, like), digest


def _rounded(weights: Weights, like: Weights) -> Weights:
    """`weights` in the types and shardings of `like`."""
    cast = lambda tree: jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)  # noqa: E731
    types, wanted = (jax.tree.map(lambda x: x.dtype, tree) for tree in (weights, like))
    if types == wanted:
        return weights
    return jax.jit(cast, out_shardings=states.shardings_of(like))(weights)


def gram_teacher_params(assembly: Assembly, gram_teacher: GramTeacher, like: Weights) -> dict:
    """The parameters that an objective's Gram teacher starts from, with the shardings of `like`."""
    options = {"reset": None, "resize": assembly.config.init_resize, "where": gram_teacher.option}
    checkpoint = formats.read_checkpoint(gram_teacher.path, hints=vars(assembly.model_config))
    return loading.fit_weights(checkpoint, like, assembly.model_config, **options).params


def _weights(
    assembly: Assembly, checkpoint: formats.LoadedCheckpoint, state: TrainState
) -> Weights:
    """The model of `checkpoint`, fitted to the run's, in the places of the state's; what is to be reset
    is the state's.
    """
    of_model = {n: tree for n, tree in state.params.items() if n not in (OWN, ADAPTERS)}
    return loading.fit_weights(
        checkpoint,
        Weights(patterns.union(state.base or {}, of_model), state.variables.get("model", {})),
        assembly.model_config,
        **_init_options(assembly),
    )


def _split(assembly: Assembly, weights: Weights) -> tuple[dict | None, dict]:
    """The base below adapters, if there are any, and what is trained of a model."""
    split = assembly.networks.adapters
    return split.split(weights.params) if split else (None, weights.params)


def module_weights(
    assembly: Assembly,
    checkpoint: formats.LoadedCheckpoint,
    new: Weights,
    classes: Sequence[str] = (),
) -> Weights:
    """What the objective owns: the arrays of a checkpoint that it continues with, the others new. What is taken and
    what is re-initialised, and why, is logged.

    Args:
      checkpoint: that of `config.init_from`.
      new: newly initialised.
      classes: names of those of the data; () if they are not known.
    """
    config, objective = assembly.config, assembly.networks.objective
    saved = saved_objectives.find_saved(checkpoint, type(objective), vars(objective.options))
    arrays = patterns.union(*new)
    if saved is None:
        taken, reset = {}, dict.fromkeys(patterns.names(arrays), "not in the checkpoint")
    else:
        taken, reset = objective.continue_from(saved, new)
    if _are_other_classes(checkpoint.classes or (), classes):
        for name in _arrays_of_classes(objective) & taken.keys():
            taken.pop(name)
            reset[name] = "the data has other classes"
    to_reset, layers = _own_reset(assembly, new)
    for name in list(taken):
        if f"{OWN}/{name}" in to_reset:
            taken.pop(name)
            reset[name] = "config.init_reset"
    logging.info("config.init_from: %s", _summary(config.objective.name, taken, reset))
    layers = {n: mask for n, mask in layers.items() if n.removeprefix(f"{OWN}/") in taken}
    loaded = fitting.take(
        {OWN: arrays},
        {f"{OWN}/{name}": array for name, array in taken.items()},
        {f"{OWN}/{name}" for name in reset},
        layers,
        is_logged=False,
    )
    return tensors_by_name.divided(loaded[OWN], new)


def _are_other_classes(own: Sequence[str], classes: Sequence[str]) -> bool:
    """Whether two lists of classes have names, and these differ."""
    lists = tuple(own), tuple(classes)
    return lists[0] != lists[1] and not any(not names or are_numbers(names) for names in lists)


def _arrays_of_classes(objective: Objective) -> set[str]:
    """The names of what an objective owns that has a place for each class: its shape would be another for one more."""
    context = objective.context
    if not context.num_classes:
        return set()
    more = dataclasses.replace(context, num_classes=context.num_classes + 1)
    other = _own_shapes(type(objective)(objective.options, more))
    return {name for name, shape in _own_shapes(objective).items() if shape != other[name]}


def _own_shapes(objective: Objective) -> dict[str, tuple[int, ...]]:
    """The shapes of what an objective owns, by name."""
    modules = nnx.eval_shape(lambda: objective.make_modules(registry.Rngs(0)))
    arrays = patterns.union(*registry.split(modules)[1])
    return {name: x.shape for name, x in patterns.named(arrays).items()}


def _summary(objective: str, taken: Collection[str], reset: Mapping[str, str]) -> str:
    """What an objective continues with, and what is re-initialised, in words."""
    parts = [f"of what the objective {objective} owns"]
    if taken:
        parts.append(f"{_modules(taken, reset)} continue as they are in the checkpoint")
    for why in dict.fromkeys(reset.values()):
        names = [name for name, reason in reset.items() if reason == why]
        others = [*taken, *(name for name in reset if name not in names)]
        parts.append(f"{_modules(names, others)} re-initialised ({why})")
    return f"{parts[0]}, {'; '.join(parts[1:])}"


def _modules(names: Collection[str], others: Collection[str]) -> str:
    """Names of arrays, a module's as one where all of its arrays are among them: 'text' for 'text/position', …"""
    split = {name.partition("/")[0] for name in others}
    first = ((name.partition("/")[0], name) for name in names)
    return ", ".join(dict.fromkeys(name if top in split else top for top, name in first))
