"""What a data set is recognised by when a run is resumed: cheap for any number of images, and the
same wherever the data set lies.

It does not read images. A sample of names and sizes finds a data set that was replaced or
re-encoded; all labels are taken, so that one image in another class is found. What a bucket's listing says of
all objects, their names, sizes and checksums, follows after a dash. An earlier version did not take that: a
fingerprint without it is compared with what stands before the dash.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from vit_jax.data.record import Labels

_SAMPLE = 1000
_SKETCH = 256  # numbers of 8 bytes


def digest(*parts) -> str:
    """16 hexadecimal digits for plain data and arrays."""
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        array = isinstance(part, np.ndarray)  # of millions of labels: not copied
        content = np.ascontiguousarray(part).data.cast("B") if array else repr(part).encode()
        hasher.update(b"%d " % len(content))
        hasher.update(content)
    return hasher.hexdigest()


def number(text: str) -> int:
    """A number below 2**64 for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def with_contents(mark: str, paths: Sequence, contents: np.ndarray | None) -> str:
    """The fingerprint `mark`, with that of all `paths` and of what a listing says of their `contents`."""
    return mark if contents is None else f"{mark}-{digest(paths, contents)}"


def split(marks: Sequence[str]) -> tuple[list[str], str]:
    """What fingerprints have before their dashes, and what follows in one of them all: '' or a dash and a digest."""
    names, _, contents = zip(*(mark.partition("-") for mark in marks), strict=True)
    return list(names), f"-{digest(contents)}" if any(contents) else ""


def same(before: str, now: str) -> bool:
    """Whether two fingerprints are of the same data; `before` may be an earlier version's."""
    return before == now or before == now.partition("-")[0]


def sketch(numbers: np.ndarray) -> str:
    """The smallest of the `numbers` (n,) uint64 of a set's examples, hashes of them, as text: of two sets it tells how
    much they have in common (Broder, "On the resemblance and containment of documents", 1997).
    """
    smallest = np.unique(numbers)[:_SKETCH].tolist()
    return "".join(f"{number:016x}" for number in smallest)


def changes(before: str, count_before: int, now: str, count_now: int) -> tuple[int, int]:
    """About how many examples a set has lost and gained, by its sketches and sizes: exact while both together have at
    most 256; beyond it, where one in twenty differs, with a standard error of 1.4 % of its size.
    """
    old = _numbers_of(before)
    new = _numbers_of(now)
    smallest = sorted(old | new)[:_SKETCH]
    common = old & new
    smallest_in_common = sum(number in common for number in smallest)
    share = smallest_in_common / max(len(smallest), 1)
    together = round(share * (count_before + count_now) / (1 + share))
    together = min(together, count_before, count_now)
    return count_before - together, count_now - together


def _numbers_of(sketch_text: str) -> set[str]:
    """The numbers of a sketch, each as its 16 hexadecimal digits."""
    return {sketch_text[at : at + 16] for at in range(0, len(sketch_text), 16)}


def sampled(count: int) -> list[int]:
    """Up to 1,000 of the numbers below `count`, evenly spaced, first and last included."""
    return np.linspace(0, count - 1, min(count, _SAMPLE)).astype(int).tolist()


def of_labels(labels: Labels) -> np.ndarray | list | None:
    """The labels that go into a fingerprint: all, or, where an example has several, a sample."""
    if isinstance(labels, tuple):
        return [labels[i] for i in sampled(len(labels))]
    return labels
