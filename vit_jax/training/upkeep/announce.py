"""The log messages of a run at its start and its end, and the recipe that it keeps in its workdir. Messages during
training are in `progress.py` and `writers.py`.
"""

import json
import os
import socket
from collections.abc import Iterable, Iterator

import jax
from absl import logging
from clu import parameter_overview
from etils import epath

from vit_jax.base import durations, patterns, places, sizes
from vit_jax.checkpoints.reading import RECIPE
from vit_jax.compute import choices
from vit_jax.config import Config
from vit_jax.data import sources, splits, views
from vit_jax.data.options import Data
from vit_jax.data.record import Source
from vit_jax.devices import gpus, meshes, processes
from vit_jax.devices import local as host
from vit_jax.evaluation import Suite
from vit_jax.evaluation.contract import Evaluator, held_out
from vit_jax.models import naming, registry
from vit_jax.optim.options import is_of_matrices
from vit_jax.optim.unreached import find_unreached
from vit_jax.recipes import user_files
from vit_jax.training.assembly import Assembly
from vit_jax.training.upkeep.clock import KINDS, Clock


def announce(
    assembly: Assembly, source: Source, suite: Suite, params: dict, workdir: epath.Path
) -> None:
    """Logs a summary of the run before it starts, where the mesh is set.

    Args:
      assembly: the run.
      source: the examples to train on.
      suite: the evaluators.
      params: shapes and shardings of the parameters.
      workdir: of the run.
    """
    config = assembly.config
    mesh = jax.sharding.get_mesh()
    if config.log.parameters and jax.process_index() == 0:
        table = parameter_overview.get_parameter_overview(params, include_stats="sharding")
        logging.info("parameters:\n%s", table)
    for line in lines(assembly, len(source), suite):
        logging.info("%s", line)
    for warning in (*warnings(config, len(source)), *unreached_options(assembly, params)):
        logging.warning("%s", warning)
    announce_devices(mesh)
    logging.info("%s", choices.summarize(assembly.model_config, mesh))
    every = config.checkpoint.every
    when = "at the end" if assembly.to_steps(every) == 0 else f"every {every} and at the end"
    logging.info("checkpoints %s in %s/checkpoints; metrics beside them", when, workdir)


def warnings(config: Config, examples: int) -> list[str]:
    """Warnings about settings that may be mistakes: a batch larger than the number of examples, and evaluation on
    training images.
    """
    sentences = []
    if config.batch_size > examples:
        sentences.append(
            f"config.batch_size = {config.batch_size} is more than the {examples} images to train on, so that a step "
            "sees some of them more than once: set a smaller one, or take a recipe for some thousand photos "
            "(configs/finetune.py:photos)"
        )
    data = config.data
    if splits.overlap(data.train_split, data.eval_split):
        sentences.append(
            f"config.data.eval_split = {data.eval_split!r} has images of config.data.train_split = "
            f"{data.train_split!r}: what is measured on training images does not tell how good the model is on others"
        )
    return sentences


def unreached_options(assembly: Assembly, params: dict) -> list[str]:
    """A sentence for each option of the optimizer that changes none of the parameters that are trained.

    Args:
      assembly: the run.
      params: shapes of the parameters of its state.
    """
    model = assembly.model_config
    by_name = patterns.named(params)
    shapes = {name: param.shape for name, param in by_name.items()}
    return find_unreached(assembly.config.optim, shapes, model.layers, model.inputs)


def announce_devices(mesh: jax.sharding.Mesh) -> None:
    """Logs the devices of the run and the cores of this process, and warns of too few of these and of GPUs
    that stay unused.
    """
    axis_sizes = meshes.sizes_of(mesh)
    axes = " x ".join(f"{axis} {size}" for axis, size in axis_sizes.items())
    local = f"{len(mesh.local_devices)} local of " if processes.count() > 1 else ""
    kind = mesh.devices.flat[0].device_kind
    cores = host.own_cores()
    logging.info("devices: %s%d x %s, mesh %s; cores: %d", local, mesh.size, kind, axes, cores)
    if warning := host.warn_of_few_cores(cores, mesh.local_devices):
        logging.warning("%s", warning)
    if not gpus.wanted(os.environ):
        return
    used = sum(device.platform == "gpu" for device in mesh.local_devices)
    use = gpus.describe_use(socket.gethostname(), used, os.environ, gpus.on_node())
    of_processes = processes.gather("devices", json.dumps(use))
    uses = [json.loads(text) for text in of_processes]
    for node, (used, available) in gpus.find_unused(uses).items():
        from vit_jax.base.install import pip_install

        logging.warning(
            "%s: the run uses %d of the node's %d GPUs. One process on each node uses all of them, and "
            "so does one for each GPU; JAX needs %s", node, used, available, pip_install("cuda13"),
        )  # fmt: skip


def lines(assembly: Assembly, examples: int, suite: Suite | None) -> list[str]:
    """The model, the data and the length of a run, a line each.

    Args:
      assembly: the run.
      examples: to train on.
      suite: the evaluators, where the data is at hand.
    """
    count = registry.count_parameters(assembly.model_config)
    sentences = [
        _model_line(assembly, count),
        _data_line(assembly.config.data, examples, suite),
        _training_line(assembly, examples),
        *_sizes(assembly),
        *_adapted(assembly, count),
        *_matrices(assembly),
    ]
    if assembly.evaluated == "ema":
        sentences.append("averaged parameters are evaluated, exported and loaded")
    return sentences


def _model_line(assembly: Assembly, count: int) -> str:
    """The model, with its `count` parameters."""
    config = assembly.config
    model = assembly.model_config
    name = naming.full_name(model, config.model.name)
    pixels = sizes.size_text(model.image_size)
    classes = f", {assembly.num_classes:,} classes" if assembly.num_classes else ""
    start = f", starting from {config.init_from}" if config.init_from else ""
    return f"model: {name}, {count:,} parameters, images of {pixels} pixels{classes}{start}"


def _data_line(data: Data, examples: int, suite: Suite | None) -> str:
    """The data, with its `examples` to train on; data sets of the same size are named once."""
    where = f" ({data.path})" if data.path else ""
    phrases = [f"data: {data.name}{where}, {examples:,} images to train on ({data.train_split})"]
    for evaluator in _evaluators(suite):
        held = held_out(evaluator)
        if held is not None:
            phrases.append(f"{len(held):,} to evaluate on ({data.eval_split})")
    return ", ".join(dict.fromkeys(phrases))


def _training_line(assembly: Assembly, examples: int) -> str:
    """The length of the run, its objective and its optimizer."""
    config = assembly.config
    steps = assembly.total_steps
    per_step = views.images_per_step(config)
    epochs = steps * per_step / examples
    return (
        f"training: {steps:,} steps of {per_step:,.6g} images ({epochs:.3g} epochs), objective "
        f"{config.objective.name}, optimizer {config.optim.name}, learning rate {config.optim.lr:g}"
    )


def _matrices(assembly: Assembly) -> list[str]:
    """The preconditioned matrices, where the optimizer has such."""
    if not is_of_matrices(assembly.config.optim.name):
        return []
    from vit_jax.optim import preconditioners

    return [preconditioners.summarize(assembly.matrices(), assembly.config.optim)]


def _sizes(assembly: Assembly) -> list[str]:
    """The schedule of image sizes, or the numbers of patches, if there are such."""
    if tokens := assembly.config.data.native_tokens:
        from vit_jax.data import native_batches

        return [
            native_batches.lengths_text(assembly.config),
            f"evaluated whole, with {tokens} patches",
        ]
    data = assembly.config.data
    if not (data.size_schedule or data.patch_sizes):
        return []
    from vit_jax.training import phases

    if data.size_schedule:
        return [phases.describe(assembly.phases())]
    return [phases.describe_patches(data, assembly.networks, assembly.passes)]


def _adapted(assembly: Assembly, count: int) -> list[str]:
    """How many of a model's `count` parameters are trained, of one with adapters."""
    if not assembly.networks.adapters:
        return []
    adapters = assembly.networks.adapters
    like = registry.abstract_weights(assembly.model_config)[1].params
    layers = ", ".join(adapters.chosen(like))
    trained = _size(adapters.trained_like(like))
    _, trained_of_model = adapters.split(like)
    frozen = count - _size(trained_of_model)
    sentences = [
        f"adapters: rank {adapters.rank} on {layers}; {trained:,} parameters are trained, {frozen:,} are frozen"
    ]
    optim = assembly.config.optim
    if optim.weight_decay or optim.layer_decay != 1:
        sentences.append(
            f"adapters: they decay as the kernels that they are added to (config.optim.weight_decay = "
            f"{optim.weight_decay:g}), and learn at the rate of their layers (layer_decay = {optim.layer_decay:g}); "
            "in version 0.2 neither reached them"
        )
    return sentences


def _size(tree: dict) -> int:
    """How many numbers the arrays of a tree hold."""
    return sum(x.size for x in jax.tree.leaves(tree))


def recipe(assembly: Assembly, head: Iterable[str], suite: Suite | None) -> str:
    """A file that trains the same: the run's resolved config.

    Args:
      assembly: the run.
      head: lines of its first docstring.
      suite: the evaluators, where the data is at hand.
    """
    config = assembly.config
    guests = [type(assembly.model_config), type(assembly.networks.objective)]
    guests += [type(evaluator) for evaluator in _evaluators(suite)]
    if is_of_matrices(config.optim.name):
        from vit_jax.optim import preconditioners

        guests.append(preconditioners.PRECONDITIONERS[config.optim.name])
    if config.data.name in sources.OPENERS:
        guests.append(sources.OPENERS[config.data.name])
    return user_files.to_python(config, head, user_files.outside(guests))


def keep_recipe(assembly: Assembly, source: Source, suite: Suite, workdir: epath.Path) -> str:
    """Writes `recipe` into the run's workdir, by the first of its processes, and returns it. A full disk
    does not end a run.
    """
    path = workdir / RECIPE
    command = f"vit_jax train --config={path} --workdir=DIR"
    head = ["The config of a run, resolved:", "", command, "", *lines(assembly, len(source), suite)]
    text = recipe(assembly, head, suite)
    if jax.process_index() == 0:
        try:
            places.write_whole(path, text)
        except OSError as error:
            logging.error("%s cannot be written: %s", path, error)
    return text


def announce_end(workdir: epath.Path, result: dict, clock: Clock) -> None:
    """Writes WORKDIR/result.json, and logs how the time was spent."""
    if jax.process_index() == 0:
        places.write_whole(workdir / "result.json", places.json_text(result) + "\n")
        logging.info("%s", where_the_time_went(clock))


def where_the_time_went(clock: Clock) -> str:
    """A sentence on the time of a run, restarts included."""
    seconds = sum(clock.seconds.values())
    shares = clock.shares()
    largest_first = sorted(shares, key=shares.get, reverse=True)
    shown = [kind for kind in largest_first if shares[kind] >= 0.001]
    phrases = [f"{shares[kind]:.1%} {KINDS[kind]}" for kind in shown]
    return f"Total {durations.duration_text(seconds)} (restarts included): {', '.join(phrases)}."


def _evaluators(suite: Suite | None) -> Iterator[Evaluator]:
    return (evaluator for _, evaluator in suite.evaluators) if suite else iter(())
