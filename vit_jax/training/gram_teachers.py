"""Whether the checkpoint of a Gram teacher (`contract.GramTeacher`) is of the same model as the student."""

from vit_jax.base.errors import ConfigError
from vit_jax.interchange import formats
from vit_jax.objectives.contract import GramTeacher
from vit_jax.objectives.networks import Networks


def check_gram_teacher(gram_teacher: GramTeacher, networks: Networks) -> None:
    """Raises `ConfigError` if the checkpoint that the Gram teacher starts from is of another model."""
    if not gram_teacher.path:
        return
    if networks.adapters:
        raise ConfigError(
            f"{gram_teacher.option} = {gram_teacher.path}: in a run with adapters the Gram teacher has the "
            f"weights that the run begins with; set --{gram_teacher.option}="
        )
    earlier = formats.read_checkpoint(gram_teacher.path).model_config
    model = networks.model_config
    for name in ("width", "depth", "heads", "patch"):
        if getattr(earlier, name, None) != getattr(model, name):
            raise ConfigError(
                f"{gram_teacher.option} = {gram_teacher.path} is a model of {name} "
                f"{getattr(earlier, name, None)}, and the student's is {getattr(model, name)}: it must be an "
                "earlier checkpoint of the same model"
            )
