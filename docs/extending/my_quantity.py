"""my_quantity.py: how large a model's weights are."""

import jax
import numpy as np

from vit_jax.extend import InspectionContext, Section, register_quantity


def inspect_norms(context: InspectionContext) -> Section:
    norms = [float(np.linalg.norm(x)) for x in jax.tree.leaves(context.weights.params)]
    text = f"The largest of {len(norms)} parameters has the norm {max(norms):.3g}."
    return Section("Norms of the parameters", text, numbers={"norms": np.array(norms)})


register_quantity(inspect_norms)
