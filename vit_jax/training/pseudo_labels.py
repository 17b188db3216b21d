"""A teacher labels images, once, before a run learns from them; the run keeps its answers. Which of them are
kept is in `data/sources/pseudo.py`; the rounds of Noisy Student are runs of one recipe, see `sweep.run_all`.
"""

import dataclasses
import io
import json

import jax
import numpy as np
from absl import logging
from etils import epath

from vit_jax import objectives
from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import fingerprints
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.config import Config
from vit_jax.data import loader, sources
from vit_jax.data.record import Source
from vit_jax.data.sources import fingerprint
from vit_jax.data.sources.pseudo import PseudoLabelled, PseudoLabels, select_confident
from vit_jax.devices import meshes, processes
from vit_jax.evaluation import gathering
from vit_jax.evaluation.forward import data_of, make_forward
from vit_jax.interchange import loading
from vit_jax.models import registry
from vit_jax.models.registry import Weights
from vit_jax.training.agreement import check_workdir_is_shared
from vit_jax.training.assembly import Assembly
from vit_jax.training.guards import check_classes, check_teacher, make_workdir

FILE = "pseudo_labels.npz"


def add(source: Source, assembly: Assembly, workdir: epath.Path) -> Source:
    """`source` and the images of `config.pseudo`, labelled by its teacher now or before.

    Args:
      source: labelled examples.
      assembly: of the run, as if there were no others.
      workdir: of the run; `pseudo_labels.npz` in it keeps the labels.

    Raises:
      ConfigError: these labels cannot be learned, the teacher cannot give them, or those in the workdir are
        another's.
      CheckpointError: the teacher cannot be read.
      UserError: the teacher is sure of no image.
    """
    config, options = assembly.config, assembly.config.pseudo
    if not assembly.model_config.num_classes or source.multi_label:
        raise ConfigError(
            "config.pseudo.teacher: only an objective that learns from labels, one for each image, can learn from a "
            "teacher's labels; leave it empty"
        )
    data = config.data
    if options.data:
        data = sources.locate(options.data, config.data, "config.pseudo.data")
    images = sources.open_source(data, options.split)
    teacher = loading.load_run(options.teacher)
    check_teacher(options.teacher, teacher.model_config, assembly.model_config)
    check_classes(options.teacher, teacher.classes, source.classes)
    chosen = {"confidence": options.confidence, "per_class": options.per_class}
    weights = registry.split(teacher.model)[1]
    identity = {
        "teacher": fingerprints.digest(weights), "images": images.fingerprint()
    } | chosen  # fmt: skip
    file = workdir / FILE
    if file.exists():
        given = _read(file, identity, weights, options.teacher)
    else:
        make_workdir(workdir)
        check_workdir_is_shared(workdir, config.hosts.wait_minutes)
        logging.info("%s labels %d images (%s)", options.teacher, len(images), options.split)
        given = select_confident(_ask(teacher, images, config), **chosen)
        if jax.process_index() == 0:
            _write(file, given, identity)
        processes.barrier("pseudo-labels", config.hosts.wait_minutes)
    logging.info(
        "pseudo-labels: %d of %d images (more confident than %g), with duplicates %d: %s",
        len(given.images), len(images), options.confidence, len(given.order), file,
    )  # fmt: skip
    return PseudoLabelled(source, images, given, ratio=options.ratio, soft=options.soft)


def _ask(teacher: TrainedModel, images: Source, config: Config) -> np.ndarray:
    """What the teacher, as it is evaluated, says of all images, cut as for evaluation by its own config: (images,
    classes) float32 in every process. An unreadable one gets zeros.
    """
    data = data_of(teacher)
    definition, weights = registry.split(teacher.model)
    forward = make_forward(definition, teacher.model_config, data)
    activation = objectives.activation(teacher.config.objective)
    mesh = meshes.replica_mesh()
    answer = jax.jit(
        lambda w, batch: activation(forward(w, batch["image"]).logits) * batch["mask"][:, None]
    )
    with (
        jax.set_mesh(mesh),
        loader.eval_batches(
            images, dataclasses.replace(config, data=data), meshes.batch_sharding(mesh)
        ) as batches,
    ):
        (answers,) = gathering.on_host(((answer(weights, batch),) for batch in batches), mesh)
    return answers[: len(images)]


def _write(file: epath.Path, given: PseudoLabels, identity: dict) -> None:
    content = io.BytesIO()
    np.savez(content, identity=json.dumps(identity), **dataclasses.asdict(given))
    places.write_whole(file, content.getvalue())


def _read(file: epath.Path, identity: dict, weights: Weights, teacher: str) -> PseudoLabels:
    with np.load(io.BytesIO(file.read_bytes())) as stored:
        kept = dict(stored)
    before = json.loads(str(kept.pop("identity")))
    if fingerprint.same(before["images"], identity["images"]):
        before["images"] = identity["images"]
    changed = [name for name, value in identity.items() if before[name] != value]
    if not fingerprints.is_digest_of(before["teacher"], weights):
        raise ConfigError(
            f"{file} was made by another teacher than config.pseudo.teacher = {teacher!r}: put that back, or use "
            "another --workdir"
        )
    if changed := [name for name in changed if name != "teacher"]:
        raise ConfigError(
            f"{file} was made with other {', '.join(changed)}: put that back, or use another --workdir"
        )
    return PseudoLabels(**kept)
