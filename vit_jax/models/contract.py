"""What a model gives, whatever its family; what a family is, see `registry`."""

from collections.abc import Callable
from typing import Any, Protocol

import flax.struct
import jax

# What a model gives beside its output: nothing, all it knows of every layer, or what a function makes
# of that of one layer: arrays by name to arrays by name. So no more than one layer's attention weights
# need be held at a time.
Capture = bool | Callable[[dict[str, jax.Array]], dict[str, jax.Array]]


GRID = "grid"  # in batches of images at sizes of their own, their rows and columns of patches


@flax.struct.dataclass
class PatchBatch:
    """Images of sizes of their own, each split into patches, row by row; what fills up to the longest is padding.

    Attributes:
      patches: (B, N, P * P * C) float, normalised; a patch's pixels row by row, their channels last.
      grids: (B, 2) int32, the rows and columns of each image, 1 or more, of N patches at most.
    """

    patches: jax.Array
    grids: jax.Array

    def lengths(self, tokens: int) -> jax.Array:
        """(B,) int32: how many of `tokens` tokens, the last N of which are the patches, come before the padding."""
        return self.grids[:, 0] * self.grids[:, 1] + (tokens - self.patches.shape[1])


@flax.struct.dataclass
class ModelOutput:
    """What every model returns.

    Attributes:
      logits: (B, classes) float32, the prediction, of early exits the last one's; `None` for a model
        without a head.
      features: (B, D) the input of the last linear layer; what few-shot and retrieval use.
      tokens: (B, N, D) after the last norm; of several branches, those that the family says.
      intermediates: on request, by name; e.g. `attention` (L, B, H, N, N) and `blocks` (L, B, N,
        D). Empty otherwise.
      exits: (E, B, classes) float32, the logits of every head or exit in order of cost, of a model
        that has several; `None` where `logits` is all there is.
    """

    logits: jax.Array | None
    features: jax.Array
    tokens: jax.Array
    intermediates: dict[str, jax.Array] = flax.struct.field(default_factory=dict)
    exits: jax.Array | None = None


class Exiting(Protocol):
    """A model with early exits, which `config.exit_flops` tells: the loop over `exit` gives the
    `exits` of its `ModelOutput`, the last of which are its `logits`.
    """

    @property
    def num_exits(self) -> int:
        """How many there are, the last one included."""

    def exit(self, index: int, images: jax.Array, carried: Any = None) -> tuple[jax.Array, Any]:
        """Computes one exit, without dropout.

        Args:
          index: of the exit, from 0.
          images: (B, H, W, C), as the model gets them.
          carried: what the exit before gave for the same images; `None` for the first.

        Returns:
          logits (B, classes) float32, and what the next exit needs: a tree of arrays (B, ...), none
          after the last exit.
        """


def images_of(batch: dict[str, jax.Array]) -> jax.Array | PatchBatch:
    """The images of a batch as the loader gives it: `image`, with `grid` those of sizes of their own."""
    return PatchBatch(batch["image"], batch[GRID]) if GRID in batch else batch["image"]


def split_images(shape: tuple[int, ...], patch: int) -> tuple[int, ...]:
    """The shape of an image (H, W, C) split into patches, (H/P, P, W/P, P, C), the same values in the same order. A
    batch of such images is for a model with this patch.
    """
    height, width, channels = shape
    return height // patch, patch, width // patch, patch, channels


def size_and_patch(shape: tuple[int, ...]) -> tuple[tuple[int, int], int]:
    """Height, width and patch of a batch (B, H, W, C), whose patch is 0, or of `split_images`."""
    if len(shape) == 4:
        return shape[1:3], 0
    return (shape[1] * shape[2], shape[3] * shape[4]), shape[2]


def captured(capture: Capture, **arrays: jax.Array) -> dict[str, jax.Array]:
    """Of a layer's `arrays` by name, what `capture` asks for."""
    if callable(capture):
        return capture(arrays)
    return arrays if capture else {}
