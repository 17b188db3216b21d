"""What a checkpoint of a run with adapters holds: these and what else is trained of the model, not its base."""

from vit_jax.models.lora import Adapters
from vit_jax.models.registry import Weights

BASE = "base"  # in a description: `path` and `digest` of the weights that the adapters are added to


def adapters_in(description: dict) -> Adapters | None:
    """The adapters that a checkpoint holds in place of a whole model; `None`: it holds the model."""
    if BASE not in description:
        return None
    lora = description["config"]["lora"]
    return Adapters(lora["lora_rank"], tuple(lora["lora_targets"]), tuple(lora["also"]))


def saved_like(description: dict, like: Weights) -> Weights:
    """Shapes and dtypes of what a checkpoint holds of a model with those of `like`."""
    adapters = adapters_in(description)
    return like._replace(params=adapters.trained_like(like.params)) if adapters else like
