"""The objects that follow from a config and its training data: the parts of a run, the context of its evaluators, and
the description in its checkpoints.
"""

from vit_jax.checkpoints import descriptions
from vit_jax.config import Config
from vit_jax.data.decoding.decode import PIXELS
from vit_jax.data.labels.masks import mask_table
from vit_jax.data.labels.segments import PanopticTable
from vit_jax.data.record import Source
from vit_jax.evaluation.contract import EvalContext
from vit_jax.training.assembly import Assembly, assemble


def assembly_for(config: Config, source: Source) -> Assembly:
    """The parts of a run on these examples."""
    return assemble(
        config,
        num_classes=len(source.classes),
        examples_per_epoch=len(source),
        multi_label=source.multi_label,
        masks=mask_table(source) or False,
    )


def subject_of(assembly: Assembly, source: Source) -> EvalContext:
    """The context of the run's evaluators: its model, with the classes of the training data."""
    model_config = assembly.model_config
    return EvalContext(
        config=assembly.config,
        model_config=model_config,
        definition=assembly.definition,
        classes=source.classes if assembly.tells_classes else (),
        networks=assembly.networks,
    )


def describe_run(assembly: Assembly, source: Source) -> dict:
    """The description of a run in all its checkpoints, as JSON."""
    config = assembly.config
    description = descriptions.describe(
        config, assembly.model_config, source.classes, len(source), source.fingerprint()
    ) | {"pixels": PIXELS}
    sketch = getattr(source, "sketch", str)()
    if sketch:
        description["training_sketch"] = sketch
    if isinstance(assembly.masks, PanopticTable):
        description["segments"] = assembly.masks.describe()
    if assembly.evaluated == "teacher":  # the config says of an average that there is one
        description["evaluated"] = "teacher"
    return description
