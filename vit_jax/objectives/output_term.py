"""An objective that learns from what the model gives of the images as they are. Alone it is like any other; in a sum of
terms (`objectives.sum`) one forward pass serves all of this kind.
"""

from collections.abc import Sequence

import jax
from flax import nnx

from vit_jax.models import layer_features
from vit_jax.models.contract import ModelOutput
from vit_jax.models.layer_features import LayerFeatures
from vit_jax.objectives.contract import Batch, Learner, Objective


class OutputTerm(Objective):
    """Base of these objectives.

    Attributes:
      layers: names of the layers that it reads beside the model's output, see `layer_features`.
      fixed_model: whether the model computes as in evaluation, without dropout.
    """

    layers: tuple[str, ...] = ()
    fixed_model: bool = False

    def of_output(
        self,
        learner: Learner,
        output: ModelOutput,
        layers: tuple[LayerFeatures, ...],
        batch: Batch,
        rngs: nnx.Rngs,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """`__call__` after the model's forward pass.

        Args:
          output: of `batch["image"]`.
          layers: those of `layers`, before the last norm.
        """
        raise NotImplementedError

    def __call__(self, learner: Learner, batch: Batch, rngs: nnx.Rngs):
        output, layers = forward(
            learner.model, batch["image"], self.layers, fixed=self.fixed_model, rngs=rngs
        )
        return self.of_output(learner, output, layers, batch, rngs)


def forward(
    model: nnx.Module,
    images: jax.Array,
    layers: Sequence[str],
    *,
    fixed: bool,
    rngs: nnx.Rngs,
) -> tuple[ModelOutput, tuple[LayerFeatures, ...]]:
    """What `OutputTerm.of_output` takes of images (B, H, W, C); `fixed` as `OutputTerm.fixed_model`."""
    return layer_features.compute(model, images, layers, norm=False, deterministic=fixed, rngs=rngs)
