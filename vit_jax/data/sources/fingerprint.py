"""What a data set is recognised by when a run is resumed: cheap for any number of images, and the
same wherever the data set lies.

It does not read images. A sample of names and sizes finds a data set that was replaced or
re-encoded; all labels are taken, so that one image in another class is found.
"""

import hashlib

import numpy as np

from vit_jax.data.record import Labels

_SAMPLE = 1000


def digest(*parts) -> str:
    """16 hexadecimal digits for plain data and arrays."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        array = isinstance(part, np.ndarray)  # of millions of labels: not copied
        content = np.ascontiguousarray(part).data.cast("B") if array else repr(part).encode()
        found.update(b"%d " % len(content))
        found.update(content)
    return found.hexdigest()


def sampled(count: int) -> list[int]:
    """Up to 1,000 of the numbers below `count`, evenly spaced, first and last included."""
    return np.linspace(0, count - 1, min(count, _SAMPLE)).astype(int).tolist()


def of_labels(labels: Labels) -> np.ndarray | list | None:
    """The labels that go into a fingerprint: all, or, where an example has several, a sample."""
    if isinstance(labels, tuple):
        return [labels[i] for i in sampled(len(labels))]
    return labels
