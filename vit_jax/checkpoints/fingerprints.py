"""Fingerprints of arrays: a checkpoint keeps a digest of every array, so that damage which file formats do
not notice is found when it is read.

Version 2 are the digests of `compute.digests`, in which order counts; they are in the description of a
checkpoint, which they tie to its state. Version 1 are sums of bits. Checkpoints of earlier versions have
only those, as a part of their state; new ones have them too, for earlier versions to read.
"""

import hashlib
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import patterns
from vit_jax.compute import digests
from vit_jax.models.registry import Weights

FIELD = "digests"  # of a description: version 2
PART = "fingerprint"  # of a state: version 1
_VERSION = "2:"  # how texts of version 2 begin
_SMALL = 2**20  # numbers, which a host marks in 10 ms


@jax.jit
def fingerprint(parts: dict) -> dict[str, jax.Array]:
    """For each part of a state, uint32 (arrays, `digests.SUMS`): the mark of each array, which neither
    sharding nor devices change. One program, so that it costs one pass and one start.
    """
    return {
        name: jnp.stack([digests.mark(x) for x in jax.tree.leaves(part)])
        for name, part in parts.items()
    }


def marks_on_host(parts: Mapping) -> dict[str, np.ndarray]:
    """`fingerprint` of arrays on devices, read from there. Those of a small model are computed by the host, since
    a program takes longer to compile than they do.
    """
    leaves = jax.tree.leaves(parts)
    elsewhere = any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves)
    if elsewhere or sum(x.size for x in leaves) > _SMALL:
        return jax.device_get(fingerprint(parts))
    return {
        name: np.stack([digests.host_mark(x) for x in jax.tree.leaves(jax.device_get(part))])
        for name, part in parts.items()
    }


def sums_of_bits(marks: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Version 1 of the fingerprint of a state's parts, as it is saved with them."""
    return {name: of_part[:, digests.SUM_OF_BITS] for name, of_part in marks.items()}


def described(marks: Mapping[str, jax.Array]) -> dict[str, str]:
    """Version 2 of it, as a description has it: for each part its arrays' digests as a text."""
    return {name: _text(of_part) for name, of_part in jax.device_get(marks).items()}


def like(parts: Mapping) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of version 1."""
    return {
        name: jax.ShapeDtypeStruct((len(jax.tree.leaves(part)),), jnp.uint32)
        for name, part in parts.items()
    }


def saved_marks(name: str, described: Mapping[str, str] | None, sums: Mapping | None) -> np.ndarray:
    """What a checkpoint says of the arrays of one part: uint32 (arrays, 2), or (arrays, 1) of version 1.

    Args:
      name: of the part.
      described: version 2 of the whole state; `None` in a checkpoint of an earlier version.
      sums: version 1 as it was read, where that is needed.
    """
    if described is None:
        return np.asarray(sums[name])[:, None]
    return np.frombuffer(bytes.fromhex(described.get(name, "")), "<u4").reshape(-1, 2)


def differ(marks: np.ndarray, saved: np.ndarray) -> np.ndarray:
    """Whether arrays are other ones than were saved, bool (arrays,).

    Args:
      marks: (arrays, SUMS) of what was read.
      saved: see `saved_marks`.
    """
    if len(marks) != len(saved):
        return np.ones(len(marks), bool)
    columns = digests.DIGEST if saved.shape[-1] == 2 else [digests.SUM_OF_BITS]
    return (marks[:, columns] != saved).any(axis=1)


def find_changed(
    parts: Mapping, described: Mapping[str, str] | None, sums: Mapping | None = None
) -> str | None:
    """The name of an array that is not what was saved, `None` if there is none.

    Args:
      parts: what was read, on devices.
      described, sums: see `saved_marks`.
    """
    marks = marks_on_host(parts)
    for name, part in parts.items():
        changed = differ(marks[name], saved_marks(name, described, sums))
        if changed.any():
            return patterns.names({name: part})[int(np.argmax(changed))]
    return None


def digest(weights: Weights) -> str:
    """A text that differs if a model's weights do; of arrays on devices."""
    return _hashed(marks_on_host({"weights": weights})["weights"], _VERSION)


def is_digest_of(text: str, weights: Weights) -> bool:
    """Whether `text` is the digest of these weights, of this version or an earlier one."""
    marks = marks_on_host({"weights": weights})["weights"]
    return text == _hashed(marks, _version_of(text))


def is_digest_on_host(text: str, arrays: Iterable[np.ndarray]) -> bool:
    """The same of the arrays of a tree in its order, in the host's memory."""
    marks = np.stack([digests.host_mark(array) for array in arrays])
    return text == _hashed(marks, _version_of(text))


def of_parts(described: Mapping[str, str], names: Iterable[str]) -> str:
    """A text that other arrays in these parts of a state would most likely not have."""
    texts = "".join(f"{name}:{described[name]}\n" for name in sorted(names))
    return _VERSION + hashlib.sha256(texts.encode()).hexdigest()


def of_sums(sums: Mapping[str, np.ndarray]) -> str:
    """The same of a checkpoint of an earlier version."""
    return hashlib.sha256(
        b"".join(np.asarray(sums[name]).tobytes() for name in sorted(sums))
    ).hexdigest()


def _version_of(text: str) -> str:
    return _VERSION if text.startswith(_VERSION) else ""


def _hashed(marks: np.ndarray, version: str) -> str:
    columns = digests.DIGEST if version else digests.SUM_OF_BITS
    content = np.ascontiguousarray(marks[:, columns]).tobytes()
    return version + hashlib.sha256(content).hexdigest()


def _text(marks: np.ndarray) -> str:
    return np.ascontiguousarray(marks[:, digests.DIGEST]).astype("<u4").tobytes().hex()
