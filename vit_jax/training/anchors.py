"""Earlier weights that an objective is anchored to, see `contract.Anchor`: whether they are of the same model."""

from vit_jax.base.errors import ConfigError
from vit_jax.interchange import formats
from vit_jax.objectives.contract import Anchor
from vit_jax.objectives.networks import Networks


def check_anchor(anchor: Anchor, networks: Networks) -> None:
    """Raises `ConfigError` if the weights that the model is anchored to are of another model."""
    if not anchor.path:
        return
    if networks.adapters:
        raise ConfigError(
            f"{anchor.option} = {anchor.path}: a run with adapters is anchored to the weights that it begins with; set "
            f"--{anchor.option}="
        )
    earlier, model = formats.read_checkpoint(anchor.path).model_config, networks.model_config
    for name in ("width", "depth", "heads", "patch"):
        if getattr(earlier, name, None) != getattr(model, name):
            raise ConfigError(
                f"{anchor.option} = {anchor.path} is a model of {name} {getattr(earlier, name, None)}, and the "
                f"student's is {getattr(model, name)}: it must be an earlier checkpoint of the same model"
            )
