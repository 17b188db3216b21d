"""What a model gives, whatever its family; what a family is, see `registry`."""

import flax.struct
import jax


@flax.struct.dataclass
class ModelOutput:
    """What every model returns.

    Attributes:
      logits: (B, classes) float32, the prediction; `None` for a model without a head.
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
