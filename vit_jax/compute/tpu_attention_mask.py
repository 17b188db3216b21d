"""How the attention kernel of TPUs leaves out keys beyond the length of their image: see `tpu_attention.py`."""

import dataclasses

import jax
import jax.numpy as jnp

from vit_jax.compute.tpu_attention_grid import LANES

HIDDEN = -1e30  # a logit whose exponential is 0
# Up to this many keys, adding to logits takes fewer bundles than changing queries and keys.
MOST_ADDED = 512


@dataclasses.dataclass(frozen=True)
class Mask:
    """Gives keys beyond the length of their image weight 0, by what is added to logits. Of many keys the product does
    so itself where heads share a tile: queries are zeros in another head's lanes, one of which is 1 instead, and in
    which keys have what is to be added.

    Attributes:
      added: 0 or `HIDDEN` of each key, (keys, 1) float32; `None`: all count.
      in_tile: the same in the type of the keys, (keys, LANES); `None`: not by the product.
    """

    added: jax.Array | None = None
    in_tile: jax.Array | None = None

    @classmethod
    def of(cls, length, k_ref):
        if length is None:
            return cls()

        def added(lanes):
            key = jax.lax.broadcasted_iota(jnp.int32, (len(k_ref), lanes), 0)
            return jnp.where(key < length, 0.0, HIDDEN)

        by_product = len(k_ref) > MOST_ADDED
        return cls(added(1), added(LANES).astype(k_ref.dtype) if by_product else None)

    def keys(self, head, k):
        if not self._by_product(head):
            return k
        return jnp.where(_lane(k) == head.free_lane, self.in_tile[:, : k.shape[1]], k)

    def queries(self, head, q):
        if not self._by_product(head):
            return head.only(q)
        return head.only(q, (_lane(q) == head.free_lane).astype(q.dtype))

    def logits(self, head, logits):
        return logits if self.added is None or self._by_product(head) else logits + self.added

    def _by_product(self, head):
        return self.in_tile is not None and len(head.tile) > 1


def _lane(x):
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
