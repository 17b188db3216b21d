"""Optimizers of matrices, by name. Each maps the gradients of the parameters that are matrices to
directions, as those in `optimizers.py` do for all parameters; `config.optim.others` names the one of
those that takes the rest.

A new one is a file here with one function (config.optim, `Matrices`) -> `GradientTransformation`, and
a line in the table below.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import optax

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.base.lazy_table import LazyTable
from vit_jax.base.schema import nearest
from vit_jax.optim.optimizers import OPTIMIZERS
from vit_jax.optim.options import Optim

if TYPE_CHECKING:
    from vit_jax.optim.matrices import Matrices

Preconditioner = Callable[[Optim, "Matrices"], optax.GradientTransformation]
PRECONDITIONERS: LazyTable[Preconditioner] = LazyTable(
    {
        "muon": "vit_jax.optim.preconditioners.muon:muon",
        "adamuon": "vit_jax.optim.preconditioners.adamuon:adamuon",
        "normuon": "vit_jax.optim.preconditioners.normuon:normuon",
        "shampoo": "vit_jax.optim.preconditioners.shampoo:shampoo",
        "soap": "vit_jax.optim.preconditioners.soap:soap",
    }
)


def register(name: str, make: Preconditioner) -> None:
    """Makes a preconditioner known under a name, from a recipe for example."""
    PRECONDITIONERS[name] = make


def check_name(name: str) -> None:
    """Raises `ConfigError` unless there is such an optimizer, of matrices or others."""
    known = [*OPTIMIZERS, *PRECONDITIONERS]
    if name not in known:
        raise ConfigError(f"config.optim.name = {name!r} is not an optimizer{nearest(name, known)}")


def summarize(chosen: "Matrices", config: Optim) -> str:
    """Who takes what, in words."""
    counts = {
        shape: sum(chosen.count(name) for name in names) for shape, names in chosen.stacks().items()
    }
    rows = [f"{count} of {m} x {n}" for (m, n), count in sorted(counts.items())]
    others = len(chosen.shapes) - len(chosen.roles)
    return f"matrices by {config.name}: {', '.join(rows)}; {others} other parameters by {config.others}"


def make(
    config: Optim, params: Any, inputs: Sequence[str], names: Sequence[str]
) -> optax.GradientTransformation:
    """The direction of parameters: that of a preconditioner for matrices, and of
    `config.optim.others` for the rest.

    Args:
      config, params, inputs: see `matrices.find`.
      names: of the parameters that it directs.
    """
    from vit_jax.optim import matrices

    all_matrices = matrices.find(config, params, inputs)
    directed = {name: all_matrices.roles[name] for name in names if name in all_matrices.roles}
    if not directed:
        return OPTIMIZERS[config.others](config)
    chosen = matrices.Matrices(directed, all_matrices.shapes)

    def is_matrix(tree):
        return patterns.map_named(lambda name, _: name in chosen.roles, tree)

    def is_other(tree):
        return jax.tree.map(lambda leaf: not leaf, is_matrix(tree))

    return optax.chain(
        optax.masked(PRECONDITIONERS[config.name](config, chosen), is_matrix),
        optax.masked(OPTIMIZERS[config.others](config), is_other),
    )
