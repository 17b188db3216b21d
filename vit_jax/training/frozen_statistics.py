"""Batch norms whose parameters are all frozen, in a step: their running statistics stay as they are.

What a frozen batch norm computes is in `models/batch_norm.py`.
"""

import contextlib
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base import patterns
from vit_jax.models.batch_norm import BatchNorm, FrozenLayers
from vit_jax.objectives.contract import Learner
from vit_jax.objectives.networks import OWN


@contextlib.contextmanager
def freezing(learner: Learner, trained: dict, freeze: Sequence[str]) -> Iterator[None]:
    """The learner's batch norms are frozen inside, where no parameter of theirs is trained.

    Args:
      learner: of a step that is being traced.
      trained: the parameters of the run, without the base of adapters.
      freeze: `config.optim.freeze`.
    """
    names = set(patterns.names(trained))
    norms = dict(_batch_norms(learner))
    for name, norm in norms.items():
        selected = [
            _is_frozen(f"{name}/{own}", norm, own, names, freeze) for own in ("scale", "bias")
        ]
        frozen = np.logical_and(*selected)
        if frozen.all():
            norm.frozen = True
        elif frozen.any():
            norm.frozen = FrozenLayers(jnp.asarray(frozen))
    yield
    for norm in norms.values():
        if norm.frozen is not False:
            del norm.frozen  # it is no state of the model


def _batch_norms(learner: Learner) -> Iterator[tuple[str, BatchNorm]]:
    """The batch norms of the model and of the objective, with the beginning of their parameters' names."""
    for prefix, network in (((), learner.model), ((OWN,), learner.modules)):
        if network is not None:
            for path, module in nnx.iter_modules(network):
                if isinstance(module, BatchNorm):
                    yield "/".join(map(str, (*prefix, *path))), module


def _is_frozen(
    name: str, norm: BatchNorm, own: str, trained: set[str], freeze: Sequence[str]
) -> np.ndarray:
    """Whether the parameter `own` of a batch norm, called `name`, is frozen: bool, of a stack (layers,)."""
    if name not in trained:  # but in the base of adapters
        return np.array(True)
    selected = patterns.selected(freeze, name, getattr(norm, own).shape)
    return np.asarray(selected)
