"""Where a step computes its update: ZeRO-1 (arXiv 1910.02054 §5), as sharding constraints.

Every device of the mesh's `data` axis has whole parameters, since it computes with all of them. But a device sums up
only the gradients of its shard of the parameters (a reduce-scatter), because its shard of the optimizer state needs no
more. The new parameters are put together at the end of the step (an all-gather). The traffic is the same as for
summing up all gradients on every device, and the update costs each device only its share.
"""

import dataclasses
from typing import Any

import jax

from vit_jax.base import patterns
from vit_jax.config import Config
from vit_jax.devices import meshes
from vit_jax.objectives.networks import Networks


@dataclasses.dataclass(frozen=True)
class Placement:
    """How parameters, and trees like them, are sharded in a step; on the mesh that is set.

    Attributes:
      rules: arguments of `meshes.specs`.
      frozen: patterns of parameters that are not updated: they stay where they are.
    """

    rules: dict
    frozen: tuple[str, ...]

    def stored(self, tree: Any) -> Any:
        """A tree like the parameters, sharded as they are between steps."""
        return self._constrained(tree, over_data=False)

    def updated(self, tree: Any) -> Any:
        """A tree like the parameters, sharded as their optimizer state is."""
        return self._constrained(tree, over_data=True)

    def _constrained(self, tree: Any, over_data: bool) -> Any:
        sizes = jax.sharding.get_abstract_mesh().shape
        if sizes.get("data", 1) == 1:  # Both are the same.
            return tree
        stored, wanted = (
            meshes.specs(tree, sizes, over_data=over, **self.rules) for over in (False, over_data)
        )

        def constrain(name: str, x: jax.Array, spec, stored_spec):
            frozen = patterns.matching(self.frozen, [name])
            return jax.lax.with_sharding_constraint(x, stored_spec if frozen else spec)

        return patterns.map_named(constrain, tree, wanted, stored)


def placement(networks: Networks, config: Config) -> Placement:
    """The placement of a run."""
    rules = networks.model_config.tensor_rules
    for teacher in networks.teachers:
        rules += teacher.config.tensor_rules
    return Placement(
        {"fsdp_min_size": config.mesh.fsdp_min_size, "tensor_rules": rules}, config.optim.freeze
    )
